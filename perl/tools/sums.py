"""Sums: the value of an expression, and rows of sums to work out, for a model that can't calculate."""

from __future__ import annotations

import ast
import operator
import random
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 100
"""Characters of an expression; SVAMP's have up to 20."""
WORDS = {"-": "difference", "+": "sum", "*": "product", "/": "quotient"}
IN_A_ROW = 12


def value_of(text: str) -> Fraction | None:
    """The exact value of numbers with + - * / and parentheses; of SVAMP's also where one is not closed or not opened,
    as in `10 - 3 ) - 5`. None for anything else, a division by 0 too."""
    try:
        return _value(_parse(text))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def drill(numbers: random.Random) -> dict[str, str]:
    """A row (question, answer) of sums that are told in words, in any order, and written and worked out in the answer:
    "the difference of 28 and 63" -> "63 - 28 = 35". Results are whole and 0 or more."""
    sums = [_sum(numbers) for _ in range(IN_A_ROW)]
    return _row(f"Work out {', '.join(told for told, _ in sums)}.", [written for _, written in sums])


def problem(numbers: random.Random) -> dict[str, str]:
    """A row that asks for one such sum."""
    told, written = _sum(numbers)
    return _row(f"What is {told}?", [written])


def _row(question: str, written: list[str]) -> dict[str, str]:
    answer = [f"{each} = {value_of(each)}" for each in written]
    return {"question": question, "answer": "\n".join([*answer, f"#### {value_of(written[-1])}"])}


def _sum(numbers: random.Random) -> tuple[str, str]:
    """In words, and as it is written."""
    sign = numbers.choices("-+*/", (40, 25, 15, 20))[0]
    most = numbers.choices((10, 20, 100, 1000), (10, 25, 50, 15))[0]
    x, y = numbers.randint(1, most), numbers.randint(1, most)
    if sign in "*/":
        x, y = numbers.randint(2, 20), numbers.randint(2, 12)
    if sign == "/":
        x *= y
    told = f"the {WORDS[sign]} of {x} and {y}"
    if sign == "-":
        x, y = max(x, y), min(x, y)
    return told, f"{x} {sign} {y}"


def _parse(text: str) -> ast.expr:
    text = text.strip().replace(",", "")
    if len(text) > LONGEST:
        raise ValueError("too long")
    opened, closed = text.count("("), text.count(")")
    return ast.parse("(" * (closed - opened) + text + ")" * (opened - closed), mode="eval").body


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
    raise ValueError("not a number, and not two with + - * / between")
