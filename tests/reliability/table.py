"""The expected message and exit code of each case of bad input: bad_input.md next to this file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("bad_input.md")


@dataclass(frozen=True)
class Row:
    """One row: cells without backquotes."""

    case: str
    wrong: str
    command: str
    message: str
    """… stands for any text."""
    code: int

    def fits(self, said: str) -> bool:
        return re.fullmatch(".*".join(map(re.escape, self.message.split("…"))), said) is not None


def rows() -> list[Row]:
    """The rows of all sections."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] != "case":
            message, _, code = cells[3].removesuffix(")").partition("` (exit code ")
            found.append(Row(cells[0], cells[1], cells[2].replace("`", ""), message.strip("`"), int(code or 2)))
    return found
