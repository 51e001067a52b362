"""Arithmetic on paper: the value of an expression, and how to get there in steps that a small model can do.

SmolLM2-135M subtracts two numbers below 100 rightly in 6 of 40 cases after 1,400 such sums of SFT in one step (`63 - 28
= 35`); digit by digit (`63 - 28 = 63 - 20 - 8 = 43 - 8 = 35`) each step is one that it can do.
"""

from __future__ import annotations

import ast
import json
import operator
import random
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
LONGEST = 100
"""Characters of an expression; SVAMP's have up to 20."""
IN_A_ROW = 12


def value_of(text: str) -> Fraction | None:
    """The exact value of numbers with + - * / and parentheses; of SVAMP's also where one is not closed or not opened,
    as in `10 - 3 ) - 5`. None for anything else, a division by 0 too."""
    try:
        return _value(_parse(text))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def worked(text: str) -> str:
    """`text` and all steps to its value: `( 10 - 3 ) + 48` gives `( 10 - 3 ) + 48 = 7 + 48 = 7 + 40 + 8 = 47 + 8 = 55`.

    Raises:
        ValueError: it is no expression of numbers; ZeroDivisionError, SyntaxError likewise.
    """
    tree, steps = _parse(text), [text.strip()]
    if isinstance(tree, ast.BinOp):
        x, y, sign = _value(tree.left), _value(tree.right), SIGNS[type(tree.op)]
        if isinstance(tree.left, ast.BinOp) or isinstance(tree.right, ast.BinOp):
            steps.append(f"{_written(x)} {sign} {_written(y)}")
        steps += _by_digits(x, sign, y)
    return " = ".join([*steps, _written(_value(tree))])


def drill(numbers: random.Random) -> dict[str, str]:
    """A row (question, answer) of sums to work out: half of them differences, which small models compute worst, with
    results of 0 or more."""
    sums = []
    for _ in range(IN_A_ROW):
        sign = numbers.choices("-+*/", (55, 23, 10, 12))[0]
        most = numbers.choices((20, 100, 1000), (20, 65, 15))[0]
        x, y = numbers.randint(1, most), numbers.randint(1, most)
        if sign in "*/":
            x, y = numbers.randint(2, 20), numbers.randint(2, 12)
        if sign == "-":
            x, y = max(x, y), min(x, y)
        sums.append(f"{x * y if sign == '/' else x} {sign} {y}")
    answer = [worked(each) for each in sums]
    last = answer[-1].rpartition(" = ")[2]
    return {"question": "Work out: " + ", ".join(sums), "answer": "\n".join([*answer, f"#### {last}"])}


def worked_answer(row: str) -> str:
    """A line of SVAMP in GSM8K's form, `{"question": …, "answer": "8 - 3 = 5\\n#### 5"}`, with the steps in its answer;
    as it is, where the answer has another form."""
    fields = json.loads(row)
    equation, mark, gold = str(fields.get("answer", "")).partition("\n#### ")
    expression = equation.rpartition(" = ")[0]
    if not mark or value_of(expression) is None or value_of(expression) != value_of(gold):
        return row
    return json.dumps({**fields, "answer": f"{worked(expression)}{mark}{gold}"}, ensure_ascii=False)


def _by_digits(x: Fraction, sign: str, y: Fraction) -> list[str]:
    """The steps between `x sign y` and its value; none where a number is below 0 or no integer."""
    if x < 0 or y < 0 or x.denominator != 1 or y.denominator != 1:
        return []
    if sign == "*":
        many, few = (x, y) if len(_places(x)) >= len(_places(y)) else (y, x)
        places = _places(many)
        if few == 1 or len(places) == 1:
            return []
        return [" + ".join(f"{place} * {few}" for place in places), " + ".join(str(place * few) for place in places)]
    if sign == "/":
        return []
    steps, places = [], _places(y)
    while len(places) > 1 or steps:
        steps.append(f"{x} {sign} " + f" {sign} ".join(map(str, places)))
        if len(places) == 1:
            break
        x, places = OPERATORS[ast.Add if sign == "+" else ast.Sub](x, places[0]), places[1:]
    return steps


def _places(number: Fraction) -> list[int]:
    """405 as 400 and 5."""
    digits = str(int(number))
    return [int(digit) * 10 ** (len(digits) - 1 - i) for i, digit in enumerate(digits) if digit != "0"] or [0]


def _written(value: Fraction) -> str:
    return str(int(value)) if value.denominator == 1 else f"{float(value):.10g}"


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
