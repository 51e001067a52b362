"""Baselines that are a mean over the rewards of the group: RLOO, OPO, GPG."""

from __future__ import annotations

import torch

from perl.algorithms.algorithm import Algorithm, Scored


def leave_one_out(scored: Scored) -> torch.Tensor:
    """A_i = r_i - mean of the other rewards of its group (arXiv 2402.14740, equation 8): float32 [rows]. A row without
    a reward has 0 and counts in no mean; so has the only row of its group that has one."""
    rewards = scored.groups()
    others = (~rewards.isnan()).sum(dim=1, keepdim=True) - 1
    baseline = (rewards.nansum(dim=1, keepdim=True) - rewards) / others.clamp(min=1)
    return scored.local((rewards - baseline).masked_fill(scored.without_advantage(), 0.0))


def length_weighted(scored: Scored) -> torch.Tensor:
    """A_i = r_i - sum(l r) / sum(l) over the group, l the trained tokens of a completion: the baseline of least
    variance where each token's gradient is as large as another's (arXiv 2505.23585, equation 8): float32 [rows]."""
    rewards = scored.groups()
    lengths = scored.gather(scored.mask.sum(dim=1).float()).view_as(rewards).masked_fill(rewards.isnan(), 0.0)
    baseline = (lengths * rewards).nansum(dim=1, keepdim=True) / lengths.sum(dim=1, keepdim=True).clamp(min=1)
    return scored.local((rewards - baseline).masked_fill(scored.without_advantage(), 0.0))


def by_share_rewarded(scored: Scored) -> torch.Tensor:
    """A_i = a (r_i - mean of its group), a the rows of all processes per row whose reward is not 0, as verl counts
    them (arXiv 2504.02546, whose a counts the rows of groups that differ): float32 [rows]."""
    rewards = scored.groups()
    known = ~rewards.isnan()
    share = known.sum() / (known & (rewards != 0)).sum().clamp(min=1)
    advantages = share * (rewards - rewards.nanmean(dim=1, keepdim=True))
    return scored.local(advantages.masked_fill(scored.without_advantage(), 0.0))


RLOO = Algorithm(paper="arXiv 2402.14740", advantages=leave_one_out)

OPO = Algorithm(paper="arXiv 2505.23585", advantages=length_weighted, settings={"training.beta": 0.0})

GPG = Algorithm(paper="arXiv 2504.02546", advantages=by_share_rewarded, settings={"training.beta": 0.0})
"""The paper's loss is -A log p: that of TRL has its gradient where a rollout serves one update."""
