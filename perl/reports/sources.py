"""What a report is made from: the folder of a training, result folders of evaluations, or both."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perl.base.errors import UserError
from perl.base.files import is_of_process
from perl.reports.results import Run, read_runs
from perl.reports.training_run import TrainingRun, is_training_run, read_training_run
from perl.scoring.results import SWEEP, VALIDATION, is_scored

DEPTH = 2
"""Folders below a given one in which results are looked for: before/sampled of the quickstart's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What one page shows. At least one of training and runs is there."""

    folder: Path
    """The first that was given: the page is written there, and named after it."""
    training: TrainingRun | None
    runs: list[Run]
    """Scored models; with a label each where there are several."""
    label: str = ""
    """What tells the runs apart: "checkpoint" in a sweep, "evaluation" where there are several, else empty."""

    @property
    def pairs(self) -> dict[int, int]:
        """Index of a run that was compared with another one of this page -> index of that one."""
        place = {run.folder.resolve(): index for index, run in enumerate(self.runs)}
        compared = {
            i: Path(run.comparison.other["folder"]).resolve() for i, run in enumerate(self.runs) if run.comparison
        }
        return {i: place[folder] for i, folder in compared.items() if folder in place}


def read_material(folders: Sequence[Path]) -> Material:
    """Everything that the folders hold. One of neither kind is searched for such, as the quickstart's folder is; the
    folder of a training is searched for evaluations.

    Raises:
        UserError: a folder is missing or holds nothing, or there is more than one training.
    """
    trainings: list[Path] = []
    results: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"DIR: no such folder {folder}; write a run's folder, or the --result_dir of an evaluation")
        evaluated, trained = list(find(folder, is_result_dir)), list(find(folder, is_training_run))
        if not evaluated and not trained:
            read_runs(folder)  # says what is missing there
        results += evaluated
        trainings += trained
    trainings = distinct(trainings)
    if len(trainings) > 1:
        names = ", ".join(map(str, trainings[:3])) + (", …" if len(trainings) > 3 else "")
        raise UserError(f"DIR: one page shows one training, and here are {len(trainings)}: {names}; write one of them")
    training = read_training_run(trainings[0]) if trainings else None
    runs, label = read_evaluations(distinct(results))
    return Material(folder=folders[0], training=training, runs=runs, label=label)


def distinct(folders: Sequence[Path]) -> list[Path]:
    return list({folder.resolve(): folder for folder in folders}.values())


def find(folder: Path, wanted: Callable[[Path], bool], depth: int = DEPTH) -> Iterator[Path]:
    """`folder`, or else the folders in it, and in those, that are `wanted`."""
    if wanted(folder):
        yield folder
    elif depth:
        for inner in sorted(folder.iterdir()):
            of_training = inner.name == VALIDATION and is_training_run(folder)  # a chart shows it; its samples are many
            if inner.is_dir() and not is_of_process(inner.name) and not of_training:
                yield from find(inner, wanted, depth - 1)


def is_result_dir(folder: Path) -> bool:
    return (folder / SWEEP).is_file() or is_scored(folder) or any(map(is_scored, folder.glob("*/")))


def read_evaluations(folders: Sequence[Path]) -> tuple[list[Run], str]:
    """The runs of these result folders, and what their labels name. Where there are several folders a label is the
    folder's path below what is common to all, and models without an adapter stand first."""
    if len(folders) <= 1:
        runs = [run for folder in folders for run in read_runs(folder)]
        return runs, "checkpoint" if runs and runs[0].label else ""
    common = os.path.commonpath([folder.resolve() for folder in folders])
    runs = [
        replace(run, label=str(Path(os.path.relpath(folder.resolve(), common)) / run.label))
        for folder in folders
        for run in read_runs(folder)
    ]
    return sorted(runs, key=lambda run: run.is_trained), "evaluation"


def untrained_like(after: Run, runs: Sequence[Run]) -> int | None:
    """Index of the first of `runs` that scored the base of `after` alone, quantised and sampled in the same way on a
    common dataset; None where there is none, or where `after` itself has no adapter."""
    if not after.is_trained:
        return None
    for index, run in enumerate(runs):
        other = {scored.dataset: scored.summary for scored in run.scored}
        keys = {scored.dataset: {record["key"] for record in scored.records} for scored in run.scored}
        for scored in after.scored:
            before = other.get(scored.dataset)
            if before is None or before["adapter"]:
                continue
            alike = ("base_hash", "quantization", "n", "sampling")
            same = all(before.get(name) == scored.summary.get(name) for name in alike)
            if same and not keys[scored.dataset].isdisjoint(record["key"] for record in scored.records):
                return index
    return None
