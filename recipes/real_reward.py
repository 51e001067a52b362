"""The second reward of `make real` (recipes/real_grpo.yaml): is the expression of a completion the right one?

A small model often chooses the wrong numbers or the wrong operation, and often miscalculates; either gives an accuracy
of 0. This reward looks at the expression before the first `=` alone, so that a group whose answers are all wrong can
still differ.
"""

from __future__ import annotations

from typing import Any

from perl.tools.sums import value_of


def expression(completions: list[list[dict[str, str]]], gold: list[str], **_: Any) -> list[float]:
    """1 where what stands before the completion's first `=` has the value of the gold answer, else 0."""
    values = [value_of(completion[0]["content"].partition("=")[0]) for completion in completions]
    return [float(value is not None and value == value_of(g)) for value, g in zip(values, gold, strict=True)]
