"""Rows of local files: parquet, json, jsonl and csv, one at a time, each with its place for messages to the user."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from perl.errors import UserError

Row = dict[str, Any]
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
_SUBFOLDERS = ("data", "main", "default")  # where a downloaded copy of a hub's repository keeps its files


def find_files(path: Path, split: str | None) -> list[Path]:
    """The files of `path` that hold `split`: the file itself, or in a folder `<split>.parquet` and the like, or the
    shards `<split>-00000-of-00002.parquet`. Without a split, a folder's test files, else its train files."""
    if path.is_file():
        check_suffix(path)
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder")
    for folder in (path, *(path / name for name in _SUBFOLDERS)):
        files = sorted(file for file in folder.glob("*") if file.suffix in SUFFIXES)
        for name in [split] if split else ["test", "train"]:
            if found := [file for file in files if file.stem == name or file.stem.startswith(f"{name}-")]:
                return found
        if files:
            break
    else:
        raise UserError(f"{path}: the folder holds no {', '.join(SUFFIXES)} file")
    if split is None and len(files) == 1:
        return files
    raise UserError(
        f"{path}: no file of split {split or 'test'!r}; splits there: {', '.join(sorted({f.stem for f in files}))}"
    )


def check_suffix(file: Path, flag: str = "") -> None:
    """Raise a UserError unless `file` ends like a format that can be read."""
    if file.suffix not in SUFFIXES:
        where = f"{flag}: " if flag else ""
        ending = file.suffix or "no suffix"
        raise UserError(f"{where}{file}: {ending} is no data format; known: {', '.join(SUFFIXES)}")


def read_rows(file: Path) -> Iterator[tuple[Row, str]]:
    """Yield (row, place) of one file, place being "train.jsonl:17". Fractional numbers of json come as Decimal, so
    that a large gold is never rounded. A UserError for a suffix that is not in SUFFIXES."""
    check_suffix(file)
    readers = {".parquet": _parquet, ".json": _json, ".jsonl": _json, ".csv": _csv}
    try:
        for number, row in enumerate(readers[file.suffix](file), start=1):
            if not isinstance(row, dict):
                raise UserError(f"{file}:{number}: a row must be an object with named columns, not {row!r:.60}")
            yield row, f"{file.name}:{number}"
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{file}: not readable as UTF-8 {file.suffix[1:]}: {error}") from error


def _parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{file}: not a readable parquet file: {error}") from error


def _json(file: Path) -> Iterator[Row]:
    """A json array of rows, or one row a line."""
    with file.open(encoding="utf-8-sig") as lines:
        start = lines.read(1024).lstrip()[:1]
        lines.seek(0)
        if start == "[":
            yield from _decode(lines.read(), str(file))
            return
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _decode(line, f"{file}:{number}")


def _decode(text: str, where: str) -> Any:
    try:
        return json.loads(text.removeprefix("\ufeff"), parse_float=Decimal)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid json: {error}") from error


def _csv(file: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        yield from csv.DictReader(lines)
