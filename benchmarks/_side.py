"""Sides of a comparison, each in a process of its own, that take turns: one works while the others wait.

The benchmark starts itself once for each side, with `--side NAME` behind its own arguments; such a process does one
round for each line that it reads, and answers with a line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ANSWER = "answer: "


class Side:
    """The process of one side, seen from the benchmark. With `checkout` it runs another commit's code, which lies in
    that folder."""

    def __init__(self, module: str, name: str, threads: int, checkout: Path | None = None):
        self.name = name if checkout is None else "before"
        arguments = sys.argv[1:]
        if checkout is not None:  # the other commit may not know the flag that named it
            at = next(i for i, argument in enumerate(arguments) if argument.startswith("--before"))
            del arguments[at : at + (1 if "=" in arguments[at] else 2)]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, "--side", name],
            cwd=checkout,
            env=os.environ
            | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
            | ({"PYTHONPATH": str(checkout)} if checkout else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.answers: list[dict[str, Any]] = []

    def round(self) -> dict[str, Any]:
        """One round's answer. Raises RuntimeError with the end of the process's log when it died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        while (line := self.process.stdout.readline()) and not line.startswith(ANSWER):
            pass  # what libraries print
        if not line:
            self.process.wait()
            self.log.seek(0)
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}:\n{self.log.read()[-3000:]}")
        self.answers.append(json.loads(line.removeprefix(ANSWER)))
        return self.answers[-1]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def median(self, field: str) -> float:
        return round(statistics.median(answer[field] for answer in self.answers), 3)

    def most(self, field: str) -> float:
        return max(answer[field] for answer in self.answers)


def wait_for_turn() -> bool:
    """In the process of a side: block until it is its turn; False: there are no more turns."""
    return bool(sys.stdin.readline())


def answer(result: dict[str, Any]) -> None:
    """In the process of a side: end its turn."""
    print(f"\n{ANSWER}{json.dumps(result)}", flush=True)


def serve(play: Callable[[], dict[str, Any]]) -> None:
    """Play a round for each turn."""
    while wait_for_turn():
        answer(play())


def take_turns(sides: Sequence[Side], pairs: int, describe: Callable[[list[dict[str, Any]]], str]) -> None:
    """`pairs` rounds of each side, alternating which goes first, with a line printed for each."""
    for pair in range(pairs):
        for side in sides if pair % 2 == 0 else sides[::-1]:
            side.round()
        print(f"pair {pair}: {describe([side.answers[-1] for side in sides])}", flush=True)


def ratio(theirs: Side, mine: Side, field: str = "wall_s") -> float:
    """Median over pairs of their time over mine."""
    pairs = zip(theirs.answers, mine.answers, strict=True)
    return round(statistics.median(a[field] / b[field] for a, b in pairs), 3)
