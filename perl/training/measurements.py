"""What the trainer measures of its rollouts and of the policies that meet in its loss, between two logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from perl.runs.metrics import RolloutStatistics
from perl.training.loss import PolicyDrift, SamplerDifference, warn_of_difference


class Measurements:
    """Sums on this process; `take` makes the metrics of all processes of them.

    Args:
        accelerator: of the trainer.
    """

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        self.tolerance: float | None = None
        """Of the difference between sampler and trainer, in nats; None before they were compared."""
        self._rollouts, self._drift, self._difference = RolloutStatistics(), PolicyDrift(), SamplerDifference()
        self._noise = SamplerDifference()
        """Of the clean policy and the noisy one that sampled, over the step's rollouts."""

    def state(self) -> dict[str, dict[str, Any]]:
        """What has been added since the last `take`: tensors, for `restore` in another process."""
        return {name: dict(vars(part)) for name, part in self._parts().items()}

    def restore(self, state: dict[str, dict[str, Any]]) -> None:
        for name, part in self._parts().items():
            vars(part).update(state[name])

    def _parts(self) -> dict[str, Any]:
        return {
            "rollouts": self._rollouts,
            "drift": self._drift,
            "difference": self._difference,
            "noise": self._noise,
        }

    def add_rollout(self, batch: dict[str, Any], rewards: torch.Tensor) -> None:
        """A generation batch, and the rewards of all processes, NaN where a row has none."""
        self._rollouts.add(batch["prompt_mask"].sum(dim=1), batch["completion_mask"], batch["advantages"], rewards)

    def add_update(self, policy: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> None:
        """Log-probabilities of a micro-batch's tokens by the policy and by the one that its ratio refers to, in nats,
        and which of them count: [rows, tokens]."""
        self._drift.add(old, policy, mask)

    def add_sampler(
        self, sampler: torch.Tensor, old: torch.Tensor, clean: torch.Tensor | None, mask: torch.Tensor, *, noisy: bool
    ) -> None:
        """Those of the sampler against `old`, as `add_update` has them; and against those of the policy without noise,
        while it is still the one that sampled.

        Args:
            noisy: the sampler had noise that `old` had not: they differ by more than rounding.
        """
        self._difference.add(old, sampler, mask)
        self._difference.noisy |= noisy
        if clean is not None:
            self._noise.add(clean, sampler, mask)

    def take_noise_kl(self, add_up: Callable[[torch.Tensor], torch.Tensor]) -> float | None:
        """KL(noisy || clean) on the tokens of the step's rollouts, in nats a token; None where the step has drawn
        nothing, or trains on none of it. Every process must come here.

        Args:
            add_up: the sum over the processes, made by each in the same order.
        """
        found = self._noise.take(add_up, self.accelerator.device)
        return None if found is None else found.kl

    def take(self) -> dict[str, float]:
        """The metrics of all processes since the last call. Every process must come here."""
        device, reduce = self.accelerator.device, self.accelerator.reduce
        metrics = self._rollouts.take(self.accelerator.gather)
        drift = self._drift.take(reduce, device)
        metrics |= {} if drift is None else {"approx_kl": drift}
        difference = self._difference.take(reduce, device)
        if difference is not None:
            metrics |= {"rollout/logp_mismatch": difference.absolute, "rollout/logp_kl": difference.kl}
            if not difference.noisy:
                warn_of_difference(difference, self.tolerance)
        return metrics
