"""Scoring on what was trained on: how many of a data set's problems the run of the adapter, or of the
model, has seen."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from pathlib import Path

from perl.base.errors import UserError
from perl.scoring.results import TrainedOn
from perl.scoring.samples import cluster_of
from perl.tasks import source_of
from perl.tasks.trained import read_trained

logger = logging.getLogger(__name__)


def trained_on(trained: Path, spec: str, split: str | None, keys: Collection[str]) -> TrainedOn | None:
    """What stands in summary.json.

    Args:
        trained: folder of the adapter that is scored, or of the model without one.
        spec: the data set that is scored, as after --dataset.
        split: as after --split.
        keys: of its problems.

    Returns:
        {"run": folder of the training, "problems": how many of `keys` it trained on}. `problems` is None where the run
        has not written them down, but trained on this data set and split. None: nothing tells what was trained on.
    """
    training = read_trained(trained)
    if training is None:
        return None
    if training.problems is not None:
        return {"run": str(training.run), "problems": sum(cluster_of(key) in training.problems for key in set(keys))}
    same = training.source is not None and training.source == _source(spec, split)
    return {"run": str(training.run), "problems": None} if same else None


def warn_of_trained(folders: Iterable[Path], spec: str, split: str | None, keys: Collection[str]) -> None:
    """One line for each run of `folders` (adapters, models) that trained on problems of this data set."""
    warned = set()
    for folder in folders:
        training = trained_on(folder, spec, split, keys)
        if training is None or training["problems"] == 0 or (run := training["run"]) in warned:
            continue
        warned.add(run)
        if training["problems"] is None:
            what = f"this is the data set and split that {run} trained on (how many of the rows is not recorded)"
        else:
            what = f"{training['problems']} of its {len(set(keys))} problems are in the training data of {run}"
        logger.warning("%s: %s; the score does not tell how it does on new problems", spec, what)


def _source(spec: str, split: str | None) -> tuple[str, ...] | None:
    try:
        return source_of(spec, split)
    except UserError:
        return None
