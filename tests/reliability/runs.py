"""Running a case: its program in this process, as a user's command line would."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from perl.base.errors import report_errors
from tests.reliability.cases import Case
from tests.reliability.place import Place


@dataclass(frozen=True)
class Met:
    """What a user meets."""

    code: int
    stdout: str
    stderr: str
    """The folder of the case taken out of both."""
    written: list[str]
    """Files in the folder that were made or changed by the program."""


def meet(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Met:
    """Make the case's mistake in `folder` and run its program there."""
    monkeypatch.chdir(folder)
    words = case.make(Place(folder))
    before = held(folder)
    first, main = program(case.command)
    monkeypatch.setattr(sys, "argv", [case.command, *first, *words])
    capfd.readouterr()
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capfd.readouterr()
    written = [name for name, state in held(folder).items() if before.get(name) != state]
    return Met(code, out.replace(f"{folder}/", ""), err.replace(f"{folder}/", ""), written)


def held(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file below `folder`."""
    states = {file: file.stat(follow_symlinks=False) for file in folder.rglob("*") if not file.is_dir()}
    return {str(file.relative_to(folder)): (state.st_size, state.st_mtime_ns) for file, state in states.items()}


def program(command: str) -> tuple[list[str], Callable[[], object]]:
    """(words before the case's own, what runs them)."""
    if command == "perl.train":
        from perl.train import main

        return [], main
    if command == "perl.sft":
        from perl.sft import main

        return [], main
    if command == "launch script":
        from perl.tools.launch import plan

        return [], reported(lambda words: bool(plan(words)) - 1)
    if command == "perl/eval.py":
        from perl.eval import main

        return [], reported(main)
    from perl.__main__ import main

    return command.split()[1:], reported(main)


def reported(main: Callable[[list[str]], int]) -> Callable[[], None]:
    def run() -> None:
        with report_errors():
            sys.exit(main(sys.argv[1:]))

    return run


@contextlib.contextmanager
def unmounted(folder: Path):
    """What a case has mounted in `folder` is gone afterwards."""
    try:
        yield
    finally:
        if (folder / "disk").is_mount():
            import subprocess

            subprocess.run(["umount", str(folder / "disk")], check=True)
