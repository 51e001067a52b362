"""A sweep's table, and its entries in sweep.json, from which a curve over the steps is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from perl.evaluation.candidates import Candidate
from perl.scoring.results import MetricRecord, Summary, SweepEntry
from perl.scoring.summary import shown


class SweepError(RuntimeError):
    """Some candidates were not scored, and all others were. One line."""


def sweep_entry(candidate: Candidate, summaries: Mapping[str, Summary] | None, error: str | None) -> SweepEntry:
    """One candidate's entry in sweep.json."""
    metrics = {name: summary["metrics"] for name, summary in summaries.items()} if summaries is not None else None
    return {
        "name": candidate.name,
        "adapter": str(candidate.adapter) if candidate.adapter else None,
        "adapter_hash": candidate.adapter_hash,
        "step": candidate.step,
        "error": error,
        "metrics": metrics,
    }


def print_sweep(entries: Sequence[SweepEntry], console: Console) -> None:
    """A row a candidate, a column a metric, in percent with the 95 % interval."""
    columns = list(
        dict.fromkeys(
            (dataset, metric)
            for entry in entries
            for dataset, metrics in (entry["metrics"] or {}).items()
            for metric in shown(metrics)
        )
    )
    several = len({dataset for dataset, _ in columns}) > 1
    table = Table("adapter")
    for dataset, metric in columns:
        table.add_column(f"{dataset}\n{metric}" if several else metric, justify="right")
    for entry in entries:
        found = [(entry["metrics"] or {}).get(dataset, {}).get(metric) for dataset, metric in columns]
        table.add_row(entry["name"], *map(_cell, found))
    console.print(table)
    for entry in entries:
        if entry["metrics"] is None:
            why = entry["error"] or "its rows are not complete; the same command goes on"
            console.print(f"{entry['name']}: not scored: {why}", highlight=False, soft_wrap=True, markup=False)


def _cell(estimate: MetricRecord | None) -> str:
    if estimate is None:
        return "–"
    return f"{100 * estimate['value']:.2f} ({100 * estimate['low']:.1f} – {100 * estimate['high']:.1f})"
