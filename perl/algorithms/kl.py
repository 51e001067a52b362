"""The KL divergence of policy and reference, and what it takes from the rewards of a completion's tokens."""

from __future__ import annotations

import torch


def token_rewards(rewards: torch.Tensor, mask: torch.Tensor, penalty: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [rows, tokens]: the completion's reward at its last token of `mask`, less the penalty of each; 0
    elsewhere, and in rows without a reward.

    Args:
        rewards: float [rows], NaN where there is none.
        mask: bool [rows, tokens].
        penalty: float [rows, tokens].
    """
    places = torch.arange(mask.shape[1], device=mask.device)
    last = (mask * places).amax(dim=1, keepdim=True)
    found = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    found.scatter_(1, last, rewards[:, None].float())
    found = found if penalty is None else found - penalty.float()
    return found.masked_fill(~mask | rewards.isnan()[:, None], 0.0)
