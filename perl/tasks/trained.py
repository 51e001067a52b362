"""Which problems a run trains on: written into its folder when it starts, read when its adapter or model is scored.

RUN/trained_problems.json: {"dataset": …, "split": …, "problems": [a hash of each, sorted]}
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

import yaml

from perl.base.errors import UserError
from perl.base.files import atomic_write, read_json
from perl.records import Problem
from perl.tasks.schemas import READ

log = logging.getLogger(__name__)

TRAINED_PROBLEMS = "trained_problems.json"


class Problems(TypedDict):
    """What is read of trained_problems.json."""

    problems: list[str]
    """`problem_hash` of each."""


def problem_hash(problem: Problem) -> str:
    """BLAKE2b of the problem's content: 16 hexadecimal digits. Of the columns that it keeps for an environment's reset
    those count which nothing else is read of: the words of a game may all have one prompt."""
    parts: list[Any] = [problem.question, problem.messages, problem.gold]
    parts += [hashlib.blake2b(image, digest_size=8).hexdigest() for image in problem.images]
    if further := sorted((name, value) for name, value in problem.columns.items() if name not in READ):
        parts.append(further)
    content = json.dumps(parts, ensure_ascii=False)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


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
    """`problem_hash` of each problem that an adapter or a model was trained on which lies in its run's folder
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
