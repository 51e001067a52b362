"""Tasks: where problems come from, how they are asked, and which rubric grades them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perl.errors import UserError, lookup, nearest
from perl.grading import MATH_VERIFY, RULES, Grader, Rubric
from perl.prompts import PromptStyle
from perl.records import Problem, Sampling
from perl.tasks.files import SUFFIXES, Row, find_files, read_rows
from perl.tasks.hub import Hub, hub_rows
from perl.tasks.schemas import asked_form, gsm8k_gold, integer_gold, math_gold, read_fields

__all__ = ["TASKS", "Task", "gold_problems", "load_problems", "problem_of_row", "rows_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A kind of problem."""

    name: str
    hub: Hub | None
    """None: a task for the user's own files."""
    style: PromptStyle
    rubric: Rubric
    sampling: Sampling
    """The evaluation's defaults."""
    read_gold: Callable[[Any], str]
    """The stored answer in the form that the rubric's rules compare; raises ValueError when it cannot be one."""


# verl's wording, so that a prompt of `prepare` equals one built from the bare question.
_GSM8K_STYLE = PromptStyle(
    template='{question} Let\'s think step by step and output the final answer after "####".',
)
# The wording of DAPO's own data (arXiv 2503.14476), as in its `source_prompt`.
_DAPO_STYLE = PromptStyle(
    template="Solve the following math problem step by step. The last line of your response should be of the form"
    " Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".',
)
_BOXED_STYLE = PromptStyle(
    template="{question}\nPlease reason step by step, and put your final answer within \\boxed{}.",
)

# Primary: flexible. lm-evaluation-harness reports both and verl's default is strict, but strict also measures whether
# the marker is written exactly, so an instruct model that answers \boxed{18} or `#### $18` scores 0. What is asked of
# a model here is the number; the marker is the format reward's affair, and `strict` stands beside it in every report.
_GSM8K_RUBRIC = Rubric(rules=("strict", "flexible"), primary="flexible", math_verify="fallback", form="strict")
# DAPO grades the last `Answer:` line by its normalized text. Golds are integers, which `answer` compares exactly; an
# expression (`Answer: 2^5`) goes to math-verify, where DAPO's own grader gives no point.
_DAPO_RUBRIC = Rubric(
    rules=("answer", "answer_line", "boxed"), primary="answer", math_verify="fallback", form="answer_line"
)
_MATH_RUBRIC = Rubric(rules=("boxed",), primary=MATH_VERIFY, math_verify="always", form="boxed")

_GREEDY = Sampling(n=1, temperature=0.0, max_new_tokens=2048)
# Thirty or forty problems decide nothing with one sample each; temperature and top_p are DAPO's for AIME.
_AVG_32 = Sampling(n=32, temperature=1.0, top_p=0.7, max_new_tokens=4096)


def _math_task(name: str, hub: Hub | None, sampling: Sampling) -> Task:
    return Task(
        name=name, hub=hub, style=_BOXED_STYLE, rubric=_MATH_RUBRIC, sampling=sampling, read_gold=math_gold
    )  # fmt: skip


TASKS: dict[str, Task] = {
    "gsm8k": Task(
        name="gsm8k",
        hub=Hub(
            repo="openai/gsm8k",
            config="main",
            splits=("train", "test"),
            eval_split="test",
            modelscope="AI-ModelScope/gsm8k",
        ),
        style=_GSM8K_STYLE,
        rubric=_GSM8K_RUBRIC,
        sampling=Sampling(n=1, temperature=0.0, max_new_tokens=512),
        read_gold=gsm8k_gold,
    ),
    "dapo-math": Task(
        name="dapo-math",
        hub=Hub(repo="open-r1/DAPO-Math-17k-Processed", config="en", splits=("train",), eval_split="train"),
        style=_DAPO_STYLE,
        rubric=_DAPO_RUBRIC,
        sampling=_GREEDY,
        read_gold=integer_gold,
    ),
    "math500": _math_task(
        "math500",
        Hub(repo="HuggingFaceH4/MATH-500", splits=("test",), eval_split="test", modelscope="AI-ModelScope/MATH-500"),
        _GREEDY,
    ),
    "aime24": _math_task("aime24", Hub(repo="HuggingFaceH4/aime_2024", splits=("train",), eval_split="train"), _AVG_32),
    "aime25": _math_task("aime25", Hub(repo="math-ai/aime25", splits=("test",), eval_split="test"), _AVG_32),
    "amc23": _math_task("amc23", Hub(repo="math-ai/amc23", splits=("test",), eval_split="test"), _AVG_32),
    # Any mathematics whose data set is not named above: a user's file of problems and LaTeX answers.
    "math": _math_task("math", None, _GREEDY),
}

