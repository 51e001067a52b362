"""The model's own `generate`, batch by batch: what any model can do, and what the decode loop is compared with.

Every batch is prefilled row by row and decoded until its longest row ends. The row-seeded choice comes in as a
logits processor that leaves one token possible.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as List
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from perl.device.sharding import any_rank, is_sharded
from perl.engines.sampling import sample, uniforms
from perl.engines.scheduler import Sequence, left_pad, mark_seen
from perl.models.folders import token_ids
from perl.models.pixels import image_arguments
from perl.records import Sampling


@torch.no_grad()
def generate_stock(
    model: Any,
    source: Iterable[Sequence | None],
    sampling: Sampling,
    *,
    eos_token_ids: Collection[int],
    pad_token_id: int,
    max_batch_tokens: int | None = None,
    max_num_seqs: int = 256,
    processors: List[LogitsProcessor] = (),
    generation_kwargs: dict[str, Any] | None = None,
) -> Iterator[Sequence]:
    """Complete the sequences of `source` with `model.generate`, longest first of those that have come, yielding each
    batch when it is through. Arguments as of perl.engines.decoder.Decoder and its `run`.

    Args:
        processors: further logits processors, called with left-padded ids before a token is drawn.
        generation_kwargs: fields of the GenerationConfig, in addition to what `sampling` says.
    """

    def size(waiting: list[Sequence]) -> int:
        waiting.sort(key=lambda sequence: -sequence.max_len)
        allowed = max_num_seqs if max_batch_tokens is None else max_batch_tokens // waiting[0].max_len
        return max(1, min(max_num_seqs, allowed))

    for batch in _batches(model, source, pad_token_id, size):
        settings = (generation_kwargs or {}) | {
            "max_new_tokens": max(sequence.max_new_tokens for sequence in batch),
            "eos_token_id": sorted(eos_token_ids) or None,
            "pad_token_id": pad_token_id,
        }
        _generate_batch(model, batch, sampling, processors, settings)
        yield from (sequence for sequence in batch if sequence.index >= 0)


def _batches(
    model: Any, source: Iterable[Sequence | None], pad_token_id: int, size: Callable[[list[Sequence]], int]
) -> Iterator[list[Sequence]]:
    """The sequences of `source`, batch by batch. Every process that holds a part of a sharded model must call
    `generate` equally often: one that is through gives it a sequence without an index, for nothing.

    Args:
        size: of those that wait, the next batch are so many; it may order them.
    """
    source, waiting, read = iter(source), list[Sequence](), 0
    sharded = is_sharded(model)
    while True:
        for sequence in iter(lambda: next(source, None), None):
            sequence.index, read = read, read + 1
            waiting.append(sequence)
        if not (any_rank(bool(waiting), model.device) if sharded else waiting):
            return
        count = size(waiting) if waiting else 0
        yield waiting[:count] or [Sequence((pad_token_id,), 0, 1)]
        del waiting[:count]


class LastLogits:
    """Inside, holds what the model computed for the next token: `generate` shows its processors only what those before
    them left of it."""

    def __init__(self, model: Any):
        self.module = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.logits: torch.Tensor | None = None

    def __enter__(self) -> LastLogits:
        self.hook = self.module.register_forward_hook(self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        self.hook.remove()

    def _note(self, module: Any, inputs: Any, output: Any) -> None:
        self.logits = output.logits[:, -1].float()

    def take(self) -> torch.Tensor:
        """float32 [rows, vocabulary]."""
        assert self.logits is not None
        return self.logits


class RowSeededChoice(LogitsProcessor):
    """Draws each row's next token with the row's own random stream and leaves only that one possible."""

    def __init__(
        self, sequences: List[Sequence], sampling: Sampling, processors: List[LogitsProcessor], last: LastLogits
    ):
        self.last = last
        self.prompts = [sequence.prompt_ids for sequence in sequences]
        self.seeds = [sequence.seed for sequence in sequences]
        self.sampling, self.processors = sampling, processors
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
        processed = scores.clone() if self.processors else scores
        for processor in self.processors:
            processed = processor(input_ids, processed)  # type: ignore[arg-type]
        tokens, logprobs = sample(processed, self.sampling, uniform, seen=self.seen, model_logits=self.last.take())
        self.logprobs.append(logprobs)
        return torch.full_like(scores, float("-inf")).scatter(1, tokens[:, None], 0.0)  # type: ignore[return-value]


def _generate_batch(
    model: Any,
    sequences: List[Sequence],
    sampling: Sampling,
    processors: List[LogitsProcessor],
    settings: dict[str, Any],
) -> None:
    # What is not set explicitly, `generate` would take from the model's own generation_config.json.
    plain = {"num_beams": 1, "num_return_sequences": 1, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
    plain |= {"repetition_penalty": 1.0, "use_cache": True}
    with LastLogits(model) as last:
        choice = RowSeededChoice(sequences, sampling, processors, last)
        drawn = _generate(model, sequences, GenerationConfig(**(plain | settings | {"do_sample": False})), choice)
    _finish(sequences, drawn, choice.logprobs, settings["eos_token_id"] or ())


def _generate(
    model: Any, sequences: List[Sequence], config: GenerationConfig, processor: LogitsProcessor
) -> torch.Tensor:
    """Tokens drawn behind the sequences' prompts, int64 [rows, tokens]."""
    ids, mask = left_pad([sequence.prompt_ids for sequence in sequences], int(config.pad_token_id), model.device)  # type: ignore[arg-type]
    images = [sequence.images() if sequence.images else None for sequence in sequences]
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        **image_arguments(images, ids, model.config),
        generation_config=config,
        logits_processor=LogitsProcessorList([processor]),
        synced_gpus=is_sharded(model),  # left out, it is true under ZeRO-3, where the weights are gathered already
    )
    return output[:, ids.shape[1] :]


