"""Proximal Policy Optimization (arXiv 1707.06347) with a critic: a baseline for each token, learned with the policy.

    delta_t = r_t + gamma V_{t+1} - V_t                                   V = 0 after the last token
    A_t     = delta_t + gamma lam A_{t+1}                                  generalized advantage estimation
    R_t     = A_t + V_t                                                    what the critic learns

The values come from perl.training.critic; the policy's loss is TRL's clipped one.
"""

from __future__ import annotations

import torch

from perl.algorithms.algorithm import Algorithm, Scored
from perl.algorithms.whitening import whiten


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, equation 16): advantages and returns, both float32
    [rows, tokens] and 0 where `mask` is not. Tokens outside of it (padding, a tool's output) are stepped over: the
    token before one is followed by the token after it.

    Args:
        rewards, values: float [rows, tokens].
        mask: bool [rows, tokens].
        gamma: discount of a token.
        lam: 0 is the temporal difference of one token, 1 the return minus the value.
    """
    device = values.device
    rewards, values, mask = rewards.cpu(), values.cpu().float(), mask.cpu()  # small steps: slow on an accelerator
    advantages = torch.zeros_like(values)
    following = advantage = advantages.new_zeros(len(advantages))
    for place in reversed(range(values.shape[1])):
        trained, value = mask[:, place], values[:, place]
        estimate = rewards[:, place] + gamma * following - value + gamma * lam * advantage
        advantage, following = torch.where(trained, estimate, advantage), torch.where(trained, value, following)
        advantages[:, place] = estimate
    advantages = advantages.masked_fill(~mask, 0.0)
    return advantages.to(device), (advantages + values).masked_fill(~mask, 0.0).to(device)


def generalized(scored: Scored) -> tuple[torch.Tensor, torch.Tensor]:
    """`gae` of the tokens of `Scored.rewarded`."""
    assert scored.values is not None
    return gae(scored.token_rewards, scored.values, scored.rewarded(), scored.gamma, scored.lam)


def white_advantages(scored: Scored) -> torch.Tensor:
    """`Scored.generalized`'s, white over the tokens of all processes: float32 [rows, tokens]."""
    assert scored.generalized is not None
    return whiten(scored.generalized[0], scored.rewarded(), scored.gather)


PPO = Algorithm(
    paper="arXiv 1707.06347",
    settings={"training.num_generations": 1},
    advantages=white_advantages,
    critic=True,
    groups=False,
    uses=frozenset({"algorithm.gamma", "algorithm.lam"}),
)
"""One completion of each prompt, as there is nothing that a group compares; clipped at 0.2, TRL's default."""
