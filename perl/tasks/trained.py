"""Which problems a run trains on: written into its folder when it starts, read when its adapter or model is scored.

RUN/trained_problems.json: {"dataset": …, "split": …, "problems": [a hash of each, sorted]}
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

import yaml

from perl.base.errors import UserError
from perl.base.files import atomic_write, read_json
from perl.base.paths import user_path
from perl.records import Problem
from perl.tasks import source_of, training_split

log = logging.getLogger(__name__)

TRAINED_PROBLEMS = "trained_problems.json"
T = TypeVar("T")


class Problems(TypedDict):
    """What is read of trained_problems.json."""

    problems: list[str]
    """`problem_hash` of each."""


class Environment(TypedDict):
    """What is read of environment.json."""

    folder: NotRequired[str]
    """Where the training was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a run's folder tells of the data that it was trained on."""

    run: Path
    problems: frozenset[str] | None
    """`problem_hash` of each; None: the run is older than trained_problems.json."""
    source: tuple[str, ...] | None
    """As `source_of` has it; None: the data set is no longer there."""


def problem_hash(problem: Problem) -> str:
    """BLAKE2b of the problem's content: 16 hexadecimal digits."""
    parts: list[Any] = [problem.question, problem.messages, problem.gold]
    parts += [hashlib.blake2b(image, digest_size=8).hexdigest() for image in problem.images]
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
    found = set(problems)
    for folder in before:
        if folder and (earlier := _read(Path(folder).parent / TRAINED_PROBLEMS, Problems)):
            found |= set(earlier["problems"])
    text = json.dumps({"dataset": dataset, "split": split, "problems": sorted(found)}, ensure_ascii=False)
    with atomic_write(run_dir / TRAINED_PROBLEMS) as file:
        file.write(text + "\n")


def read_trained(folder: Path) -> Trained | None:
    """What is known of the training of an adapter or a model that lies in its run's folder (RUN/adapter, RUN/model,
    RUN/checkpoint-N); None also for RUN/base, with which a run begins."""
    run = folder.resolve().parent
    if folder.resolve().name == "base":
        return None
    try:
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["dataset"]
        dataset, split = config["dataset_name_or_path"], config["split"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None
    written = _read(run / TRAINED_PROBLEMS, Problems)
    return Trained(
        run=run,
        problems=frozenset(written["problems"]) if written else None,
        source=_source(dataset, split, run),
    )


def trained_environment(folder: Path) -> dict[str, Any]:
    """What the run that an adapter or a model lies in had in its group `environment`, where that named tools or an
    environment; else empty."""
    try:
        group = _config(folder)["environment"]
        return dict(group) if group["tools"] or group["factory"] else {}
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return {}


def trained_quantization(folder: Path) -> str | None:
    """What the run that an adapter or a model lies in had as rollout.quantization; None where nothing tells."""
    try:
        value = _config(folder)["rollout"]["quantization"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None
    return value if isinstance(value, str) else None


def _config(folder: Path) -> Any:
    """The config.yaml of the run that an adapter or a model lies in."""
    return yaml.safe_load((folder.resolve().parent / "config.yaml").read_text(encoding="utf-8"))


def _source(dataset: str | list[str], split: str | None, run: Path) -> tuple[str, ...] | None:
    """Of the training; a relative path counts from where the training was started. None for a list: a run on several
    data sets has written its problems down."""
    if not isinstance(dataset, str):
        return None
    place = Path((_read(run / "environment.json", Environment) or {}).get("folder", "."), user_path(dataset))
    spec = str(place) if os.path.exists(place) else dataset
    try:
        return source_of(spec, split or training_split(spec))
    except UserError:
        return None


def _read(file: Path, kind: type[T]) -> T | None:
    if not file.is_file():
        return None
    try:
        return read_json(file, kind=kind)
    except UserError as error:
        log.warning("%s; it counts as not there", error)
        return None