def _finish(sequences: List[Sequence], drawn: torch.Tensor, logprobs: List[torch.Tensor], eos: Collection[int]) -> None:
    """What was drawn for each of `sequences`, up to its end.

    Args:
        drawn: int64 [rows, tokens].
        logprobs: of each token, float32 [rows].
    """
    numbers = torch.stack(list(logprobs), dim=1).tolist()
    for sequence, row, row_logprobs in zip(sequences, drawn.tolist(), numbers, strict=True):
        tokens = row[: sequence.max_new_tokens]
        end = next((i for i, token in enumerate(tokens) if token in eos), None)
        length = len(tokens) if end is None else end + 1
        sequence.token_ids, sequence.logprobs = tokens[:length], row_logprobs[:length]
        sequence.launched, sequence.stopped = length, end is not None


class ChosenLogProbs(LogitsProcessor):
    """Notes the log-probability of each token that `generate` draws: log_softmax(model logits / temperature), as TRL's
    trainer computes it, without penalty or truncation."""

    def __init__(self, temperature: float, last: LastLogits):
        self.temperature, self.last = temperature, last
        self.scores: torch.Tensor | None = None
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.note(input_ids)
        self.scores = self.last.take() / self.temperature
        return scores

    def note(self, ids: torch.Tensor) -> None:
        """`ids`: int64 [rows, tokens], the last one being drawn from the scores seen last."""
        if self.scores is not None:
            chosen = self.scores.gather(1, ids[:, -1:])[:, 0]
            self.logprobs.append(chosen - self.scores.logsumexp(dim=-1))


@torch.no_grad()
def generate_plain(model: Any, source: Iterable[Sequence | None], config: GenerationConfig) -> Iterator[Sequence]:
    """Complete the sequences of `source` with `model.generate` as TRL calls it: all that have come in one batch,
    torch's own random numbers, and none of the sequences' seeds.

    Args:
        model: a transformers model or a PeftModel, in evaluation mode.
        config: as `generate` takes it, with eos_token_id and pad_token_id.
    """
    pad = int(config.pad_token_id)  # type: ignore[arg-type]
    for batch in _batches(model, source, pad, len):
        with LastLogits(model) as last:
            chosen = ChosenLogProbs(float(config.temperature or 1.0) if config.do_sample else 1.0, last)
            drawn = _generate(model, batch, config, chosen)
            chosen.note(drawn)
        _finish(batch, drawn, chosen.logprobs, token_ids(config.eos_token_id))
        yield from (sequence for sequence in batch if sequence.index >= 0)
