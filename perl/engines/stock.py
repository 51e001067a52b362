"""The model's own `generate`, batch by batch: what any model can do, and what the decode loop is compared with.

Every batch is prefilled row by row and decoded until its longest row ends. The row-seeded choice comes in as a
logits processor that leaves one token possible.
"""

from __future__ import annotations

import contextlib
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
def generate_stock(decoder: Any, source: Iterable[Sequence | None], sampling: Sampling) -> Iterator[Sequence]:
    """As perl.engines.decoder.Decoder.run, by `generate` of its model: the longest first of those that have come,
    yielding each batch when it is through."""
    budget, most = decoder.max_batch_tokens, decoder.max_num_seqs

    def size(waiting: list[Sequence]) -> int:
        waiting.sort(key=lambda sequence: -sequence.max_len)
        return max(1, min(most, most if budget is None else budget // waiting[0].max_len))

    for batch in _batches(decoder.model, source, decoder.pad_token_id, size):
        _generate_batch(decoder, batch, sampling)
        yield from (sequence for sequence in batch if sequence.index >= 0)


def _batches(
    model: Any, source: Iterable[Sequence | None], pad_token_id: int, size: Callable[[list[Sequence]], int]
) -> Iterator[list[Sequence]]:
    """The sequences of `source`, batch by batch. Every process that holds a part of a sharded model must call
    `generate` equally often: one that is through gives it a sequence without an index, for nothing; of a prompt with
    images, if it had one, as the vision tower may be split too.

    Args:
        size: of those that wait, the next batch are so many; it may order them.
    """
    source, waiting, read = iter(source), list[Sequence](), 0
    sharded, filler = is_sharded(model), Sequence((pad_token_id,), 0, 1)
    while True:
        for sequence in iter(lambda: next(source, None), None):
            sequence.index, read = read, read + 1
            if sequence.images is not None:
                filler = Sequence(sequence.prompt_ids, 0, 1, images=sequence.images)
            waiting.append(sequence)
        if not (any_rank(bool(waiting), model.device) if sharded else waiting):
            return
        count = size(waiting) if waiting else 0
        yield waiting[:count] or [filler]
        del waiting[:count]


@contextlib.contextmanager
def last_logits(model: Any) -> Iterator[list[torch.Tensor]]:
    """Inside, a list of what the model computed for the next token, float32 [rows, vocabulary]: `generate` shows its
    processors only what those before them left of it."""
    logits: list[torch.Tensor] = []

    def note(module: Any, inputs: Any, output: Any) -> None:
        logits[:] = [output.logits[:, -1].float()]

    module = model.get_base_model() if hasattr(model, "get_base_model") else model
    hook = module.register_forward_hook(note)
    try:
        yield logits
    finally:
        hook.remove()


class RowSeededChoice(LogitsProcessor):
    """Draws each row's next token with the row's own random stream and leaves only that one possible."""

    def __init__(
        self, sequences: List[Sequence], sampling: Sampling, processors: List[LogitsProcessor], last: list[torch.Tensor]
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
        tokens, logprobs = sample(processed, self.sampling, uniform, seen=self.seen, model_logits=self.last[0])
        self.logprobs.append(logprobs)
        return torch.full_like(scores, float("-inf")).scatter(1, tokens[:, None], 0.0)  # type: ignore[return-value]


def _generate_batch(decoder: Any, sequences: List[Sequence], sampling: Sampling) -> None:
    # What is not set explicitly, `generate` would take from the model's own generation_config.json.
    plain = {"num_beams": 1, "num_return_sequences": 1, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
    fields = {"repetition_penalty": 1.0, "use_cache": True, **decoder.generation_kwargs, "do_sample": False}
    fields["max_new_tokens"] = max(sequence.max_new_tokens for sequence in sequences)
    fields |= {"eos_token_id": sorted(decoder.eos_token_ids) or None, "pad_token_id": decoder.pad_token_id}
    with last_logits(decoder.model) as last:
        choice = RowSeededChoice(sequences, sampling, decoder.processors, last)
        drawn = _generate(decoder.model, sequences, GenerationConfig(**(plain | fields)), choice)
    _finish(sequences, drawn, choice.logprobs, decoder.eos_token_ids)


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

    def __init__(self, temperature: float, last: list[torch.Tensor]):
        self.temperature, self.last = temperature, last
        self.scores: torch.Tensor | None = None
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.note(input_ids)
        self.scores = self.last[0] / self.temperature
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
        with last_logits(model) as last:
            chosen = ChosenLogProbs(float(config.temperature or 1.0) if config.do_sample else 1.0, last)
            drawn = _generate(model, batch, config, chosen)
            chosen.note(drawn)
        _finish(batch, drawn, chosen.logprobs, token_ids(config.eos_token_id))
        yield from (sequence for sequence in batch if sequence.index >= 0)
