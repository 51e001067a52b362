"""Tasks: problems from the hub and from files, each with the prompt style and the rubric that it is graded by."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from perl.base.errors import UserError, lookup, nearest
from perl.base.paths import user_path
from perl.grading import RULES, Grader
from perl.records import Problem
from perl.tasks import reasoning_gym
from perl.tasks.files import SUFFIXES, Row, find_files, read_rows, require_characters
from perl.tasks.hub import Hub, hub_rows
from perl.tasks.reasoning_gym import is_generated
from perl.tasks.registry import DATA_SOURCES, HUBS, SCHEMA_TASKS, TASKS, Task
from perl.tasks.schemas import SCHEMAS, Fields, asked_form, gold_text, read_fields, worked_answer

__all__ = [
    "HUBS",
    "TASKS",
    "Task",
    "data_name",
    "failing_references",
    "load_problems",
    "problem_of_row",
    "rows_of",
    "training_split",
    "worked_answer",
]

logger = logging.getLogger(__name__)

HELD = ("prompt", "reward_model", "extra_info", "images")
"""Columns that a Problem has anyway."""
NAMED = ("gold", "task", "row")
"""What rewards and environments are given under these names is made here (perl.runs.setup)."""


def data_name(spec: str) -> str:
    """The name of a task or a known repository of the hub as it is written here, whatever its case and its hyphens in
    `spec` ("GSM8K", "MATH-500"); anything else, and what names an existing file or folder, as it stands."""
    repo, colon, config = spec.partition(":")
    if is_generated(spec) or spec in TASKS or repo in HUBS or _path_of(spec) is not None:
        return spec
    found = [name for name in (*TASKS, *HUBS) if _plain(name) == _plain(repo)]
    return f"{found[0]}{colon}{config}" if len(found) == 1 else spec


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def load_problems(
    spec: str,
    split: str | None = None,
    limit: int | None = None,
    task: str | None = None,
    graded: bool = True,
    columns: bool = False,
) -> list[Problem]:
    """The problems of a data set.

    Args:
        spec: a task's name in any case, a hub name ("openai/gsm8k", "open-r1/DAPO-Math-17k-Processed", with ":cn" for
            another configuration), reasoning_gym:NAME (perl.tasks.reasoning_gym), or a path to a parquet, json, jsonl
            or csv file or to a folder with one per split.
        split: default: the task's evaluation split; in a folder test, else train. A single file is one split.
        limit: keep only the first `limit` problems.
        task: grade every row as this task, whatever the row says.
        graded: the rows are graded by their tasks. False, where only rewards of the user's own score them, or an
            environment: a row may lack an answer, or name a data source that is no task of ours.
        columns: keep those that nothing here reads too, for an environment's reset.
    """
    spec = data_name(spec)
    if task is not None:
        lookup(TASKS, task, "task")
    reasons: Counter[tuple[str, str, str]] = Counter()
    rows = rows_of(spec, split, task)
    problems = _problems(rows, reasons, graded, _Kept(spec).of if columns else lambda row: {})
    result = list(itertools.islice(problems, limit))
    for (file, name, why), count in reasons.items():
        place = spec if Path(spec).name == file else f"{spec} ({file})"
        logger.info("%s: %d rows are graded %s: %s", place, count, f"as task {name}" if name else "by no task", why)
    if not result:
        raise UserError(f"{spec}: no rows" + (f" in split {split!r}" if split else ""))
    return result


def training_split(spec: str) -> str | None:
    """The split to train on where the user names none: the data set's own training split, a folder's train files, and
    for a single file None. A UserError for a bench, which has none: what is trained on can no longer be scored on."""
    spec = data_name(spec)
    if is_generated(spec):
        return "train"
    if (path := _path_of(spec)) is not None:
        return "train" if os.path.isdir(path) else None
    _, hub = _hub_of(spec)
    if hub.known and hub.train_split is None:
        raise UserError(f"{spec} is a bench without a training split; to train on it all the same, name its split")
    return hub.train_split or "train"


def rows_of(spec: str, split: str | None, task: str | None = None) -> Iterator[tuple[Row, str, str | None]]:
    """Yield (row, place, task or None) of whatever `spec` names; the task is known where `spec` or the caller says it.
    A task's name comes first, then reasoning_gym:NAME, an existing path, the hub."""
    spec = data_name(spec)
    if is_generated(spec):
        yield from ((row, where, reasoning_gym.TASK) for row, where in reasoning_gym.generated_rows(spec, split, task))
        return
    if (path := _path_of(spec)) is not None:
        for file in find_files(path, split):
            yield from ((row, where, task) for row, where in read_rows(file))
        return
    name, hub = _hub_of(spec)
    rows = hub_rows(hub, split or hub.eval_split)
    rows = _without_repeats(rows, spec) if hub.repeats else rows
    yield from ((row, where, task or name) for row, where in rows)


