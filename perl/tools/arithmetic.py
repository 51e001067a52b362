"""Arithmetic of many digits: problems told in words, and how each is solved, by one call of the tool python or step by
step in writing."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """`told` in words; `terms`, whose sum is asked for, each of one factor or two; of the last ones `minus` are taken
    away."""

    told: str
    terms: tuple[tuple[int, ...], ...]
    minus: int = 0

    @property
    def signed(self) -> list[tuple[int, tuple[int, ...]]]:
        first = len(self.terms) - self.minus
        return [(1 if place < first else -1, term) for place, term in enumerate(self.terms)]

    @property
    def expression(self) -> str:
        """As Python writes it."""
        text = ""
        for sign, term in self.signed:
            text += (" + " if sign > 0 else " - ") + " * ".join(map(str, term))
        return text.removeprefix(" + ")

    @property
    def value(self) -> int:
        return sum(sign * product(term) for sign, term in self.signed)


def product(factors: tuple[int, ...]) -> int:
    first, second = factors if len(factors) == 2 else (factors[0], 1)
    return first * second


def make(numbers: random.Random) -> Problem:
    """A product of three by four digits, alone or with a term more; or a sum of four terms of four and five digits.
    The result is above 0."""
    x, y, z = numbers.randint(101, 999), numbers.randint(1001, 9999), numbers.randint(1001, 99999)
    kind = numbers.choice(("times", "product", "price", "plus", "minus", "sum"))
    match kind:
        case "times":
            return Problem(f"What is {x} times {y}?", ((x, y),))
        case "product":
            return Problem(f"What is the product of {y} and {x}?", ((y, x),))
        case "price":
            return Problem(f"A shop orders {x} machines at {y} dollars each. How many dollars does it pay?", ((x, y),))
        case "plus":
            told = f"A firm has {z} parts and buys {x} boxes of {y} parts each. How many parts does it have then?"
            return Problem(told, ((z,), (x, y)))
        case "minus":
            told = f"What is {x} times {y}, less {z}?"
            return Problem(told, ((x, y), (z,)), 1)
    terms = [numbers.randint(1001, 99999) for _ in range(4)]
    return Problem(f"What is the sum of {', '.join(map(str, terms[:3]))} and {terms[3]}?", tuple((t,) for t in terms))


def row(problem: Problem) -> dict[str, str]:
    """As training and evaluation read it (task math)."""
    return {"problem": problem.told, "answer": str(problem.value)}


def by_tool(problem: Problem, prompt: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """A row for perl.sft: the conversation with the tool python, and the answer in a box."""
    call = {"name": "python", "arguments": {"code": f"print({problem.expression})"}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "python", "content": str(problem.value)},
        {"role": "assistant", "content": boxed(problem.value)},
    ]
    return {"messages": [*prompt, *turns], "tools": tools}


def in_writing(problem: Problem, prompt: list[dict[str, Any]]) -> dict[str, Any]:
    """A row for perl.sft: a product is the sum of the first factor times each digit of the other, which are added one
    by one, as are the terms; then the answer in a box."""
    lines: list[str] = []
    values: list[int] = []
    for sign, term in problem.signed:
        if len(term) == 2:
            lines += written_product(*term)
        values.append(sign * product(term))
    lines += added(values) if len(values) > 1 else []
    return {"prompt": prompt, "completion": "\n".join([*lines, boxed(problem.value)])}


def written_product(x: int, y: int) -> list[str]:
    """The longer factor times each digit of the shorter one with its zeros, from the first on, and their sum."""
    long, short = max(x, y), min(x, y)
    parts = [int(digit) * 10**place for place, digit in reversed(list(enumerate(reversed(str(short))))) if digit != "0"]
    lines = [f"{long} * {part} = {long * part}" for part in parts]
    return [*lines, *(added([long * part for part in parts]) if len(parts) > 1 else [])]


def added(values: list[int]) -> list[str]:
    """The running sum, a line for each further value."""
    lines, total = [], values[0]
    for value in values[1:]:
        lines.append(f"{total} {'+' if value >= 0 else '-'} {abs(value)} = {total + value}")
        total += value
    return lines


def boxed(value: int) -> str:
    return f"\\boxed{{{value}}}"
