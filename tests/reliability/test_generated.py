"""The properties of generated.py, each on a few inputs that are the same every time."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perl.grading import Grader
from tests.reliability.generated import properties, told, tried

FEW = {"any_flag_is_taken_or_told": 12, "any_recipe_is_taken_or_told": 15, "grader_never_raises": 15}
"""Inputs of the properties that take longer; of the others 60."""


@pytest.fixture(scope="module")
def grader():
    with Grader() as grader:
        yield grader


@pytest.mark.parametrize("name", sorted(properties(Grader())))
def test_generated(name, grader):
    tried(properties(grader)[name], FEW.get(name, 60), again=True)()


def test_the_program_goes_on_with_new_inputs_until_the_time_is_over():
    """Every round must try all properties again; Hypothesis refuses to prepare one twice."""
    command = [sys.executable, "-m", "tests.reliability.generated", "--only", "decimals_are_exact", "--minutes", "0.05"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout
    rounds, broken = map(int, re.findall(r"\d+ (?=rounds|broken)", done.stdout))
    assert rounds >= 2
    assert broken == 0


def test_each_way_in_which_a_property_breaks_is_a_line_with_its_input():
    """Hypothesis raises a group where there are several, whose own text is only how many."""

    @given(st.integers(0, 100))
    def property_(number):
        assert number != 0, "nought\nis wrong"
        if number > 50:
            raise ValueError(number)

    with pytest.raises(ExceptionGroup) as raised:
        tried(property_, 60, again=True)()
    found = sorted(told(raised.value))
    assert [line.split("(", 1)[0] for line in found] == ["AssertionError", "ValueError"]
    assert ["number=0" in line for line in found] == [True, False]
    assert "number=51" in found[1]
    assert all("(test_generated.py:" in line and "\n" not in line for line in found)


def test_a_single_broken_rule_is_one_line():
    @given(st.integers(0, 100))
    def property_(number):
        assert number < 50

    with pytest.raises(AssertionError) as raised:
        tried(property_, 60, again=True)()
    (line,) = told(raised.value)
    assert "number=50" in line