# Other repositories of the same tasks, by their names on the hub.
_OTHER_HUBS: dict[str, tuple[str, Hub]] = {
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        "dapo-math",
        Hub(repo="BytedTsinghua-SIA/DAPO-Math-17k", splits=("train",), eval_split="train", repeats=True),
    ),
}
HUBS: dict[str, tuple[str, Hub]] = {
    **{task.hub.repo: (task.name, task.hub) for task in TASKS.values() if task.hub},
    **_OTHER_HUBS,
}

# Task of a row by its `data_source` (verl) or `source` column; names of tasks and of HUBS count too.
_DATA_SOURCES = {
    "math_dapo": "dapo-math",
    "openai/prm800k math_splits": "math500",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
}
# Task of a row by its schema, where it names no known source.
_SCHEMA_TASKS = {"dapo": "dapo-math", "bench": "math"}


def load_problems(
    spec: str, split: str | None = None, limit: int | None = None, task: str | None = None
) -> list[Problem]:
    """The problems of a data set.

    Args:
        spec: a task's name, a hub name ("openai/gsm8k", "open-r1/DAPO-Math-17k-Processed", with ":cn" for another
            configuration), or a path to a parquet, json, jsonl or csv file or to a folder with one per split.
        split: default: the task's evaluation split; in a folder test, else train. A single file is one split.
        limit: keep only the first `limit` problems.
        task: grade every row as this task, whatever the row says.
    """
    if task is not None:
        lookup(TASKS, task, "task")
    problems = (problem_of_row(row, where, chosen) for row, where, chosen in rows_of(spec, split, task))
    if (known := HUBS.get(spec.partition(":")[0])) and known[1].repeats:
        problems = _without_repeats(problems, spec)
    result = list(itertools.islice(problems, limit))
    if not result:
        raise UserError(f"{spec}: no rows" + (f" in split {split!r}" if split else ""))
    return result


def rows_of(spec: str, split: str | None, task: str | None = None) -> Iterator[tuple[Row, str, str | None]]:
    """Yield (row, place, task or None) of whatever `spec` names; the task is known where `spec` or the caller says it.
    A task's name comes first, then an existing path, then the hub."""
    path = Path(spec).expanduser()
    if spec not in TASKS and (path.exists() or _looks_like_path(spec)):
        for file in find_files(path, split):
            yield from ((row, where, task) for row, where in read_rows(file))
        return
    name, hub = _hub_of(spec)
    rows = hub_rows(hub, split or hub.eval_split)
    yield from ((row, where, task or name) for row, where in rows)


def problem_of_row(row: Row, where: str, task: str | None) -> Problem:
    """The Problem that `row` holds. Without `task`, the row's data source decides, then its schema."""
    fields = read_fields(row, where)
    name = task or _task_of(fields.data_source) or _SCHEMA_TASKS.get(fields.schema)
    if name is None and fields.schema == "gsm8k":
        name = "gsm8k" if "####" in str(fields.gold) else "math"
    if name is None and fields.schema == "guide":  # says nothing but its texts: the form they ask for decides
        texts = [str(fields.gold), *(message["content"] for message in fields.messages or ())]
        forms = {asked_form(text) for text in texts}
        name = "gsm8k" if "####" in forms else "dapo-math" if "Answer:" in forms else "math"
    if name is None:
        raise UserError(
            f"{where}: data_source {fields.data_source!r} names no task; say which one grades the rows:"
            f" task {', '.join(TASKS)}"
        )
    try:
        gold = TASKS[name].read_gold(fields.gold)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    if fields.messages is None and not fields.question:
        raise UserError(f"{where}: the question is empty")
    return Problem(task=name, question=fields.question, gold=gold, messages=fields.messages, source=where)


def gold_problems(problems: Sequence[Problem], grader: Grader) -> list[Problem]:
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


def _task_of(data_source: str | None) -> str | None:
    if data_source in TASKS:
        return data_source
    if data_source in HUBS:
        return HUBS[data_source][0]
    return _DATA_SOURCES.get(data_source or "")


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
        return None, Hub(repo=repo, config=config or None, eval_split="test")
    guess = nearest(spec, [*TASKS, *HUBS])
    raise UserError(
        f"unknown data set {spec!r}; {f'did you mean {guess!r}? ' if guess else ''}known tasks: {', '.join(TASKS)};"
        " or give a hub name (owner/name) or a path to a file or folder"
    )


def _looks_like_path(spec: str) -> bool:
    return spec.endswith(SUFFIXES) or spec.startswith((".", "/", "~")) or spec.count("/") > 1


def _without_repeats(problems: Iterator[Problem], spec: str) -> Iterator[Problem]:
    seen: set[tuple[str, str]] = set()
    dropped = 0
    for problem in problems:
        key = (problem.question or str(problem.messages), problem.gold)
        if key in seen:
            dropped += 1
            continue
        seen.add(key)
        yield problem
    logger.info("%s: %d exact repeats dropped", spec, dropped)
