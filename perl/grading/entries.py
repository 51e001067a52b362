"""reasoning-gym's own scoring: the gold is an entry, as JSON, and what is right its generator's score_answer says.

An entry is {"generator": a name, "settings": its keyword arguments, "question": …, "answer": …, "metadata": …}.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from perl.base.errors import UserError

CALLS = {
    "abs", "divmod", "max", "min", "pow", "round", "sum", "Abs", "Add", "Float", "Integer", "Max", "Min", "Mod", "Mul",
    "Pow", "Rational", "acos", "acosh", "acot", "acsc", "asec", "asin", "asinh", "atan", "atan2", "atanh", "binomial",
    "cbrt", "ceiling", "cos", "cosh", "cot", "coth", "csc", "erf", "exp", "factorial", "floor", "gamma", "gcd", "lcm",
    "ln", "log", "root", "sec", "sign", "sin", "sinh", "sqrt", "tan", "tanh",
}  # fmt: skip
"""What an answer may call."""
LONGEST = 10_000
"""Characters of an answer that is looked through."""
DEEPEST = 200
"""Levels of an answer's syntax tree; Python's own bound depends on what called, and on sys.setrecursionlimit."""
_CALLED = re.compile(r"([^\W\d]\w*)\(")
_CALLED_APART = re.compile(r"(?<![^\W\d])([^\W\d]\w*+)(?:[\s\\]|#.*\n)*\(")
"""With what Python takes for blanks before the bracket: words of a text stand so too."""
_CODE = re.compile(
    r"__|:=|\blambda\b|\bfor\b.*\bin\b|\.\s*\w+\s*\(|[\])]\s*\("
    r"|\(.*['\"\\{]|['\"\\}].*\(|(['\"]).*\\.*\1",
    re.DOTALL,
)
"""In a text that Python does not read as a whole."""
_LITERAL = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.UnaryOp, ast.unaryop, ast.expr_context,
)  # fmt: skip
_CALCULATED = (
    *_LITERAL, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Name, ast.Subscript, ast.Slice, ast.Call,
    ast.operator, ast.boolop, ast.cmpop,
)  # fmt: skip


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

    Some generators have Python or sympy evaluate the answer, which would run a call that stands in it: one that could
    do more than calculate is wrong unseen.
    """
    entry = read_entry(gold)
    if entry is None:
        correct = answer.strip() == gold.strip()
    elif _may_run(answer):
        correct = False
    else:
        score = _scorer(entry["generator"], json.dumps(entry["settings"]))
        try:
            correct = float(score(answer, entry)) >= 1.0
        except _RAISED:
            correct = False
    return float(correct), None, "correct" if correct else "wrong"


def _may_run(answer: str) -> bool:
    """Whether evaluating an answer, or a part of it, could do more than make a value or calculate one."""
    if not any(mark in answer for mark in "([\\"):
        return False
    if len(answer) > LONGEST:
        return True
    try:
        with warnings.catch_warnings(action="ignore"):
            levels = _levels(ast.parse(answer.strip(), mode="eval"))
    except (SyntaxError, ValueError):  # a text, a board, or what sympy alone reads
        harmless = CALLS.issuperset(_CALLED.findall(answer)) and _known().isdisjoint(_CALLED_APART.findall(answer))
        return bool(_CODE.search(answer)) or not harmless
    except (MemoryError, RecursionError):
        return True
    nodes = [node for level in itertools.islice(levels, DEEPEST) for node in level]
    if next(levels, None):
        return True
    return not (all(isinstance(node, _LITERAL) for node in nodes) or all(map(_calculates, nodes)))


def _levels(tree: ast.AST) -> Iterator[list[ast.AST]]:
    """The nodes of a syntax tree, level by level."""
    level = [tree]
    while level:
        yield level
        level = [child for node in level for child in ast.iter_child_nodes(node)]


@functools.cache
def _known() -> set[str]:
    """What an evaluation by Python or by sympy finds to call, but for CALLS."""
    import sympy

    found = vars(builtins) | {name: getattr(sympy, name) for name in sympy.__all__}
    return {name for name, value in found.items() if callable(value)} - CALLS


def _calculates(node: ast.AST) -> bool:
    match node:
        case ast.Call():  # its arguments are nodes too, but for their names
            return isinstance(node.func, ast.Name) and node.func.id in CALLS and not node.keywords
        case ast.Constant():
            return isinstance(node.value, int | float)
        case ast.Name():
            return "__" not in node.id
        case _:
            return isinstance(node, _CALCULATED)


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
