"""npu-smi's tables, read as versions 23.0 to 26.0 print them for 910B (one chip an NPU) and 910C (two).

`npu-smi info` draws a box whose width and columns change: 910C adds Phy-ID, 26.0 widens the box and adds the process
id inside the container, cards without HBM lack its column. So cells are split at the bars and recognised by content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One computing device, which torch_npu calls npu:N."""

    index: int
    """The id that ASCEND_RT_VISIBLE_DEVICES takes: counted from 0 over what this machine or container sees."""
    npu: int
    """The card's id in npu-smi, which inside a container is the host's."""
    chip: int
    name: str
    health: str
    memory_used_mb: int
    memory_total_mb: int


@dataclass(frozen=True)
class Holder:
    """A process that holds a device."""

    npu: int
    chip: int
    pid: int
    name: str
    memory_mb: int
    container_pid: int | None
    """Its id inside its container, which npu-smi prints from 26.0 on."""


@dataclass(frozen=True)
class Table:
    """`npu-smi info`."""

    version: str = ""
    chips: tuple[Chip, ...] = ()
    holders: tuple[Holder, ...] = ()


def parse_info(text: str) -> Table:
    """`npu-smi info`; an empty Table when the text holds none."""
    version = re.search(r"npu-smi\s+(\S+)\s+Version:", text)
    chips: list[Chip] = []
    holders: list[Holder] = []
    card: tuple[int, str, str] | None = None
    in_processes = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "Process id" in line:
            in_processes = True
        elif in_processes:
            holder = _holder(cells)
            if holder:
                holders.append(holder)
        elif len(cells) == 3 and card is None:
            match = re.fullmatch(r"(\d+)\s+(\S.*)", cells[0])
            # The second line of a 910C begins with two numbers too, but is read below, with its card.
            card = (int(match[1]), match[2], cells[1]) if match else None
        elif len(cells) == 3 and card is not None:
            match = re.fullmatch(r"(\d+)(?:\s+(\d+))?", cells[0])
            memory = re.findall(r"(\d+)\s*/\s*(\d+)", cells[2])
            if match and memory:
                used, total = memory[-1]
                chips.append(Chip(len(chips), card[0], int(match[1]), card[1], card[2], int(used), int(total)))
            card = None
    return Table(version[1] if version else "", tuple(chips), tuple(holders))


def _holder(cells: list[str]) -> Holder | None:
    """A row of the process table: NPU and chip | pid | name | MB | pid in the container (26.0)."""
    ids = re.fullmatch(r"(\d+)\s+(\d+)", cells[0])
    if len(cells) < 4 or not ids or not cells[1].isdigit():
        return None
    inside = int(cells[4]) if len(cells) > 4 and cells[4].isdigit() else None
    memory = int(cells[3]) if cells[3].isdigit() else 0
    return Holder(int(ids[1]), int(ids[2]), int(cells[1]), cells[2], memory, inside)


def dcmi_error(text: str) -> str:
    """The code ("-8020") with which npu-smi's library refused to start, or ""."""
    match = re.search(r"dcmi (?:module|model) initialized? ?(?:failed|fail).*?(-\d{4})", text, re.DOTALL)
    return match[1] if match else ""
