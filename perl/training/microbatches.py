"""Which rows of a generation batch go into which micro-batch.

TRL shuffles a generation batch and cuts it into micro-batches. Within one optimizer update, where gradients are summed,
the rows may be dealt out anew without changing the update: those of one prompt together, so that the prompt is computed
once for them, longest first, so that neighbours are alike; and rows that carry no gradient left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

MicroBatch = dict[str, Any]
"""What TRL's loss takes: tensors whose first dimension is rows, and scalars. Ours adds SCALE and TOKENS."""

SCALE = "loss_scale"
"""Factor on the micro-batch's loss: where the loss is a mean over the rows of a micro-batch, the share of
per_device_train_batch_size that its rows are. 0.0: it has no row of its own, and only takes part."""
TOKENS = "trained_tokens"
"""Tokens of all rows of the window, prompts too and rows left out too, in its first micro-batch; 0 in the others."""

MEAN_OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
SUM_OVER_TOKENS = ("dapo", "cispo", "vespo")
"""Losses of TRL by how a micro-batch enters them. "bnpo" divides by the micro-batch's own number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealer:
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

    def arrange(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """As many micro-batches as before, the rows dealt out anew among those that surely belong to one update: TRL
        samples every len(micro_batches) micro-batches and updates after every `accumulation`."""
        window = math.gcd(len(micro_batches), self.accumulation)
        starts = range(0, len(micro_batches), window)
        return [batch for start in starts for batch in self._window(micro_batches[start : start + window])]

    def _window(self, window: Sequence[MicroBatch]) -> list[MicroBatch]:
        tokens = [int(batch["prompt_mask"].sum() + batch["completion_mask"].sum()) for batch in window]
        if self.fixed:
            return [batch | {SCALE: 1.0, TOKENS: count} for batch, count in zip(window, tokens, strict=True)]
        dealt = self._deal(window)
        return [batch | {TOKENS: 0 if index else sum(tokens)} for index, batch in enumerate(dealt)]

    def _deal(self, window: Sequence[MicroBatch]) -> list[MicroBatch]:
        size = len(window[0]["completion_ids"])
        rows = {
            name: torch.cat([batch[name] for batch in window]) if _by_row(value) else value
            for name, value in window[0].items()
        }
        order = _order(rows, self.group)
        kept = [row for row in order if not self.leave_out_zero or rows["advantages"][row] != 0]
        dealt = []
        for start in range(0, len(kept), size):
            chunk = kept[start : start + size]
            scale = len(chunk) / size if self.loss_type in MEAN_OVER_ROWS else 1.0
            dealt.append(_select(rows, chunk) | {SCALE: scale})
        while len(dealt) < len(window):
            dealt.append(_nothing(rows, order[-1]) | {SCALE: 0.0})
        return dealt


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


def _nothing(rows: MicroBatch, row: int) -> MicroBatch:
    """One row that takes part in the forward, as every rank must, and contributes an exact zero."""
    batch = _select(rows, [row])
    return batch | {name: batch[name] * 0 for name in ("advantages", "completion_mask")}


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
