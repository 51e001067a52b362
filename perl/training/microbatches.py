"""Which rows of a generation batch go into which micro-batch.

TRL shuffles a generation batch and cuts it into micro-batches. Within one optimizer update, where gradients are summed,
the rows may be redistributed without changing the update: those of one prompt together, so that the prompt is computed
once for them, longest first, so that neighbours are alike; and rows that carry no gradient left out.
"""

from __future__ import annotations

import functools
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from perl import device
from perl.engines.attention import numbers_of
from perl.models.folders import takes_images
from perl.runs.metrics import ModelSize, Work, update_flops
from perl.training.packing import enable_packing, prompt_work, row_work

if TYPE_CHECKING:
    from perl.config.training import TrainingConfig
    from perl.device import Kernel

log = logging.getLogger(__name__)

MicroBatch = dict[str, Any]
"""What TRL's loss takes: tensors whose first dimension is rows, and scalars. Ours adds SCALE and TOKENS."""

SCALE = "loss_scale"
"""Factor on the micro-batch's loss: where the loss is a mean over the rows of a micro-batch, the share of
per_device_train_batch_size that its rows are. 0.0: no process has a row to compute in it, it only takes part."""
TOKENS = "trained_tokens"
"""Tokens of all rows of the window, prompts too and rows left out too, in its first micro-batch; 0 in the others."""

