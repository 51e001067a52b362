"""samples.jsonl: append-only, keyed by content, safe against a process that dies while it writes.

A folder holds run.json (what every row in it was made with) and samples.jsonl (one line a row). A last line that was
torn is cut off, and its sample is pending again; so is one that has failed, whose record stays until it is completed.
Nothing else is ever rewritten, but for verdicts by --rescore.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perl.base.errors import RankError, UserError
from perl.base.files import LOCK, atomic_write, json_line, lock_now, open_lock, read_json, write_json
from perl.scoring.results import RUN, SAMPLES, SampleRecord, keep, read_samples

logger = logging.getLogger(__name__)

GRADING_HASH = "grading_hash"
"""In run.json: hash of the code that graded (perl.grading.rules_hash)."""
RowId = tuple[str, int]
"""(key, sample)."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make `folder` and keep every other evaluation out of it; the lock ends with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open_lock(folder / LOCK)
    except OSError as error:
        raise UserError(f"--result_dir {folder}: {error.strerror}") from error
    with handle:
        try:
            lock_now(handle)
        except BlockingIOError as error:
            raise UserError(
                f"--result_dir {folder}: another evaluation is writing here; wait, or name another"
            ) from error
        yield


class Store:
    """The rows of one dataset that are done."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        """Open `folder`, making it if need be.

        Args:
            identity: what the rows are made with (model, adapter, sampling, prompts), as JSON values. A folder that
                was begun with another one is refused, with the difference named.
        """
        self.folder = folder
        self.path = folder / SAMPLES
        self.records: dict[RowId, SampleRecord] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--result_dir: {folder}: {error.strerror}; remove it, or name another folder") from error
        self.grading_hash: str | None = _require_same(folder / RUN, json.loads(json.dumps(identity)))
        """Hash of the rules that graded the first rows."""
        if self.path.exists():
            self._load()

    def __contains__(self, row: RowId) -> bool:
        return row in self.records

    def append(self, records: Sequence[SampleRecord]) -> None:
        """Add rows, on disk when this returns (as far as the kernel goes: a killed process loses none of them). What
        fails once more is not added."""
        ids = [(record["key"], record["sample"]) for record in records]
        kept = {row: self.records[row] for row in ids if row in self.records}
        lines = "".join(json_line(record) for record in records if keep(kept, record))
        try:
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(lines)
        except OSError as error:
            raise RankError(
                f"{self.path}: {error.strerror}; what was written stays: make room, and the same command goes on"
            ) from error
        self.records |= kept

    def replace(self, records: Sequence[SampleRecord]) -> None:
        """Write the file again with `records`; the old one stays until the new one is whole on disk."""
        try:
            with atomic_write(self.path, errors="backslashreplace") as file:
                file.writelines(map(json_line, records))
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}; it stays as it was") from error
        self.records = {(record["key"], record["sample"]): record for record in records}

    def _load(self) -> None:
        """Read what is there; cut a torn last line off, so that the next one does not continue it."""
        self.records = read_samples(self.path)
        data = self.path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(self.path, data.rfind(b"\n") + 1)


def _require_same(file: Path, identity: dict[str, Any]) -> str | None:
    """Refuse another identity. Other grading rules are no reason to, as --rescore can bring all rows under one."""
    if not file.exists():
        write_json(file, identity)
        return identity.get(GRADING_HASH)
    before = read_json(file, hint="remove the folder, or name another --result_dir")
    graded = before.pop(GRADING_HASH, None)
    if None not in (graded, grading := identity.pop(GRADING_HASH, None)) and graded != grading:
        logger.warning("%s was graded by other rules than today's; --rescore grades all of it again", file.parent)
    changes = [f"{name} was {excerpt(old)}, is {excerpt(new)}" for name, old, new in differences(before, identity)]
    if changes:
        raise UserError(f"{file.parent} holds other results: {'; '.join(changes)}; name another --result_dir")
    return graded


def differences(before: Any, now: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted name, old, new) of each leaf in which two JSON values differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        changes = []
        for key in {**before, **now}:
            changes += differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
        return changes
    return [] if before == now else [(name, before, now)]


def excerpt(value: Any) -> str:
    """JSON for a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
