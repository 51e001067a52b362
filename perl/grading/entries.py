"""reasoning-gym's own scoring: the gold is an entry, as JSON, and what is right its generator's score_answer says.

An entry is {"generator": a name, "settings": its keyword arguments, "question": …, "answer": …, "metadata": …}.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import json
import re
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

from perl.base.errors import UserError

HARMLESS = frozenset(("abs", "divmod", "max", "min", "pow", "round", "sum"))
_BUILTINS = "|".join(sorted(name for name, value in vars(builtins).items() if isinstance(value, BuiltinFunctionType)))
_CODE = re.compile(
    rf"__|\b(?!(?:{'|'.join(sorted(HARMLESS))})\b)(?:{_BUILTINS})\b|[\w)\]]\s*\([^)]*['\"]|\.\s*[A-Za-z_]\w*\s*\("
)


def read_entry(gold: str) -> dict[str, Any] | None:
    """None: it is a plain answer."""
    if not gold.startswith('{"'):
        return None
    try:
        entry = json.loads(gold)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and {"generator", "settings", "answer"} <= entry.keys() else None


def answer_of(gold: str) -> str:
    """The answer that an entry gives, or a plain one."""
    entry = read_entry(gold)
    return gold if entry is None else str(entry["answer"])


def judge_entry(answer: str, gold: str) -> tuple[float, str | None, str]:
    """(score, None, reason): 1 where the generator gives all of a point, else 0, also where it fails on the answer. A
    gold that is a plain answer is compared as a text.

    Some generators have sympy evaluate the answer, which would run a call that stands in it: one that could do more
    than calculate is wrong unseen.
    """
    entry = read_entry(gold)
    if entry is None:
        correct = answer.strip() == gold.strip()
    elif "(" in answer and _CODE.search(answer):
        correct = False
    else:
        score = _scorer(entry["generator"], json.dumps(entry["settings"]))
        try:
            correct = float(score(answer, entry)) >= 1.0
        except _RAISED:
            correct = False
    return float(correct), None, "correct" if correct else "wrong"


def require_scoring(gold: str) -> None:
    """Raise a UserError where an entry is to be judged and reasoning-gym is not installed."""
    if read_entry(gold) is not None and not _installed():
        raise UserError(
            "reasoning_gym: reasoning-gym, which grades these, is not installed; pip install -e '.[reasoning_gym]'"
        )


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("reasoning_gym") is not None


def import_generators() -> None:
    """Before the first deadline runs."""
    if _installed():
        import reasoning_gym  # noqa: F401  # pyright: ignore[reportMissingImports]


_RAISED = (Exception,)
"""prime_factorization raises on any text that is no product."""


@functools.cache
def _scorer(generator: str, settings: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import create_dataset  # pyright: ignore[reportMissingImports]

    return create_dataset(generator, seed=0, size=1, **json.loads(settings)).score_answer
