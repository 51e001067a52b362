"""The tables on the screen: the metrics of an evaluation, and those of a sweep's candidates side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from perl.scoring.results import MetricRecord, Summary, SweepEntry
from perl.scoring.summary import shown


def print_table(summaries: Mapping[str, Summary], console: Console) -> None:
    """The metrics of each dataset."""
    table = Table("dataset", "metric")
    for column in ("value", "95 % interval"):
        table.add_column(column, justify="right")
    for name, summary in summaries.items():
        for place, metric in enumerate(shown(summary["metrics"])):
            e = summary["metrics"][metric]
            interval = f"{100 * e['low']:.2f} – {100 * e['high']:.2f}"
            table.add_row("" if place else name, metric, f"{100 * e['value']:.2f}", interval)
        table.add_section()
    console.print(table)
    for name, summary in summaries.items():
        console.print(f"{name}: {_sentence(summary)}", highlight=False, soft_wrap=True)


def _sentence(summary: Summary) -> str:
    rules = ", ".join(f"{rule} {100 * mean['mean']:.2f}" for rule, mean in summary["rules"].items())
    text = (
        f"{summary['problems']} problems × {summary['n']}; truncated {summary['truncated']:.1%}, no answer found"
        f" {summary['unextracted']:.1%}, timeouts {summary['timeouts']}; mean length {summary['mean_tokens']:.0f}"
        f" tokens; by rule: {rules}"
    )
    if summary["generation"]:
        text += f"; {summary['generation']['tokens_per_s']:,.0f} tokens/s"
    return text


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
        estimates = [(entry["metrics"] or {}).get(dataset, {}).get(metric) for dataset, metric in columns]
        table.add_row(entry["name"], *map(_cell, estimates))
    console.print(table)
    for entry in entries:
        if entry["metrics"] is None:
            why = entry["error"] or "its rows are not complete; the same command goes on"
            console.print(f"{entry['name']}: not scored: {why}", highlight=False, soft_wrap=True, markup=False)


def _cell(estimate: MetricRecord | None) -> str:
    if estimate is None:
        return "–"
    return f"{100 * estimate['value']:.2f} ({100 * estimate['low']:.1f} – {100 * estimate['high']:.1f})"
