"""The value of an expression, and rows of sums."""

import json
import random
from collections import Counter
from fractions import Fraction

import pytest

from perl.tools.real import DATA, lines
from perl.tools.sums import IN_A_ROW, drill, value_of


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


def test_every_expression_of_svamp_has_the_gold_value():
    if not DATA.is_dir():
        pytest.skip("SVAMP's rows are not in ../shared/data/svamp")
    answers = [json.loads(row)["answer"] for row in lines(DATA / "train.jsonl")]
    pairs = [answer.split("\n#### ") for answer in answers]
    assert [value_of(equation.split(" = ")[0]) for equation, _ in pairs] == [value_of(gold) for _, gold in pairs]


def test_drills_are_right_and_not_below_0():
    signs = Counter()
    for seed in range(50):
        row = drill(random.Random(seed))
        *answers, last = row["answer"].splitlines()
        assert len(answers) == IN_A_ROW
        assert row["question"] == "Work out: " + ", ".join(answer.split(" = ")[0] for answer in answers)
        for answer in answers:
            expression, result = answer.split(" = ")
            assert value_of(expression) == int(result) >= 0
            signs[answer.split(" ")[1]] += 1
        assert last == f"#### {answers[-1].split(' = ')[1]}"
    assert 0.45 < signs["-"] / signs.total() < 0.65
