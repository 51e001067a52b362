"""Which numbers a field can have: of those that the libraries below take any number for, and fail on later or not at
all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jsonargparse import Namespace

from perl.base.errors import UserError

LIMITS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "from 0",
        lambda n: n >= 0,
        "adam_epsilon cispo_min_ratio dataloader_num_workers entropy_coef epsilon epsilon_high learning_rate"
        " max_grad_norm warmup_steps weight_decay",
    ),
    (
        "above 0",
        lambda n: n > 0,
        "delta eval_steps logging_steps sapo_temperature_neg sapo_temperature_pos save_steps",
    ),
    (
        "from 1",
        lambda n: n >= 1,
        "generation_batch_size gradient_accumulation_steps max_completion_length num_iterations"
        " per_device_eval_batch_size per_device_train_batch_size save_total_limit steps_per_generation",
    ),
    ("above 0, to 1", lambda n: 0 < n <= 1, "vllm_gpu_memory_utilization"),
    ("from 0 to 1", lambda n: 0 <= n <= 1, "top_entropy_quantile"),
    ("from 0, below 1", lambda n: 0 <= n < 1, "adam_beta1 adam_beta2"),
    (f"from 0 to {2**32 - 1}", lambda n: 0 <= n < 2**32, "seed data_seed"),
)
"""In words, as a test, and fields of TRL's configuration."""
RANGES = {f"training.{name}": (words, holds) for words, holds, names in LIMITS for name in names.split()}
RANGES["common.seed"] = RANGES["training.seed"]


def check_numbers(values: Namespace) -> None:
    """Raise a UserError for a number of the configuration that is out of its range, or that is not finite."""
    for name, number in _numbers(values.as_dict(), ""):
        try:
            finite = math.isfinite(number)
        except OverflowError:  # a whole number that no float holds
            raise UserError(f"--config.{name}: larger than any number can be; write a smaller one") from None
        if not finite:
            raise UserError(f"--config.{name} {number}: write a finite number")
        words, holds = RANGES.get(name, ("", math.isfinite))
        if not holds(number):
            raise UserError(f"--config.{name} {number}: write a number {words}")


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
