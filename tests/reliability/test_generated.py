"""The properties of generated.py, each on a few inputs that are the same every time."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from perl.grading import Grader
from tests.reliability.generated import properties, tried

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
