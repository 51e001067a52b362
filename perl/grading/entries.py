"""reasoning-gym's own scoring: the gold is an entry, as JSON, and what is right its generator's score_answer says.

An entry is {"generator": a name, "settings": its keyword arguments, "question": …, "answer": …, "metadata": …}.
"""

from __future__ import annotations

import builtins
import functools
import json
import re
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

HARMLESS = frozenset(("abs", "divmod", "max", "min", "pow", "round", "sum"))
_BUILTINS = "|".join(sorted(name for name, value in vars(builtins).items() if isinstance(value, BuiltinFunctionType)))
_CODE = re.compile(
    rf"__|\b(?!(?:{'|'.join(sorted(HARMLESS))})\b)(?:{_BUILTINS})\b|[\w)\]]\s*\([^)]*['\"]|\.\s*[A-Za-z_]\w*\s*\("
)


def answer_of(gold: str) -> str:
    """The answer that an entry gives; a text that is no entry comes back."""
    if gold.startswith('{"'):
        try:
            entry = json.loads(gold)
        except ValueError:
            return gold
        if isinstance(entry, dict) and isinstance(entry.get("answer"), str):
            return entry["answer"]
    return gold


def judge_entry(answer: str, gold: str) -> tuple[float, str | None, str]:
    """(score, None, reason): 1 where the generator gives all of a point, else 0, also where it fails on the answer.

    Some generators have sympy evaluate the answer, which would run a call that stands in it: one that could do more
    than calculate is wrong unseen.
    """
    if "(" in answer and _CODE.search(answer):
        return 0.0, None, "wrong"
    entry = json.loads(gold)
    score = _scorer(entry["generator"], json.dumps(entry["settings"]))
    try:
        correct = float(score(answer, entry)) >= 1.0
    except _RAISED:
        correct = False
    return float(correct), None, "correct" if correct else "wrong"


def import_generators() -> None:
    """Before the first deadline runs."""
    import reasoning_gym  # noqa: F401  # pyright: ignore[reportMissingImports]


_RAISED = (Exception,)
"""prime_factorization raises on any text that is no product."""


@functools.cache
def _scorer(generator: str, settings: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import create_dataset  # pyright: ignore[reportMissingImports]

    return create_dataset(generator, seed=0, size=1, **json.loads(settings)).score_answer
