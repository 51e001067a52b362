"""A generation batch, and how its rows are dealt out to the micro-batches of the updates.

    Batch        this process's trajectories, with a column for each thing that is computed of them
    Cycle        which micro-batches are made of it
    Dealer.deal  Batch -> one list of MicroBatches, which the updates take one by one

transformers makes as many micro-batches of an update as gradient_accumulation_steps says. Within an update, where
gradients are added up, any row may stand in any of them without changing it: those of one prompt together, so that the
prompt is computed once for them, longest first, so that neighbours are alike; rows that carry no gradient in none. With
max_tokens_per_microbatch there are as many micro-batches as the tokens need, and nothing is computed for the others.
"""

from __future__ import annotations

import functools
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from perl.device import to_device
from perl.records import Trajectory, Weights
from perl.runs.metrics import ModelSize, Work, update_flops
from perl.training.packing import prompt_work, row_work

if TYPE_CHECKING:
    from perl.config.training import TrainingConfig

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Batch:
    """Rows of this process. Columns are float32 [rows, width] on the device, one width on all processes,
    log-probabilities in nats; None: not needed."""

    rows: list[Trajectory]
    mask: torch.Tensor
    """bool: tokens that the policy drew and that are trained on."""
    sampler: torch.Tensor | None = None
    """Log-probabilities by what has drawn the tokens, NaN where it gave none for a token; None: it gives none, on any
    process."""
    tokens: float = 0.0
    """Tokens of `mask` in the generation batch, of all processes."""
    advantages: torch.Tensor | None = None
    """[rows, width] or [rows, 1]."""
    old: torch.Tensor | None = None
    """Log-probabilities by the policy that the ratio refers to; None: the one that is trained, before the update."""
    reference: torch.Tensor | None = None
    values: torch.Tensor | None = None
    """The critic's, before the updates."""
    returns: torch.Tensor | None = None
    """What the critic learns, NaN where a token has none."""

    @classmethod
    def of(
        cls, rows: list[Trajectory], device: torch.device, mask_truncated: bool, longest: int, logprobs: bool
    ) -> Batch:
        """
        Args:
            mask_truncated: completions that were cut off are not trained on.
            longest: tokens of the longest completion of all processes.
            logprobs: what has drawn the tokens gave log-probabilities, on some process.
        """
        width = max(1, longest)

        def column(numbers: Callable[[Trajectory], Sequence[Any]], fill: Any, dtype: torch.dtype) -> torch.Tensor:
            padded = [[*row_numbers, *[fill] * (width - len(row_numbers))] for row_numbers in map(numbers, rows)]
            return to_device(torch.tensor(padded, dtype=dtype), device)

        def sampler(row: Trajectory) -> Sequence[float]:
            return row.logprobs or [math.nan] * len(row.token_ids)

        def trained_on(row: Trajectory) -> Sequence[bool]:
            left_out = row.failure is not None or (mask_truncated and row.finish == "length")
            return [] if left_out else row.sampled

        return cls(
            rows=rows,
            mask=column(trained_on, False, torch.bool),
            sampler=column(sampler, 0.0, torch.float32) if logprobs else None,
        )

    @property
    def width(self) -> int:
        """Tokens of a column: the longest completion's of all processes."""
        return self.mask.shape[1]

    def columns(self) -> dict[str, torch.Tensor]:
        """Those that there are, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def select(self, places: Sequence[int]) -> Batch:
        """The rows at these places, in this order."""
        index = to_device(torch.tensor(places), self.mask.device)
        columns = {name: column[index] for name, column in self.columns().items()}
        return replace(self, rows=[self.rows[place] for place in places], **columns)

    def state(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint: of the data set's row its prompt alone, and neither how it was
        drawn, nor the environment, nor what a reward function has logged, which may be anything."""
        rows, left_out = [], ("asked", "environment")
        for row in self.rows:
            kept = {each.name: getattr(row, each.name) for each in fields(row) if each.name not in left_out}
            rows.append(kept | {"weights": asdict(row.weights), "row": {"prompt": row.row["prompt"]}, "extras": {}})
        return {"rows": rows, "tokens": self.tokens, **self.columns()}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Batch:
        """What `state` was of."""
        rows = [Trajectory(**(row | {"weights": Weights(**row["weights"])})) for row in state["rows"]]
        columns: dict[str, Any] = state | {"rows": rows}
        return cls(**columns)


