"""The charts of a report, as SVG. Values are fractions, and shown in percent."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from perl.reports.svg import WIDTH, Scale, drawing, element, line, path, rect, text, ticks, title

BINS = 28
COLOURS = 8
"""Of lines in one chart; a further line has the first one's again."""


@dataclass(frozen=True, slots=True)
class Point:
    """An estimate and its 95 % interval, at a place on the horizontal axis."""

    x: float
    value: float
    low: float
    high: float

    @property
    def words(self) -> str:
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"

    @property
    def change(self) -> str:
        """The same of a difference."""
        return f"{100 * self.value:+.1f} ({100 * self.low:+.1f} to {100 * self.high:+.1f})".replace("-", "−")


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Line:
    """A metric over the optimizer steps."""

    metric: str
    """Its name in metrics.jsonl."""
    name: str
    """What it is called in the legend."""
    points: Sequence[tuple[int, float]]
    """(step, value), ascending, at least one."""
    band: Sequence[tuple[int, float, float]] = ()
    """(step, low, high) of what is drawn behind the line."""


@dataclass(frozen=True, slots=True)
class Bars:
    """Scores that differ in the model alone, the first of them without training."""

    title: str
    rows: Sequence[tuple[str, Point]]


ROW, BOTTOM = 44, 24
"""Heights of a row with an estimate, and of the labels below the last."""


def accuracies(rows: Sequence[tuple[str, Point]]) -> Markup:
    """A dot with its interval for each row, one below the other on one axis from 0 to 100 %."""
    scale = Scale(0.0, 1.0, 8, WIDTH - 8)
    said = [(name, point, point.words) for name, point in rows]
    return estimates("Accuracy with 95 % intervals", said, scale, percent_grid(scale, ROW * len(rows)))


def differences(rows: Sequence[tuple[str, Point]]) -> Markup:
    """A dot with its interval for each row on one axis of percentage points, zero in the middle."""
    reach = max(max(abs(point.low), abs(point.high)) for _, point in rows) or 0.01
    marks = ticks(-100 * reach, 100 * reach, 4)
    end = marks[-1]
    scale = Scale(-end / 100, end / 100, 8, WIDTH - 8)
    grid = []
    for mark in marks:
        x, anchor = scale(mark / 100), {-end: "start", end: "end"}.get(mark, "middle")
        grid.append(line(x, 0, x, ROW * len(rows), class_="grid" if mark else "level"))
        grid.append(
            text(
                f"{mark:+g}".replace("-", "−") if mark else "0",
                x,
                ROW * len(rows) + 17,
                text_anchor=anchor,
                class_="tick",
            )
        )
    said = [(name, point, point.change) for name, point in rows]
    return estimates("Differences in percentage points with 95 % intervals", said, scale, grid)


def estimates(what: str, rows: Sequence[tuple[str, Point, str]], scale: Scale, grid: Sequence[Markup]) -> Markup:
    """Rows are (name, estimate, the estimate in words); `grid` is what they stand on."""
    parts = list(grid)
    for place, (name, point, words) in enumerate(rows):
        y = place * ROW
        parts.append(text(name, 8, y + 16, class_="name"))
        parts.append(text(words, WIDTH - 8, y + 16, text_anchor="end", class_="value"))
        parts += interval(scale(point.low), scale(point.high), y + 29)
        dot = element("circle", title(f"{name}: {words}"), cx=scale(point.value), cy=y + 29, r=5, class_="dot")
        parts.append(dot)
    return drawing(
        ROW * len(rows) + BOTTOM, f"{what}. {'; '.join(f'{name}: {words}' for name, _, words in rows)}", *parts
    )


def percent_grid(scale: Scale, bottom: float, marks: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)) -> list[Markup]:
    """Vertical lines at 0, 25, … 100 % and their labels below."""
    parts = []
    for share in marks:
        anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
        parts.append(line(scale(share), 0, scale(share), bottom, class_="grid"))
        parts.append(text(f"{100 * share:.0f} %", scale(share), bottom + 17, text_anchor=anchor, class_="tick"))
    return parts


def interval(start: float, end: float, y: float) -> list[Markup]:
    ends = [line(x, y - 5, x, y + 5, class_="interval") for x in (start, end)]
    return [line(start, y, end, y, class_="interval"), *ends]


