"""The value of an expression, and rows of sums."""

import json
import random
import re
from collections import Counter
from fractions import Fraction

import pytest

from perl.tools.real import DATA, lines
from perl.tools.sums import IN_A_ROW, WORDS, drill, problem, value_of


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


TOLD = re.compile(r"the (\w+) of (\d+) and (\d+)")


@pytest.mark.parametrize(("make", "count"), [(drill, IN_A_ROW), (problem, 1)])
def test_sums_are_right_and_not_below_0_and_the_question_has_no_sign(make, count):
    signs = Counter()
    for seed in range(600 // count):
        row = make(random.Random(seed))
        *answers, last = row["answer"].splitlines()
        told = TOLD.findall(row["question"])
        assert len(answers) == len(told) == count
        for answer, (word, one, other) in zip(answers, told, strict=True):
            expression, result = answer.split(" = ")
            left, sign, right = expression.split(" ")
            assert word == WORDS[sign]
            assert {left, right} == {one, other}
            assert value_of(expression) == int(result) >= 0
            signs[sign] += 1
        assert last == f"#### {answers[-1].split(' = ')[1]}"
        assert not re.search("[-+*/=]", row["question"])
    assert 0.3 < signs["-"] / signs.total() < 0.5


def test_a_difference_is_told_in_any_order():
    rows = [drill(random.Random(seed)) for seed in range(10)]
    told = [found for row in rows for found in TOLD.findall(row["question"]) if found[0] == "difference"]
    assert {int(one) < int(other) for _, one, other in told} == {True, False}
