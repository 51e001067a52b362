# ruff: noqa: E501
"""Write statements.jsonl: ways in which a model states the golds of MATH-500, right ones and near misses.

    python -m tests.grading.make_statements ../shared/data/bench/math500.jsonl

A row is {"gold", "kind", "held_out", "right": [completions], "wrong": [completions]}. Forms of numbers, fractions,
angles and the like are made from the gold; expressions, sets, intervals and texts are written by hand in BY_HAND and
MORE. Every third gold is held out: the rules were written without looking at its statements.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("statements.jsonl")
FORMS_PER_GOLD = 5
"""Statements of each label for one gold; fewer where it has fewer forms."""

# How a completion presents an answer; `@` is the answer in LaTeX, GOLD the gold.
WRAPS = (
    "We compute step by step.\n\nThe result is $\\boxed{@}$.",
    "Since $3 + 4 = 7$, we are done. Therefore, the final answer is $@$.",
    "Let us check: $2 \\cdot 2 = 4$.\n\n**Answer:** $@$",
    "\\[\\boxed{@}\\]",
    "This follows from case 2.\n\n### Final Answer\n\n$$@$$",
    "Final Answer: The final answer is $@$. I hope it is correct.",
    "Hence the answer is \\(@\\).",
    "So we get\n$$\n\\boxed{@}\n$$\nwhich was to be found in 1 step.",
)
# For near misses: the same, where the gold also stands in the reasoning.
MISLED = (
    "One might think of $GOLD$. That is not it.\n\nThe result is $\\boxed{@}$.",
    "The first attempt gives $GOLD$, but we made a mistake. Therefore, the final answer is $@$.",
)
# A completion that is cut off: no final statement, although the gold is the last thing it says.
CUT_OFF = (
    "First we collect the terms. Substituting back gives $3 \\cdot 1 = 3$, then we look at the case $GOLD$",
    "We have to try several values. Let us try $GOLD$, which would mean that",
    "Step 1: write down what is known.\n\nStep 2: suppose that it were $GOLD$. Then",
    "The candidates are 100, 200 and $GOLD$",
    "Thus the first of the two cases gives $GOLD$, and the second one",
)

# Line of MATH-500 (from 0) -> the unit or the counted thing, as the question has it.
UNITS = {
    5: "inches", 13: "cm", 27: "dollars", 38: "calories", 40: "cm", 59: "students", 86: "outfits", 107: "elements",
    122: "customers", 128: "miles", 141: "pencils", 149: "years old", 167: "cubic units", 169: "square units",
    182: "students", 187: "nickels", 198: "ways", 200: "daps", 207: "pizzas", 212: "questions", 214: "students",
    216: "Trinkets", 222: "square centimeters", 231: "years", 243: "units", 244: "sides", 246: "meals",
    258: "blue marbles", 263: "sides", 270: "dollars", 273: "dollars", 287: "seconds", 297: "leaves", 321: "meters",
    325: "beakers", 329: "inches per second", 369: "cm^2", 396: "square inches", 404: "boxes", 411: "handshakes",
    427: "cents", 441: "gallons", 447: "boys", 453: "representatives", 458: "students", 462: "cents", 476: "feet",
    486: "cubic inches", 8: "units", 85: "meters", 426: "cm", 220: "gallons", 451: "inches",
    18: "degrees", 37: "degrees", 94: "degrees", 133: "degrees", 240: "degrees", 324: "degrees",
}  # fmt: skip
# Line of MATH-500 -> what the question asks for by name.
NAMES = {
    22: "x", 45: "\\tan A", 49: "x", 56: "N", 61: "a", 77: "x", 79: "x", 83: "x", 84: "a+b", 87: "x", 93: "c",
    95: "y", 110: "a_1", 112: "A+B+C+D", 116: "x", 117: "x", 121: "x", 130: "n", 131: "f(3)", 148: "x", 168: "n",
    173: "a", 185: "k", 191: "b", 196: "x", 199: "x", 262: "x", 290: "r", 311: "n", 315: "a", 322: "b", 327: "P(5)",
    333: "b", 342: "x", 344: "a", 346: "x", 387: "f(-2)", 410: "N", 412: "P(16)", 424: "x", 436: "n", 443: "x",
    446: "n", 464: "x", 484: "x", 57: "|(1-i)^8|", 65: "1^{(2^{235423523})}", 47: "a+b+c", 108: "k", 19: "a",
    17: "c", 2: "f(-2) + f(-1) + f(0)", 11: "p(8)", 64: "d", 124: "x", 360: "b", 389: "\\sin T", 483: "\\tan A",
    15: "w", 126: "z_{2002}", 496: "|w|",
}  # fmt: skip

Forms = tuple[list[str], list[str]]
"""Right answers and wrong ones. An answer that begins with `RAW ` is a whole completion."""


# ------------------------------------------------------------------------------------------------- made from the gold


def integer(n: int, line: int) -> Forms:
    name, unit = NAMES.get(line), UNITS.get(line)
    lead = f"{name} = " if name else ""
    right = [
        f"{lead}{n - 3} + 3 = {n}",
        f"{n}.0",
        f"{n}.00" if n % 5 == 0 else f"\\mathbf{{{n}}}",
        f"\\text{{{n}}}",
        f"{3 * n} - {2 * n} = {n}" if n > 0 else f"{n - 1} + 1 = {n}",
        f"RAW After simplifying, the expression equals {n}.\n\nThe answer is **{n}**.",
        f"RAW **Final Answer**\n\\boxed{{{n}}}",
        f"RAW Answer: {n}",
    ]
    if name:
        right = [
            f"{name} = {n}",
            f"RAW Thus {name if len(name) == 1 else f'${name}$'} must be found.\n\nTherefore, ${name} = {n}$.",
            *right,
        ]
    if unit:
        word = f"\\text{{ {unit}}}" if "^" not in unit else "\\text{ cm}^2"
        right = [
            f"{n}{word}",
            f"RAW The answer is {n} {unit}.",
            f"RAW So the answer is ${n}$ {unit}.",
            f"{n}\\ \\mathrm{{{unit}}}",
            *right,
        ]
        if unit == "degrees":
            right = [f"{n}^\\circ", f"{n}^{{\\circ}}", f"{n}°", *right]
        if unit == "dollars":
            right = [f"\\${n}", f"\\${n}.00", *right]
    if abs(n) >= 1000:
        right = [f"{n:,}", f"{n:,}".replace(",", "{,}"), f"{n:,}".replace(",", "\\,"), *right]
    wrong = [
        f"{n + 1}",
        f"{-n}" if n else "1",
        f"{n}{0 if n else 1}",
        f"{lead}{n - 2} + 3 = {n + 1}",
        f"\\frac{{1}}{{{n}}}" if abs(n) > 1 else "\\frac{1}{2}",
        f"{n}x" if n else "x",
        f"{n} \\text{{ or }} {n + 1}",
        f"{n}, {n + 2}",
        f"x > {n}",
        f"({n}, {n + 1})",
        f"{n}\\pi" if n else "\\pi",
        f"\\sqrt{{{n}}}" if n > 1 else f"{n + 2}",
        f"x \\neq {n}",
        f"{n}.5",
        f"{n}^2" if abs(n) > 1 else f"{n - 1}",
        # work that is left standing
        f"\\frac{{{2 * n}}}{{2}}" if n % 2 else f"2 \\cdot {n // 2}" if n >= 0 else f"-2 \\cdot {-n // 2}",
        f"{n - 2} + 2",
        f"{n} \\text{{ million}}" if n else "1",
        f"{n}\\text{{, or maybe }} {n + 1}",
        f"RAW The answer is not {n} but {n + 1}.",
        f"{n - 1}{(chr(92) + 'text{ ' + unit + '}') if unit and '^' not in unit else ''}",
    ]
    if n >= 12 and str(n) != str(n)[::-1]:
        wrong.append(str(int(str(n)[::-1])) if n % 10 else f"{n + 9}")
    return right, wrong


def fraction(q: Fraction, line: int) -> Forms:
    a, b, sign = abs(q.numerator), q.denominator, "-" if q < 0 else ""
    lead = f"{NAMES[line]} = " if line in NAMES else ""
    unit = UNITS.get(line)
    right = [
        f"\\dfrac{{{a}}}{{{b}}}" if not sign else f"\\frac{{-{a}}}{{{b}}}",
        f"{sign}{a}/{b}",
        f"{sign}\\frac{{{3 * a}}}{{{3 * b}}} = {sign}\\frac{{{a}}}{{{b}}}",
        f"{lead}{sign}\\frac{{{a}}}{{{b}}}",
        f"{sign}\\tfrac{{{a}}}{{{b}}}",
        f"{sign}\\frac{{{a}}}{{{b}}} \\approx {a / b if not sign else -a / b:.4f}",
        f"{sign}{a} / {b}",
        f"{sign}\\frac{{{2 * a}}}{{{2 * b}}}",
        f"{sign}\\left(\\frac{{{a}}}{{{b}}}\\right)",
        f"RAW Therefore the answer is {sign}{a}/{b}.",
    ]
    if terminating(b):
        right = [
            decimal(abs(q), sign),
            f"{sign}\\frac{{{a}}}{{{b}}} \\text{{ (or }} {decimal(abs(q), sign)})",
            f"{sign}\\frac{{{a}}}{{{b}}} = {decimal(abs(q), sign)}",
            *right,
        ]
    if a > b and not sign:
        right.insert(0, f"{a // b}\\frac{{{a % b}}}{{{b}}}")
    if unit:
        right = [f"\\frac{{{a}}}{{{b}}}\\text{{ {unit}}}", *right]
    wrong = [
        f"{sign}\\frac{{{b}}}{{{a}}}",
        f"{'' if sign else '-'}\\frac{{{a}}}{{{b}}}",
        f"{sign}\\frac{{{a + 1}}}{{{b}}}",
        f"{sign}\\frac{{{a}}}{{{b + 1}}}",
        f"{sign}{a}/{b} = {sign}{a + 1}/{b}",
        f"{sign}{a}{b}",
        f"{sign}{a}",
        f"{sign}\\frac{{{a}}}{{{b}}} + 1",
        f"{sign}\\frac{{{a}}}{{{b}}}\\pi",
        f"\\sqrt{{\\frac{{{a}}}{{{b}}}}}",
        f"\\frac{{{a}}}{{{b}}} \\text{{ or }} \\frac{{{b}}}{{{a}}}",
        f"({a}, {b})",
        f"{sign}{a / b + 0.1:.3f}",
    ]
    return right, wrong


def angle(n: int, line: int) -> Forms:
    right = [
        f"{n}", f"{n}^{{\\circ}}", f"{n}°", f"{n} \\text{{ degrees}}", f"{n}\\degree", f"\\angle = {n}^\\circ",
        f"180^\\circ - {180 - n}^\\circ = {n}^\\circ", f"RAW The angle is found. The answer is {n} degrees.",
        f"RAW The answer is {n}°.", f"\\theta = {n}^\\circ", f"{n}\\,^\\circ",
    ]  # fmt: skip
    wrong = [
        f"{n + 1}^\\circ", f"-{n}^\\circ", f"{n}\\pi", f"{n} \\text{{ radians}}", f"{n}0^\\circ", f"{n - 5} \\text{{ degrees}}",
        f"\\angle = {n + 10}^\\circ", f"180^\\circ - {n}^\\circ = {180 - n if n != 90 else 91}^\\circ", f"\\frac{{{n}}}{{2}}^\\circ",
        f"{n}^\\circ \\text{{ or }} {n + 60}^\\circ",
    ]  # fmt: skip
    return right, wrong


def root(a: int, b: int, line: int) -> Forms:
    """a * sqrt(b), a > 1."""
    square, unit = a * a * b, UNITS.get(line, "units")
    right = [
        f"{a}\\sqrt{{{b}}}", f"{a} \\cdot \\sqrt{{{b}}}", f"\\sqrt{{{square}}}", f"\\sqrt{{{square}}} = {a}\\sqrt{{{b}}}",
        f"{a}\\sqrt{{{b}}} \\approx {a * b**0.5:.2f}", f"RAW The answer is {a}√{b}.", f"{a}√{b}", f"\\sqrt{{{b}}} \\cdot {a}",
        f"RAW The answer is ${a}\\sqrt{{{b}}}$ {unit}." if line in UNITS else f"RAW So the answer is ${a} \\sqrt {b}$." if b < 10 else f"{a} * sqrt({b})",
    ]  # fmt: skip
    wrong = [
        f"{a + 1}\\sqrt{{{b}}}", f"{a}\\sqrt{{{b + 1}}}", f"-{a}\\sqrt{{{b}}}", f"{b}\\sqrt{{{a}}}" if a != b else f"{b}\\sqrt{{2{a}}}",
        f"{a} + \\sqrt{{{b}}}", f"\\sqrt{{{a * b}}}", f"{a}{b}", f"\\frac{{{a}}}{{\\sqrt{{{b}}}}}" if b != 1 else f"{a}",
        f"{a}\\sqrt[3]{{{b}}}", f"{a * b}", f"\\pm {a}\\sqrt{{{b}}}", f"{a}\\sqrt{{{square}}}",
    ]  # fmt: skip
    return right, wrong


def based(digits: str, base: int) -> Forms:
    word = {5: "five", 6: "six", 8: "eight", 9: "nine"}[base]
    value = int(digits, base)
    right = [
        f"{digits}_{base}", f"{digits}_{{{base}}}", f"{digits}", f"({digits})_{{{base}}}", f"{digits}_{{\\text{{{word}}}}}",
        f"{digits} \\text{{ (base }} {base})", f"{value}_{{10}} = {digits}_{{{base}}}", f"RAW The answer is {digits} in base {base}.",
        f"{digits}_\\text{{{word}}}",
    ]  # fmt: skip
    wrong = [
        f"{digits}_{{{base + 1}}}", f"{value}", f"{value}_{{10}} = {digits[::-1]}_{{{base}}}" if digits != digits[::-1] else f"{value + 1}",
        f"{int(digits) + 1}_{base}", f"{digits}0_{base}", f"{digits}_{{10}}", f"-{digits}_{base}", f"{digits} \\text{{ (base }} {base - 1})",
        f"{digits}^{base}", f"{digits}_{{{base}}} + 1",
    ]  # fmt: skip
    return right, wrong


def point(parts: list[str], name: str) -> Forms:
    flipped = [negate(parts[0]), *parts[1:]]
    off = [*parts[:-1], f"{parts[-1]}+1" if not re.fullmatch(r"-?\d+", parts[-1]) else str(int(parts[-1]) + 1)]
    join = ", ".join
    right = [
        f"({join(parts)})", f"\\left({join(parts)}\\right)", f"{name} = ({join(parts)})", f"({','.join(parts)})",
        f"\\left( {' , '.join(parts)} \\right)", f"RAW The answer is $({join(parts)})$.", f"RAW So ${name} = \\boxed{{({join(parts)})}}$.",
        " , ".join(f"{n} = {p}" for n, p in zip(name.strip("()").split(","), parts, strict=True)),
    ]  # fmt: skip
    wrong = [
        f"({join(parts[::-1])})", f"({join(flipped)})", f"({join(off)})", f"({join(parts[:-1])})", f"({join([*parts, '0'])})",
        f"{name} = ({join(parts[1:] + parts[:1])})", f"{parts[0]}", f"({join([parts[0]] * len(parts))})",
        f"({join(parts)}) \\text{{ or }} ({join(flipped)})",
    ]  # fmt: skip
    return right, wrong


def vector(parts: list[str], common: int = 1) -> Forms:
    """A column vector; `common`: a denominator that can be taken out."""
    rows = " \\\\ ".join
    tex = [re.sub(r"(-?)(\d+)/(\d+)", r"\1\\frac{\2}{\3}", part) for part in parts]
    units = ["\\mathbf{i}", "\\mathbf{j}", "\\mathbf{k}"]
    flipped, off = [*parts[:-1], negate(parts[-1])], [*parts[:-1], f"{parts[-1]} + 1"]
    sums = "".join(
        f"{'' if part[0] == '-' or not k else '+'}{part} {unit}"
        for k, (part, unit) in enumerate(zip(tex, units, strict=False))
    )
    right = [
        f"\\begin{{bmatrix}} {rows(parts)} \\end{{bmatrix}}", f"\\left(\\begin{{array}}{{c}} {rows(tex)} \\end{{array}}\\right)",
        f"\\langle {', '.join(tex)} \\rangle", f"({', '.join(parts)})", f"\\mathbf{{v}} = \\begin{{pmatrix}} {rows(tex)} \\end{{pmatrix}}",
        f"\\begin{{pmatrix}} {' & '.join(tex)} \\end{{pmatrix}}^T", sums, f"\\begin{{pmatrix}}{rows(parts)}\\end{{pmatrix}}",
        f"\\left[\\begin{{matrix}} {rows(tex)} \\end{{matrix}}\\right]", f"({', '.join(tex)})^\\top",
    ]  # fmt: skip
    if common > 1:
        scaled = [str(int(Fraction(part) * common)) for part in parts]
        right.insert(0, f"\\frac{{1}}{{{common}}} \\begin{{pmatrix}} {rows(scaled)} \\end{{pmatrix}}")
    wrong = [
        f"\\begin{{pmatrix}} {rows(parts[::-1])} \\end{{pmatrix}}", f"\\begin{{pmatrix}} {rows(flipped)} \\end{{pmatrix}}",
        f"\\begin{{bmatrix}} {rows(off)} \\end{{bmatrix}}", f"\\langle {', '.join(parts[:-1])} \\rangle", f"\\begin{{pmatrix}} {rows(parts[:-1])} \\end{{pmatrix}}",
        f"2 \\begin{{pmatrix}} {rows(parts)} \\end{{pmatrix}}", f"({', '.join(flipped)})", f"{parts[0]}", f"-\\begin{{pmatrix}} {rows(parts)} \\end{{pmatrix}}",
    ]  # fmt: skip
    return right, wrong


def complex_number(a: int, b: int, line: int) -> Forms:
    part = "i" if abs(b) == 1 else f"{abs(b)}i"
    sign, other = ("-", "+") if b < 0 else ("+", "-")
    lead = f"{NAMES.get(line, 'z')} = "
    right = [
        f"{a} {sign} {part}", f"{'-' if b < 0 else ''}{part} {'+' if a >= 0 else '-'} {abs(a)}", f"{lead}{a}{sign}{part}", f"{a} + ({b})i",
        f"({a}) {sign} {part}", f"{a}{sign}{abs(b)}\\mathrm{{i}}" if abs(b) > 1 else f"{a}{sign}\\mathrm{{i}}",
        f"({a - 1}{sign}{part}) + 1 = {a} {sign} {part}", f"RAW The answer is {a} {sign} {part}.", f"{a} {sign} {abs(b)} \\cdot i",
    ]  # fmt: skip
    wrong = [
        f"{a} {other} {part}", f"{-a} {sign} {part}", f"{b} + {a}i" if a >= 0 else f"{b} - {-a}i", f"{a + 1} {sign} {part}", f"{a} {sign} {abs(b) + 1}i",
        f"{a}", f"{b}i", f"{a} {sign} {abs(b)}", f"({a}, {b + 1})", f"2({a} {sign} {part})",
    ]  # fmt: skip
    return right, wrong


def terminating(b: int) -> bool:
    for p in (2, 5):
        while b % p == 0:
            b //= p
    return b == 1


def decimal(q: Fraction, sign: str = "") -> str:
    return f"{sign}{float(q):.10f}".rstrip("0").rstrip(".")


def negate(part: str) -> str:
    return part[1:] if part.startswith("-") else f"-{part}" if part != "0" else "1"


# ---------------------------------------------------------------------------------------------------- written by hand

# gold -> (right, wrong)
BY_HAND: dict[str, Forms] = {
    "p - q": (["p-q", "-q + p", "\\sum = p - q", "p + (-q)", "RAW So the sum is $p - q$.\n\nThe answer is $p - q$."], ["q - p", "p + q", "p", "pq", "p - 2q", "p - q + 1"]),
    "\\text{Evelyn}": (["Evelyn", "\\text{Evelyn}", "\\textbf{Evelyn}", "\\mathrm{Evelyn}", "RAW The answer is Evelyn.", "RAW Answer: **Evelyn**", "\\text{evelyn}", "RAW The student with the greatest average speed is \\boxed{\\text{Evelyn}}."], ["\\text{Carla}", "Angela", "\\text{Evelyn and Carla}", "\\text{Briana}", "\\text{Debra}", "RAW The answer is not Evelyn.", "\\text{not Evelyn}"]),
    "\\sqrt{51}": (["DE = \\sqrt{51}", "\\sqrt{51} \\approx 7.14", "√51", "\\sqrt{100 - 49} = \\sqrt{51}", "51^{1/2}", "\\sqrt{3 \\cdot 17}", "\\sqrt {51}"], ["51", "\\sqrt{15}", "-\\sqrt{51}", "\\sqrt{50}", "2\\sqrt{51}", "\\sqrt{5}1", "\\sqrt[3]{51}"]),
    "\\pi": (["c = \\pi", "\\pi \\approx 3.14159", "π", "1 \\cdot \\pi", "\\frac{2\\pi}{2} = \\pi", "RAW The answer is π."], ["2\\pi", "-\\pi", "\\frac{\\pi}{2}", "\\pi + 1", "\\pi^2", "p", "3"]),
    "x=5": (["5", "x = 5", "x=5.0", "x = \\frac{10}{2} = 5", "\\{5\\}", "RAW The only solution is $x = 5$.\n\n**Answer:** $x=5$"], ["x = -5", "x = 5, x = 7", "y + x = 5", "x > 5", "x \\neq 5", "x = 15", "x = 1/5"]),
    "1,-2": (["1, -2", "n = 1, -2", "n = 1 \\text{ and } n = -2", "\\{1, -2\\}", "-2, 1", "1 \\text{ or } -2", "RAW Thus, the answer is $\\boxed{1}$ and $\\boxed{-2}$.", "n = -2 \\text{ or } n = 1", "1 \\text{ and } {-2}"], ["1, 2", "1", "-2", "-1, 2", "1, -2, 0", "1 - 2", "n = -1", "1, -3"]),
    "3, 5, 7": (["x = 3, 5, 7", "x = 3, x = 5, x = 7", "3, 5, \\text{ and } 7", "\\{3,5,7\\}", "7, 5, 3", "x_1 = 3, x_2 = 5, x_3 = 7", "x \\in \\{3, 5, 7\\}", "RAW The answer is $3$, $5$, and $7$.", "x=3 \\text{ or } x=5 \\text{ or } x=7"], ["3, 5", "3, 5, 8", "3, 5, -7", "\\{3, 5, 7, 9\\}", "357", "3 + 5 + 7", "15", "x = 3"]),
    "x^5 - x^4 + x^3 - x^2 + x - 1": (["x^5-x^4+x^3-x^2+x-1", "-1 + x - x^2 + x^3 - x^4 + x^5", "x^{5} - x^{4} + x^{3} - x^{2} + x - 1", "q(x) = x^5 - x^4 + x^3 - x^2 + x - 1", "(x-1)(x^4+x^2+1)"], ["x^5 - x^4 + x^3 - x^2 + x + 1", "x^5 + x^4 + x^3 + x^2 + x + 1", "x^4 - x^3 + x^2 - x + 1", "x^5 - x^4 + x^3 - x^2 + x", "-2", "x^6 - x^5 + x^4 - x^3 + x^2 - x"]),
    "-\\frac{\\pi}{6}": (["-\\pi/6", "\\frac{-\\pi}{6}", "-\\dfrac{\\pi}{6}", "\\arcsin\\left(-\\frac{1}{2}\\right) = -\\frac{\\pi}{6}", "-\\frac{\\pi}{6} \\text{ radians}", "-\\frac{1}{6}\\pi", "-\\frac{\\pi}{6} \\approx -0.5236"], ["\\frac{\\pi}{6}", "-\\frac{\\pi}{3}", "-\\frac{6}{\\pi}", "-\\frac{1}{6}", "\\frac{11\\pi}{6}", "-\\frac{\\pi}{6} + \\pi", "30"]),
    "x^3+3x-6": (["x^3 + 3x - 6", "3x + x^3 - 6", "x^{3}+3x-6", "x^3 + 3x^2 - 3x^2 + 3x - 6 = x^3 + 3x - 6", "-6 + 3x + x^3"], ["x^3 - 3x - 6", "x^3+3x+6", "x^3+3x", "x^2+3x-6", "x^3 + 6x^2 + 3x - 6", "3x - 6"]),
    "\\frac{3\\sqrt{3}}{4}": (["\\dfrac{3\\sqrt{3}}{4}", "\\frac{3}{4}\\sqrt{3}", "3\\sqrt{3}/4", "\\frac{3\\sqrt3}{4}", "\\frac{3 \\sqrt{3}}{4} \\approx 1.299", "\\frac{\\sqrt{27}}{4}", "(3√3)/4"], ["\\frac{\\sqrt{3}}{4}", "\\frac{4\\sqrt{3}}{3}", "-\\frac{3\\sqrt{3}}{4}", "\\frac{3\\sqrt{2}}{4}", "\\frac{3 + \\sqrt{3}}{4}", "3\\sqrt{3}"]),
    "\\cot x": (["\\cot(x)", "\\cot{x}", "\\frac{\\cos x}{\\sin x}", "\\frac{\\cos x}{\\sin x} = \\cot x", "\\frac{1}{\\tan x}", "\\cot x"], ["\\tan x", "-\\cot x", "\\cot y", "\\cos x", "\\csc x", "\\cot^2 x"]),
    "1 \\pm \\sqrt{19}": (["1 + \\sqrt{19}, 1 - \\sqrt{19}", "x = 1 \\pm \\sqrt{19}", "1 - \\sqrt{19}, 1 + \\sqrt{19}", "1 + \\sqrt{19} \\text{ and } 1 - \\sqrt{19}", "\\{1 - \\sqrt{19}, 1 + \\sqrt{19}\\}", "1\\pm\\sqrt{19}", "x = 1 + \\sqrt{19} \\text{ or } x = 1 - \\sqrt{19}"], ["1 + \\sqrt{19}", "-1 \\pm \\sqrt{19}", "1 \\pm \\sqrt{18}", "1 + \\sqrt{19}, -1 - \\sqrt{19}", "\\pm\\sqrt{19}", "\\pm 1 + \\sqrt{19}", "19 \\pm \\sqrt{1}"]),
    "\\text{east}": (["east", "\\text{East}", "\\textbf{east}", "\\mathrm{east}", "RAW She is facing east.\n\nThe answer is **east**.", "\\text{East.}", "RAW Answer: East"], ["\\text{west}", "\\text{north}", "\\text{seat}", "\\text{northeast}", "\\text{south}", "\\text{not east}", "\\text{east or west}"]),
    "2k+2": (["2k + 2", "2 + 2k", "2(k+1)", "(-k+4) + (-2+3k) = 2k + 2", "2\\cdot k + 2", "2(k + 1) = 2k + 2"], ["2k - 2", "2k", "k + 2", "4k + 2", "2k^2 + 2", "2n+2", "2k + 2 = 0"]),
    "(a+5)(b+2)": (["(b+2)(a+5)", "(a + 5)(b + 2)", "(a+5) \\cdot (b+2)", "a(b+2)+5(b+2) = (a+5)(b+2)", "\\left(a+5\\right)\\left(b+2\\right)"], ["(a+2)(b+5)", "(a-5)(b-2)", "(a+5)(b-2)", "(a+5) + (b+2)", "(a+5)", "(a+5)(a+2)"]),
    "(3,4]": (["(3, 4]", "\\left(3,4\\right]", "3 < \\lambda \\le 4", "\\lambda \\in (3,4]", "3 < \\lambda \\leq 4", "\\left( 3, 4 \\right]", "\\{\\lambda : 3 < \\lambda \\le 4\\}"], ["[3,4]", "(3,4)", "[3,4)", "(3,5]", "3 \\le \\lambda \\le 4", "4", "3 < \\lambda < 4", "(-3,4]", "\\{3,4\\}"]),
    "\\text{even}": (["even", "\\text{Even}", "\\mathrm{even}", "\\textbf{even}", "``even''", "\\text{``even\"}", "RAW The function is even.\n\nThe answer is even.", "RAW **Answer:** Even"], ["\\text{odd}", "\\text{neither}", "\\text{not even}", "\\text{even and odd}", "\\text{neither even nor odd}", "2"]),
    "\\frac{270}7\\text{ degrees}": (["\\frac{270}{7}", "\\frac{270}{7}^\\circ", "\\dfrac{270}{7}\\text{ degrees}", "\\left(\\frac{270}{7}\\right)^\\circ", "38\\frac{4}{7}", "270/7", "\\frac{270}{7} \\text{ degrees} \\approx 38.57^\\circ"], ["\\frac{7}{270}", "\\frac{270}{7}\\pi", "\\frac{271}{7}^\\circ", "\\frac{270}{8}", "-\\frac{270}{7}", "\\frac{270}{7} \\text{ radians}", "270"]),
    "5x - 7y + 11z + 4 = 0": (["5x-7y+11z+4=0", "5x - 7y + 11z + 4 = 0", "0 = 5x - 7y + 11z + 4", "4 + 5x - 7y + 11z = 0", "\\text{The plane is } 5x - 7y + 11z + 4 = 0"], ["5x - 7y + 11z - 4 = 0", "5x + 7y + 11z + 4 = 0", "5x - 7y + 11z + 4 = 1", "0", "5x - 7y + 11z = 4", "x + y + z = 0", "5x - 7y + 4 = 0"]),
    "\\frac{\\sqrt{3}}{3}": (["\\frac{1}{\\sqrt{3}}", "\\dfrac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}} = \\frac{\\sqrt{3}}{3}", "\\sqrt{3}/3", "\\frac13\\sqrt3", "\\frac{\\sqrt{3}}{3} \\approx 0.577"], ["\\sqrt{3}", "\\frac{3}{\\sqrt{3}}", "-\\frac{\\sqrt{3}}{3}", "\\frac{\\sqrt{3}}{2}", "\\frac{\\sqrt{2}}{3}", "\\frac{1}{3}"]),
    "(2,\\infty)": (["(2, \\infty)", "(2, +\\infty)", "x > 2", "\\left(2, \\infty\\right)", "S \\in (2, \\infty)", "2 < x < \\infty", "(2,∞)"], ["[2,\\infty)", "(-\\infty, 2)", "x \\ge 2", "(3,\\infty)", "(-2,\\infty)", "2", "x < 2", "(2, 100)"]),
    "\\left( \\frac{3}{2}, -13 \\right)": (["(\\frac{3}{2}, -13)", "(3/2,-13)", "(1.5, -13)", "(m,b) = \\left(\\frac{3}{2}, -13\\right)", "m = \\frac{3}{2}, b = -13", "\\left(\\dfrac32, -13\\right)"], ["(-13, \\frac{3}{2})", "(\\frac{2}{3}, -13)", "(\\frac{3}{2}, 13)", "(-\\frac{3}{2}, -13)", "\\frac{3}{2}", "y = \\frac{3}{2}x + 13"]),
    "\\text{(C)}": (["C", "(C)", "\\text{C}", "\\textbf{(C)}", "\\mathrm{C}", "\\text{(C) Plane}", "RAW The answer is (C).", "RAW The correct option is **C**.\n\nAnswer: C", "\\text{Option C}", "C)"], ["\\text{(D)}", "B", "\\text{(A)}", "\\text{(C) or (D)}", "\\text{not C}", "\\text{(CD)}", "3", "(E)"]),
    "\\text{(E)}": (["E", "(E)", "\\text{E}", "\\textbf{(E)}", "\\textbf{E}", "\\text{(E) Hyperbola}", "RAW The answer is (E).", "RAW **Answer:** E", "\\text{E. Hyperbola}"], ["\\text{(D)}", "B", "\\text{(F)}", "\\text{(D) or (E)}", "e^1", "5", "(C)", "\\text{A or E}"]),
    "\\text{(B)}": (["B", "(B)", "\\text{B}", "\\textbf{(B)}", "\\mathrm{(B)}", "RAW The answer is (B).", "RAW The correct choice is B.\n\nAnswer: (B)", "\\text{choice B}"], ["\\text{(D)}", "8", "\\text{(A)}", "\\text{(A) and (B)}", "\\text{none}", "2", "(E)"]),
    "288 \\pi": (["288\\pi", "288 \\cdot \\pi", "V = \\frac{4}{3}\\pi \\cdot 6^3 = 288\\pi", "288π", "288\\pi \\approx 904.78", "288 \\pi \\text{ cubic units}"], ["288", "\\frac{288}{\\pi}", "-288\\pi", "828\\pi", "288\\pi^2", "289\\pi"]),
    "-13x+3": (["-13x + 3", "3 - 13x", "r(x) = -13x + 3", "3-13x", "-(13x - 3)"], ["13x+3", "-13x-3", "3x - 13", "-13x", "-13x^2+3", "-13 + 3"]),
    "\\begin{pmatrix} -1 & 0 \\\\ 0 & -1 \\end{pmatrix}": (["\\begin{bmatrix} -1 & 0 \\\\ 0 & -1 \\end{bmatrix}", "\\left(\\begin{array}{cc} -1 & 0 \\\\ 0 & -1 \\end{array}\\right)", "\\begin{pmatrix}-1&0\\\\0&-1\\end{pmatrix}", "-\\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}", "-I = \\begin{pmatrix} -1 & 0 \\\\ 0 & -1 \\end{pmatrix}", "\\left[\\begin{matrix} -1 & 0 \\\\ 0 & -1 \\end{matrix}\\right]", "\\left[ \\begin{array}{rr} -1 & 0 \\\\ 0 & -1 \\end{array} \\right]"], ["\\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}", "\\begin{pmatrix} 0 & -1 \\\\ -1 & 0 \\end{pmatrix}", "\\begin{pmatrix} -1 & 0 \\\\ 0 & 1 \\end{pmatrix}", "\\begin{vmatrix} -1 & 0 \\\\ 0 & -1 \\end{vmatrix}", "-1", "\\begin{pmatrix} -1 \\\\ -1 \\end{pmatrix}", "\\begin{pmatrix} -1 & 0 & 0 & -1 \\end{pmatrix}"]),
    "864 \\mbox{ inches}^2": (["864", "864 \\text{ in}^2", "864 \\text{ square inches}", "864\\ \\text{in.}^2", "6 \\cdot 144 = 864", "RAW The answer is 864 square inches.", "864\\text{ inches}^2"], ["863", "846 \\text{ in}^2", "864 \\text{ cm}^2", "864 \\text{ square feet}", "6 \\cdot 12 = 72", "-864"]),
    "1\\frac{4}{5}": (["1 \\frac{4}{5}", "\\frac{9}{5}", "1.8", "\\frac{9}{5} = 1\\frac{4}{5}", "1\\dfrac{4}{5}", "9/5", "1\\,\\frac{4}{5}", "1 4/5"], ["\\frac{4}{5}", "1\\frac{5}{4}", "14/5", "\\frac{14}{5}", "-1\\frac{4}{5}", "1\\frac{3}{5}", "1.45"]),
    "18+2\\pi": (["18 + 2\\pi", "2\\pi + 18", "2(9 + \\pi)", "P = 18 + 2\\pi", "18+2π", "18 + 2\\pi \\approx 24.28", "18 + 2\\pi \\text{ units}"], ["18 - 2\\pi", "20\\pi", "18\\pi + 2", "18 + \\pi", "2\\pi", "18"]),
    "\\sqrt{53}": (["\\sqrt {53}", "√53", "\\sqrt{53} \\approx 7.28", "53^{\\frac{1}{2}}", "\\sqrt{53} = \\sqrt{53}", "RAW The answer is √53."], ["53", "\\sqrt{35}", "-\\sqrt{53}", "\\sqrt{54}", "3\\sqrt{5}", "\\sqrt[3]{53}"]),
    "7\\pi": (["7 \\pi", "7 \\cdot \\pi", "7π", "\\pi \\cdot 7", "7\\pi \\approx 21.99", "\\frac{14\\pi}{2} = 7\\pi"], ["7", "\\frac{7}{\\pi}", "-7\\pi", "8\\pi", "7\\pi^2", "\\frac{\\pi}{7}"]),
    "3 \\pm 2 \\sqrt{2}": (["3 + 2\\sqrt{2}, 3 - 2\\sqrt{2}", "x = 3 \\pm 2\\sqrt{2}", "3 - 2\\sqrt{2}, 3 + 2\\sqrt{2}", "3 + 2\\sqrt2 \\text{ and } 3 - 2\\sqrt2", "3 \\pm \\sqrt{8}", "x = 3 \\pm \\sqrt{8} = 3 \\pm 2\\sqrt{2}"], ["3 + 2\\sqrt{2}", "2 \\pm 3\\sqrt{2}", "-3 \\pm 2\\sqrt{2}", "3 \\pm \\sqrt{2}", "3 + 2\\sqrt{2}, -3 - 2\\sqrt{2}", "3 \\pm 2\\sqrt{3}"]),
    "\\left(\\frac{3}{5},\\frac{8}{3}\\right]": (["(\\frac{3}{5}, \\frac{8}{3}]", "\\frac{3}{5} < x \\le \\frac{8}{3}", "x \\in \\left(\\frac{3}{5}, \\frac{8}{3}\\right]", "(3/5, 8/3]", "\\left(\\dfrac35,\\dfrac83\\right]", "(0.6, \\frac{8}{3}]"], ["[\\frac{3}{5}, \\frac{8}{3}]", "(\\frac{3}{5}, \\frac{8}{3})", "(\\frac{5}{3}, \\frac{8}{3}]", "(\\frac{3}{5}, \\frac{3}{8}]", "\\frac{3}{5} \\le x \\le \\frac{8}{3}", "[\\frac{3}{5},\\frac{8}{3})"]),
    "5.4 \\text{ cents}": (["5.4", "5.4 \\text{ cents}", "5.40 \\text{ cents}", "5.4¢", "RAW The answer is 5.4 cents.", "5.4 \\, \\text{cents}"], ["5.5 \\text{ cents}", "54 \\text{ cents}", "\\$5.40", "4.5 \\text{ cents}", "0.54", "5.4 \\text{ dollars}"]),
    "(-\\infty, 0]": (["(-\\infty,0]", "y \\le 0", "\\left(-\\infty, 0\\right]", "y \\in (-\\infty, 0]", "(-∞, 0]", "-\\infty < y \\leq 0"], ["(-\\infty, 0)", "[0, \\infty)", "y < 0", "(-\\infty, 1]", "[-\\infty, \\infty]", "y \\ge 0", "0"]),
    "1+2\\sqrt{3}": (["1 + 2\\sqrt{3}", "2\\sqrt{3} + 1", "1+2\\sqrt3", "1 + \\sqrt{12} = 1 + 2\\sqrt{3}", "1 + 2√3", "1 + \\sqrt{12}", "1 + 2\\sqrt{3} \\approx 4.46"], ["1 - 2\\sqrt{3}", "2 + \\sqrt{3}", "3\\sqrt{3}", "1 + 3\\sqrt{2}", "2\\sqrt{3}", "1 + 2\\sqrt{2}"]),
    "(5,\\infty)": (["(5, \\infty)", "(5,+\\infty)", "x > 5", "x \\in (5, \\infty)", "\\left( 5, \\infty \\right)", "5 < x", "\\{x \\mid x > 5\\}"], ["[5,\\infty)", "(-\\infty, 5)", "x \\geq 5", "x < 5", "(-5,\\infty)", "(6,\\infty)", "x \\neq 5", "5"]),
    "12\\pi": (["12 \\pi", "12\\pi \\text{ inches per second}", "12π", "\\frac{36\\pi}{3} = 12\\pi", "12 \\cdot \\pi \\approx 37.7", "RAW The answer is $12\\pi$ inches per second."], ["12", "21\\pi", "-12\\pi", "\\frac{12}{\\pi}", "13\\pi", "12\\pi^2"]),
    "\\frac{11+9a}{20}": (["\\dfrac{11 + 9a}{20}", "\\frac{9a + 11}{20}", "(11+9a)/20", "\\frac{9a}{20} + \\frac{11}{20}", "\\frac{16+24a - 5 - 15a}{20} = \\frac{11+9a}{20}", "\\frac{1}{20}(9a+11)"], ["\\frac{11-9a}{20}", "\\frac{9+11a}{20}", "\\frac{20}{11+9a}", "\\frac{11+9a}{10}", "11 + 9a", "\\frac{11+9b}{20}"]),
    "2k": (["2 k", "2 \\cdot k", "k \\cdot 2", "a+b+c+d+e+f = 2k", "k + k = 2k"], ["k", "-2k", "2", "k^2", "2n", "3k", "2/k"]),
    "6r^2-4r-24": (["6r^2 - 4r - 24", "-24 - 4r + 6r^2", "2(3r^2 - 2r - 12)", "6r^{2} - 4r - 24", "6r^2 + (-4)r + (-24)"], ["6r^2+4r-24", "6r^2-4r+24", "6r^2 - 24", "6r^3-4r-24", "4r^2-6r-24", "6x^2 - 4x - 23"]),
    "11 \\sqrt{5} + 11": (["11 + 11\\sqrt{5}", "11\\sqrt{5} + 11", "11(1 + \\sqrt{5})", "11(\\sqrt5+1)", "11\\sqrt{5}+11 \\approx 35.6", "\\sqrt{605} + 11"], ["11\\sqrt{5} - 11", "22\\sqrt{5}", "11\\sqrt{5}", "5\\sqrt{11} + 11", "11\\sqrt{6} + 11", "-11\\sqrt{5} + 11"]),
    "(-\\sqrt{3}, \\sqrt{3})": (["-\\sqrt{3} < x < \\sqrt{3}", "\\left(-\\sqrt{3}, \\sqrt{3}\\right)", "x \\in (-\\sqrt{3}, \\sqrt{3})", "(-√3, √3)", "(-\\sqrt3,\\sqrt3)", "|x| < \\sqrt{3}"], ["[-\\sqrt{3}, \\sqrt{3}]", "(-3, 3)", "(\\sqrt{3}, -\\sqrt{3})", "(0, \\sqrt{3})", "\\pm\\sqrt{3}", "(-\\sqrt{3}, \\sqrt{3}]", "(-\\sqrt{2}, \\sqrt{2})"]),
    "\\text{ellipse}": (["ellipse", "\\text{Ellipse}", "\\textbf{ellipse}", "\\text{an ellipse}", "RAW The answer is an ellipse.", "\\mathrm{ellipse}", "RAW Answer: ellipse"], ["\\text{circle}", "\\text{hyperbola}", "\\text{parabola}", "\\text{not an ellipse}", "\\text{line}", "\\text{ellipsis}", "\\text{circle or ellipse}"]),
    "\\frac{20000}{\\pi}": (["\\dfrac{20000}{\\pi}", "20000/\\pi", "\\frac{20,000}{\\pi}", "\\frac{20000}{\\pi} \\text{ square meters}", "\\frac{20000}{\\pi} \\approx 6366.2", "\\frac{20000}{\\pi} \\text{ m}^2", "\\frac{40000}{2\\pi} = \\frac{20000}{\\pi}"], ["20000\\pi", "\\frac{10000}{\\pi}", "20000", "\\frac{\\pi}{20000}", "\\frac{2000}{\\pi}", "-\\frac{20000}{\\pi}"]),
    "x \\in [-2,7]": (["[-2, 7]", "-2 \\le x \\le 7", "x \\in [-2, 7]", "\\left[-2,7\\right]", "-2 \\leq x \\leq 7", "7 \\ge x \\ge -2", "RAW The answer is $x\\in[-2,7]$."], ["(-2,7)", "[-2,7)", "-2 < x < 7", "[2,7]", "[-7,2]", "x \\in \\{-2, 7\\}", "x \\le -2 \\text{ or } x \\ge 7"]),
    "15x - 80": (["15x-80", "-80 + 15x", "5(3x - 16)", "19x - 4x + 1 - 81 = 15x - 80", "15 x - 80"], ["15x + 80", "80 - 15x", "15x", "-65", "23x - 80", "15x - 82"]),
    "\\frac{\\sqrt{21}}{5}": (["\\dfrac{\\sqrt{21}}{5}", "\\sqrt{21}/5", "\\sin T = \\frac{\\sqrt{21}}{5}", "\\frac{1}{5}\\sqrt{21}", "\\sqrt{\\frac{21}{25}}", "\\frac{\\sqrt{21}}{5} \\approx 0.917"], ["\\frac{2}{5}", "\\frac{5}{\\sqrt{21}}", "-\\frac{\\sqrt{21}}{5}", "\\frac{\\sqrt{12}}{5}", "\\frac{21}{5}", "\\frac{\\sqrt{21}}{25}"]),
    "\\sqrt{66}": (["\\sqrt {66}", "√66", "\\sqrt{66} \\approx 8.12", "\\sqrt{6 \\cdot 11}", "d = \\sqrt{66}", "\\sqrt{6}\\sqrt{11}"], ["66", "\\sqrt{65}", "-\\sqrt{66}", "6\\sqrt{6}", "\\sqrt{6}", "\\sqrt[4]{66}"]),
    "\\text{Navin}": (["Navin", "\\text{Navin}", "\\textbf{Navin}", "RAW Navin would earn the most.\n\n**Answer: Navin**", "RAW The answer is Navin.", "\\mathrm{Navin}"], ["\\text{Luka}", "\\text{Ian}", "\\text{Navin and Luka}", "\\text{Vanin}", "\\text{not Navin}", "RAW The answer is not Navin but Luka."]),
    "5r^5": (["5r^{5}", "5 \\cdot r^5", "\\frac{40r^9}{8r^4} = 5r^5", "5 r^5", "r^5 \\cdot 5"], ["5r^4", "5r", "r^5", "-5r^5", "(5r)^5", "5x^5", "4r^5"]),
    "3R^2": (["3R^{2}", "3 R^2", "3 \\cdot R^2", "AF^2 + BF^2 + CF^2 = 3R^2", "R^2 + 2R^2 = 3R^2"], ["2R^2", "3R", "3R^3", "3r^2 + a^2", "-3R^2", "(3R)^2", "R^2"]),
    "\\{1\\pm\\sqrt{5},-2\\}": (["\\{1 + \\sqrt{5}, 1 - \\sqrt{5}, -2\\}", "\\{-2, 1 \\pm \\sqrt{5}\\}", "\\left\\{1 \\pm \\sqrt{5}, -2\\right\\}", "-2, 1 + \\sqrt{5}, 1 - \\sqrt{5}", "\\{-2, 1-\\sqrt5, 1+\\sqrt5\\}", "\\{1 - \\sqrt{5}, -2, 1 + \\sqrt{5}\\}"], ["\\{1 \\pm \\sqrt{5}, 2\\}", "\\{1 + \\sqrt{5}, -2\\}", "\\{1 \\pm \\sqrt{5}\\}", "\\{-1 \\pm \\sqrt{5}, -2\\}", "-2", "\\{1 \\pm \\sqrt{6}, -2\\}", "\\{1 \\pm \\sqrt{5}, -2, 0\\}"]),
    "\\left[ \\frac{\\pi^2}{8}, \\frac{5 \\pi^2}{4} \\right]": (["[\\frac{\\pi^2}{8}, \\frac{5\\pi^2}{4}]", "\\left[\\dfrac{\\pi^2}{8}, \\dfrac{5\\pi^2}{4}\\right]", "\\frac{\\pi^2}{8} \\le f(x) \\le \\frac{5\\pi^2}{4}", "[\\pi^2/8, 5\\pi^2/4]", "\\left[\\frac{1}{8}\\pi^2, \\frac{5}{4}\\pi^2\\right]"], ["(\\frac{\\pi^2}{8}, \\frac{5\\pi^2}{4})", "[\\frac{\\pi^2}{4}, \\frac{5\\pi^2}{4}]", "[\\frac{\\pi}{8}, \\frac{5\\pi}{4}]", "[\\frac{\\pi^2}{8}, \\frac{\\pi^2}{4}]", "[0, \\frac{5\\pi^2}{4}]", "\\frac{\\pi^2}{8}"]),
    "(-\\infty, 2) \\cup (3, \\infty)": (["(-\\infty,2)\\cup(3,\\infty)", "x < 2 \\text{ or } x > 3", "(3, \\infty) \\cup (-\\infty, 2)", "x \\in (-\\infty, 2) \\cup (3, \\infty)", "(-\\infty, 2) \\cup (3, +\\infty)", "\\left(-\\infty,2\\right)\\cup\\left(3,\\infty\\right)", "x > 3 \\text{ or } x < 2"], ["(-\\infty, 2] \\cup [3, \\infty)", "(2, 3)", "(-\\infty, 2)", "(-\\infty, 3) \\cup (2, \\infty)", "x \\le 2 \\text{ or } x \\ge 3", "(-\\infty, 2) \\cap (3, \\infty)", "(-\\infty, -2) \\cup (3, \\infty)"]),
    "x^8 + x^7 + x^6 + x^5 + x^4 + x^3 + x^2 + x + 1": (["x^8+x^7+x^6+x^5+x^4+x^3+x^2+x+1", "1 + x + x^2 + x^3 + x^4 + x^5 + x^6 + x^7 + x^8", "x^{8} + x^{7} + x^{6} + x^{5} + x^{4} + x^{3} + x^{2} + x + 1", "q(x) = x^8 + x^7 + x^6 + x^5 + x^4 + x^3 + x^2 + x + 1", "(x^2+x+1)(x^6+x^3+1)"], ["x^8 + x^7 + x^6 + x^5 + x^4 + x^3 + x^2 + x", "x^7 + x^6 + x^5 + x^4 + x^3 + x^2 + x + 1", "x^8 - x^7 + x^6 - x^5 + x^4 - x^3 + x^2 - x + 1", "x^8 + x^7 + x^6 + x^5 + x^4 + x^3 + x^2 + x + 2", "2"]),
    "y = 2x + 3": (["y = 2x + 3", "y=2x+3", "y = 3 + 2x", "y = 2 x + 3", "\\text{The line is } y = 2x + 3", "RAW The answer is y = 2x + 3."], ["y = 2x - 3", "y = 3x + 2", "y = -2x + 3", "x = 2y + 3", "y = 2x", "y = 2x + 1", "y = 3"]),
    "-2,1": (["-2, 1", "1, -2", "x = -2, 1", "x = -2 \\text{ and } x = 1", "\\{-2, 1\\}", "x = 1 \\text{ or } x = -2", "-2 \\text{ and } 1", "RAW The answer is $\\boxed{-2, 1}$."], ["2, 1", "-2", "1", "-2, -1", "-2, 1, 7", "-1", "-2 + 1", "2, -1"]),
    "\\$18.90": (["18.90", "\\$18.90", "18.9", "\\$18.9", "18.90 \\text{ dollars}", "RAW The answer is \\$18.90.", "RAW The answer is $18.90 dollars.", "1890 \\text{ cents}"], ["\\$19.80", "\\$189.0", "\\$18.09", "18.90 \\text{ cents}", "\\$1.89", "-\\$18.90", "\\$18"]),
    "\\$32,\\!348": (["\\$32,348", "32348", "32,348", "\\$32{,}348", "\\$32348.00", "32,348 \\text{ dollars}", "RAW The answer is \\$32,348.", "\\$32\\,348"], ["\\$32,349", "\\$32.348", "\\$32,384", "32,348 \\text{ cents}", "\\$3,234.80", "-\\$32,348", "\\$348"]),
    "\\$36": (["36", "\\$36", "\\$36.00", "36 \\text{ dollars}", "RAW The answer is $36.", "x = 36", "RAW The original price of the shirt was \\$36.\n\n\\boxed{\\$36}", "\\text{\\$36}"], ["\\$63", "\\$35", "36 \\text{ cents}", "\\$3.60", "-36", "\\$36.50", "360"]),
    "8 \\pi": (["8\\pi", "8 \\cdot \\pi", "\\frac{72\\pi}{9} = 8\\pi", "8π", "8\\pi \\approx 25.13", "\\pi \\cdot 8"], ["8", "-8\\pi", "\\frac{8}{\\pi}", "9\\pi", "8\\pi^2", "\\frac{\\pi}{8}"]),
    "15\\mbox{ cm}^2": (["15", "15 \\text{ cm}^2", "15 \\text{ square centimeters}", "15\\ \\mathrm{cm}^2", "15 \\text{ cm}^{2}", "\\frac{1}{2} \\cdot 5 \\cdot 6 = 15", "RAW The answer is 15 square centimeters."], ["51 \\text{ cm}^2", "15 \\text{ m}^2", "16 \\text{ cm}^2", "1.5", "-15", "30 \\text{ cm}^2", "15 \\text{ inches}^2"]),
    "137 \\frac{1}{2}": (["137.5", "137\\frac{1}{2}", "\\frac{275}{2}", "137\\dfrac12", "137 \\tfrac{1}{2} \\text{ miles}", "137\\frac{1}{2} = 137.5", "RAW The answer is 137.5 miles.", "137 1/2"], ["137", "\\frac{137}{2}", "136\\frac{1}{2}", "137\\frac{2}{1}", "-137\\frac{1}{2}", "1371/2", "13.75"]),
    "8n^2 + 4n + 1": (["8n^2+4n+1", "1 + 4n + 8n^2", "8n^{2} + 4n + 1", "4n(2n+1) + 1", "8 n^2 + 4 n + 1"], ["8n^2 - 4n + 1", "8n^2 + 4n - 1", "8n^2 + 4n", "4n^2 + 8n + 1", "8n + 4n + 1", "8x^2 + 4x + 2"]),
    "y = -2x": (["y = -2x", "y=-2x", "y = -2 x", "y = -2x + 0", "RAW The answer is y = -2x.", "\\text{The line is } y = -2x"], ["y = 2x", "x = -2y", "y = -2", "y = -2x + 1", "y = -x", "2"]),
    "(2,12) \\cup (12,102)": (["(2, 12) \\cup (12, 102)", "(12,102) \\cup (2,12)", "x \\in (2,12) \\cup (12,102)", "2 < x < 12 \\text{ or } 12 < x < 102", "(2,12)∪(12,102)", "\\left(2,12\\right)\\cup\\left(12,102\\right)"], ["(2,102)", "[2,12) \\cup (12,102)", "(2,12) \\cup (12,100)", "(2,12)", "(2,12) \\cap (12,102)", "(2,12] \\cup [12,102)", "(12,102)"]),
    "(0,9) \\cup (9,36)": (["(0, 9) \\cup (9, 36)", "(9,36)\\cup(0,9)", "x \\in (0,9) \\cup (9,36)", "0 < x < 9 \\text{ or } 9 < x < 36", "\\left(0,9\\right) \\cup \\left(9,36\\right)", "(0,9) ∪ (9,36)"], ["(0,36)", "(0,9) \\cup (9,36]", "[0,9) \\cup (9,36)", "(0,9)", "(0,9) \\cap (9,36)", "(-9,0) \\cup (9,36)", "(0,9) \\cup (9,16)"]),
    "\\left( 3, \\frac{\\pi}{2} \\right)": (["(3, \\frac{\\pi}{2})", "(3, \\pi/2)", "(r,\\theta) = \\left(3, \\frac{\\pi}{2}\\right)", "\\left(3,\\dfrac{\\pi}{2}\\right)", "r = 3, \\theta = \\frac{\\pi}{2}", "(3, π/2)"], ["(\\frac{\\pi}{2}, 3)", "(3, \\frac{\\pi}{4})", "(-3, \\frac{\\pi}{2})", "(3, -\\frac{\\pi}{2})", "3", "(3, \\frac{2}{\\pi})", "[3, \\pi]"]),
    ".0000672": (["0.0000672", "6.72 \\times 10^{-5}", ".0000672", "\\frac{672}{10000000} = 0.0000672", "0.00006720", "\\frac{21}{312500}"], ["0.000672", "6.72 \\times 10^{-4}", "0.0000627", "672", "-0.0000672", "6.72 \\times 10^5"]),
}  # fmt: skip

# What MATH-500 has none of, but other benches and a user's own files have.
MORE: dict[str, Forms] = {
    "\\text{Wednesday}": (["Wednesday", "\\text{Wednesday}", "RAW The answer is Wednesday.", "RAW Answer: **Wednesday**", "\\textbf{Wednesday}", "\\text{a Wednesday}", "RAW It will be a Wednesday.\n\nTherefore, the answer is \\boxed{\\text{Wednesday}}."], ["\\text{Tuesday}", "\\text{Wednesday or Thursday}", "\\text{Thursday}", "3", "\\text{not Wednesday}", "\\text{Wednesday, Friday}"]),
    "2:30 \\text{ p.m.}": (["2:30 \\text{ pm}", "2:30\\text{ PM}", "RAW The answer is 2:30 p.m.", "RAW Answer: 2:30 PM", "2{:}30 \\text{ p.m.}", "\\text{2:30 p.m.}"], ["2:30 \\text{ a.m.}", "3:30 \\text{ p.m.}", "2:03 \\text{ p.m.}", "2:35 \\text{ p.m.}", "230", "12:30 \\text{ p.m.}"]),
    "11:05": (["11:05", "\\text{11:05}", "11{:}05", "RAW The answer is 11:05.", "RAW **Answer:** 11:05"], ["11:50", "10:05", "11:06", "1105", "5:11", "-11:05"]),
    "3:4": (["3:4", "3 : 4", "\\text{3:4}", "3 \\text{ to } 4", "RAW The answer is 3:4."], ["4:3", "3:5", "7", "34", "2:4", "-3:4"]),
    "25\\%": (["25\\%", "25%", "25 \\text{ percent}", "RAW The answer is 25%.", "RAW The answer is 25 percent.", "25"], ["20\\%", "2.5\\%", "52\\%", "-25\\%", "0.25\\%", "250\\%"]),
    "\\text{Yes}": (["yes", "\\text{Yes}", "RAW The answer is yes.", "\\textbf{Yes}", "RAW Answer: Yes"], ["\\text{No}", "\\text{yes and no}", "1", "\\text{maybe}", "RAW The answer is no."]),
    "3\\frac{1}{2}": (["3 1/2", "3½", "3.5", "3.50", "\\frac{7}{2}", "7/2", "3\\,\\frac{1}{2}", "RAW The answer is 3 1/2."], ["3", "\\frac{1}{2}", "3 - 1/2", "3 \\cdot \\frac{1}{2}", "31/2", "3 1/0", "3:30", "3-4", "3 \\sqrt{2}", "3^{1/2}"]),
    "1000000": (["1,000,000", "1{,}000{,}000", "1e6", "10^6", "1 \\times 10^{6}", "1 000 000", "RAW The answer is 1,000,000."], ["1e5", "1,000", "1000 \\cdot 1000", "1000^2", "100,000", "1,000,00", "2000000/2", "0"]),
    "\\$3.50": (["$3.50", "3.50", "\\$3.5", "3.5", "7/2", "3 1/2", "RAW The answer is $3.50."], ["3.50%", "\\$350", "7 / 2 \\cdot 1 + 0", "3-50", "3:50", "\\$.35", "-\\$3.50", "4 - 0.50"]),
    "-7": (["-7", "-7.", "- 7", "\\text{minus }7", "-7.0", "RAW The answer is -7."], ["7", "3 - 10", "0 - 7", "10-17", "-14/2", "-7^1", "7-", "-\\sqrt{49}", "-7/0"]),
    ".75": ([".75", "0.75", "3/4", "3 / 4", "\\frac{6}{8}", "7.5e-1", "RAW The answer is .75."], ["75%", "1 - 1/4", "7.5", "75", "3:4", "3-4", "\\sqrt{.5625}", "1.5 / 2 \\cdot 1"]),
    "35": (["35", "35.", "35\\%", "35%", "35.0", "RAW The answer is 35."], ["70 / 2", "5 \\cdot 7", "\\sqrt{1225}", "30-35", "36 - 1", "35^2", "7:35", "35/0", "35e1", "3.5", "30 5"]),
    "3y+4": (["x = 3y + 4", "x = \\frac{6y+8}{2} = 3y + 4", "3y + 4", "4 + 3y", "\\frac{6y + 8}{2}", "x = 3(y + 1) + 1 = 3y + 4"], ["3y - 4", "x = 3y + 4 = 3y + 5", "4y + 3", "3x + 4", "x = \\frac{6y+8}{2} = 3y + 8", "7y"]),
}  # fmt: skip
MORE_UNITS_POINTS = {
    6: "(x,y)",
    60: "(p,q,r)",
    78: "(a,b)",
    144: "(x,y)",
    218: "(x,y)",
    314: "(x,y)",
    364: "(a,b,c,d)",
    376: "(a,b)",
}


def forms(gold: str, line: int) -> tuple[str, Forms]:
    """(kind, right and wrong answers) of a gold."""
    if gold in BY_HAND:
        return "by hand", BY_HAND[gold]
    bare = re.sub(r",\\!\s*|,(?=\d{3})", "", gold)
    if re.fullmatch(r"-?\d+", bare):
        return "integer", integer(int(bare), line)
    if re.fullmatch(r"-?\d*\.\d+", gold):
        q = Fraction(gold)
        right, wrong = fraction(q, line)
        shifted = decimal(q * 10), decimal(q / 10), decimal(q + Fraction(1, 100)), decimal(-q)
        return "decimal", ([f"{gold}0", *right], [*shifted, *wrong])
    if match := re.fullmatch(r"(-?)\\d?frac\s?(?:\{(\d+)\}|(\d))\s?(?:\{(\d+)\}|(\d))", gold):
        sign, a, a1, b, b1 = match.groups()
        return "fraction", fraction(Fraction(int(sign + (a or a1)), int(b or b1)), line)
    if match := re.fullmatch(r"(\d+)\^\\circ", gold):
        return "angle", angle(int(match[1]), line)
    if match := re.fullmatch(r"(\d+)\s?\\sqrt\{?(\d+)\}?", gold):
        return "root", root(int(match[1]), int(match[2]), line)
    if match := re.fullmatch(r"(\d+)_\{?(\d)\}?", gold):
        return "base", based(match[1], int(match[2]))
    if match := re.fullmatch(r"(-?\d+)\s?([+-])\s?(\d+)i", gold):
        return "complex", complex_number(int(match[1]), int(match[2] + match[3]), line)
    if match := re.fullmatch(r"-\\sqrt\{(\d+)\}", gold):
        b = match[1]
        return "root", (
            [
                f"-\\sqrt{{{b}}}",
                f"-√{b}",
                f"-\\sqrt{{{b}}} \\approx {-(int(b) ** 0.5):.3f}",
                f"-1 \\cdot \\sqrt{{{b}}}",
            ],
            [f"\\sqrt{{{b}}}", f"-{b}", f"-\\sqrt{{{int(b) + 1}}}", f"\\pm\\sqrt{{{b}}}", f"-2\\sqrt{{{b}}}"],
        )
    if match := re.fullmatch(r"\\sqrt\{(\d+)\}", gold):
        b = int(match[1])
        return "root", ([f"\\sqrt{{{b}}}", f"√{b}", f"\\sqrt{{{b}}} \\approx {b**0.5:.3f}", f"\\frac{{{b}}}{{\\sqrt{{{b}}}}} = \\sqrt{{{b}}}", f"{b}^{{1/2}}", f"\\sqrt{{{b}}}\\text{{ meters}}" if line == 85 else f"\\sqrt {{{b}}}"], [f"-\\sqrt{{{b}}}", f"{b}", f"\\sqrt{{{b + 1}}}", f"\\pm\\sqrt{{{b}}}", f"2\\sqrt{{{b}}}", f"\\sqrt[3]{{{b}}}"])  # fmt: skip
    if match := re.fullmatch(r"\\begin\{pmatrix\} (.*) \\end\{pmatrix\}", gold):
        parts = match[1].split(" \\\\ ")
        return "vector", vector(parts, max(Fraction(part).denominator for part in parts))
    if line in MORE_UNITS_POINTS:
        return "point", point(gold.strip("()").split(","), MORE_UNITS_POINTS[line])
    raise ValueError(f"line {line}: no forms for {gold!r}")


def rows(golds: Sequence[str]) -> Iterator[dict[str, Any]]:
    wraps, misled, cut_off = itertools.cycle(WRAPS), itertools.cycle((*WRAPS, *MISLED)), itertools.cycle(CUT_OFF)
    lines: dict[str, list[int]] = {}
    for line, gold in enumerate([*golds, *MORE]):
        lines.setdefault(gold, []).append(line)
    for number, gold in enumerate(lines):
        right: dict[str, None] = {}
        wrong: dict[str, None] = {}
        kind = "more"
        for line in lines[gold]:
            kind, answers = ("more", MORE[gold]) if gold in MORE else forms(gold, line)
            count = FORMS_PER_GOLD if kind in ("integer", "fraction", "decimal") else 99
            right |= dict.fromkeys(_complete(answer, wraps, gold) for answer in _some(answers[0], count, line))
            wrong |= dict.fromkeys(_complete(answer, misled, gold) for answer in _some(answers[1], count, line))
        wrong |= {next(cut_off).replace("GOLD", gold): None for _ in range(2)}
        yield {"gold": gold, "kind": kind, "held_out": number % 3 == 2, "right": [*right], "wrong": [*wrong]}


def _some(answers: list[str], count: int, line: int) -> list[str]:
    """`count` of the answers, others for each line; the first two always, as they are the likeliest."""
    unique = list(dict.fromkeys(answers))
    rest = unique[2:]
    turn = line * 2 % max(1, len(rest))
    return unique[:2] + (rest[turn:] + rest[:turn])[: count - 2]


def _complete(answer: str, wraps: Iterator[str], gold: str) -> str:
    if answer.startswith("RAW "):
        return answer[4:]
    return next(wraps).replace("@", answer).replace("GOLD", gold)


def main() -> None:
    golds = [json.loads(line)["answer"] for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    made = list(rows(golds))
    FILE.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8")
    print(
        f"{FILE.name}: {len(made)} golds, {sum(len(row['right']) for row in made)} right, {sum(len(row['wrong']) for row in made)} wrong"
    )


if __name__ == "__main__":
    main()
