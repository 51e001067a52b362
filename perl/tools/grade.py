"""python -m perl grade: grade completions that stand in a file."""

from __future__ import annotations

import argparse
import base64
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from perl.base.errors import UserError, lookup
from perl.base.files import atomic_write, target
from perl.base.paths import user_path
from perl.grading import Grader
from perl.records import Grade
from perl.tasks import TASKS, Task
from perl.tasks.files import Row, check_suffix, read_rows

BATCH = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", required=True, help=f"whose rules grade: {', '.join(TASKS)}")
    parser.add_argument("--input", required=True, help='rows with "gold" and "output" (jsonl, json, csv or parquet)')
    parser.add_argument(
        "--output", required=True, help="jsonl to write: the same rows with score, scores, extracted, reason"
    )
    parser.add_argument("--deadline_s", type=float, default=5.0, help="seconds that one verification may take")


def run(args: argparse.Namespace) -> int:
    task = lookup(TASKS, args.task, "task", "--task")
    source, output = user_path(args.input), user_path(args.output)
    if not source.is_file():
        raise UserError(f"--input: no such file {source}")
    check_suffix(source, "--input")
    if not output.parent.is_dir():
        raise UserError(f"--output: no such folder {output.parent}")
    if output.is_dir():
        raise UserError(f"--output: {output} is a folder; name a file in it")
    if not args.deadline_s > 0:
        raise UserError(f"--deadline_s {args.deadline_s:g}: write a number of seconds above 0")
    reasons: Counter[str] = Counter()
    # A lone surrogate, which json may hold and UTF-8 may not, is written as the escape it came as.
    with Grader(args.deadline_s) as grader, atomic_write(target(output), errors="backslashreplace") as lines:
        for row, grade in graded_rows(source, task, grader):
            reasons[grade.reason] += 1
            lines.write(json.dumps(row | grade.as_dict(), ensure_ascii=False, default=_plain) + "\n")
        if not (rows := reasons.total()):
            raise UserError(f"--input: {source} holds no rows")
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    print(f"{output}: {rows} rows graded as {task.name}, accuracy {reasons['correct'] / rows:.4f} ({counts})")
    return 0


def graded_rows(source: Path, task: Task, grader: Grader) -> Iterator[tuple[Row, Grade]]:
    rows = read_rows(source)
    while batch := list(itertools.islice(rows, BATCH)):
        golds, outputs = [], []
        for row, where in batch:
            for column in ("gold", "output"):
                if row.get(column) is None:
                    raise UserError(f"{where}: no {column!r}; columns there: {', '.join(row) or '(none)'}")
            if not isinstance(row["output"], str):
                raise UserError(f"{where}: 'output' must be a text, not {row['output']!r:.60}")
            try:
                golds.append(task.read_gold(row["gold"]))
            except ValueError as error:
                raise UserError(f"{where}: {error}") from error
            outputs.append(row["output"])
        for (row, _), grade in zip(batch, grader.grade(task.rubric, outputs, golds), strict=True):
            yield row, grade


def _plain(value: Any) -> Any:
    """What JSON has no form for: a fractional number, bytes of an image, a time of a parquet file."""
    if isinstance(value, Decimal):
        return float(value)
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
