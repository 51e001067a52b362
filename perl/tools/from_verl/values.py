"""What a value of verl must be, by the names that keys.yaml calls it; a ValueError says what is wrong with it."""

from __future__ import annotations

import math
import os
from typing import Any

KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "mse", "k2": "mse", "low_var_kl": "low_var_kl",
                 "k3": "low_var_kl"}  # fmt: skip
"""verl's names -> ours."""


def anything(value: Any) -> Any:
    return value


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0 or value < 0:
        raise ValueError(f"{shown(value)} is not a whole number")
    return int(value)


def positive(value: Any) -> int:
    if whole(value) < 1:
        raise ValueError(f"{shown(value)} is not a whole number from 1")
    return int(value)


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{shown(value)} is not a number")
    try:
        is_finite = math.isfinite(value)
    except OverflowError:  # a whole number beyond a float's range
        is_finite = False
    if not is_finite:
        raise ValueError(f"{shown(value)} is not a number")
    return float(value)


def above_0(value: Any) -> float:
    if number(value) <= 0:
        raise ValueError(f"{shown(value)} is not above 0")
    return float(value)


def not_negative(value: Any) -> float:
    if number(value) < 0:
        raise ValueError(f"{shown(value)} is below 0")
    return float(value)


def top_p(value: Any) -> float:
    if not 0 < number(value) <= 1:
        raise ValueError(f"{shown(value)} is not above 0 and at most 1")
    return float(value)


def yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{shown(value)} is neither true nor false")
    return value


def text(value: Any) -> str:
    if isinstance(value, dict | list) or value is None or value == "":
        raise ValueError("it is empty" if value == "" else f"{shown(value)} is not a text")
    return str(value)


def path(value: Any) -> str:
    """A path, or a name on the hub; `~` is written out, as verl does."""
    return os.path.expanduser(text(value))


def paths(value: Any) -> list[str]:
    return [path(item) for item in texts(value)]


def texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError("[] is an empty list")
    return [text(item) for item in values]


def one_or_more(value: Any) -> str | list[str]:
    items = texts(value)
    return items[0] if len(items) == 1 else items


def shown(value: Any) -> str:
    """A value as a user of verl writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    return str(value)


def one_or_more_paths(value: Any) -> str | list[str]:
    return one_or_more(paths(value))


def no_or_more_texts(value: Any) -> list[str]:
    return texts(value) if value else []


def deviation(value: Any) -> str:
    """norm_adv_by_std_in_grpo as TRL's scale_rewards."""
    return "group" if yes_or_no(value) else "none"


def top_k(value: Any) -> int:
    return 0 if value in (-1, None) else whole(value)


def kl_estimator(value: Any) -> str:
    if value not in KL_ESTIMATORS:
        raise ValueError(f"{shown(value)}: {', '.join(KL_ESTIMATORS)} are there")
    return KL_ESTIMATORS[value]
