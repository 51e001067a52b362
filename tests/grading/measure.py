"""How many right and wrong statements of statements.jsonl a grader accepts.

    python -m tests.grading.measure [--math_verify] [--show]

--math_verify: math-verify's `parse` and `verify` alone instead of the rules of task math. --show: what is judged
falsely.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from perl.grading import Grader
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


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--math_verify", action="store_true")
    parser.add_argument("--show", action="store_true")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    rows = statements()
    accepted = (accepted_by_math_verify if args.math_verify else accepted_by_perl)(rows)
    for name, held_out in (("seen", (False,)), ("held out", (True,)), ("all", (False, True))):
        right = [said for row, said in zip(rows, accepted, strict=True) if row.right and row.held_out in held_out]
        wrong = [said for row, said in zip(rows, accepted, strict=True) if not row.right and row.held_out in held_out]
        print(
            f"{name}: right {sum(right)} of {len(right)} ({sum(right) / len(right):.2%}),"
            f" wrong {sum(wrong)} of {len(wrong)}"
        )
    for row, said in zip(rows, accepted, strict=True):
        if args.show and said != row.right and not row.held_out:
            print("wrong accepted" if said else "right refused", repr(row.gold), repr(row.text[-100:]))


if __name__ == "__main__":
    main()
