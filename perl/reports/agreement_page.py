"""The page of two trainings that were compared: the verdict, the errors, and both curves of each metric."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from perl.reports import charts, embed
from perl.reports.agreement import Agreement, Axis, Comparison, Runs, Side, placed, remarks, verdict
from perl.reports.charts import Line
from perl.reports.curves import Curves
from perl.reports.figures import Figure
from perl.reports.page import STEPS_SCRIPTS, document, part, write_html

X_NAMES = {"rollout": "rollout", "prompt": "number of the prompt", "step": "logged step"}
UNITS = {
    "entropy": "nats a token",
    "val-core/": "share of 1",
    "completions/clipped_ratio": "share",
    "completions/": "tokens",
    "prompts/": "tokens",
    "timing/": "seconds a rollout",
    "perf/throughput": "tokens/s a device",
    "perf/max_memory": "GB",
}
"""Of metrics whose names begin so; others have none but their name."""


def write_agreement(comparison: Comparison, runs: Runs, output: Path) -> Path:
    """Write the page; return `output`. A UserError where it cannot be written."""
    return write_html(render(comparison, runs), output)


def render(comparison: Comparison, runs: Runs) -> Markup:
    lines = {found.name: sides(found, runs, comparison.axis) for found in comparison.metrics}
    x_name = X_NAMES[comparison.axis.name]
    figures = [figure(found, lines[found.name], x_name) for found in comparison.metrics]
    logs = max(len(line.points) for pair in lines.values() for line in pair)
    section = part(
        "agreement",
        verdict=verdict(comparison),
        aligned=f"Aligned by {x_name} ({comparison.axis.why}).",
        metrics=comparison.metrics,
        renamed=any(found.logged_as != (found.name, found.name) for found in comparison.metrics),
        notes=remarks(comparison),
        x_name=comparison.axis.name,
        smoothed=charts.window(logs),
        figures=figures,
        steps=embed.json_for_html(columns([line for pair in lines.values() for line in pair])),
        files=[(side, run) for side in ("A", "B") for run in runs[side]],
    )
    return document(f"{title(runs['B'])} against {title(runs['A'])}", "Comparison", [section], STEPS_SCRIPTS)


def title(side: Sequence[Curves]) -> str:
    name = side[0].source.resolve().name
    return name if len(side) == 1 else f"{name} and {len(side) - 1} more"


def sides(found: Agreement, runs: Runs, axis: Axis) -> list[Line]:
    """The curve of each side: where it has several runs their mean, at the places that all of them have."""
    made, index = [], 0
    for side in ("A", "B"):
        each = []
        for run in runs[side]:
            spans = placed(run, found.name, axis, index)
            each.append({span.end: span.value for span in spans if math.isfinite(span.value)})
            index += 1
        places = sorted(set.intersection(*map(set, each)))
        points = [(place, statistics.fmean(values[place] for values in each)) for place in places]
        made.append(Line(f"{found.name} {side}", label(side, len(each)), points))
    return [line for line in made if line.points]


def label(side: Side, count: int) -> str:
    return side if count == 1 else f"{side}, mean of {count}"


def figure(found: Agreement, lines: Sequence[Line], x_name: str) -> Figure:
    unit = next((unit for start, unit in UNITS.items() if found.name.startswith(start)), found.name)
    chart = charts.trend(lines, found.name, unit=unit, x_name=x_name)
    share = "" if found.relative is None else f", {100 * found.relative:.2f} % of A"
    note = f"MAE {found.absolute:.4g}{share}."
    return Figure(found.name, note, chart, [(f"s{number}", line.name) for number, line in enumerate(lines)])


def columns(lines: Sequence[Line]) -> dict[str, Any]:
    """What steps.js reads: every place of any line, and each line's value there, null where it has none."""
    places = sorted({place for line in lines for place, _ in line.points})
    known = {line.metric: dict(line.points) for line in lines}
    values = {name: [float(f"{v[p]:.5g}") if p in v else None for p in places] for name, v in known.items()}
    return {"step": places, "values": values}
