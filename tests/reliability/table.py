"""The table of docs/reliability.md: read for the tests, and by `python -m tests.reliability.table NAME …` its rows are
printed, with what the cases meet today, for whoever adds one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST = "reliability/test_bad_input.py::test_bad_input"
PAGE = ROOT / "docs" / "reliability.md"


@dataclass(frozen=True)
class Row:
    """One row: cells without backquotes."""

    wrong: str
    command: str
    message: str
    """… stands for any text."""
    code: int
    test: str
    """Node id from tests/."""

    def fits(self, said: str) -> bool:
        return re.fullmatch(".*".join(map(re.escape, self.message.split("…"))), said) is not None


def rows(page: Path) -> list[Row]:
    """Of the tables of bad input, from all sections."""
    found = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 5 and cells[3].isdigit():
            command, message, test = (cells[i].replace("`", "") for i in (1, 2, 4))
            found.append(Row(cells[0].strip(), command, message, int(cells[3]), test))
    return found
