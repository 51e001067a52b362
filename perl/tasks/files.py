"""Rows of local files: parquet, json, jsonl and csv, each with its place for messages to the user."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, TextIO

from perl.base.errors import UserError

Row = dict[str, Any]
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
_WRITE = f"write a file of rows ({', '.join(SUFFIXES)}), or a folder"
LONGEST_ROW = 64 << 20
"""Characters of one row; images as base64 are the longest that there are."""
TOO_LONG = f"a row of more than {LONGEST_ROW >> 20} million characters; is this a file of rows?"
JSON_MISTAKES = (ValueError, RecursionError, InvalidOperation)
"""What decoding raises: no json, a whole number of too many digits, too deep, too large an exponent."""
_DECODER = json.JSONDecoder(parse_float=Decimal)
_SHARD = re.compile(r"-(\d+)-of-(\d+)(-[0-9a-f]+)?$")
_SUBFOLDERS = ("data", "main", "default")  # where a downloaded copy of a hub's repository keeps its files
_ABOUT_DATA = ("dataset_info.json", "dataset_infos.json", "state.json")  # what `datasets` writes of them


class NoSplitError(UserError):
    """A folder holds no file of a split."""


def find_files(path: Path, split: str | None) -> list[Path]:
    """The files of `path` that hold `split`: the file itself, which is one split, or in a folder `<split>.parquet` and
    the like, or the shards `<split>-00000-of-00002.parquet`, which the hub may have given a hash at the end. Without a
    split, a folder's test files, else its train files. A UserError where a split is there twice, or lacks a shard."""
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise UserError(f"{path}: no such file or folder; {_WRITE}")
    if path.is_file():
        check_suffix(path)
        if split and not path.stem.startswith(split):
            raise UserError(f"{path}: is one file, which has no split {split!r}; leave the split out, or name a folder")
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: is a device or a pipe; {_WRITE}")
    folders = (path, *(path / name for name in _SUBFOLDERS))
    files = [file for folder in folders for file in sorted(folder.glob("*"))]
    files = [file for file in files if file.suffix in SUFFIXES and file.name not in _ABOUT_DATA]
    for name, folder in itertools.product([split] if split else ["test", "train"], folders):
        if found := [file for file in files if file.parent == folder and _SHARD.sub("", file.stem) == name]:
            _require_whole(folder, name, found)
            return found
    if not files:
        raise NoSplitError(f"{path}: the folder holds no {', '.join(SUFFIXES)} file")
    if split is None and len(files) == 1:
        _require_whole(path, _SHARD.sub("", files[0].stem), files)
        return files
    raise NoSplitError(
        f"{path}: no file of split {split or 'test'!r}; splits there: {', '.join(sorted({f.stem for f in files}))}"
    )


def _require_whole(folder: Path, split: str, files: Sequence[Path]) -> None:
    """Raise a UserError unless `files` are one split: in one format, all its shards, each once."""
    seen: dict[int, Path] = {}
    first, total = files[0], _shard_of(files[0])[1]
    for file in files:
        index, of = _shard_of(file)
        if other := seen.get(index) or (None if (file.suffix, of) == (first.suffix, total) else first):
            raise UserError(
                f"{folder}: holds {split} twice, as {other.name} and {file.name}; name one of the files, or move the"
                " other away"
            )
        seen[index] = file
    numbers = range(1, total + 1) if total in seen else range(total)
    if other := next((file for n, file in seen.items() if n not in numbers), None):
        raise UserError(f"{folder}: {other.name} is none of {total} shards of {split}; move it away, or name a file")
    if (missing := next((n for n in numbers if n not in seen), None)) is not None:
        raise UserError(
            f"{folder}: holds {len(files)} of {total} shards of {split}: shard {missing:05d}-of-{total:05d} is missing;"
            " fetch it, or name a file"
        )


def _shard_of(file: Path) -> tuple[int, int]:
    """(Its number, of how many shards); a split that is whole is the only one."""
    found = _SHARD.search(file.stem)
    return (int(found[1]), int(found[2])) if found else (0, 1)


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


def require_characters(content: Any, where: str) -> None:
    """Raise a UserError for texts in `content`, JSON values, with half a character: json can hold a lone surrogate,
    which no tokenizer and no file takes."""
    try:
        json.dumps(content, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UserError(f"{where}: holds {half}, half of a character; write the whole character") from error


def structure(value: Any, where: str) -> Any:
    """A column that holds a list or a mapping; csv stores it as JSON. A UserError for JSON of numbers too long, or
    brackets too deep, to be read."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value  # a text may begin with a bracket
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: {json_mistake(error)}") from error
    return value


def text_or_turns(value: Any, where: str) -> Any:
    """A column that holds a text, which may be JSON itself, or the turns of a chat."""
    turns = structure(value, where)
    are_turns = isinstance(turns, list) and turns and all(isinstance(turn, dict) and "role" in turn for turn in turns)
    return turns if are_turns else value


def _require_distinct(columns: Sequence[str], file: Path) -> None:
    """Raise a UserError where two columns have one name: a row would hold the last. A csv's may be without one."""
    if twice := next((name for name, count in Counter(columns).items() if name and count > 1), None):
        raise UserError(f"{file}: two columns are called {twice}; give one of them another name")


def _parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            _require_distinct(table.schema_arrow.names, file)
            for batch in table.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OverflowError) as error:  # the latter for a duration that Python has no value for
        raise UserError(f"{file}: not a readable parquet file: {error}") from error


def _json(file: Path) -> Iterator[Any]:
    """A json array of rows, read as a whole, or one row a line, of which one at a time is in memory."""
    with file.open(encoding="utf-8-sig") as text:
        start = text.read(1024).lstrip()[:1]
        text.seek(0)
        if start == "[":
            yield from _decode(text.read(), str(file))
            return
        for number, line in enumerate(_lines(text, file), start=1):
            if line.strip():
                yield _decode(line, f"{file}:{number}")


def _lines(text: TextIO, file: Path) -> Iterator[str]:
    """The lines of a file. One that is longer than any row (a file of zeros has no end of line) is a UserError."""
    for number in itertools.count(1):
        line = text.readline(LONGEST_ROW + 1)
        if not line:
            return
        if len(line) > LONGEST_ROW:
            raise UserError(f"{file}:{number}: {TOO_LONG}")
        yield line


def _decode(text: str, where: str) -> Any:
    try:
        return _DECODER.decode(text.removeprefix("\ufeff"))
    except JSON_MISTAKES as error:
        raise UserError(f"{where}: {json_mistake(error)}") from error


def json_mistake(error: Exception) -> str:
    """What is wrong, one of JSON_MISTAKES."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid json: {error}"
    if isinstance(error, RecursionError):
        return "not valid json: brackets nest too deep"
    if isinstance(error, InvalidOperation):
        return "a number whose exponent is too large; write it as a text"
    return f"a number of more than {sys.get_int_max_str_digits()} digits; write it as a text"


def _csv(file: Path) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_ROW)
    with file.open(encoding="utf-8-sig", newline="") as text:
        rows = csv.DictReader(_lines(text, file), strict=True)
        _require_distinct(rows.fieldnames or (), file)
        for number, row in enumerate(rows, start=1):
            if None in row:
                raise UserError(
                    f"{file}:{number}: more fields than the header has; a text with a comma stands in quotes"
                )
            yield row
