"""python -m perl prepare: a task's data as train.parquet and test.parquet with verl's columns, checked."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from perl.base.errors import UserError, lookup
from perl.base.files import atomic_write
from perl.base.paths import user_path
from perl.grading import Grader
from perl.prompts import build_messages
from perl.records import Problem
from perl.tasks import TASKS, Task, failing_references, problem_of_row, rows_of, worked_answer
from perl.tasks.files import NoSplitError, Row, find_files, read_rows

SPLITS = ("train", "test")
SHOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", help=f"what to prepare: {', '.join(TASKS)}")
    parser.add_argument(
        "--local_save_dir", "--local_dir", required=True, help="folder to write train.parquet and test.parquet to"
    )
    parser.add_argument(
        "--source", nargs="+", default=[], help="local files or folders to read instead of the hub; a word of a file's"
        " name, train or test, says which it is, and has to where the task has both"
    )  # fmt: skip
    parser.add_argument(
        "--test_rows", type=int, default=256, help="rows held out as test.parquet where the task has only training"
        " data, at most a tenth of them"
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    task = lookup(TASKS, args.task, "task", "prepare")
    if args.test_rows < 0:
        raise UserError(f"--test_rows {args.test_rows}: must be 0 or more")
    folder = user_path(args.local_save_dir)
    splits: dict[str, list[tuple[Row, Problem]]] = defaultdict(list)
    for split, row, where in _source_rows(task, args.source):
        splits[split].append((row, problem_of_row(row, where, task.name)))
    if not splits:
        raise UserError(f"prepare: no rows in {' '.join(args.source) or task.name}")
    splits = {split: _without_repeats(split, rows, task) for split, rows in splits.items()}
    if splits.keys() == set(SPLITS):
        splits["train"] = _without_test(splits["train"], splits["test"], task)
    if "test" not in splits and args.test_rows:
        splits["train"], held_out = _hold_out(splits["train"], args.test_rows, task)
        if held_out:
            splits["test"] = held_out
            print(f"test: {len(held_out)} rows held out of train, chosen by a hash of their prompts")
        else:
            print(f"test: none, as a tenth of {len(splits['train'])} rows is less than one")
    for split in set(SPLITS) - splits.keys():
        if (file := folder / f"{split}.parquet").exists():
            raise UserError(
                f"--local_save_dir {folder}: {file.name} is there already, and this run writes none: its rows may be"
                " among the others'; remove it, or write another folder"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--local_save_dir {folder}: {error.strerror}; write another folder") from error
    with Grader() as grader:
        for split, rows in splits.items():
            failed = failing_references([problem for _, problem in rows], grader)
            _write(folder / f"{split}.parquet", _verl_rows(rows, task, split))
            print(
                f"{folder / f'{split}.parquet'}: {len(rows)} rows;"
                f" {len(failed)} golds do not pass their own verifier{' (kept)' if failed else ''}"
            )
    return 0


def _source_rows(task: Task, sources: Sequence[str]) -> Iterator[tuple[str, Row, str]]:
    """Yield (split, row, place) of the given files, or of the task's splits on the hub."""
    hub = task.hub
    hub_splits: dict[str, str | None] = (
        {"train": hub.train_split, "test": hub.eval_split} if hub else dict.fromkeys(SPLITS)
    )
    if hub and hub.eval_split == hub.train_split:
        del hub_splits["test"]
    known = [split for split, name in hub_splits.items() if name or hub is None]
    if not sources:
        for split in known:
            yield from ((split, row, where) for row, where, _ in rows_of(task.name, hub_splits[split]))
        return
    for source in map(Path, sources):
        path = user_path(source)
        if path.is_dir():
            names = splits_of(path)
        else:
            found = find_files(path, None)  # a file that is not there has no name to complain of
            names = {_split_of(path, known): found}
        for split, files in names.items():
            for file in files:
                yield from ((split, row, where) for row, where in read_rows(file))