def _problems(
    rows: Iterator[tuple[Row, str, str | None]],
    reasons: Counter[tuple[str, str, str]],
    graded: bool,
    columns: Callable[[Row], dict[str, Any]],
) -> Iterator[Problem]:
    """The problems of `rows`; counts in `reasons` by which task, and why, each file's rows are graded."""
    for row, where, chosen in rows:
        # Where nothing needs an answer, a csv has an empty cell for none.
        fields = read_fields(row if graded else {k: v for k, v in row.items() if v != ""}, where)
        name, why = (chosen, "") if chosen is not None else task_of(fields, where, graded)
        if chosen is None:
            reasons[where.rpartition(":")[0], name, why] += 1
        yield replace(_problem(fields, where, name, graded), columns=columns(row))


class _Kept:
    """What a Problem keeps of its row's columns: JSON, under names that are free. One line for each other column."""

    def __init__(self, spec: str):
        self.spec = spec
        self.told: set[str] = set()

    def of(self, row: Row) -> dict[str, Any]:
        kept = {}
        for name, value in row.items():
            if name in HELD:
                continue
            if name in NAMED:
                self._tell(name, "a column of that name is perl's own; give it another name")
            elif (plain := as_json(value)) is None and value is not None:
                self._tell(name, f"{type(value).__name__} is no JSON; store a text or a number")
            else:
                kept[name] = plain
        return kept

    def _tell(self, name: str, why: str) -> None:
        if name not in self.told:
            self.told.add(name)
            logger.warning("%s: column %s is not given to the environment's reset: %s", self.spec, name, why)


def as_json(value: Any) -> Any:
    """A column's value as JSON has it, or None."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_number)
        return json.loads(text.encode())  # half of a surrogate pair is no text
    except (TypeError, ValueError, RecursionError):
        return None


def _number(value: Any) -> float:
    if isinstance(value, Decimal):
        return float(value)
    raise TypeError


def problem_of_row(row: Row, where: str, task: str | None) -> Problem:
    """The Problem that `row` holds. Without `task`, the row's data source decides, then its schema."""
    fields = read_fields(row, where)
    return _problem(fields, where, task or task_of(fields, where)[0])


def _problem(fields: Fields, where: str, task: str, graded: bool = True) -> Problem:
    if fields.messages is None and not fields.question:
        raise UserError(f"{where}: the question is empty")
    gold = _gold(fields, where, task, graded)
    require_characters((fields.question, fields.messages, gold), where)
    return Problem(
        task=task,
        question=fields.question,
        gold=gold,
        messages=fields.messages,
        images=fields.images,
        source=where,
        data_source=fields.data_source or (TASKS[task].data_source if task else ""),
        ground_truth=fields.gold if fields.schema == "verl" else gold or None,
        extra_info=fields.extra_info,
    )


def _gold(fields: Fields, where: str, task: str, graded: bool) -> str:
    stored = fields.gold
    if stored is None and graded:
        raise UserError(
            f"{where}: there is no answer to grade by; add a column answer or reward_model.ground_truth (rows without"
            " one can be trained on by a reward of your own, or an environment's, alone)"
        )
    if not graded and (stored == "" or isinstance(stored, bool) or not isinstance(stored, str | int | float | Decimal)):
        return ""  # verl's ground_truth may be anything, and its reward knows what
    try:
        gold = TASKS[task].read_gold(stored) if task else gold_text(stored)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    if not gold:
        raise UserError(f"{where}: the gold answer {stored!r:.60} is empty; nothing stands where the answer belongs")
    return gold


