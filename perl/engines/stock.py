"""The model's own `generate`, batch by batch: what any model can do, and what the fast loop is compared with.

Every batch is prefilled row by row and decoded until its longest row ends. The row-seeded choice comes in as a
logits processor that leaves one token possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from perl.engines.rows import Finished, Job, Row, arrived, left_pad, mark_seen
from perl.engines.sampling import choose, uniforms
from perl.records import Sampling
from perl.sharding import is_sharded as is_sharded

if TYPE_CHECKING:
    from transformers.generation.logits_process import LogitsProcessor as Processor


def decode_stock(model: Any, job: Job, processors: Sequence[Processor] = ()) -> Iterator[Finished]:
    """Complete `job.rows` with `model.generate`, longest first of those that have come, yielding each batch's rows when
    it is through.

    A sharded model gets all rows as one batch, whatever `job.max_batch_tokens`: every rank must call `generate` the
    same number of times.

    Args:
        model: a transformers model, or a PeftModel around one, in evaluation mode.
        job: rows and sampling.
        processors: further logits processors, called with left-padded ids before sampling.
    """
    source = iter(job.rows)
    waiting: list[tuple[int, Row]] = []
    read = 0
    while True:
        fresh = arrived(source, read)
        read += len(fresh)
        waiting = sorted(waiting + fresh, key=lambda item: -item[1].reach)
        if not waiting:
            return
        size = len(waiting) if is_sharded(model) else max(1, job.max_batch_tokens // waiting[0][1].reach)
        batch, waiting = waiting[:size], waiting[size:]
        yield from _decode_batch(model, job, batch, processors)


def generation_config(job: Job, rows: Sequence[Row]) -> GenerationConfig:
    """A configuration that leaves the choice of tokens to us: what it does not set explicitly, `generate` would take
    from the model's own generation_config.json."""
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        repetition_penalty=1.0,
        use_cache=True,
        max_new_tokens=max((row.max_new_tokens for row in rows), default=1),
        eos_token_id=sorted(job.eos_token_ids) or None,
        pad_token_id=job.pad_token_id,
    )


class RowSeededChoice(LogitsProcessor):
    """Draws each row's next token with the row's own random stream and leaves only that one possible."""

    def __init__(self, rows: Sequence[Row], sampling: Sampling, processors: Sequence[Processor]):
        self.prompts = [row.prompt_ids for row in rows]
        self.seeds = [row.seed for row in rows]
        self.sampling = sampling
        self.processors = LogitsProcessorList(processors)
        self.logprobs: list[torch.Tensor] = []
        self.seen: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:  # type: ignore[override]
        step = len(self.logprobs)
        if self.sampling.repetition_penalty != 1:
            if self.seen is None:
                self.seen = mark_seen(self.prompts, scores.shape[-1], scores.device)
            else:
                self.seen.scatter_(1, input_ids[:, -1:], True)
        uniform = torch.from_numpy(uniforms(self.seeds, [step] * len(self.seeds))).to(scores.device)
        processed = self.processors(input_ids, scores.clone()) if self.processors else scores  # type: ignore[arg-type]
        tokens, logprobs = choose(processed, self.sampling, uniform, seen=self.seen, model_logits=scores)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, float("-inf")).scatter(1, tokens[:, None], 0.0)  # type: ignore[return-value]


def _decode_batch(
    model: Any, job: Job, batch: Sequence[tuple[int, Row]], processors: Sequence[Processor]
) -> Iterator[Finished]:
    rows = [row for _, row in batch]
    ids, mask = left_pad([row.prompt_ids for row in rows], job.pad_token_id, model.device)
    choice = RowSeededChoice(rows, job.sampling, processors)
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        generation_config=generation_config(job, rows),
        logits_processor=LogitsProcessorList([choice]),
    )
    drawn = output[:, ids.shape[1] :].tolist()
    logprobs = torch.stack(choice.logprobs, dim=1).tolist()
    for (index, row), tokens, row_logprobs in zip(batch, drawn, logprobs, strict=True):
        tokens = tokens[: row.max_new_tokens]
        end = next((i for i, token in enumerate(tokens) if token in job.eos_token_ids), None)
        length = len(tokens) if end is None else end + 1
        yield Finished(index=index, token_ids=tokens[:length], logprobs=row_logprobs[:length], stopped=end is not None)
