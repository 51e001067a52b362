"""ReMax: what the policy earns of a prompt when it does not explore is what a completion is compared with."""

from __future__ import annotations

import torch

from perl.algorithms.algorithm import Algorithm, Scored
from perl.algorithms.ppo import gae


def beyond_greedy(scored: Scored) -> torch.Tensor:
    """The sum of the rewards from a token to the last, less the reward of the greedy completion of its prompt
    (arXiv 2310.10505, algorithm 1): float32 [rows, tokens]; 0 where either has none. As in verl the policy that samples
    draws the latter too, here with its noise, and the KL divergence is taken from the former alone."""
    assert scored.baselines is not None
    returns, _ = gae(scored.token_rewards, torch.zeros_like(scored.token_rewards), scored.mask, gamma=1.0, lam=1.0)
    known = scored.rewarded() & scored.baselines.isfinite()[:, None]
    return (returns - scored.baselines[:, None]).masked_fill(~known, 0.0)


REMAX = Algorithm(paper="arXiv 2310.10505", advantages=beyond_greedy, groups=False, greedy=True)
"""No group is compared: one completion of each prompt will do, as in the paper."""
