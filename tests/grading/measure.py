"""How many right and wrong statements of statements.jsonl each rule accepts: perl's of task math, math-verify alone,
and verl's of MATH (its math.py).

    python -m tests.grading.measure [--show]

--show: what perl judges falsely.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from perl.grading import Grader
from perl.grading.text import last_box
from perl.tasks import TASKS

FILE = Path(__file__).with_name("statements.jsonl")


class Statement(NamedTuple):
    gold: str
    text: str
    right: bool
    held_out: bool


def statements() -> list[Statement]:
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return [
        Statement(row["gold"], text, label == "right", row["held_out"])
        for row in rows
        for label in ("right", "wrong")
        for text in row[label]
    ]


def accepted_by_perl(rows: Sequence[Statement]) -> list[bool]:
    with Grader() as grader:
        grades = grader.grade(TASKS["math"].rubric, [row.text for row in rows], [row.gold for row in rows])
    return [grade.score == 1.0 for grade in grades]


def accepted_by_math_verify(rows: Sequence[Statement]) -> list[bool]:
    from math_verify import parse, verify

    return [verify(parse(f"\\boxed{{{row.gold}}}"), parse(row.text)) for row in rows]


def accepted_by_verl(rows: Sequence[Statement]) -> list[bool]:
    """The last box and the gold are one text when stripped, Hendrycks's rule for MATH."""
    return [
        (box := last_box(row.text)) is not None and verl_stripped(box[1]) == verl_stripped(row.gold) for row in rows
    ]


def verl_stripped(text: str) -> str:
    """An answer as verl's `strip_string` leaves it (verl/utils/reward_score/math.py, Apache 2.0), restated."""
    for dropped in ("\n", "\\!", "\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "\\%"):
        text = text.replace(dropped, "")
    text = text.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    text = text.split("\\text{ ")[0].replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    name, equals, value = text.partition("=")
    text = value if equals and "=" not in value and len(name) <= 2 else text
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


RULES = {"perl": accepted_by_perl, "math-verify": accepted_by_math_verify, "verl": accepted_by_verl}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--show", action="store_true")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    rows = statements()
    for rule, accepts in RULES.items():
        accepted = accepts(rows)
        for name, held_out in (("seen", (False,)), ("held out", (True,)), ("all", (False, True))):
            judged = [(yes, row.right) for row, yes in zip(rows, accepted, strict=True) if row.held_out in held_out]
            right, wrong = ([yes for yes, label in judged if label == wanted] for wanted in (True, False))
            print(
                f"{rule}, {name}: right {sum(right)} of {len(right)} ({sum(right) / len(right):.2%}),"
                f" wrong {sum(wrong)} of {len(wrong)}"
            )
        for row, yes in zip(rows, accepted, strict=True):
            if args.show and rule == "perl" and yes != row.right and not row.held_out:
                print("wrong accepted" if yes else "right refused", repr(row.gold), repr(row.text[-100:]))


if __name__ == "__main__":
    main()
