"""REINFORCE++: advantages of tokens, normalized over all tokens of the batch instead of the group."""

from __future__ import annotations

import torch

from perl.algorithms.algorithm import Algorithm, Scored
from perl.algorithms.ppo import gae
from perl.algorithms.whitening import whiten


def whitened_returns(scored: Scored) -> torch.Tensor:
    """The discounted sum of the rewards from a token to the last, whitened (arXiv 2501.03262, equations 8 and 9):
    float32 [rows, tokens]. Tokens that are not trained on are skipped: they discount nothing."""
    no_values = torch.zeros_like(scored.token_rewards)
    returns, _ = gae(scored.token_rewards, no_values, scored.mask, scored.gamma, lam=1.0)
    return whiten(returns, scored.rewarded(), scored.gather)


def whitened_baseline(scored: Scored) -> torch.Tensor:
    """A_i = r_i - mean of its group, whitened over the tokens (arXiv 2501.03262, "REINFORCE++ with baseline"): float32
    [rows, tokens]."""
    rewards = scored.groups()
    centred = (rewards - rewards.nanmean(dim=1, keepdim=True)).masked_fill(scored.without_advantage(), 0.0)
    return whiten(scored.local(centred)[:, None].expand(scored.mask.shape), scored.rewarded(), scored.gather)


REINFORCE_PLUS_PLUS = Algorithm(
    paper="arXiv 2501.03262", advantages=whitened_returns, groups=False, uses=frozenset({"algorithm.gamma"})
)
"""No group is compared: one completion of each prompt will do, as in the paper, which takes a KL divergence (k1) from
the rewards: algorithm.kl_in_reward."""

REINFORCE_PLUS_PLUS_BASELINE = Algorithm(paper="arXiv 2501.03262", advantages=whitened_baseline)
"""The paper puts the KL divergence into the loss as k2: training.beta with algorithm.kl_estimator mse."""
