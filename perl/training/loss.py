"""The loss of GRPO (arXiv 2402.03300), and what of it is ours.

For row i with completion tokens t, rewards r_i of its group, policy p, the policy p_old that the ratio refers to and
the sampler's own probabilities q:

    A_i   = (r_i - mean(r)) / (std(r) + 1e-4)                advantage    TRL; exactly 0 here where all r are equal
    rho   = clamp(p_old / q)                                 importance   importance_ratio, on request
    ratio = p / p_old
    L_it  = -min(ratio, clip(ratio, 1 - eps, 1 + eps)) * A_i * rho        TRL's `_compute_loss`, called in trainer.py

    L_it += beta * kl(p, p_ref)                                           TRL's low_var_kl; ours, add_up_tokens

The loss is linear in the advantage, whatever TRL's loss_type is but "vespo": rho is multiplied into it. Rows whose A
is 0 have no gradient and are not computed (perl.training.microbatches).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from perl.base.errors import RankError
from perl.engines.base import warn_once

TOLERANCE = {4: 1e-3, 2: 0.2}
"""Largest mean difference between the sampler's and the trainer's log-probabilities, in nats, by bytes of the numbers
that are computed with. Float32 differs in the order of sums alone: 24 bits leave a logit of 20 about 1e-6, and some
hundred sums in a row less than a hundred times that. In bfloat16, of 8 bits, sampler and trainer round the same outputs
at different places (autocast, packing, the cache): random weights, whose every token is improbable and shows the
logit's whole error, were 0.005 apart at 28 M, 0.014 at Qwen2.5-0.5B's shape and 0.029 at 1.5B's; a quarter of 7B's
layers, 0.020, makes 0.06 of all."""
LEAST_RATIO = 0.5
"""Mean of the importance sampling ratios below which most of the gradient is lost."""


class TokenLogProbs(NamedTuple):
    """What a forward pass says of the completions of a micro-batch, as TRL's loss takes it."""

    logps: torch.Tensor
    """[rows, tokens], in nats."""
    entropies: torch.Tensor | None
    """[rows, tokens]."""
    aux_loss: torch.Tensor | None
    """Of a mixture of experts' router."""


def equal_rewards(rewards: torch.Tensor, weights: torch.Tensor, group_size: int) -> torch.Tensor:
    """bool [rows]: whether all rewards of the row's group are the same number, so that its advantage is 0.

    In floating point, reward minus the group's mean need not be: the mean of eight 1.2 is not 1.2, and divided by the
    deviation of that rounding an advantage of 1e-3 remains.

    Args:
        rewards: float [rows, functions], NaN where a function gave none; groups of `group_size` consecutive rows.
        weights: float [functions].
    """
    total = (rewards * weights).nansum(dim=1)
    missing = rewards.isnan().all(dim=1)
    groups = total.view(-1, group_size)
    absent = missing.view(-1, group_size)
    highest = groups.masked_fill(absent, -math.inf).amax(dim=1)
    lowest = groups.masked_fill(absent, math.inf).amin(dim=1)
    return (highest <= lowest).repeat_interleave(group_size)


def each_equal(rewards: torch.Tensor, weights: torch.Tensor, group_size: int) -> torch.Tensor:
    """`equal_rewards` of every function by itself, where each is normalized before they are added up (TRL's
    normalize_then_sum)."""
    functions = zip(rewards.split(1, dim=1), weights.split(1), strict=True)
    return torch.stack([equal_rewards(*function, group_size) for function in functions]).all(dim=0)


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


def add_up_tokens(
    values: torch.Tensor,
    mask: torch.Tensor,
    loss_type: str,
    *,
    longest: int,
    micro_batches: int,
    window_tokens: torch.Tensor,
) -> torch.Tensor:
    """What TRL's `_compute_loss` makes of the per-token loss of a micro-batch: a scalar.

    Args:
        values, mask: [rows, tokens], and which of them count.
        loss_type: of TRL.
        longest: training.max_completion_length.
        micro_batches: of an optimizer update.
        window_tokens: [], tokens that count in an optimizer update, of a mean process.
    """
    counted = values * mask
    match loss_type:
        case "grpo" | "sapo":
            return (counted.sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)).mean() / micro_batches
        case "bnpo":
            return counted.sum() / mask.sum().clamp(min=1.0) / micro_batches
        case "dr_grpo":
            return counted.sum() / (len(values) * longest) / micro_batches
        case "luspo":
            return counted.sum(dim=1).mean() / micro_batches
        case "dapo" | "cispo" | "vespo":
            return counted.sum() / window_tokens
    raise ValueError(f"unknown loss_type {loss_type}")


# Sampler and trainer


class Difference(NamedTuple):
    """How far two policies are apart on tokens that the first one drew."""

    absolute: float
    """Mean of |log p_trainer - log p_sampler|, in nats."""
    kl: float
    """KL(sampler || trainer), estimated by the mean of r - 1 - log r with r = p_trainer / p_sampler: "k3" of John
    Schulman's "Approximating KL divergence" (2020), unbiased and never negative."""
    noisy: bool = False
    """Whether one of those that drew had noise that the other policy had not: they differ by more than rounding."""


