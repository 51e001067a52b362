"""comparison.html: the scores of trainings that were compared, their curves, and each run."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from perl.reports import charts, embed
from perl.reports.charts import COLOURS, Bars, Line
from perl.reports.figures import Figure
from perl.reports.methods import Comparison, Setting
from perl.reports.page import STEPS_SCRIPTS, document, part, write_html


def write_comparison(comparison: Comparison, output: Path) -> Path:
    """Write the page; return `output`. A UserError where it cannot be written."""
    return write_html(render(comparison), output)


def render(comparison: Comparison) -> Markup:
    """The scores of each dataset, the curves, and the runs."""
    lines = curves(comparison)
    smoothed = max((each.curve.smoothed for each in comparison.settings if each.curve), default=1)
    datasets = list(dict.fromkeys(place.dataset for place in comparison.places))
    section = part(
        "methods",
        comparison=comparison,
        datasets=[(name, [p for p in comparison.places if p.dataset == name]) for name in datasets],
        figures={name: score_figures(comparison, name) for name in datasets},
        several_bases=len(comparison.bases) > 1,
        curve=curve_figure(comparison, lines, smoothed) if lines else None,
        steps=embed.columns(lines),
    )
    models = " and ".join(dict.fromkeys(Path(each.model).name or each.model for each in comparison.settings))
    compared = ", ".join(each.name for each in comparison.settings)
    return document(f"{models}: {compared}", "Comparison of trainings", [section], STEPS_SCRIPTS if lines else ())


def score_figures(comparison: Comparison, dataset: str) -> list[Figure]:
    """For each way of sampling: the accuracies, and the changes from the first values."""
    figures = []
    for place in (place for place in comparison.places if place.dataset == dataset):
        how = comparison.title(place)
        bases = [(base_name(comparison, model), scores[place]) for model, scores in comparison.bases.items()]
        rows = [charts.estimate(name, score._asdict(), "bar before") for name, score in bases]
        rows += [
            charts.estimate(each.name, each.scores[place]._asdict())
            for each in comparison.settings
            if place in each.scores
        ]
        if rows:
            chart = charts.bars([Bars("", rows)], "Accuracy with 95 % intervals")
            figures.append(Figure(f"Accuracy, {how}", "With 95 % intervals.", chart))
        changes = [
            charts.estimate(each.name, each.changes[place]._asdict(), difference=True)
            for each in comparison.settings
            if place in each.changes
        ]
        if changes:
            note = "Percentage points, paired seed by seed and problem by problem, with 95 % intervals."
            chart = charts.differences("Differences in percentage points with 95 % intervals", changes)
            figures.append(Figure(f"Change from {comparison.settings[0].name}, {how}", note, chart))
    return figures


def base_name(comparison: Comparison, model: str) -> str:
    return "base" if len(comparison.bases) == 1 else f"base {Path(model).name}"


def curves(comparison: Comparison) -> list[Line]:
    """The curve of each set of values; those of one metric alone, which is the first one's."""
    drawn = [each for each in comparison.settings if each.curve]
    metric = drawn[0].curve.metric if drawn and drawn[0].curve else None
    return [
        Line(f"{number}", label(each), each.curve.points, each.curve.band)
        for number, each in enumerate(drawn)
        if each.curve and each.curve.metric == metric
    ]


def label(each: Setting) -> str:
    return each.name if len(each.finished) == 1 else f"{each.name}, mean of {len(each.finished)}"


def curve_figure(comparison: Comparison, lines: list[Line], smoothed: int) -> Figure:
    metric = next(each.curve.metric for each in comparison.settings if each.curve)
    note = "Mean over the seeds; the band reaches from the lowest seed to the highest."
    if smoothed > 1:
        note += f" Running means of {smoothed} logs."
    span = (0.0,) if metric == "reward" else ()
    chart = charts.trend(lines, metric.capitalize(), unit=metric, span=span, smooth=False)
    legend = [(f"s{number % COLOURS}", line.name) for number, line in enumerate(lines)]
    return Figure(metric.capitalize(), note, chart, legend)
