"""Scoring on what was trained on: how many of a data set's problems the run of the adapter, or of the
model, has seen."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from pathlib import Path

from perl.scoring.results import TrainedOn
from perl.scoring.samples import cluster_of
from perl.tasks.trained import read_trained

logger = logging.getLogger(__name__)


def trained_on(trained: Path, keys: Collection[str]) -> TrainedOn | None:
    """What stands in summary.json.

    Args:
        trained: folder of the adapter that is scored, or of the model without one.
        keys: of the problems that are scored.

    Returns:
        {"run": folder of the training, "problems": how many of `keys` it trained on}. None: nothing tells what was
        trained on.
    """
    problems = read_trained(trained)
    if problems is None:
        return None
    return {"run": str(trained.resolve().parent), "problems": sum(cluster_of(key) in problems for key in set(keys))}


def warn_of_trained(folders: Iterable[Path], spec: str, keys: Collection[str]) -> None:
    """One line for each run of `folders` (adapters, models) that trained on problems of this data set."""
    warned = set()
    for folder in folders:
        training = trained_on(folder, keys)
        if training is None or not training["problems"] or (run := training["run"]) in warned:
            continue
        warned.add(run)
        logger.warning(
            "%s: %d of its %d problems are in the training data of %s; the score does not tell how it does on new"
            " problems",
            spec, training["problems"], len(set(keys)), run,
        )  # fmt: skip
