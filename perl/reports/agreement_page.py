"""The page of two trainings that were compared: the verdict, the errors, and both curves of each metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from perl.reports import charts, embed
from perl.reports.agreement import Agreement, Comparison, Runs, Side
from perl.reports.charts import Line
from perl.reports.curves import Curves
from perl.reports.figures import Figure
from perl.reports.page import STEPS_SCRIPTS, document, part, write_html


def write_agreement(comparison: Comparison, runs: Runs, output: Path) -> Path:
    """Write the page; return `output`. A UserError where it cannot be written."""
    lines = [sides(metric, runs) for metric in comparison.metrics]
    section = part(
        "agreement",
        comparison=comparison,
        smoothed=charts.window(max(len(metric.steps) for metric in comparison.metrics)),
        figures=[figure(metric, pair) for metric, pair in zip(comparison.metrics, lines, strict=True)],
        steps=embed.columns([line for pair in lines for line in pair]),
        files=[(side, run) for side in ("A", "B") for run in runs[side]],
    )
    title = f"{title_of(runs['B'])} against {title_of(runs['A'])}"
    return write_html(document(title, "Comparison", [section], STEPS_SCRIPTS), output)


def title_of(side: Sequence[Curves]) -> str:
    name = side[0].source.resolve().name
    return name if len(side) == 1 else f"{name} and {len(side) - 1} more"


def sides(metric: Agreement, runs: Runs) -> list[Line]:
    """The curve of each side at the compared steps."""
    lines = []
    curves: dict[Side, Sequence[float]] = {"A": metric.curve_a, "B": metric.curve_b}
    for side, values in curves.items():
        label = side if len(runs[side]) == 1 else f"{side}, mean of {len(runs[side])}"
        points = [(step, value) for step, value in zip(metric.steps, values, strict=True) if math.isfinite(value)]
        lines.append(Line(f"{metric.name} {side}", label, points))
    return [line for line in lines if line.points]


def figure(metric: Agreement, lines: Sequence[Line]) -> Figure:
    chart = charts.trend(lines, metric.name, unit=metric.name, x_name="step") if lines else Markup()
    share = "" if metric.relative is None else f", {100 * metric.relative:.2f} % of A"
    legend = [(f"s{number}", line.name) for number, line in enumerate(lines)]
    return Figure(metric.name, f"MAE {metric.absolute:.4g}{share}.", chart, legend)
