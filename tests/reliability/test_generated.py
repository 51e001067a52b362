"""The properties of generated.py, each on a few inputs that are the same every time."""

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
