"""The tables on the screen: the metrics of an evaluation, and those of a sweep's candidates."""

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
            table.add_row("" if place else name, metric, *_cells(summary["metrics"][metric]))
        table.add_section()
    console.print(table)
    for name, summary in summaries.items():
        console.print(f"{name}: {_sentence(summary)}", highlight=False, soft_wrap=True)


def _sentence(summary: Summary) -> str:
    rules = ", ".join(f"{rule} {100 * mean['mean']:.2f}" for rule, mean in summary["rules"].items())
    unextracted = "" if summary["unextracted"] is None else f", no answer found {summary['unextracted']:.1%}"
    text = (
        f"{summary['problems']} problems × {summary['n']}; truncated {summary['truncated']:.1%}{unextracted}, timeouts"
        f" {summary['timeouts']}; mean length {summary['mean_tokens']:.0f} tokens; by rule: {rules}"
    )
    if summary["generation"]:
        text += f"; {summary['generation']['tokens_per_s']:,.0f} tokens/s"
    return text


def print_sweep(entries: Sequence[SweepEntry], console: Console) -> None:
    """A row for each metric of each candidate and dataset, in percent. 80 columns are enough."""
    table = Table()
    for column in ("adapter", "dataset"):
        table.add_column(column, overflow="fold")
    table.add_column("metric", no_wrap=True)
    for column in ("value", "95 % interval"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries:
        adapter = entry["name"]
        for name, metrics in (entry["metrics"] or {}).items():
            dataset = name
            for metric in shown(metrics):
                table.add_row(adapter, dataset, metric, *_cells(metrics[metric]))
                adapter = dataset = ""
        table.add_section()
    console.print(table)
    for entry in entries:
        if entry["metrics"] is None:
            why = entry["error"] or "its rows are not complete; the same command goes on"
            console.print(f"{entry['name']}: not scored: {why}", highlight=False, soft_wrap=True, markup=False)


def _cells(estimate: MetricRecord) -> tuple[str, str]:
    return f"{100 * estimate['value']:.2f}", f"{100 * estimate['low']:.2f} – {100 * estimate['high']:.2f}"
