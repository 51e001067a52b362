"""What a model says of trajectories: log-probabilities and entropies of their tokens, and a critic's values.

    score     a micro-batch, with its gradient
    logps     all of a batch, without one: by the policy before its updates, the reference, the policies that drew
    values    the critic's, of all of a batch

Rows are lists of tokens on the host. They go to the device once for each forward: packed into one sequence, where the
model takes that (perl.training.packing), or padded into a rectangle. Nothing is read back.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from perl.device import to_device
from perl.engines.base import evaluation_mode
from perl.engines.scheduler import left_pad
from perl.models.pixels import image_arguments
from perl.runs.metrics import StepClock, Work, sequences
from perl.training.batch import by_prompt, cut_by_tokens, piece_of
from perl.training.packing import TokenOutputs, forward_arguments, pack, packed_work

if TYPE_CHECKING:
    from perl.device import Kernel
    from perl.records import Trajectory
    from perl.training.packing import Reader
    from perl.training.processes import Processes

PASS_TOKENS = 16_384
"""Tokens of a forward without a gradient, where max_tokens_per_microbatch does not say: its activations are freed layer
by layer."""


@dataclass(slots=True, kw_only=True)
class Passes:
    """Forwards of a model with TRL's fused head.

    A pass over a batch has as many forwards on every process: with weights that are split (ZeRO-3, FSDP2) each of them
    gathers those of all.
    """

    packed: bool
    """Rows are packed where that saves tokens; needs `enable_packing`."""
    kernel: Kernel | None
    """Of packed attention; None is sdpa."""
    aux_loss: bool
    """The loss has a router's auxiliary loss."""
    max_tokens: int = PASS_TOKENS
    processes: Processes
    config: Any
    """The policy's, of transformers."""
    clock: StepClock
    without_checkpointing: Callable[[], contextlib.AbstractContextManager[Any]]
    """Inside it no forward of the policy keeps anything for a backward."""
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    pad_token_id: int = 0
    image_inputs: Callable[[Trajectory], Any] = field(default=lambda row: None)
    """Of a row's images (perl.models.pixels.ImageInputs); None: it has none."""

    def score(
        self, model: Any, rows: Sequence[Trajectory], width: int, readers: Sequence[Reader] = ("policy",)
    ) -> TokenOutputs:
        """One forward over a micro-batch, of all its readers together."""
        with self.autocast():
            outputs, work = self.forward(model, rows, width, readers)
        self.clock.count_update(work)
        return outputs

    @torch.no_grad()
    def logps(self, model: Any, rows: Sequence[Trajectory], width: int) -> torch.Tensor:
        """float32 [rows, width], in nats: by `model` as it is, wrapped or not. Every process must come here."""
        return self._by_chunks(rows, lambda chunk: self.forward(model, chunk, width), "logps")

    @torch.no_grad()
    def values(self, model: Any, rows: Sequence[Trajectory], width: int) -> torch.Tensor:
        """float32 [rows, width]: by the policy's critic. Every process must come here."""
        with evaluation_mode(model):
            return self._by_chunks(rows, lambda chunk: self.forward(model, chunk, width, ("critic",)), "values")

    def _by_chunks(
        self,
        rows: Sequence[Trajectory],
        forward: Callable[[Sequence[Trajectory]], tuple[TokenOutputs, Work]],
        wanted: str,
    ) -> torch.Tensor:
        chunks = list((by_tokens if self.packed else by_area)(rows, self.max_tokens))
        parts: list[torch.Tensor] = []
        with self.without_checkpointing(), self.autocast():
            for index in range(self.processes.largest([len(chunks)])[0]):
                outputs, work = forward([rows[place] for place in chunks[min(index, len(chunks) - 1)]])
                if index < len(chunks):
                    parts.append(getattr(outputs, wanted).float())
                self.clock.count_forward(work)
        order = torch.tensor(list(itertools.chain(*chunks)))
        return torch.cat(parts)[order.argsort().to(parts[0].device)]

    def forward(
        self, model: Any, rows: Sequence[Trajectory], width: int, readers: Sequence[Reader] = ("policy",)
    ) -> tuple[TokenOutputs, Work]:
        """One over `rows`, for the critic always packed, and what it has computed."""
        prompt = max(len(row.prompt_ids) for row in rows)
        completion = max(1, *(len(row.token_ids) for row in rows))
        shorter = packed_work(rows).tokens < len(rows) * (prompt + completion)
        if "critic" not in readers and not (self.packed and shorter):
            return self._padded(model, rows, completion, width)
        packed = pack(rows, width, self.processes.device, self.kernel, readers)
        output = model(**forward_arguments(packed))
        if not packed.packing.uses:
            raise RuntimeError("the model's attention was not given the layout of the packed micro-batch")
        names = {"logps": "log_probs", "entropies": "entropy"} if "policy" in readers else {}
        names |= {"values": "state_values"} if "critic" in readers else {}
        given = {name: getattr(output, key) for name, key in names.items()}
        columns = {name: packed.unpack(values) for name, values in given.items() if values is not None}
        return TokenOutputs(**columns), packed.work

    def _padded(self, model: Any, rows: Sequence[Trajectory], completion: int, width: int) -> tuple[TokenOutputs, Work]:
        """TRL's forward: prompts are padded on the left, completions on the right."""
        where = self.processes.device
        ids, mask = left_pad([row.prompt_ids for row in rows], self.pad_token_id, where)
        missing = [completion - len(row.token_ids) for row in rows]
        drawn = [[*row.token_ids, *[self.pad_token_id] * count] for row, count in zip(rows, missing, strict=True)]
        seen = [[1] * (completion - count) + [0] * count for count in missing]
        ids = torch.cat([ids, to_device(torch.tensor(drawn), where)], dim=1)
        mask = torch.cat([mask, to_device(torch.tensor(seen), where)], dim=1)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-completion] = -100
        further: dict[str, Any] = {"output_router_logits": True} if self.aux_loss else {}
        further |= image_arguments([self.image_inputs(row) for row in rows], ids, self.config)
        output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, **further)
        columns = (0, width - completion)
        logps = F.pad(output.log_probs[:, -completion:], columns)
        entropies = None if output.entropy is None else F.pad(output.entropy[:, -completion:], columns)
        work = sequences([len(row.prompt_ids) + len(row.token_ids) for row in rows])
        return TokenOutputs(logps, entropies, output.aux_loss if self.aux_loss else None), work


def by_tokens(rows: Sequence[Trajectory], max_tokens: int) -> list[list[int]]:
    """The places of `rows`, those of one prompt together, cut where one more row would make a packed sequence longer
    than `max_tokens`. A row that is longer by itself is alone; there is at least one chunk."""
    pieces = [piece_of(place, rows[place]) for place in by_prompt(rows, range(len(rows)))]
    return cut_by_tokens(pieces, max_tokens) or [[]]


def by_area(rows: Sequence[Trajectory], max_tokens: int) -> Iterator[list[int]]:
    """The places of `rows`, longest first, cut where one more row would make their rectangle, padding included, larger
    than `max_tokens`. A row that is longer by itself is alone; there is at least one chunk."""
    lengths = [(len(row.prompt_ids), len(row.token_ids)) for row in rows]
    chunk: list[int] = []
    prompt = completion = 0
    for place in sorted(range(len(rows)), key=lambda place: -sum(lengths[place])):
        prompt, completion = max(prompt, lengths[place][0]), max(completion, lengths[place][1])
        if chunk and (len(chunk) + 1) * (prompt + completion) > max_tokens:
            yield chunk
            chunk, (prompt, completion) = [], lengths[place]
        chunk.append(place)
    yield chunk
