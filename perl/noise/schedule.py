"""Which sigma at which step: pure functions of progress, and of the measured KL divergence for `target_kl`.

Linear decay over stages is verl's and the guide's; the first stage without noise and exponential decay are QeRL's
(arXiv 2510.11696, section 3.3), whose exponent divides by the number of noisy intervals and so is undefined for two
stages in its released form; here a single noisy stage has sigma_start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from perl.config.schema import NoiseConfig


def _exponential(start: float, end: float, x: float) -> float:
    return start * (end / start) ** x if start > 0 else 0.0


SCHEDULES: dict[str, Callable[[float, float, float], float]] = {
    "linear": lambda start, end, x: start + (end - start) * x,
    "exponential": _exponential,
    "cosine": lambda start, end, x: end + (start - end) * 0.5 * (1 + math.cos(math.pi * x)),
    "logarithmic": lambda start, end, x: start + (end - start) * math.log1p(x * (math.e - 1)),
}
"""name -> f(sigma_start, sigma_end, x): x runs from 0 at the first noisy stage (sigma_start) to 1 at the last. The
schedule target_kl has no such function: its sigma follows from measurements (`adapt`)."""

MOST_CHANGE = 2.0
"""Factor that target_kl changes sigma by at most, from one rollout to the next."""
MOST_RANGE = 100.0
"""Factor that target_kl leaves sigma_start by at most, either way."""
MOST_KL = 10.0
"""Targets that one rollout's KL divergence counts as at most, so that a single one does not decide the next twenty."""
MEMORY = 0.9
"""Weight of a rollout's measurement over that of the next: the last ten are two thirds of the whole."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where in the decay a step lies."""

    index: int
    sigma: float
    """Under target_kl that of the first noisy rollout; `adapt` gives the later ones."""
    target_kl: float | None = None
    """KL divergence to hold, in nats a token; None for the other schedules, and without noise."""


def stage_at(step: int, max_steps: int, config: NoiseConfig) -> Stage:
    """Stage and sigma of optimizer step `step` (0 to max_steps - 1).

    stage = min(floor(step / max_steps * num_stages), num_stages - 1); the last stage is exactly sigma_end, the first
    noisy one exactly sigma_start (both, when there is only one: sigma_start). With warmup_stage, stage 0 has sigma 0.
    target_kl: the target falls in the same way, exponentially, from target_kl_start to target_kl_end.
    """
    # Integers throughout: floor(step / max_steps * num_stages) in floats puts some boundaries one step late.
    index = min(step * config.num_stages // max_steps, config.num_stages - 1)
    first = 1 if config.warmup_stage else 0
    if index < first:
        return Stage(index, 0.0)
    intervals = config.num_stages - 1 - first
    x = (index - first) / intervals if intervals > 0 else 0.0
    if config.schedule == "target_kl":
        target = _decayed(_exponential, config.target_kl_start, config.target_kl_end, x)
        return Stage(index, config.sigma_start, target)
    return Stage(index, _decayed(SCHEDULES[config.schedule], config.sigma_start, config.sigma_end, x))


def _decayed(decay: Callable[[float, float, float], float], start: float, end: float, x: float) -> float:
    return start if x == 0 else end if x == 1 else decay(start, end, x)  # exact at both ends


@dataclass(frozen=True, slots=True)
class Adapted:
    """State of the schedule target_kl between two rollouts."""

    sigma: float
    """Of the next noisy rollout."""
    kl: float = 0.0
    """Sum of the measured KL divergences, each counting MEMORY times as much as the one after it."""
    squares: float = 0.0
    """Sum of those rollouts' sigma^2, in the same way."""


def adapt(before: Adapted, kl: float, target: float, sigma_start: float) -> Adapted:
    """The next rollout's sigma, where noise of `before.sigma` has moved the policy by `kl`.

    For small noise the KL divergence is c * sigma^2 (its gradient at sigma 0 is 0). One rollout measures c badly: a few
    improbable tokens are most of it. So c is the ratio of the sums over the rollouts so far, each weighing MEMORY of
    the next, and

        c = sum(kl) / sum(sigma^2),    sigma_next = clip(sqrt(target / c), sigma / MOST_CHANGE, sigma * MOST_CHANGE),

    within a factor MOST_RANGE of sigma_start. After the first rollout c is kl / sigma^2.

    Args:
        kl: measured, in nats a token; counts as at most MOST_KL targets, as do infinity and NaN.
        target: in nats a token, above 0.
    """
    sigma, most = before.sigma, MOST_KL * target
    kls = MEMORY * before.kl + (min(kl, most) if math.isfinite(kl) else most)
    squares = MEMORY * before.squares + sigma**2
    wanted = math.sqrt(target * squares / kls) if kls > 0 else math.inf
    wanted = min(max(wanted, sigma / MOST_CHANGE), sigma * MOST_CHANGE)
    return Adapted(min(max(wanted, sigma_start / MOST_RANGE), sigma_start * MOST_RANGE), kls, squares)
