"""The KL divergence of policy and reference, and what it takes from the rewards of a completion's tokens."""

from __future__ import annotations

from dataclasses import dataclass

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
    spread = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    spread.scatter_(1, last, rewards[:, None].float())
    spread = spread if penalty is None else spread - penalty.float()
    return spread.masked_fill(~mask | rewards.isnan()[:, None], 0.0)


def kl_divergence(policy: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """KL(policy || reference) of each token, in nats, estimated from the one token that the policy drew, as John
    Schulman's "Approximating KL divergence" (2020) names the estimators.

    Args:
        policy, reference: log-probabilities of the tokens, any shape.
        estimator: "k1", log p - log q, unbiased; "abs", its absolute value; "mse" (k2), half its square, whose gradient
            is that of the KL divergence; "low_var_kl" (k3), q/p - 1 - log q/p, unbiased and never negative.
    """
    apart = policy - reference
    match estimator:
        case "k1":
            return apart
        case "abs":
            return apart.abs()
        case "mse":
            return 0.5 * apart.square()
        case "low_var_kl":
            return torch.exp(-apart) + apart - 1
    raise ValueError(f"unknown estimator {estimator}")


@dataclass(slots=True)
class KLCoefficient:
    """Of the KL divergence in the reward: fixed, or adapted to a target (arXiv 1909.08593, section 2.2)."""

    value: float
    target: float | None = None
    """In nats a token; None leaves `value` fixed."""
    horizon: int = 10000
    """Completions over which an error of 20 % changes `value` by 20 %, and of no rollout by more."""

    def adapt(self, kl: float, completions: int) -> None:
        """After a rollout of so many completions of all processes, whose mean KL divergence a token was `kl`."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * min(1.0, completions / self.horizon)
