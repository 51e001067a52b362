"""Which sigma at which step: pure functions of progress.

Linear decay over stages is verl's and the guide's; the first stage without noise and exponential decay are QeRL's
(arXiv 2510.11696, section 3.3), whose exponent divides by the number of noisy intervals and so is undefined for two
stages in its released form; here a single noisy stage has sigma_start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from perl.config.schema import NoiseConfig


def _linear(start: float, end: float, x: float) -> float:
    return start + (end - start) * x


def _exponential(start: float, end: float, x: float) -> float:
    return start * (end / start) ** x if start > 0 else 0.0


def _cosine(start: float, end: float, x: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * x))


def _logarithmic(start: float, end: float, x: float) -> float:
    return start + (end - start) * math.log1p(x * (math.e - 1))


SCHEDULES: dict[str, Callable[[float, float, float], float]] = {
    "linear": _linear,
    "exponential": _exponential,
    "cosine": _cosine,
    "logarithmic": _logarithmic,
}
"""name -> f(sigma_start, sigma_end, x): x runs from 0 at the first noisy stage (sigma_start) to 1 at the last."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where in the decay a step lies."""

    index: int
    sigma: float


def stage_at(step: int, max_steps: int, config: NoiseConfig) -> Stage:
    """Stage and sigma of optimizer step `step` (0 to max_steps - 1).

    stage = min(floor(step / max_steps * num_stages), num_stages - 1); the last stage is exactly sigma_end, the first
    noisy one exactly sigma_start (both, when there is only one: sigma_start). With warmup_stage, stage 0 has sigma 0.
    """
    # Integers throughout: floor(step / max_steps * num_stages) in floats puts some boundaries one step late.
    index = min(step * config.num_stages // max_steps, config.num_stages - 1)
    first = 1 if config.warmup_stage else 0
    if index < first:
        return Stage(index, 0.0)
    intervals = config.num_stages - 1 - first
    if intervals <= 0 or index == first:
        return Stage(index, config.sigma_start)
    if index == config.num_stages - 1:
        return Stage(index, config.sigma_end)
    decay = SCHEDULES[config.schedule]
    return Stage(index, decay(config.sigma_start, config.sigma_end, (index - first) / intervals))
