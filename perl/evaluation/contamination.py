"""Scoring on what was trained on: how many of a data set's problems the adapter's own run has seen."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from perl.errors import UserError
from perl.scoring.samples import cluster_of
from perl.tasks import source_of
from perl.tasks.trained import read_trained

logger = logging.getLogger(__name__)


def trained_on(adapter: Path | None, spec: str, split: str | None, keys: Collection[str]) -> dict[str, Any] | None:
    """What stands in summary.json.

    Args:
        spec: the data set that is scored, as after --dataset.
        split: as after --split.
        keys: of its problems.

    Returns:
        {"run": folder of the training, "problems": how many of `keys` it trained on}. `problems` is None where the run
        has not written them down, but trained on this data set and split. None: nothing tells what was trained on.
    """
    trained = read_trained(adapter) if adapter is not None else None
    if trained is None:
        return None
    if trained.problems is not None:
        return {"run": str(trained.run), "problems": sum(cluster_of(key) in trained.problems for key in set(keys))}
    same = trained.source is not None and trained.source == _source(spec, split)
    return {"run": str(trained.run), "problems": None} if same else None


def warn_of_trained(adapters: Iterable[Path | None], spec: str, split: str | None, keys: Collection[str]) -> None:
    """One line for each run of `adapters` that trained on problems of this data set."""
    said = set()
    for adapter in adapters:
        found = trained_on(adapter, spec, split, keys)
        if found is None or found["problems"] == 0 or found["run"] in said:
            continue
        said.add(found["run"])
        if found["problems"] is None:
            what = (
                f"this is the data set and split that {found['run']} trained on (how many of the rows is not recorded)"
            )
        else:
            what = f"{found['problems']} of its {len(set(keys))} problems are in the training data of {found['run']}"
        logger.warning("%s: %s; the score does not tell how the adapter does on new problems", spec, what)


def _source(spec: str, split: str | None) -> tuple[str, ...] | None:
    try:
        return source_of(spec, split)
    except UserError:
        return None