@dataclass
class SamplerDifference:
    """The difference over all tokens added since the last `take`."""

    _sums: torch.Tensor | None = field(default=None)
    """float32 [3]: absolute differences, k3 terms, tokens."""
    noisy: bool = False
    """As Difference has it, of this process."""

    @torch.no_grad()
    def add(self, trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> None:
        """Log-probabilities of drawn tokens by both, in nats, and which of them count: all [rows, tokens]. A token
        without a number (NaN from vLLM) does not count."""
        ratio = trainer.float() - sampler.float()
        kept = mask.bool() & ~ratio.isnan()
        ratio = ratio.masked_fill(~kept, 0.0)
        sums = torch.stack([ratio.abs().sum(), (ratio.exp() - 1 - ratio).sum(), kept.sum().float()])
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self, add_up: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Difference | None:
        """Over all processes, and start again; None where no token was added.

        Args:
            add_up: from this process's sums to those of all processes.
        """
        sums = torch.zeros(3, device=device) if self._sums is None else self._sums
        noisy = torch.tensor([float(self.noisy)], device=sums.device)
        self._sums, self.noisy = None, False
        absolute, k3, tokens, noisy_processes = add_up(torch.cat([sums, noisy])).tolist()
        return Difference(absolute / tokens, k3 / tokens, noisy_processes > 0) if tokens else None


@dataclass
class PolicyDrift:
    """How far the policy is from the old one that its ratio refers to: the mean of log p_old - log p over all tokens
    added since the last `take`, verl's actor/ppo_kl (k1 of "Approximating KL divergence"), each within 20 nats."""

    _sums: torch.Tensor | None = field(default=None)
    """float32 [2]: of the differences, and tokens."""

    @torch.no_grad()
    def add(self, old: torch.Tensor, policy: torch.Tensor, mask: torch.Tensor) -> None:
        """Log-probabilities of drawn tokens by both, in nats, and which of them count: all [rows, tokens]."""
        apart = (old.float() - policy.float()).masked_fill(~mask.bool(), 0.0).clamp(-20, 20)
        sums = torch.stack([apart.sum(), mask.sum().float()])
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self, add_up: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> float | None:
        """As `SamplerDifference.take`."""
        sums = torch.zeros(2, device=device) if self._sums is None else self._sums
        self._sums = None
        apart, tokens = add_up(sums).tolist()
        return apart / tokens if tokens else None


def require_same_policy(difference: Difference | None, allowed: float) -> None:
    """Raise a RankError where completions do not come from the policy that is trained, their log-probabilities being
    more than `allowed` nats apart: a sampler that runs the base model, or the weights of another run, learns nothing
    and looks healthy."""
    if difference is not None and not difference.absolute <= allowed:
        raise RankError(
            f"rollout: the sampler does not run the policy that is trained: its log-probabilities are"
            f" {difference.absolute:.2g} nats from the trainer's on average, where {allowed:.2g} is rounding;"
            " --config.rollout.engine generate samples with the trainer's own model, --config.rollout.merge_adapter"
            " false with the adapter unmerged"
        )


def warn_of_difference(difference: Difference, allowed: float | None) -> None:
    """Log once where sampler and trainer were one policy at the start and are not any more."""
    if allowed is not None and difference.absolute > allowed:
        warn_once(
            f"rollout: the sampler's log-probabilities are more than {allowed:.2g} nats from the trainer's, which is no"
            " rounding: it may have missed the adapter, or it samples an older policy (rollout/logp_mismatch shows it)"
        )


def warn_of_ratio(mean: float, mode: str) -> None:
    """Log once where TRL's importance sampling correction takes most of the loss away.

    Args:
        mean: of the ratios, as they weigh the loss.
        mode: vllm_importance_sampling_mode.
    """
    if mean < LEAST_RATIO:
        remedy = (
            "sampler and trainer are far apart (rollout/logp_mismatch)"
            if mode == "token_truncate"
            else "write --config.training.vllm_importance_sampling_mode token_truncate"
        )
        warn_once(
            f"rollout: the importance sampling ratios are below {LEAST_RATIO} on average, so that most of the gradient"
            f" is lost (sampling/importance_sampling_ratio/mean, vllm_importance_sampling_mode {mode}): {remedy}"
        )


def pad_right(rows: Sequence[Sequence[float | None]], device: torch.device) -> torch.Tensor:
    """float32 [rows, longest], 0 beyond a row's end and NaN for None, which TRL writes for a NaN of vLLM."""
    width = max(map(len, rows))
    numbers = [[math.nan if x is None else x for x in row] + [0.0] * (width - len(row)) for row in rows]
    return torch.tensor(numbers, dtype=torch.float32, device=device)