def bars(rows: Sequence[tuple[str, float, str]]) -> Markup:
    """Each rule's score as a bar on one axis from 0 to 100 %. Rows are (name, share, note alongside the share)."""
    row_height, bottom = 40, 24
    height = row_height * len(rows) + bottom
    scale = Scale(0.0, 1.0, 8, WIDTH - 8)
    parts = percent_grid(scale, height - bottom)
    for place, (name, share, note) in enumerate(rows):
        y = place * row_height
        said = f"{100 * share:.1f} %{note}"
        parts.append(text(name, 8, y + 15, class_="name"))
        parts.append(text(said, WIDTH - 8, y + 15, text_anchor="end", class_="value"))
        parts.append(rect(8, y + 22, WIDTH - 16, 9, rx=2, class_="track"))
        width = scale(share) - 8
        parts.append(rect(8, y + 22, width, 9, title(f"{name}: {said}"), rx=2, class_="bar" if place else "bar first"))
    label = "; ".join(f"{name}: {100 * share:.1f} %{note}" for name, share, note in rows)
    return drawing(height, f"Score by rule. {label}", *parts)


def shares(rows: Sequence[tuple[str, Sequence[tuple[str, str, int]]]]) -> Markup:
    """One bar a row, split by what became of its samples. Rows are (name, [(class, what, count), …])."""
    row_height, bottom = 44, 24
    height = row_height * len(rows) + bottom
    scale = Scale(0.0, 1.0, 8, WIDTH - 8)
    parts = percent_grid(scale, height - bottom)
    spoken = []
    for place, (name, groups) in enumerate(rows):
        y, total, start = place * row_height, sum(count for _, _, count in groups), 0
        parts.append(text(name, 8, y + 16, class_="name"))
        parts.append(text(f"{total:,} samples", WIDTH - 8, y + 16, text_anchor="end", class_="value"))
        for kind, what, count in groups:
            if count:
                left, right = scale(start / total), scale((start + count) / total)
                said = f"{name}: {count:,} {what}, {100 * count / total:.1f} %"
                width = max(right - left - 1, 0.75)
                parts.append(rect(left, y + 23, width, 12, title(said), class_=kind))
                spoken.append(said)
            start += count
    return drawing(height, "; ".join(spoken), *parts)


