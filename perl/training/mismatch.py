"""How far the sampler's log-probabilities are from the trainer's, and the weights that make up for it in the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch


@dataclass
class Mismatch:
    """Sums over the tokens that the loss has seen since the last `take`."""

    _sums: torch.Tensor | None = field(default=None)
    """float32 [3]: absolute differences, k3 terms, tokens."""

    @torch.no_grad()
    def add(self, trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> None:
        """Log-probabilities of drawn tokens by both, in nats, and which of them count: all [rows, tokens]. A token
        without a number (NaN from vLLM) does not count."""
        ratio = trainer.float() - sampler.float()
        kept = mask.bool() & ~ratio.isnan()
        ratio = ratio.masked_fill(~kept, 0.0)
        sums = torch.stack([ratio.abs().sum(), (ratio.exp() - 1 - ratio).sum(), kept.sum().float()])
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self, add_up: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> dict[str, float]:
        """The metrics over all processes, and start anew.

        rollout/logp_mismatch is the mean absolute difference. rollout/logp_kl estimates KL(sampler || trainer) on the
        sampler's own tokens by the mean of r - 1 - log r with r = trainer / sampler, "k3" of John Schulman's
        "Approximating KL divergence" (2020): unbiased, and never negative.

        Args:
            add_up: from this process's sums to those of all processes.
        """
        sums = torch.zeros(3, device=device) if self._sums is None else self._sums
        self._sums = None
        absolute, k3, tokens = add_up(sums).tolist()
        if not tokens:
            return {}
        return {"rollout/logp_mismatch": absolute / tokens, "rollout/logp_kl": k3 / tokens}


def importance_ratio(
    trainer: torch.Tensor,
    sampler: torch.Tensor,
    mask: torch.Tensor,
    level: Literal["token", "sequence"],
    low: float | None,
    high: float | None,
) -> torch.Tensor:
    """Truncated importance weights (Ionides, "Truncated importance sampling", 2008; as a bound on off-policy gradients
    in IMPALA, arXiv 1802.01561): clamp(p_trainer / p_sampler), of each token, or of the whole completion.

    Args:
        trainer, sampler, mask: [rows, tokens], log-probabilities in nats and which tokens count.
        low, high: bounds; None is no bound.

    Returns:
        float32 [rows, tokens] or [rows, 1], without gradient; 1 where nothing counts.
    """
    ratio = (trainer.detach().float() - sampler.float()).masked_fill(~mask.bool(), 0.0).nan_to_num(nan=0.0)
    ratio = (ratio.sum(dim=1, keepdim=True) if level == "sequence" else ratio).exp()
    return ratio if low is None and high is None else ratio.clamp(low, high)
