"""REINFORCE Leave-One-Out."""

from __future__ import annotations

import torch

from perl.algorithms.algorithm import Algorithm, Scored


def leave_one_out(scored: Scored) -> torch.Tensor:
    """A_i = r_i - mean of the other rewards of its group (arXiv 2402.14740, equation 8): float32 [rows]. A row without
    a reward has 0 and counts in no mean; so has the only row of its group that has one."""
    rewards = scored.groups()
    known = ~rewards.isnan()
    others = known.sum(dim=1, keepdim=True) - 1
    total = rewards.nan_to_num(nan=0.0).sum(dim=1, keepdim=True)
    baseline = (total - rewards) / others.clamp(min=1)
    equal = (rewards == rewards.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)) | ~known
    nothing = ~known | (others < 1) | equal.all(dim=1, keepdim=True)
    return scored.mine((rewards - baseline).masked_fill(nothing, 0.0))


RLOO = Algorithm(paper="arXiv 2402.14740", advantages=leave_one_out)