def task_of(fields: Fields, where: str, graded: bool = True) -> tuple[str, str]:
    """The task that grades a row which is not told its task, and why: by its data source, its schema, or its texts.
    Where nothing needs to be `graded`, and nothing names a task, it is ""."""
    other = "--config.dataset.task, or the evaluator's --task, chooses another"
    if name := DATA_SOURCES.get(fields.data_source or ""):
        return name, f"their data_source is {fields.data_source}"
    if not graded and fields.data_source is not None and fields.schema in ("verl", "prompt"):
        return "", f"their data_source {fields.data_source} is none of ours, and the reward is your own"
    if name := SCHEMA_TASKS.get(fields.schema):
        return name, f"they have the columns {SCHEMAS[fields.schema]} ({other})"
    if fields.schema == "gsm8k":
        if "####" in str(fields.gold):
            return "gsm8k", "their answers hold ####"
        return "math", f"their answers hold no #### ({other})"
    if fields.schema in ("guide", "prompt"):  # says nothing but its texts: the form they ask for decides
        texts = [str(fields.gold), *(message["content"] for message in fields.messages or ())]
        forms = {asked_form(text) for text in texts}
        for form, name in (("####", "gsm8k"), ("Answer:", "dapo-math")):
            if form in forms:
                return name, f"prompt or answer holds {form}"
        if fields.gold is None and not graded:
            return "", "they have no answer, and the reward is your own"
        return "math", f"neither prompt nor answer holds #### or Answer: ({other})"
    raise UserError(
        f"{where}: data_source {fields.data_source!r} names no task; say which one grades the rows:"
        f" task {', '.join(TASKS)}"
    )


def failing_references(problems: Sequence[Problem], grader: Grader) -> list[Problem]:
    """The problems whose own gold, stated in the form the task asks for, does not pass the task's rubric: a model
    could not earn these points. They are also logged, as one warning with the first few."""
    failed = []
    for task, group in itertools.groupby(problems, key=lambda problem: problem.task):
        rows, rubric = list(group), TASKS[task].rubric
        stated = [RULES[rubric.form].state(row.gold) for row in rows]
        grades = grader.grade(rubric, stated, [row.gold for row in rows])
        failed += [row for row, grade in zip(rows, grades, strict=True) if grade.score != 1.0]
    if failed:
        first = ", ".join(f"{row.source} ({row.gold!r:.60})" for row in failed[:3])
        logger.warning(
            "%d of %d gold answers do not pass their own verifier: %s%s",
            len(failed), len(problems), first, ", ..." if len(failed) > 3 else "",
        )  # fmt: skip
    return failed


def _hub_of(spec: str) -> tuple[str | None, Hub]:
    """(task, place on the hub) of a task's name or a hub name."""
    if spec in TASKS:
        if hub := TASKS[spec].hub:
            return spec, hub
        raise UserError(f"{spec}: this task has no data set of its own; give a file of problems and answers")
    repo, _, config = spec.partition(":")
    if repo in HUBS:
        task, hub = HUBS[repo]
        return task, replace(hub, config=config or hub.config)
    if repo.count("/") == 1 and all(repo.split("/")):
        return None, Hub(repo=repo, config=config or None, eval_split="test", known=False, modelscope=repo)
    guess = nearest(spec, [*TASKS, *HUBS])
    raise UserError(
        f"unknown data set {spec!r}; {f'did you mean {guess!r}? ' if guess else ''}known tasks: {', '.join(TASKS)};"
        " or give a hub name (owner/name) or a path to a file or folder"
    )


def _path_of(spec: str) -> Path | None:
    """The file or folder that `spec` names, there or not; None where it names a task or a place on the hub."""
    if spec in TASKS:
        return None
    path = user_path(spec)
    looks_like_path = spec.endswith(SUFFIXES) or spec.startswith((".", "/", "~")) or spec.count("/") > 1
    return path if looks_like_path or os.path.exists(path) else None  # Path.exists raises for a name that is too long


def _without_repeats(rows: Iterator[tuple[Row, str]], spec: str) -> Iterator[tuple[Row, str]]:
    seen: set[tuple[str, str]] = set()
    dropped = 0
    for row, where in rows:
        fields = read_fields(row, where)
        key = (fields.question or str(fields.messages), str(fields.gold))
        if key in seen:
            dropped += 1
            continue
        seen.add(key)
        yield row, where
    logger.info("%s: %d exact repeats dropped", spec, dropped)
