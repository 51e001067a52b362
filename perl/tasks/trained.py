"""Which problems a run trains on: written into its folder when it starts, read when its adapter or model is scored.

RUN/trained_problems.json: {"dataset": …, "split": …, "problems": [a hash of each, sorted]}
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import yaml

from perl.base.errors import UserError
from perl.base.files import atomic_write, read_json
from perl.prompts import PromptStyle
from perl.records import Problem
from perl.tasks.registry import TASKS
from perl.tasks.schemas import READ

log = logging.getLogger(__name__)

TRAINED_PROBLEMS = "trained_problems.json"


class Problems(TypedDict):
    """What is read of trained_problems.json."""

    problems: list[str]
    """`asked_hash` of each; `problem_hash` in runs of before 0.14."""


def problem_hash(problem: Problem) -> str:
    """BLAKE2b of the problem's content: 16 hexadecimal digits. Of the columns that it keeps for an environment's reset
    those count which nothing else is read of: the words of a game may all have one prompt."""
    parts: list[Any] = [problem.question, problem.messages, problem.gold]
    parts += [hashlib.blake2b(image, digest_size=8).hexdigest() for image in problem.images]
    if further := sorted((name, value) for name, value in problem.columns.items() if name not in READ):
        parts.append(further)
    content = json.dumps(parts, ensure_ascii=False)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def asked_hash(problem: Problem) -> str:
    """`problem_hash` of the bare question, without stray white space: a row of `prepare`, which holds the task's whole
    prompt, has the hash of the row that it was made of."""
    style = TASKS[problem.task].style if problem.task else PromptStyle()
    before, _, after = (" ".join(part.split()) for part in style.template.partition("{question}"))
    question = " ".join(problem.question.split())
    turns = [message | {"content": " ".join(str(message["content"]).split())} for message in problem.messages or ()]
    if [turn["role"] for turn in turns] == ["user"]:
        words = turns[0]["content"]
        if words.startswith(before) and words.endswith(after):
            question, turns = words.removeprefix(before).removesuffix(after).strip(), []
    return problem_hash(replace(problem, question=question, messages=tuple(turns) or None))


def count_trained(problems: Mapping[str, Problem], trained: Collection[str]) -> int:
    """How many of `problems`, by their keys in samples.jsonl, are among `trained` (Problems.problems)."""
    return sum(key.partition("-")[0] in trained or asked_hash(each) in trained for key, each in problems.items())


def write_trained(
    run_dir: Path, dataset: str | list[str], split: str | None, problems: Iterable[str], *before: str | None
) -> None:
    """Write trained_problems.json, whole or not at all.

    Args:
        before: what the run begins with (a checkpoint, an adapter, a model); the problems of the runs that left these
            are kept, as what is trained has seen them too.
    """
    found = set(problems).union(*(_read(Path(folder).parent) or () for folder in before if folder))
    text = json.dumps({"dataset": dataset, "split": split, "problems": sorted(found)}, ensure_ascii=False)
    with atomic_write(run_dir / TRAINED_PROBLEMS) as file:
        file.write(text + "\n")


def read_trained(folder: Path) -> frozenset[str] | None:
    """`asked_hash` of each problem that an adapter or a model was trained on which lies in its run's folder
    (RUN/adapter, RUN/model, RUN/checkpoint-N); None where nothing tells, as of RUN/base, with which a run begins."""
    return None if folder.resolve().name == "base" else _read(folder.resolve().parent)


def trained_with(folder: Path, group: str) -> dict[str, Any]:
    """A group of the config.yaml of the run that an adapter or a model lies in; empty where nothing tells."""
    try:
        return dict(yaml.safe_load((folder.resolve().parent / "config.yaml").read_text(encoding="utf-8"))[group])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return {}


def _read(run: Path) -> frozenset[str] | None:
    file = run / TRAINED_PROBLEMS
    if not file.is_file():
        return None
    try:
        return frozenset(read_json(file, kind=Problems)["problems"])
    except UserError as error:
        log.warning("%s; it counts as not there", error)
        return None
