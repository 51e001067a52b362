"""Advantages with mean 0 and variance 1 over the tokens of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def whiten(values: torch.Tensor, mask: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the tokens of `mask` of all processes, the variance with Bessel's
    correction (verl's masked_whiten): float32 [rows, tokens], 0 elsewhere, and everywhere where all of them are the
    same: what rounding leaves of these an optimizer that normalizes gradients would take for a direction.

    Args:
        values: float [rows, tokens].
        mask: bool [rows, tokens].
        gather: from [1, numbers] of this process to [processes, numbers].
    """
    values = values.float()
    counted = values.masked_fill(~mask, 0.0)
    ends = [(sign * values).masked_fill(~mask, -math.inf).max() for sign in (1, -1)]
    gathered = gather(torch.stack([mask.sum().float(), counted.sum(), *ends])[None])
    count, total = gathered[:, :2].sum(dim=0)
    high, low = gathered[:, 2:].amax(dim=0)  # the lowest with its sign turned
    centred = (counted - total / count.clamp(min=1.0)).masked_fill(~mask, 0.0)
    squares = gather(centred.square().sum()[None, None]).sum()
    white = centred * (squares / (count - 1.0).clamp(min=1.0) + 1e-8).rsqrt()
    return white.masked_fill(high <= -low, 0.0)
