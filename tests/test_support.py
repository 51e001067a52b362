"""docs/support.md: every test that it names exists, and it knows every algorithm."""

import re

import pytest

from perl.algorithms import ALGORITHMS
from tests.docs_commands import ROOT

PAGE = ROOT / "docs" / "support.md"
NAMED = re.compile(r"(?<![\w/])([a-z_]+/(?:[a-z_]+/)*test_\w+\.py)(?:::(\w+))?")


def test_every_test_that_a_cell_names_exists():
    named = NAMED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > 20
    for file, test in named:
        path = ROOT / "tests" / file
        assert path.is_file(), file
        assert not test or f"\ndef {test}(" in path.read_text(encoding="utf-8"), f"{file}::{test}"


@pytest.mark.parametrize("page", ["support", "algorithms"])
def test_every_algorithm_has_a_row(page):
    rows = [line for line in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    named = {name for row in rows for name in re.split(r"[,、]\s*", row.split("|")[1].replace("`", "").strip())}
    assert set(ALGORITHMS) <= named
