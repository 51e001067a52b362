"""What a report is made of, read from a result folder: each dataset's summary.json and samples.jsonl, compare.json."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perl.errors import UserError
from perl.reports.comparisons import Comparison, read_comparison

logger = logging.getLogger(__name__)

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One dataset, scored by one model."""

    dataset: str
    summary: dict[str, Any]
    records: list[Record]
    """Rows of samples.jsonl, each problem's samples side by side in the order of their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One model: the only one of an evaluation, or one checkpoint of a sweep."""

    label: str
    """The checkpoint's name in a sweep, else empty."""
    step: int | None
    """Optimizer steps of a sweep's checkpoint, 0 for the base; None where that is not known."""
    scored: list[Scored]
    comparison: Comparison | None = None
    """With another evaluation, if one was made."""

    @classmethod
    def of(cls, folder: Path, scored: list[Scored], label: str = "", step: int | None = None) -> Run:
        """`folder`: where compare.json lies."""
        comparison = read_comparison(folder, {each.dataset: each.records for each in scored})
        return cls(label=label, step=step, scored=scored, comparison=comparison)


def read_runs(result_dir: Path) -> list[Run]:
    """Everything that `result_dir` holds: one run, or those of a sweep in the order of sweep.json. A dataset's own
    folder is taken too.

    Raises:
        UserError: there are no results.
    """
    if not result_dir.is_dir():
        raise UserError(f"RESULT_DIR: no such folder {result_dir}; write what --result_dir of perl/eval.py was")
    if (result_dir / "sweep.json").is_file():
        runs = read_sweep(result_dir)
    else:
        scored = [read_scored(result_dir)] if is_dataset(result_dir) else scored_in(result_dir)
        runs = [Run.of(result_dir, scored)] if scored else []
    if runs:
        return runs
    if any(result_dir.glob("**/samples.jsonl")):
        raise UserError(
            f"RESULT_DIR: no dataset in {result_dir} has a summary.json, so its evaluation has not ended; the same"
            " command of perl/eval.py finishes it"
        )
    raise UserError(f"RESULT_DIR: no results in {result_dir}; write what --result_dir of perl/eval.py was")


def read_sweep(result_dir: Path) -> list[Run]:
    """The candidates of a sweep that were scored; a warning for each other one."""
    runs = []
    for candidate in _read_json(result_dir / "sweep.json")["candidates"]:
        name, folder = candidate["name"], result_dir / candidate["name"]
        if candidate["metrics"] is None or not (scored := scored_in(folder)):
            logger.warning("report: %s is left out: %s", name, candidate["error"] or "it is not scored yet")
            continue
        runs.append(Run.of(folder, scored, name, candidate["step"]))
    return runs


def is_dataset(folder: Path) -> bool:
    return (folder / "samples.jsonl").is_file() and (folder / "summary.json").is_file()


def scored_in(folder: Path) -> list[Scored]:
    return [read_scored(inner) for inner in sorted(folder.iterdir()) if inner.is_dir() and is_dataset(inner)]


def read_scored(folder: Path) -> Scored:
    summary = _read_json(folder / "summary.json")
    records = list(_read_lines(folder / "samples.jsonl"))
    place = {key: i for i, key in enumerate(dict.fromkeys(record["key"] for record in records))}
    records.sort(key=lambda record: (place[record["key"]], record["sample"]))
    if len(records) != summary["samples"]:
        logger.warning(
            "%s: samples.jsonl has %d rows, the summary was made from %d (another --n or --max_samples)",
            folder, len(records), summary["samples"],
        )  # fmt: skip
    return Scored(dataset=folder.name, summary=summary, records=records)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable ({error}); the same command of perl/eval.py writes it again") from error


def _read_lines(file: Path) -> list[Record]:
    """The rows; those that are no JSON (a line torn by a killed process) are left out, with a warning."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    records, torn = [], 0
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            torn += 1
    if torn:
        logger.warning("%s: %d broken lines left out", file, torn)
    return records
