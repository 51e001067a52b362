"""Which rows of a generation batch go into which micro-batch.

TRL shuffles a generation batch and cuts it into micro-batches. Within one optimizer update, where gradients are summed,
the rows may be dealt out anew without changing the update: those of one prompt together, so that the prompt is computed
once for them, longest first, so that neighbours are alike; and rows that carry no gradient left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from perl.training.packing import enable_packing

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
    """Deals the rows of a generation batch out to its micro-batches."""

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

    def arrange(
        self, micro_batches: Sequence[MicroBatch], all_reduce_max: Callable[[list[int]], list[int]]
    ) -> list[MicroBatch]:
        """As many micro-batches as before, the rows dealt out anew among those that surely belong to one update: TRL
        samples every len(micro_batches) micro-batches and updates after every `accumulation`.

        Args:
            all_reduce_max: from one number per window of this process to the largest among all processes. TRL gathers
                metrics by row, so the i-th micro-batch has as many rows on every process.
        """
        size = math.gcd(len(micro_batches), self.accumulation)
        windows = [micro_batches[start : start + size] for start in range(0, len(micro_batches), size)]
        if self.fixed:
            return [batch | {SCALE: 1.0, TOKENS: _tokens([batch])} for batch in micro_batches]
        stacked = [_stack(window) for window in windows]
        kept = [self._kept(rows) for rows in stacked]
        arranged = []
        for window, rows, mine, count in zip(
            windows, stacked, kept, all_reduce_max([len(k) for k in kept]), strict=True
        ):
            dealt = self._deal(rows, mine, count, len(window))
            arranged += [batch | {TOKENS: 0 if i else _tokens(window)} for i, batch in enumerate(dealt)]
        return arranged

    def share_left_out(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Of the rows that `arrange` is given, how many it leaves out."""
        if self.fixed or not self.leave_out_zero:
            return 0.0
        zero = [float((batch["advantages"] == 0).float().mean()) for batch in micro_batches]
        return sum(zero) / len(zero)

    def _kept(self, rows: MicroBatch) -> list[int]:
        """The rows to compute, in the order in which they are dealt."""
        order = _order(rows, self.group)
        return [row for row in order if not self.leave_out_zero or rows["advantages"][row] != 0]

    def _deal(self, rows: MicroBatch, kept: list[int], count: int, micro_batches: int) -> list[MicroBatch]:
        """`kept`, filled up to `count` rows with some that contribute nothing, in so many micro-batches."""
        size = len(rows["advantages"]) // micro_batches
        places = [*kept, *[kept[-1] if kept else 0] * (count - len(kept))]
        dealt = []
        for start in range(0, count, size):
            chunk = _select(rows, places[start : start + size])
            fillers = max(0, min(start + size, count) - max(start, len(kept)))
            scale = len(chunk["advantages"]) / size if self.loss_type in MEAN_OVER_ROWS else 1.0
            dealt.append(pad_rows(chunk, fillers) | {SCALE: scale})
        while len(dealt) < micro_batches:
            dealt.append(pad_rows(_select(rows, [0]), 1) | {SCALE: 0.0})
        return dealt


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """How an update's forwards are computed."""

    packed: bool
    """Micro-batches are packed (perl.training.packing), not padded."""
    batcher: MicroBatcher


def plan_update(
    policy: Any,
    *,
    loss_type: str,
    accumulation: int,
    beta: float,
    top_entropy_quantile: float,
    entropy_bonus: bool,
    aux_loss: bool,
    torch_compile: bool,
    main_process: bool,
) -> UpdatePlan:
    """Whether the micro-batches of `policy` (a transformers model or a PeftModel) are packed, which it is prepared for,
    and how their rows are dealt; the main process logs one line for what is not done, and why.

    Args:
        loss_type, beta, top_entropy_quantile, torch_compile: fields of GRPOConfig.
        accumulation: its gradient_accumulation_steps.
        entropy_bonus: the loss has one.
        aux_loss: the loss has a router's auxiliary loss.
    """
    if aux_loss or torch_compile:
        padded = "the router's auxiliary loss" if aux_loss else "torch_compile wants one shape"
    else:
        padded = enable_packing(policy)
    fixed = None
    if loss_type not in (*MEAN_OVER_ROWS, *SUM_OVER_TOKENS):
        fixed = f"loss_type {loss_type}"
    elif top_entropy_quantile < 1.0:
        fixed = "top_entropy_quantile below 1"
    elif entropy_bonus or aux_loss:
        fixed = "the entropy bonus" if entropy_bonus else "the router's auxiliary loss"
    if padded and main_process:
        log.info("micro-batches are padded, not packed: %s", padded)
    if fixed and main_process:
        log.info("micro-batches have the rows that TRL gives them: %s depends on their make-up", fixed)
    batcher = MicroBatcher(
        loss_type=loss_type,
        accumulation=accumulation,
        leave_out_zero=beta == 0.0,
        group=padded is None,
        fixed=fixed,
    )
    return UpdatePlan(padded is None, batcher)


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
    """`batch` with its last `count` rows taking part in the forward, as every rank must, and contributing an exact 0:
    no advantage, no token of the completion."""
    first = len(batch["advantages"]) - count
    quiet = {name: batch[name].clone() for name in ("advantages", "completion_mask")}
    for value in quiet.values():
        value[first:] = 0
    return batch | quiet


def equal_rewards(rewards: torch.Tensor, weights: torch.Tensor, group_size: int) -> torch.Tensor:
    """bool [rows]: whether all rewards of the row's group are the same number, so that its advantage is 0.

    In floating point, reward minus the group's mean need not be: the mean of eight 1.2 is not 1.2, and divided by the
    deviation of that rounding an advantage of 1e-3 remains.

    Args:
        rewards: float [rows, functions], NaN where a function gave none; groups of `group_size` consecutive rows.
        weights: float [functions].
    """
    total = (rewards * weights).nansum(dim=1)
    missing = rewards.isnan().all(dim=1)
    groups = total.view(-1, group_size)
    absent = missing.view(-1, group_size)
    highest = groups.masked_fill(absent, -math.inf).amax(dim=1)
    lowest = groups.masked_fill(absent, math.inf).amin(dim=1)
    return (highest <= lowest).repeat_interleave(group_size)
