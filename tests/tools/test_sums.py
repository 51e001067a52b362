"""Worked sums: every step has the value of the whole, and the digits are taken one place at a time."""

import json
import random
from collections import Counter
from fractions import Fraction

import pytest

from perl.tools.real import DATA, lines
from perl.tools.sums import IN_A_ROW, drill, value_of, worked, worked_answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8 - 3", 5),
        ("10 - 3 ) - 5", 2),  # as SVAMP writes it
        ("35 * ( 4 / 2", 70),
        ("0.5 + .25", Fraction(3, 4)),
        ("1,200 / 7", Fraction(1200, 7)),
        ("-3 + 5", 2),
        ("8 / 0", None),
        ("He had 8 - 3", None),
        ("__import__('os')", None),
        ("9 ** 9 ** 9", None),
        ("True + 1", None),
        ("(" * 60, None),
        ("1 + " * 40 + "1", None),  # too long
        ("", None),
    ],
)
def test_value(text, value):
    assert value_of(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "63 - 28 = 63 - 20 - 8 = 43 - 8 = 35",
        "445 + 187 = 445 + 100 + 80 + 7 = 545 + 80 + 7 = 625 + 7 = 632",
        "105 - 30 = 75",
        "17 * 12 = 10 * 12 + 7 * 12 = 120 + 84 = 204",
        "12 * 305 = 10 * 305 + 2 * 305 = 3050 + 610 = 3660",
        "8 * 3 = 24",
        "204 / 12 = 17",
        "( 10 - 3 ) + 48 = 7 + 48 = 7 + 40 + 8 = 47 + 8 = 55",
        "10 - 3 ) - 5 = 7 - 5 = 2",
        "3 - ( 5 - 24 = 3 - -19 = 22",
        "0.5 + 12 = 12.5",
    ],
)
def test_steps(text):
    assert worked(text.split(" = ")[0]) == text


def test_a_worked_answer_keeps_question_and_gold():
    row = {"question": "Each é?", "answer": "63 - 28 = 35\n#### 35"}
    assert json.loads(worked_answer(json.dumps(row))) == {
        "question": "Each é?",
        "answer": "63 - 28 = 63 - 20 - 8 = 43 - 8 = 35\n#### 35",
    }
    for answer in ("63 - 28 = 36\n#### 36", "He has 35.\n#### 35", "35"):  # wrong, no equation, no mark
        other = json.dumps({"question": "q", "answer": answer})
        assert worked_answer(other) == other


def test_every_step_of_svamps_answers_has_the_gold_value():
    if not DATA.is_dir():
        pytest.skip("SVAMP's rows are not in ../shared/data/svamp")
    changed = 0
    for row in lines(DATA / "train.jsonl"):
        answer = json.loads(worked_answer(row))["answer"]
        equation, gold = answer.split("\n#### ")
        assert {value_of(step) for step in equation.split(" = ")} == {value_of(gold)}
        changed += answer != json.loads(row)["answer"]
    assert changed == 435


def test_drills_are_right_and_not_below_0():
    signs = Counter()
    for seed in range(50):
        row = drill(random.Random(seed))
        *answers, last = row["answer"].splitlines()
        assert len(answers) == IN_A_ROW
        assert row["question"] == "Work out: " + ", ".join(answer.split(" = ")[0] for answer in answers)
        for answer in answers:
            values = {value_of(step) for step in answer.split(" = ")}
            assert len(values) == 1
            assert min(values) >= 0
            signs[answer.split(" ")[1]] += 1
        assert last == f"#### {answers[-1].rpartition(' = ')[2]}"
    assert 0.45 < signs["-"] / signs.total() < 0.65