@dataclass(slots=True)
class MicroBatch:
    """What one call of the loss computes."""

    batch: Batch | None
    """None: nothing, on any process."""
    padding: bool = False
    """The rows are there as every process must run as many forwards; their loss counts nothing."""
    trained_tokens: int = 0
    """Tokens of all rows of the window, prompts too and rows left out too, in its first micro-batch; 0 in others."""

    def state(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint."""
        return {
            "batch": self.batch and self.batch.state(),
            "padding": self.padding,
            "trained_tokens": self.trained_tokens,
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> MicroBatch:
        """What `state` was of."""
        values: dict[str, Any] = state | {"batch": state["batch"] and Batch.restored(state["batch"])}
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """When a generation batch is drawn, and what is made of it. Micro-batches are counted from 0 over the run."""

    accumulation: int
    """Micro-batches of an optimizer update; of an epoch's last one there may be fewer."""
    per_generation: int
    """Micro-batches that a generation batch is dealt out to."""
    iterations: int = 1
    """Times that they are trained on."""

    @classmethod
    def of(cls, args: TrainingConfig) -> Cycle:
        return cls(
            accumulation=args.gradient_accumulation_steps,
            per_generation=args.steps_per_generation or 1,
            iterations=args.num_iterations,
        )

    @property
    def length(self) -> int:
        """Micro-batches from a generation batch to the next."""
        return self.per_generation * self.iterations

    @property
    def several_updates(self) -> bool:
        """A generation batch serves more than one update."""
        return self.accumulation % self.length != 0

    def begins(self, micro_batch: int) -> bool:
        """Whether a generation batch is drawn for it."""
        return micro_batch % self.length == 0

    def place(self, micro_batch: int) -> int:
        """Among those that its generation batch was dealt out to."""
        return micro_batch % self.per_generation

    def begins_amid_update(self, first: int) -> bool:
        """Whether a generation batch is drawn within the update that begins with `first`, and not for that one."""
        return self.length - first % self.length < self.accumulation

    def batches_left(self, step: int, last: int, made: int, epoch: int) -> int:
        """Generation batches to be drawn, the next one included.

        Args:
            step: updates made.
            last: of all updates of the run.
            made: micro-batches of the update under way.
            epoch: micro-batches of an epoch.
        """
        updates = math.ceil(epoch / self.accumulation)

        def until(step: int) -> int:
            return step // updates * epoch + min(step % updates * self.accumulation, epoch)

        return max(1, math.ceil((until(last) - until(step) - made) / self.length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealer:
    """Deals the rows of a generation batch out to its micro-batches."""

    cycle: Cycle
    leave_out_zero: bool
    """Rows whose advantage is exactly 0 are not computed: right when nothing but the advantage makes their gradient."""
    group: bool
    """Rows of one prompt stay together; otherwise rows are ordered by length alone."""
    fixed: bool = False
    """The loss depends on which rows share a micro-batch: each gets per_device_train_batch_size, as TRL gives them."""
    max_tokens: int | None = None
    """Tokens of a micro-batch's packed sequence; more only for a single row, or where the rows need more micro-batches
    than there are: then as few as will do. Needs `group`."""
    size: ModelSize | None = None
    """What a row costs is counted from; None: its tokens."""

    def deal(self, batch: Batch, largest: Callable[[list[int]], list[int]]) -> list[MicroBatch]:
        """The micro-batches of a cycle, of windows that surely belong to one update. Empty ones come
        first: the last one is where gradients are exchanged.

        Args:
            largest: from numbers of this process to the largest of each among all processes, which have as many.
        """
        per_micro_batch = len(batch.rows) // self.cycle.per_generation
        if self.fixed:
            starts = range(0, len(batch.rows), per_micro_batch)
            micro_batches = [batch.select(range(start, start + per_micro_batch)) for start in starts]
            return [MicroBatch(each, trained_tokens=_tokens(each.rows)) for each in micro_batches]
        size = math.gcd(self.cycle.per_generation, self.cycle.accumulation)
        step = size * per_micro_batch
        windows = [list(range(start, start + step)) for start in range(0, len(batch.rows), step)]
        kept = self.computed(batch).tolist()
        chosen = [[place for place in self._order(batch.rows, window) if kept[place]] for window in windows]
        chunks = self._chunks(batch.rows, chosen, size, per_micro_batch, largest)
        counts = largest([len(window) for window in chunks])
        dealt: list[MicroBatch] = []
        for window, places, count in zip(chunks, windows, counts, strict=True):
            count = max(1, count)  # where no row is computed the optimizer makes its step all the same
            missing = [[]] * (count - len(window))
            micro_batches = [MicroBatch(None)] * (size - count)
            micro_batches += [self._micro_batch(batch, chunk) for chunk in [*window, *missing]]
            micro_batches[0] = replace(micro_batches[0], trained_tokens=_tokens([batch.rows[i] for i in places]))
            dealt += micro_batches
        return dealt

    def computed(self, batch: Batch) -> torch.Tensor:
        """bool [rows]: whether anything of the row enters the loss. Where all its tokens are masked (a completion that
        was cut off) neither advantage nor KL divergence does."""
        rows = batch.mask.any(dim=1)
        if self.fixed or not self.leave_out_zero:
            return rows
        assert batch.advantages is not None
        return rows & ((batch.advantages != 0) & batch.mask).any(dim=1)

    def _micro_batch(self, batch: Batch, places: Sequence[int]) -> MicroBatch:
        """With no places: one token of the first row, which takes part and counts nothing. With images its whole
        prompt: where weights are split, the vision tower's are gathered by all processes together."""
        if places:
            return MicroBatch(batch.select(places))
        one = batch.select([0])
        (row,) = one.rows
        prompt = row.prompt_ids if row.images else row.prompt_ids[-1:]
        one.rows = [replace(row, prompt_ids=prompt, token_ids=[], sampled=[], logprobs=[])]
        return MicroBatch(one, padding=True)

    def _order(self, rows: Sequence[Trajectory], places: Sequence[int]) -> list[int]:
        """Longest completion first; with `group`, prompts with the longest completions first, and the rows of a prompt
        together."""
        order = sorted(places, key=lambda place: -len(rows[place].token_ids))
        return by_prompt(rows, order) if self.group else order

    def _chunks(
        self,
        rows: Sequence[Trajectory],
        chosen: Sequence[Sequence[int]],
        size: int,
        per_micro_batch: int,
        largest: Callable[[list[int]], list[int]],
    ) -> list[list[list[int]]]:
        """For each window the places of each micro-batch that has any."""
        if self.max_tokens is None:
            return [
                [list(places[start : start + per_micro_batch]) for start in range(0, len(places), per_micro_batch)]
                for places in chosen
            ]
        pieces = [[row_cost(place, rows[place], self.size) for place in places] for places in chosen]
        limits = [smallest_limit(window, self.max_tokens, size) for window in pieces]
        if max(limits) > self.max_tokens:
            _say_what_is_exceeded(self.max_tokens, size)
        needed = largest([len(cut_by_tokens(*window)) for window in zip(pieces, limits, strict=True)])
        return [spread(*window) for window in zip(pieces, limits, needed, strict=True)]


class RowCost(NamedTuple):
    """What a row adds to a packed sequence, and what its prompt does, once for all of its rows."""

    place: int
    prompt: tuple[int, ...]
    prompt_tokens: int
    tokens: int
    prompt_cost: int
    """In tokens that attend to nothing."""
    cost: int


def row_cost(place: int, row: Trajectory, size: ModelSize | None = None) -> RowCost:
    """
    Args:
        size: what the costs are counted from; None: tokens.
    """
    works = prompt_work(len(row.prompt_ids)), row_work(len(row.prompt_ids), len(row.token_ids))
    prompt_tokens, tokens = prompt_cost, cost = [work.tokens for work in works]
    if size is not None:
        prompt_cost, cost = (round(update_flops(size, work) / update_flops(size, Work(1, 0))) for work in works)
    return RowCost(place, row.prompt_ids, prompt_tokens, tokens, prompt_cost, cost)


def by_prompt(rows: Sequence[Trajectory], places: Iterable[int]) -> list[int]:
    """`places`, those of one prompt together."""
    prompts: dict[tuple[int, ...], list[int]] = {}
    for place in places:
        prompts.setdefault(rows[place].prompt_ids, []).append(place)
    return [place for members in prompts.values() for place in members]


def cut_by_tokens(pieces: Sequence[RowCost], max_tokens: int, max_cost: float = math.inf) -> list[list[int]]:
    """The rows of `pieces` in their order, cut wherever one more row would make the sequence longer than `max_tokens`
    or cost more than `max_cost`. A row that is so by itself is alone."""
    chunks: list[list[int]] = []
    prompts: set[tuple[int, ...]] = set()
    tokens = cost = 0
    for piece in pieces:
        known = piece.prompt in prompts
        tokens += piece.tokens + (0 if known else piece.prompt_tokens)
        cost += piece.cost + (0 if known else piece.prompt_cost)
        if not chunks or tokens > max_tokens or cost > max_cost:
            chunks.append([])
            prompts = set()
            tokens, cost = piece.tokens + piece.prompt_tokens, piece.cost + piece.prompt_cost
        chunks[-1].append(piece.place)
        prompts.add(piece.prompt)
    return chunks


def smallest_limit(pieces: Sequence[RowCost], max_tokens: int, micro_batches: int) -> int:
    """`max_tokens`, or the smallest number above it that needs no more than so many micro-batches."""
    whole = sum(piece.prompt_tokens + piece.tokens for piece in pieces)
    fits = range(max_tokens, max(max_tokens, whole) + 1)
    return fits[bisect_left(fits, True, key=lambda limit: len(cut_by_tokens(pieces, limit)) <= micro_batches)]


def spread(pieces: Sequence[RowCost], max_tokens: int, micro_batches: int) -> list[list[int]]:
    """The rows of `pieces` in so many micro-batches of at most `max_tokens`, the costliest as cheap as can be."""
    whole = sum(piece.prompt_cost + piece.cost for piece in pieces)
    costs = range(whole + 1)
    best = bisect_left(costs, True, key=lambda cost: len(cut_by_tokens(pieces, max_tokens, cost)) <= micro_batches)
    return cut_by_tokens(pieces, max_tokens, costs[best])


@functools.cache  # once a run
def _say_what_is_exceeded(max_tokens: int, micro_batches: int) -> None:
    log.warning(
        "training.max_tokens_per_microbatch %d: the rows of an update need more than its %d micro-batches"
        " (gradient_accumulation_steps), which get more tokens, as few as will do",
        max_tokens,
        micro_batches,
    )


def _tokens(rows: Sequence[Trajectory]) -> int:
    return sum(len(row.prompt_ids) + len(row.token_ids) for row in rows)