def lengths(finished: Sequence[int], truncated: Sequence[int]) -> Markup:
    """Histogram of completion lengths in tokens; those cut off stand on top of the others in their own colour."""
    height, left, top, right, bottom = 200, 40, 10, 8, 40
    both = [*finished, *truncated]
    longest = max(both)
    marks = ticks(0, max(longest, 1), 5)
    marks = [mark for mark in marks if mark == int(mark)]
    width = max(-(-(longest + 1) // BINS), 1)
    counts = [[0, 0] for _ in range(longest // width + 1)]
    for which, group in enumerate((finished, truncated)):
        for length in group:
            counts[length // width][which] += 1
    x = Scale(0, max(marks[-1], width * len(counts)), left, WIDTH - right)
    levels = [level for level in ticks(0, max(map(sum, counts)), 4) if level == int(level)]
    y = Scale(0, levels[-1], height - bottom, top)
    parts = []
    for level in levels:
        parts.append(line(left, y(level), WIDTH - right, y(level), class_="grid"))
        parts.append(text(f"{level:,.0f}", left - 6, y(level) + 4, text_anchor="end", class_="tick"))
    parts += [
        text(f"{mark:,.0f}", x(mark), height - bottom + 17, text_anchor="middle", class_="tick") for mark in marks
    ]
    parts.append(text("tokens", (left + WIDTH - right) / 2, height - 6, text_anchor="middle", class_="tick"))
    for place, (ended, cut) in enumerate(counts):
        start, stop = x(place * width) + 0.5, x((place + 1) * width) - 0.5
        reach = f"{place * width:,}" if width == 1 else f"{place * width:,} to {(place + 1) * width - 1:,}"
        said = title(f"{reach} tokens: {ended} finished, {cut} truncated")
        if ended:
            parts.append(rect(start, y(ended), stop - start, y(0) - y(ended), said, class_="bar"))
        if cut:
            parts.append(rect(start, y(ended + cut), stop - start, y(ended) - y(ended + cut), said, class_="bar cut"))
    label = (
        f"Lengths of {len(both)} completions: median {statistics.median(both):.0f}, longest {longest} tokens,"
        f" {len(truncated)} truncated"
    )
    return drawing(height, label, *parts)


def curves(
    lines: Sequence[Curve], what: str, *, x_name: str, logarithmic: bool = False, level: Point | None = None
) -> Markup:
    """Lines with a band for the interval. The vertical axis spans what there is, not 0 to 100 %.

    Args:
        level: drawn across, dashed, with its name below it: what the others are compared with.
    """
    height, left, top, right, bottom = 220, 44, 14, 14, 40
    points = [point for curve in lines for point in curve.points]
    known = [*points, level] if level else points
    levels = ticks(100 * min(p.low for p in known), 100 * max(p.high for p in known), 5)
    places = sorted({point.x for point in points})
    x = Scale(places[0], places[-1], left + 10, WIDTH - right, logarithmic)
    y = Scale(levels[0] / 100, levels[-1] / 100, height - bottom, top)
    parts = []
    for mark in levels:
        parts.append(line(left, y(mark / 100), WIDTH - right, y(mark / 100), class_="grid"))
        parts.append(text(f"{mark:g} %", left - 6, y(mark / 100) + 4, text_anchor="end", class_="tick"))
    for place in spaced(places, x):
        parts.append(text(f"{place:g}", x(place), height - bottom + 17, text_anchor="middle", class_="tick"))
    parts.append(text(x_name, (left + WIDTH - right) / 2, height - 6, text_anchor="middle", class_="tick"))
    if level:
        said = title(f"base: {level.words}")
        parts.append(
            element("line", said, x1=left, y1=y(level.value), x2=WIDTH - right, y2=y(level.value), class_="level")
        )
        parts.append(text("base", WIDTH - right, y(level.value) - 5, text_anchor="end", class_="tick"))
    for number, curve in enumerate(lines):
        parts += band(curve, x, y, x_name, number)
    spoken = "; ".join(f"{c.name}, {x_name} {p.x:g}: {p.words}" for c in lines for p in c.points)
    return drawing(height, f"{what}. {spoken}", *parts)


def band(curve: Curve, x: Scale, y: Scale, x_name: str, number: int) -> list[Markup]:
    """One line, its band, and a dot for each point."""
    upper = [(x(p.x), y(p.high)) for p in curve.points]
    lower = [(x(p.x), y(p.low)) for p in reversed(curve.points)]
    parts = [path([*upper, *lower], class_=f"band s{number}")]
    if len(curve.points) == 1:
        (only,) = curve.points
        parts = [line(x(only.x), y(only.low), x(only.x), y(only.high), class_="interval")]
    parts.append(path([(x(p.x), y(p.value)) for p in curve.points], class_=f"line s{number}"))
    for p in curve.points:
        said = title(f"{curve.name}, {x_name} {p.x:g}: {p.words}")
        parts.append(element("circle", said, cx=x(p.x), cy=y(p.value), r=4, class_=f"dot s{number}"))
    return parts


def spaced(places: Sequence[float], x: Scale, gap: float = 34) -> list[float]:
    """Those places whose labels do not run into each other, the first and the last among them."""
    kept: list[float] = []
    for place in places:
        if not kept or x(place) - x(kept[-1]) >= gap:
            kept.append(place)
    if kept[-1] != places[-1]:
        kept[-1] = places[-1]
    return kept


TREND_HEIGHT = 200
SMOOTHED_FROM = 40
"""Logs from which a line is drawn as their running mean, with the logs themselves thin behind it."""
DENSE_FROM = 300
"""Logs from which they are drawn paler."""


def window(count: int) -> int:
    """Logs in the running mean of a line of `count` logs: about a fifteenth of them, odd; 1 is none."""
    return count // 30 * 2 + 1 if count >= SMOOTHED_FROM else 1


def running_mean(values: Sequence[float], size: int) -> list[float]:
    """Mean of the `size` (odd) values around each value; at the ends of as many on both sides as there are."""
    sums = [0.0, *itertools.accumulate(values)]
    means = []
    for place in range(len(values)):
        reach = min(size // 2, place, len(values) - 1 - place)
        means.append((sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1))
    return means


def trend(
    lines: Sequence[Line],
    what: str,
    *,
    unit: str,
    span: Sequence[float] = (),
    smooth: bool = True,
    x_name: str = "optimizer step",
) -> Markup:
    """Metrics over the optimizer steps. The page's script finds what it needs for the values under the pointer in the
    data attributes.

    Args:
        unit: of the vertical axis, written above it.
        span: values that the vertical axis shows in any case.
        smooth: draw the running mean where there are many logs.
        x_name: what the horizontal axis counts; its last word is what one of them is called.
    """
    top, right, bottom = 30, 14, 36
    x_word = x_name.split()[-1]
    values = [value for line in lines for _, value in line.points]
    values += [value for line in lines for _, *reach in line.band for value in reach]
    steps = [step for line in lines for step, _ in line.points]
    levels = ticks(min([*values, *span]), max([*values, *span]), 5)
    labels = [f"{level:,.10g}".replace("-", "−") for level in levels]
    left = 14 + 6.6 * max(map(len, labels))
    x = Scale(min(steps), max(steps), left, WIDTH - right)
    y = Scale(levels[0], levels[-1], TREND_HEIGHT - bottom, top)
    parts = [text(unit, 0, 12, class_="tick unit"), text("", WIDTH - right, 12, text_anchor="end", class_="readout")]
    for level, label in zip(levels, labels, strict=True):
        parts.append(line(left, y(level), WIDTH - right, y(level), class_="grid"))
        parts.append(text(label, left - 6, y(level) + 4, text_anchor="end", class_="tick"))
    for mark in whole_marks(min(steps), max(steps)):
        label = f"{mark:,}"
        place = min(x(mark), WIDTH - 3.5 * len(label))  # the last one would be cut off at the edge
        parts.append(line(x(mark), y(levels[0]), x(mark), y(levels[0]) + 4, class_="grid"))
        parts.append(text(label, place, TREND_HEIGHT - bottom + 17, text_anchor="middle", class_="tick"))
    middle = (left + WIDTH - right) / 2
    parts.append(text(x_name, middle, TREND_HEIGHT - 4, text_anchor="middle", class_="tick"))
    for number, each in enumerate(lines):
        if len(each.band) > 1:
            upper = [(x(step), y(high)) for step, _, high in each.band]
            lower = [(x(step), y(low)) for step, low, _ in reversed(each.band)]
            parts.append(path([*upper, *lower], class_=f"band s{number % COLOURS}"))
    for number, each in enumerate(lines):
        parts += trace(each, x, y, number % COLOURS, smooth)
    parts.append(line(left, top, left, TREND_HEIGHT - bottom, class_="cursor", visibility="hidden"))
    return drawing(
        TREND_HEIGHT,
        f"{what} ({unit}). {'; '.join(in_words(each, x_word) for each in lines)}",
        *parts,
        class_="chart trend",
        data_metrics=json.dumps([each.metric for each in lines]),
        data_plot=json.dumps([x.low, x.high, x.start, x.end]),
        **({} if x_word == "step" else {"data_x": x_word}),
    )


def trace(each: Line, x: Scale, y: Scale, number: int, smooth: bool) -> list[Markup]:
    """One line, or its running mean with the logs behind it; a dot where there is a single log."""
    if len(each.points) == 1:
        ((step, value),) = each.points
        return [element("circle", cx=x(step), cy=y(value), r=4.0, class_=f"dot s{number}")]
    steps, values = zip(*each.points, strict=True)
    size = window(len(values)) if smooth else 1
    drawn = path(
        [(x(s), y(v)) for s, v in zip(steps, running_mean(values, size), strict=True)], class_=f"line s{number}"
    )
    if size == 1:
        return [drawn]
    kind = "raw dense" if len(values) > DENSE_FROM else "raw"
    return [path([(x(s), y(v)) for s, v in each.points], class_=f"{kind} s{number}"), drawn]


def in_words(each: Line, x_word: str) -> str:
    (first, start), (last, end) = each.points[0], each.points[-1]
    return f"{each.name}: {start:.4g} at {x_word} {first:,}, {end:.4g} at {x_word} {last:,}"


def whole_marks(low: int, high: int) -> list[int]:
    """About five round whole numbers from `low` to `high`; `low` itself where there are none."""
    return [int(mark) for mark in ticks(low, high, 5) if low <= mark <= high and mark == int(mark)] or [low]


GROUP, BAR = 26, 26
"""Heights of a group's title and of a bar with the space below it."""
PERCENT_MARKS = (0.0, 0.5, 1.0)


def before_after(groups: Sequence[Bars]) -> Markup:
    """A bar with its interval for each score, on one axis from 0 to 100 %."""
    names = [name for group in groups for name, _ in group.rows]
    left, right = min(14 + 6.6 * max(map(len, names)), 150), WIDTH - 150
    scale = Scale(0.0, 1.0, left, right)
    parts, y, spoken = [], 0, []
    for group in groups:
        parts.append(text(group.title, 0, y + 17, class_="name"))
        y += GROUP
        end = y + BAR * len(group.rows)
        parts += [line(scale(share), y - 2, scale(share), end - 4, class_="grid") for share in PERCENT_MARKS]
        for place, (name, point) in enumerate(group.rows):
            said = f"{name}: {point.words}"
            spoken.append(f"{group.title}, {said}")
            parts.append(text(shortened(name, 19), left - 8, y + 14, text_anchor="end", class_="tick"))
            kind = "bar first" if place else "bar before"
            parts.append(rect(left, y + 2, scale(point.value) - left, 16, title(said), rx=2, class_=kind))
            parts += interval(scale(point.low), scale(point.high), y + 10)
            parts.append(text(point.words, WIDTH, y + 14, text_anchor="end", class_="value"))
            y += BAR
    for share in PERCENT_MARKS:
        parts.append(text(f"{100 * share:.0f} %", scale(share), y + 12, text_anchor="middle", class_="tick"))
    label = f"Scores with 95 % intervals. {'; '.join(spoken)}"
    return drawing(y + 18, label, *parts, class_="chart scores")


def shortened(name: str, longest: int) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"
