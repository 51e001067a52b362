"""Which numbers a field can have: of those that the libraries below take any number for, and fail on later or not at
all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jsonargparse import Namespace

from perl.base.errors import UserError


class Range(NamedTuple):
    """Numbers from `low` to `high`."""

    low: float
    high: float = math.inf
    above: bool = False
    """`low` itself is none of them."""
    below: bool = False
    """`high` itself is none of them."""

    def holds(self, number: float) -> bool:
        enough = number > self.low if self.above else number >= self.low
        return enough and (number < self.high if self.below else number <= self.high)

    def __str__(self) -> str:
        start = f"above {self.low:g}" if self.above else f"from {self.low:g}"
        if self.high == math.inf:
            return start
        return f"{start}, below {self.high}" if self.below else f"{start} to {self.high}"


SEED = Range(0, 2**32 - 1)
SHARE = Range(0, 1)
BETA = Range(0, 1, below=True)
ABOVE_0 = Range(0, above=True)
RANGES = {
    "common.seed": SEED,
    "training.adam_beta1": BETA,
    "training.adam_beta2": BETA,
    "training.adam_epsilon": Range(0),
    "training.data_seed": SEED,
    "training.dataloader_num_workers": Range(0),
    "training.delta": ABOVE_0,
    "training.entropy_coef": Range(0),
    "training.epsilon": Range(0),
    "training.epsilon_high": Range(0),
    "training.eval_steps": ABOVE_0,
    "training.generation_batch_size": Range(1),
    "training.gradient_accumulation_steps": Range(1),
    "training.learning_rate": Range(0),
    "training.logging_steps": ABOVE_0,
    "training.max_completion_length": Range(1),
    "training.max_grad_norm": Range(0),
    "training.num_iterations": Range(1),
    "training.per_device_eval_batch_size": Range(1),
    "training.per_device_train_batch_size": Range(1),
    "training.save_steps": ABOVE_0,
    "training.save_total_limit": Range(1),
    "training.seed": SEED,
    "training.steps_per_generation": Range(1),
    "training.top_entropy_quantile": SHARE,
    "training.warmup_steps": Range(0),
    "training.weight_decay": Range(0),
}


def check_numbers(values: Namespace) -> None:
    """Raise a UserError for a number of the configuration that is out of its range, or that is not finite."""
    for name, number in _numbers(values.as_dict(), ""):
        try:
            finite = math.isfinite(number)
        except OverflowError:  # a whole number that no float holds
            raise UserError(f"--config.{name}: larger than any number can be; write a smaller one") from None
        if not finite:
            raise UserError(f"--config.{name} {number}: write a finite number")
        limits = RANGES.get(name)
        if limits is not None and not limits.holds(number):
            raise UserError(f"--config.{name} {number}: write a number {limits}")


def _numbers(content: Any, name: str) -> Iterator[tuple[str, float]]:
    """(dotted name, number) of every number, in lists and mappings too."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _numbers(value, f"{name}.{key}" if name else str(key))
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _numbers(value, name)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield name, content
