"""The second reward of `make real` (recipes/real_grpo.yaml): is the expression of a completion the right one?

A small model chooses the wrong operation more often than it miscalculates, and both give an accuracy of 0. This reward
looks at the expression before the first `=` alone, so that a group whose answers are all wrong can still differ.
"""

from __future__ import annotations

import ast
import operator
from fractions import Fraction
from typing import Any

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 100
"""Characters of an expression; SVAMP's have up to 20."""


def expression(completions: list[list[dict[str, str]]], gold: list[str], **_: Any) -> list[float]:
    """1 where what stands before the completion's first `=` has the value of the gold answer, else 0."""
    return [
        float(value_of(completion[0]["content"].partition("=")[0]) == value_of(answer) is not None)
        for completion, answer in zip(completions, gold, strict=True)
    ]


def value_of(text: str) -> Fraction | None:
    """The exact value of a sum with + - * / and parentheses; of SVAMP's also where one is not closed or not opened, as
    in `10 - 3 ) - 5`. None for anything else, a division by 0 too."""
    text = text.strip().replace(",", "")
    opened, closed = text.count("("), text.count(")")
    try:
        tree = ast.parse("(" * (closed - opened) + text + ")" * (opened - closed), mode="eval")
        return None if len(text) > LONGEST else _value(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=inside):
            return -_value(inside)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(left), _value(right))
    raise ValueError("not a sum")
