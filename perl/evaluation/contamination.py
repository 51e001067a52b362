"""Scoring on what was trained on: how many of a data set's problems the run of the adapter, or of the
model, has seen."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from perl.records import Problem
from perl.scoring.results import TrainedOn
from perl.tasks.trained import count_trained, read_trained

logger = logging.getLogger(__name__)


def trained_on(trained: Path, scored: Mapping[str, Problem]) -> TrainedOn | None:
    """What stands in summary.json.

    Args:
        trained: folder of the adapter that is scored, or of the model without one.
        scored: the problems that are scored, by key.

    Returns:
        {"run": folder of the training, "problems": how many of `scored` it trained on}. None: nothing tells what was
        trained on.
    """
    problems = read_trained(trained)
    if problems is None:
        return None
    return {"run": str(trained.resolve().parent), "problems": count_trained(scored, problems)}


def warn_of_trained(folders: Iterable[Path], spec: str, scored: Mapping[str, Problem]) -> None:
    """One line for each run of `folders` (adapters, models) that trained on problems of this data set."""
    warned = set()
    for folder in folders:
        training = trained_on(folder, scored)
        if training is None or not training["problems"] or (run := training["run"]) in warned:
            continue
        warned.add(run)
        logger.warning(
            "%s: %d of its %d problems are in the training data of %s; the score does not tell how it does on new"
            " problems",
            spec, training["problems"], len(scored), run,
        )  # fmt: skip