MEAN_OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
SUM_OVER_TOKENS = ("dapo", "cispo", "vespo")
"""Losses of TRL by how a micro-batch enters them. "bnpo" divides by the micro-batch's own number of tokens."""
LOSS_TYPES = (*MEAN_OVER_ROWS, *SUM_OVER_TOKENS, "bnpo")
"""All of them: TRL itself refuses others at the first loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatcher:
    """Deals the rows of a generation batch out to its micro-batches.

    TRL takes per_device_train_batch_size rows for each. With `max_tokens` it is as many as their packed sequence has
    room for, in as few micro-batches as that needs on the process that needs most; each process spreads its own rows
    evenly over these, by cost, so that none waits for another longer than it must. Rows do not move between processes.
    TRL's other micro-batches remain, as its count of calls is fixed, with a sequence of one token.
    """

    loss_type: str
    """One of MEAN_OVER_ROWS and SUM_OVER_TOKENS, unless `fixed`."""
    accumulation: int
    """Micro-batches of an optimizer update."""
    leave_out_zero: bool
    """Rows whose advantage is exactly 0 are not computed: right when nothing but the advantage makes their gradient."""
    group: bool
    """Rows of one prompt stay together; otherwise rows are ordered by length alone."""
    fixed: str | None = None
    """Why every micro-batch must have the rows that TRL gave it, or None."""
    max_tokens: int | None = None
    """Tokens of a micro-batch's packed sequence; more only for a single row, or where the rows need more micro-batches
    than there are: then as few as will do. Needs `group`."""
    size: ModelSize | None = None
    """What a row costs is counted from; None: its tokens."""

    def arrange(
        self, micro_batches: Sequence[MicroBatch], all_reduce_max: Callable[[list[int]], list[int]]
    ) -> list[MicroBatch]:
        """As many micro-batches as before, the rows redistributed among those that surely belong to one update: TRL
        samples every len(micro_batches) micro-batches and updates after every `accumulation`.

        Args:
            all_reduce_max: from numbers of this process to the largest of each among all processes, which have as many.
                TRL gathers metrics by row, so the i-th micro-batch has as many rows on every process.
        """
        if self.fixed:
            return [batch | {SCALE: 1.0, TOKENS: _tokens([batch])} for batch in micro_batches]
        size = math.gcd(len(micro_batches), self.accumulation)
        windows = [micro_batches[start : start + size] for start in range(0, len(micro_batches), size)]
        stacked = [_stack(window) for window in windows]
        chunks = self._chunks(stacked, size, all_reduce_max)
        counts = all_reduce_max([len(chunk) for window in chunks for chunk in window])
        arranged = []
        for index, (window, rows) in enumerate(zip(windows, stacked, strict=True)):
            per_row = len(rows["advantages"]) // size
            dealt = zip(chunks[index], counts[index * size : (index + 1) * size], strict=True)
            batches = [self._micro_batch(rows, chunk, count, per_row) for chunk, count in dealt]
            arranged += [batch | {TOKENS: 0 if i else _tokens(window)} for i, batch in enumerate(batches)]
        return arranged

    def share_left_out(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Of the rows that `arrange` is given, how many it leaves out."""
        if self.fixed:
            return 0.0
        shares = [1.0 - float(self._computed(batch).float().mean()) for batch in micro_batches]
        return sum(shares) / len(shares)

    def _computed(self, rows: MicroBatch) -> torch.Tensor:
        """bool [rows]: whether anything of the row enters the loss. Where all its tokens are masked (a completion that
        was cut off, or a tool's output) neither advantage nor KL does; it counts in a mean over rows, as SCALE says."""
        mask = rows["completion_mask"]
        computed = mask.any(dim=1)
        if not self.leave_out_zero:
            return computed
        advantages = rows["advantages"]  # [rows] or [rows, tokens]
        return computed & (advantages != 0 if advantages.ndim == 1 else (advantages * mask != 0).any(dim=1))

    def _chunks(
        self, stacked: Sequence[MicroBatch], size: int, all_reduce_max: Callable[[list[int]], list[int]]
    ) -> list[list[list[int]]]:
        """For each window of `size` micro-batches the rows of each, those that are computed alone."""
        kept = []
        for rows in stacked:
            computed = self._computed(rows).tolist()
            kept.append([row for row in _order(rows, self.group) if computed[row]])
        if self.max_tokens is None:
            sizes = [len(rows["advantages"]) // size for rows in stacked]
            cut = [
                [mine[start : start + step] for start in range(0, len(mine), step)]
                for mine, step in zip(kept, sizes, strict=True)
            ]
        else:
            sequences = [self._sequence(rows, mine) for rows, mine in zip(stacked, kept, strict=True)]
            limits = [smallest_limit(sequence, self.max_tokens, size) for sequence in sequences]
            if max(limits) > self.max_tokens:
                _say_what_is_exceeded(self.max_tokens, size)
            needed = [len(cut_by_tokens(mine, limit)) for mine, limit in zip(sequences, limits, strict=True)]
            needed = all_reduce_max(needed)
            cut = [spread(*each) for each in zip(sequences, limits, needed, strict=True)]
        return [[*chunks, *[[] for _ in range(size - len(chunks))]] for chunks in cut]

    def _sequence(self, rows: MicroBatch, kept: Sequence[int]) -> list[Piece]:
        prompts = rows["prompt_mask"].sum(dim=1).tolist()
        completions = rows["completion_mask"].sum(dim=1).tolist()
        pieces = []
        for row in kept:
            shared, own = prompt_work(prompts[row]), row_work(prompts[row], completions[row])
            key = tuple(rows["prompt_ids"][row].tolist())
            pieces.append(Piece(row, key, shared.tokens, own.tokens, self._cost(shared), self._cost(own)))
        return pieces

    def _cost(self, work: Work) -> int:
        """In tokens that attend to nothing."""
        if self.size is None:
            return work.tokens
        return round(update_flops(self.size, work) / update_flops(self.size, Work(1, 0)))

    def _micro_batch(self, rows: MicroBatch, chunk: Sequence[int], count: int, per_row: int) -> MicroBatch:
        """`chunk`, filled up to `count` rows with some that contribute nothing; one such row where `count` is 0."""
        fillers = max(count, 1) - len(chunk)
        filled = pad_rows(_select(rows, [*chunk, *[chunk[-1] if chunk else 0] * fillers]), fillers)
        scale = count / per_row if self.loss_type in MEAN_OVER_ROWS else float(count > 0)
        return filled | {SCALE: scale}


class Piece(NamedTuple):
    """What a row adds to a packed sequence, and what its prompt does, once for all of its rows."""

    row: int
    prompt: tuple[int, ...]
    prompt_tokens: int
    tokens: int
    prompt_cost: int
    cost: int


def cut_by_tokens(pieces: Sequence[Piece], max_tokens: int, max_cost: float = math.inf) -> list[list[int]]:
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
        chunks[-1].append(piece.row)
        prompts.add(piece.prompt)
    return chunks


def smallest_limit(pieces: Sequence[Piece], max_tokens: int, micro_batches: int) -> int:
    """`max_tokens`, or the smallest number above it that needs no more than so many micro-batches."""
    whole = sum(piece.prompt_tokens + piece.tokens for piece in pieces)
    fits = range(max_tokens, max(max_tokens, whole) + 1)
    return fits[bisect_left(fits, True, key=lambda limit: len(cut_by_tokens(pieces, limit)) <= micro_batches)]


def spread(pieces: Sequence[Piece], max_tokens: int, micro_batches: int) -> list[list[int]]:
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


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """How an update's forwards are computed."""

    packed: bool
    """Micro-batches are packed (perl.training.packing), not padded."""
    batcher: MicroBatcher
    kernel: Kernel | None
    """Of packed attention; None is sdpa."""


def plan_update(
    policy: Any,
    args: TrainingConfig,
    *,
    entropy_bonus: bool,
    aux_loss: bool,
    critic: bool,
    size: ModelSize | None,
    autocast: torch.dtype | None,
) -> UpdatePlan:
    """Whether the micro-batches of `policy` (a transformers model or a PeftModel) are packed, which it is prepared for,
    and how their rows are dealt; the main process logs one line for what is not done, and why.

    Args:
        entropy_bonus: the loss has one.
        aux_loss: the loss has a router's auxiliary loss.
        critic: a critic learns from every row.
        size: of `policy`; None where its FLOPs can't be counted.
        autocast: the dtype that attention is computed in, where that is not the model's.
    """
    say = args.process_index == 0
    if aux_loss or args.torch_compile:
        padded = "the router's auxiliary loss" if aux_loss else "torch_compile wants one shape"
    else:
        padded = enable_packing(policy)
    fixed = why_fixed(args, entropy_bonus, aux_loss, takes_images(policy.config))
    if padded and say:
        log.info("micro-batches are padded, not packed: %s", padded)
    if fixed and say:
        log.info("micro-batches have the rows that TRL gives them: %s depends on their make-up", fixed)
    if args.max_tokens_per_microbatch is not None and (padded or fixed) and say:
        log.warning(
            "training.max_tokens_per_microbatch has no effect: micro-batches are %s",
            "padded" if padded else "those of TRL",
        )
    batcher = MicroBatcher(
        loss_type=args.loss_type,
        accumulation=args.gradient_accumulation_steps,
        leave_out_zero=args.beta == 0.0 and not critic,
        group=padded is None,
        fixed=fixed,
        max_tokens=None if padded else args.max_tokens_per_microbatch,
        size=size,
    )
    kernel = None if padded else device.varlen_attention(args.attention_kernels)
    if kernel is not None:
        dtype, head_dim = numbers_of(policy)
        if (missing := kernel.missing(autocast or dtype, head_dim)) is not None:
            if say:
                log.info("packed micro-batches are computed by sdpa: %s", missing)
            kernel = None
    return UpdatePlan(padded is None, batcher, kernel)


def why_fixed(args: TrainingConfig, entropy_bonus: bool, aux_loss: bool, images: bool) -> str | None:
    """What of the loss depends on which rows share a micro-batch, so that these must be those that TRL gives; None:
    nothing does."""
    if args.loss_type not in (*MEAN_OVER_ROWS, *SUM_OVER_TOKENS):
        return f"loss_type {args.loss_type}"
    if args.top_entropy_quantile < 1.0:
        return "top_entropy_quantile below 1"
    if images:
        return "what TRL keeps of their images"
    if entropy_bonus:
        return "the entropy bonus"
    return "the router's auxiliary loss" if aux_loss else None


def _tokens(batches: Sequence[MicroBatch]) -> int:
    return sum(int(batch["prompt_mask"].sum() + batch["completion_mask"].sum()) for batch in batches)


def _stack(window: Sequence[MicroBatch]) -> MicroBatch:
    return {
        name: torch.cat([batch[name] for batch in window]) if _by_row(value) else value
        for name, value in window[0].items()
    }


def _by_row(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _order(rows: MicroBatch, group: bool) -> list[int]:
    """Row indices, longest completion first; with `group`, prompts with the longest completions first, and the rows of
    a prompt together."""
    lengths = rows["completion_mask"].sum(dim=1).tolist()
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    if not group:
        return order
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in order:
        by_prompt.setdefault(tuple(rows["prompt_ids"][row].tolist()), []).append(row)
    return [row for members in by_prompt.values() for row in members]


def _select(rows: MicroBatch, chosen: Sequence[int]) -> MicroBatch:
    index = torch.tensor(chosen, device=rows["completion_ids"].device)
    return {name: value[index] if _by_row(value) else value for name, value in rows.items()}


def pad_rows(batch: MicroBatch, count: int) -> MicroBatch:
    """`batch` with its last `count` rows taking part in the forward, as every rank must, and contributing an exact 0
    at the cost of a token: no advantage, no token of the completion, the last one of the prompt."""
    if not count:
        return batch
    first = len(batch["advantages"]) - count
    quiet = {name: batch[name].clone() for name in ("advantages", "completion_mask", "prompt_mask")}
    quiet["advantages"][first:] = 0
    quiet["completion_mask"][first:] = 0
    quiet["prompt_mask"][first:, :-1] = 0
    return batch | quiet