def splits_of(folder: Path) -> dict[str, list[Path]]:
    """The files of each split that a folder holds; a UserError where there is none."""
    files = {}
    for split in SPLITS:
        with contextlib.suppress(NoSplitError):
            files[split] = find_files(folder, split)
    return files or {"train": find_files(folder, "train")}  # its error says what is there instead


def _split_of(file: Path, known: Sequence[str]) -> str:
    """The split that a word of a file's name says, or the task's only one."""
    words = re.findall("[a-z]+", file.stem.lower())  # "latest" and "contest" say nothing
    named = [split for split in SPLITS if any(word.startswith(split) for word in words)]
    if len(named) == 1:
        return named[0]
    if len(known) == 1:
        return known[0]
    raise UserError(f"--source {file}: the name must say train or test, as train.jsonl does")


def _prompt_key(problem: Problem, task: Task) -> str:
    """The prompt's words, so that stray white space makes no difference, and its images."""
    images = [hashlib.blake2b(image, digest_size=8).hexdigest() for image in problem.images]
    words = " ".join(message["content"] for message in build_messages(problem, task.style)).split()
    return " ".join([*words, *images])


def _without_repeats(split: str, rows: list[tuple[Row, Problem]], task: Task) -> list[tuple[Row, Problem]]:
    """Each prompt once. Where its golds differ nobody can tell which is right, and a wrong reward costs more than a
    lost row: all its rows are dropped."""
    by_prompt: dict[str, list[tuple[Row, Problem]]] = defaultdict(list)
    for row in rows:
        by_prompt[_prompt_key(row[1], task)].append(row)
    kept, conflicts, repeats = [], [], 0
    for same in by_prompt.values():
        if len({problem.gold for _, problem in same}) > 1:
            conflicts.append(same)
        else:
            kept.append(same[0])
            repeats += len(same) - 1
    if repeats:
        print(f"{split}: {repeats} exact repeats dropped")
    if conflicts:
        lost = sum(map(len, conflicts))
        print(f"{split}: {len(conflicts)} prompts with conflicting golds: all their {lost} rows dropped")
        for same in conflicts[:SHOWN]:
            print("  " + ", ".join(f"{problem.source} says {problem.gold}" for _, problem in same))
    return kept


def _without_test(train: list[tuple[Row, Problem]], test: list[tuple[Row, Problem]], task: Task) -> list:
    """The training rows that are not in test as well: a score would not tell how a model does on new problems."""
    held_out = {_prompt_key(problem, task) for _, problem in test}
    kept = [(row, problem) for row, problem in train if _prompt_key(problem, task) not in held_out]
    if not kept:
        raise UserError("prepare: all rows of train are in test as well; name other files")
    if both := len(train) - len(kept):
        print(f"train: {both} rows that are in test as well dropped")
    return kept


def _hold_out(rows: list[tuple[Row, Problem]], wanted: int, task: Task) -> tuple[list, list]:
    """(train, test) with `wanted` test rows, at most a tenth; the same rows whatever their order."""

    def digest(index: int) -> bytes:
        return hashlib.blake2b(_prompt_key(rows[index][1], task).encode(), digest_size=8).digest()

    count = min(wanted, len(rows) // 10)
    test = set(sorted(range(len(rows)), key=digest)[:count])
    return [r for i, r in enumerate(rows) if i not in test], [rows[i] for i in sorted(test)]


def _verl_rows(rows: list[tuple[Row, Problem]], task: Task, split: str) -> list[dict[str, Any]]:
    with_images = any(problem.images for _, problem in rows)  # all rows of a file have the same columns
    return [
        {
            "data_source": task.data_source,
            "prompt": build_messages(problem, task.style),
            **({"images": [{"bytes": image, "path": None} for image in problem.images]} if with_images else {}),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.gold},
            "extra_info": {
                "split": split,
                "index": index,
                "question": problem.question,
                "answer": worked_answer(row, problem.source) or problem.gold,
            },
            "answer": problem.gold,
        }
        for index, (row, problem) in enumerate(rows)
    ]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    with atomic_write(path, "wb") as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
