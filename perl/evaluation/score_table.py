"""The table on the screen."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from perl.scoring.results import Summary
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
