"""The loss of GRPO (arXiv 2402.03300) and its kin: a function from what is known of a micro-batch to a scalar.

For a token t of row i that the policy p drew, with p_old the policy that the ratio refers to, q what the sampler says
and A the advantage (perl.algorithms):

    ratio = p / p_old                                            of a token, or the geometric mean of a completion's
    rho   = truncated or masked p_old / q                        importance_ratio, where it is asked for
    L_it  = surrogate(ratio, A_it) * rho_it + beta * KL(p, p_ref)                                           SURROGATES
    L     = L_it added up over tokens and rows                                                             add_up

`mask` is True at the tokens that the policy drew and that are trained on: no other enters anything here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from perl.algorithms.kl import kl_divergence

if TYPE_CHECKING:
    from perl.config.schema import CorrectionMode
    from perl.config.training import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What of the configuration shapes the loss; fields as in GRPOConfig."""

    loss_type: str = "grpo"
    level: str = "token"
    """importance_sampling_level: of the ratio."""
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    cispo_min_ratio: float | None = None
    delta: float | None = None
    beta: float = 0.0
    kl_estimator: str = "low_var_kl"
    bias_corrected_kl: bool = False
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    """Of positive and of other advantages."""
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    """k and lambda of advantages that are not negative."""
    vespo_negative: tuple[float, float] = (3.0, 2.0)
    off_policy_threshold: float | None = None
    longest: int = 1
    """max_completion_length."""
    correction: CorrectionMode = "none"
    """How the loss is weighed by p_old / q."""
    correction_bounds: tuple[float | None, float | None] = (None, 3.0)

    @classmethod
    def of(cls, args: TrainingConfig, kl_estimator: str, correction: CorrectionMode) -> LossSettings:
        high = args.epsilon_high
        return cls(
            loss_type=args.loss_type,
            level=args.importance_sampling_level,
            epsilon_low=args.epsilon,
            epsilon_high=args.epsilon if high is None else high,
            cispo_min_ratio=args.cispo_min_ratio,
            delta=args.delta,
            beta=args.beta,
            kl_estimator=kl_estimator,
            bias_corrected_kl=args.use_bias_correction_kl and kl_estimator != "mse",
            sapo_temperatures=(args.sapo_temperature_pos, args.sapo_temperature_neg),
            vespo_positive=(args.vespo_k_pos, args.vespo_lambda_pos),
            vespo_negative=(args.vespo_k_neg, args.vespo_lambda_neg),
            off_policy_threshold=args.off_policy_mask_threshold,
            longest=args.max_completion_length,
            correction=correction,
            correction_bounds=(args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What is known of a micro-batch: [rows, tokens], log-probabilities of the tokens in nats."""

    policy: torch.Tensor
    """By the policy, with its gradient."""
    old: torch.Tensor
    """By the policy that the ratio refers to."""
    mask: torch.Tensor
    """bool."""
    advantages: torch.Tensor
    """float [rows, tokens] or [rows, 1]."""
    sampler: torch.Tensor | None = None
    """By what has drawn the tokens, NaN where it gave none."""
    reference: torch.Tensor | None = None
    """Needed for a beta above 0."""
    entropies: torch.Tensor | None = None
    entropy_threshold: torch.Tensor | None = None
    """[]: tokens of less entropy have no part in the policy's loss (arXiv 2506.01939); None: all have."""

    def masked(self) -> LossInputs:
        """0 for what is said of tokens that are not in `mask`: e to the power of it may be infinite, which no
        multiplication by 0 takes back."""
        names = ("policy", "old", "sampler", "reference")
        columns = {name: column for name in names if (column := getattr(self, name)) is not None}
        return replace(self, **{name: column.masked_fill(~self.mask, 0.0) for name, column in columns.items()})


@dataclass(frozen=True, slots=True)
class Update:
    """What the losses of an optimizer update's micro-batches are divided by, so that their sum is the update's."""

    rows: int
    """Rows of this process, those included that are not computed."""
    tokens: float
    """That count, of a mean process."""
    micro_batches: int


class Measured(NamedTuple):
    """Numbers of which the log has the mean, and which of them count: one shape, [rows, tokens] or [rows, 1]."""

    values: torch.Tensor
    counted: torch.Tensor


@dataclass(frozen=True, slots=True)
class LossOutputs:
    loss: torch.Tensor
    """[]: this micro-batch's part of the update's loss."""
    metrics: dict[str, Measured] = field(default_factory=dict)


Surrogate = Callable[[LossInputs, torch.Tensor, LossSettings], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(inputs, log of the ratio [rows, tokens] or [rows, 1], settings) -> loss of each token, and what the log shows."""


def policy_loss(inputs: LossInputs, settings: LossSettings, update: Update) -> LossOutputs:
    """The loss of a micro-batch, with the terms that `settings` asks for."""
    inputs = inputs.masked()
    log_ratio = inputs.policy - inputs.old
    if settings.level == "sequence":
        log_ratio = masked_mean(log_ratio, inputs.mask)
    losses, shown = SURROGATES[settings.loss_type](inputs, log_ratio, settings)
    if settings.off_policy_threshold is not None:
        losses = losses * off_policy_mask(inputs, settings.off_policy_threshold)
    if inputs.entropy_threshold is not None:
        assert inputs.entropies is not None
        losses = losses * (inputs.entropies >= inputs.entropy_threshold)
    metrics = {name: measured(values, inputs.mask) for name, values in shown.items()}
    if settings.correction != "none":
        weight = correction(inputs, settings)
        metrics["sampling/importance_sampling_ratio/mean"] = measured(weight, inputs.mask)
        losses = losses if settings.loss_type == "vespo" else losses * weight  # vespo's own weight has it
    if settings.beta:
        assert inputs.reference is not None
        kl = kl_divergence(inputs.policy, inputs.reference, settings.kl_estimator)
        kl = kl * log_ratio.exp() if settings.bias_corrected_kl else kl
        losses = losses + settings.beta * kl
        metrics["kl"] = measured(kl, inputs.mask)
    return LossOutputs(add_up(losses, inputs.mask, settings, update), metrics)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[rows, 1]: the mean over the tokens of `mask`, 0 where there is none."""
    return (values * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def measured(values: torch.Tensor, mask: torch.Tensor) -> Measured:
    """[rows, 1], one number a row, counts the rows that have a token of `mask`."""
    values = values.detach().float()
    return Measured(values, mask if values.shape == mask.shape else mask.any(dim=1, keepdim=True))


# The loss of a token


def clipped(inputs: LossInputs, log_ratio: torch.Tensor, settings: LossSettings):
    """-min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A): PPO's (arXiv 1707.06347, equation 7), with bounds of
    their own (DAPO, arXiv 2503.14476, equation 10), and the ratio at most `delta` (INTELLECT-2, arXiv 2505.07291)."""
    ratio, advantages = log_ratio.exp(), inputs.advantages
    low, high = 1 - settings.epsilon_low, 1 + settings.epsilon_high
    inside = ratio.clamp(low, high)
    ratio = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    is_low, is_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    return -torch.minimum(ratio * advantages, inside * advantages), {
        "clip_ratio/low_mean": is_low,
        "clip_ratio/high_mean": is_high,
        "clip_ratio/region_mean": is_low | is_high,
    }


def cispo(inputs: LossInputs, log_ratio: torch.Tensor, settings: LossSettings):
    """-clip(ratio, cispo_min_ratio, eps_high) A log p, the ratio without gradient (arXiv 2506.13585, equation 4)."""
    ratio, advantages, low = log_ratio.exp(), inputs.advantages, settings.cispo_min_ratio
    is_clipped = (ratio > settings.epsilon_high) & (advantages > 0)
    if low is not None:
        is_clipped = is_clipped | (ratio < low) & (advantages < 0)
    losses = -ratio.clamp(low, settings.epsilon_high).detach() * advantages * inputs.policy
    return losses, {"cispo_clip_ratio": is_clipped}


def sapo(inputs: LossInputs, log_ratio: torch.Tensor, settings: LossSettings):
    """-sigmoid(tau (ratio - 1)) 4 / tau A, tau by the advantage's sign (arXiv 2511.20347, equations 5 and 6)."""
    positive, other = settings.sapo_temperatures
    temperature = torch.where(inputs.advantages > 0, positive, other)
    return -torch.sigmoid(temperature * (log_ratio.exp() - 1)) * 4 / temperature * inputs.advantages, {}


def vespo(inputs: LossInputs, log_ratio: torch.Tensor, settings: LossSettings):
    """-phi(w) A log p with w the ratio of the whole completion and phi(w) = e^lambda w^k e^(-lambda w), without
    gradient (arXiv 2602.10693): k and lambda by the advantage's sign, log w within those of 1e-8 and e^20."""
    lowest = math.log(1e-8)
    with torch.no_grad():
        log_w = ((inputs.policy - inputs.old).clamp(-20, 20) * inputs.mask).sum(dim=1, keepdim=True)
        if settings.correction != "none":
            log_rho = correction(inputs, settings).log().clamp(lowest, 20)
            log_w = log_w + log_rho.sum(dim=1, keepdim=True)
        log_w = log_w.clamp(lowest, 20)
        positive = inputs.advantages >= 0
        (k, lam), (k_negative, lam_negative) = settings.vespo_positive, settings.vespo_negative
        k, lam = torch.where(positive, k, k_negative), torch.where(positive, lam, lam_negative).clamp(min=1e-4)
        phi = (lam + k * log_w - lam * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return -phi * inputs.advantages * inputs.policy, {"vespo/phi_seq_mean": phi}


SURROGATES: dict[str, Surrogate] = {
    "grpo": clipped,
    "bnpo": clipped,
    "dr_grpo": clipped,
    "dapo": clipped,
    "luspo": clipped,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
}
"""By training.loss_type. How the tokens are added up goes by it too (`add_up`)."""


def add_up(losses: torch.Tensor, mask: torch.Tensor, settings: LossSettings, update: Update) -> torch.Tensor:
    """[]: the losses of the tokens ([rows, tokens], or [rows, 1] for all of a row) as a micro-batch's part of the loss.

    grpo and sapo: a mean over each row's tokens, then over rows. dr_grpo: rows are divided by max_completion_length
    (arXiv 2503.20783). luspo: by nothing (arXiv 2602.05261). dapo, cispo, vespo: a mean over the update's tokens, of
    several updates of a rollout over the mean one's. bnpo: over the micro-batch's."""
    counted = losses * mask
    match settings.loss_type:
        case "grpo" | "sapo":
            return masked_mean(losses, mask).sum() / update.rows
        case "dr_grpo":
            return counted.sum() / (update.rows * settings.longest)
        case "luspo":
            return counted.sum() / update.rows
        case "bnpo":
            return counted.sum() / mask.sum().clamp(min=1) / update.micro_batches
    return counted.sum() / update.tokens


# Weights on it


def importance_ratio(
    old: torch.Tensor,
    sampler: torch.Tensor,
    mask: torch.Tensor,
    mode: CorrectionMode,
    low: float | None,
    high: float | None,
) -> torch.Tensor:
    """p_old / q of each token, or of the whole completion; outside of the bounds it becomes the bound (truncated
    importance sampling: Ionides 2008; IMPALA, arXiv 1802.01561) or 0 (masked).

    Args:
        old, sampler, mask: [rows, tokens], log-probabilities in nats and which tokens count.
        low, high: None is no bound.

    Returns:
        float32 [rows, tokens] or [rows, 1], without gradient; 1 where nothing counts, or the sampler gave no number.
    """
    apart = (old.detach().float() - sampler.float()).masked_fill(~mask, 0.0).nan_to_num(nan=0.0)
    ratio = (apart.sum(dim=1, keepdim=True) if mode.startswith("sequence") else apart).exp()
    if low is None and high is None:
        return ratio
    inside = ratio.clamp(low, high)
    return torch.where(inside == ratio, ratio, 0.0) if mode.endswith("mask") else inside


def correction(inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """`importance_ratio` as the settings ask for it; 1 of a batch that no token was drawn of."""
    if inputs.sampler is None:
        return torch.ones_like(inputs.advantages[:, :1])
    return importance_ratio(inputs.old, inputs.sampler, inputs.mask, settings.correction, *settings.correction_bounds)


def off_policy_mask(inputs: LossInputs, threshold: float) -> torch.Tensor:
    """float [rows, 1]: 0 for a completion of negative advantage whose mean log q / p is above `threshold`
    (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)."""
    drawn_by = inputs.old if inputs.sampler is None else inputs.sampler
    apart = (drawn_by - inputs.policy.detach()).nan_to_num(nan=0.0)
    near = masked_mean(apart, inputs.mask) <= threshold
    return ((inputs.advantages >= 0) | near).float()


def entropy_threshold(entropies: torch.Tensor, mask: torch.Tensor, share: float, gather: Callable) -> torch.Tensor:
    """[]: the entropy that a `share` of all processes' tokens of `mask` reach; NaN, which no entropy reaches, where
    there is none. Nothing is waited for. Every process must come here.

    Args:
        gather: from a tensor of this process to those of all, as large, one after the other.
    """
    entropies = gather(entropies.detach().float().masked_fill(~mask, math.nan)).flatten().sort().values  # NaN last
    last = ((~entropies.isnan()).sum(dim=0, keepdim=True) - 1).clamp(min=0)  # torch.quantile takes 16 M at most
    place = (1 - share) * last
    low, high = entropies[place.long().clamp(max=last)], entropies[place.ceil().long().clamp(max=last)]
    return low.lerp(high, place.frac())[0]


@dataclass(slots=True)
class EntropyBonus:
    """The mean entropy of the tokens, taken from the loss with a coefficient that is fixed or follows a target
    (training.use_adaptive_entropy): by entropy_coef_delta up after an update below the target, and down after others;
    while the last one was above it, 0 counts."""

    coefficient: float | torch.Tensor
    """A float32 [] on the device once it follows the target, as `last` is then."""
    target: float | None = None
    """None: fixed."""
    delta: float = 0.0
    bounds: tuple[float, float] = (0.0, 0.0)
    last: float | torch.Tensor = math.inf
    """Mean entropy of the last update."""
    _sums: torch.Tensor | None = None
    """float32 [2]: entropies, tokens."""

    @classmethod
    def of(cls, args: TrainingConfig) -> EntropyBonus | None:
        """None where the loss has none."""
        adaptive = args.use_adaptive_entropy
        if not adaptive and not args.entropy_coef:
            return None
        bounds = args.entropy_coef_min, args.entropy_coef_max
        return cls(args.entropy_coef, args.entropy_target if adaptive else None, args.entropy_coef_delta, bounds)

    def loss(self, entropies: torch.Tensor, mask: torch.Tensor, micro_batches: int) -> torch.Tensor:
        """[]: of a micro-batch, whose tokens of `mask` are added to the update's."""
        sums = torch.stack([(entropies * mask).sum(), mask.sum().float()])
        self._sums = sums.detach() if self._sums is None else self._sums + sums.detach()
        applied = self.coefficient if self.target is None else self.coefficient * (self.last <= self.target)
        return -applied * sums[0] / sums[1].clamp(min=1) / micro_batches

    def end_of_update(self, add_up: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Nothing is waited for. Every process must come here.

        Args:
            add_up: from this process's sums to those of all processes.
        """
        if self.target is not None and self._sums is not None:
            entropies, tokens = add_up(self._sums)
            self.last = entropies / tokens.clamp(min=1.0)
            step = torch.where(self.last <= self.target, self.delta, -self.delta)
            self.coefficient = (self.coefficient + step).clamp(*self.bounds)
        self._sums = None

    def state(self) -> list[float]:
        return [float(self.coefficient), float(self.last)]
