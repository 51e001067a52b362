"""What a report is made of: one run, or those of a sweep, each with its datasets and its comparison."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from perl.base.errors import UserError, one_line
from perl.base.files import read_json
from perl.scoring.comparison import Comparison, read_comparison
from perl.scoring.results import AGAIN, SAMPLES, SWEEP, ScoredSet, Sweep, is_scored, read_scored

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One model: the only one of an evaluation, or one checkpoint of a sweep."""

    folder: Path
    """Where its datasets lie, each in a folder of its own, and compare.json."""
    label: str = ""
    """The checkpoint's name in a sweep, the folder's where a page shows several evaluations, else empty."""
    step: int | None = None
    """Optimizer steps of a sweep's checkpoint, 0 for the base; None where that is not known."""
    scored: list[ScoredSet]
    comparison: Comparison | None = None
    """With another evaluation, if one was made."""

    @property
    def is_trained(self) -> bool:
        return any(scored.summary["adapter"] for scored in self.scored)


def read_runs(result_dir: Path) -> list[Run]:
    """Everything that `result_dir` holds: one run, or those of a sweep in the order of sweep.json. A dataset's own
    folder is taken too.

    Raises:
        UserError: there are no results.
    """
    if not result_dir.is_dir():
        raise UserError(f"RESULT_DIR: no such folder {result_dir}; write what --result_dir of perl/eval.py was")
    if (result_dir / SWEEP).is_file():
        runs = read_sweep(result_dir)
    elif is_scored(result_dir):
        runs = [Run(folder=result_dir.parent, scored=[read_scored(result_dir)])]
    else:
        runs = [run] if (run := read_run(result_dir)) else []
    if runs:
        return runs
    if any(result_dir.glob(f"**/{SAMPLES}")):
        raise UserError(
            f"RESULT_DIR: no dataset in {result_dir} has a summary.json, so its evaluation has not ended; the same"
            " command of perl/eval.py finishes it"
        )
    raise UserError(f"RESULT_DIR: no results in {result_dir}; write what --result_dir of perl/eval.py was")


def read_sweep(result_dir: Path) -> list[Run]:
    """The candidates of a sweep that were scored; a warning for each other one."""
    runs = []
    sweep = read_json(result_dir / SWEEP, hint=AGAIN, kind=Sweep)
    for candidate in sweep["candidates"]:
        name = candidate["name"]
        if candidate["metrics"] is None or not (run := read_run(result_dir / name)):
            why = candidate["error"] or "it is not scored yet"
            logger.warning("report: %s is left out: %s", one_line(name), one_line(why))
            continue
        runs.append(replace(run, label=name, step=candidate["step"]))
    return runs


def read_run(folder: Path) -> Run | None:
    """The datasets in `folder` and the comparison of them; None where there is none."""
    if not folder.is_dir():
        return None
    scored = [read_scored(inner) for inner in sorted(folder.iterdir()) if is_scored(inner)]
    comparison = read_comparison(folder, {each.dataset: each.records for each in scored})
    return Run(folder=folder, scored=scored, comparison=comparison) if scored else None
