"""The charts of a report, as SVG. Values are fractions, and shown in percent."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from perl.reports.svg import WIDTH, Scale, drawing, element, line, path, rect, text, ticks, title

BINS = 28


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


def percent_grid(scale: Scale, bottom: float) -> list[Markup]:
    """Vertical lines at 0, 25, … 100 % and their labels below."""
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
        parts.append(line(scale(share), 0, scale(share), bottom, class_="grid"))
        parts.append(text(f"{100 * share:.0f} %", scale(share), bottom + 17, text_anchor=anchor, class_="tick"))
    return parts


def interval(start: float, end: float, y: float) -> list[Markup]:
    ends = [line(x, y - 5, x, y + 5, class_="interval") for x in (start, end)]
    return [line(start, y, end, y, class_="interval"), *ends]


def bars(rows: Sequence[tuple[str, float, str]]) -> Markup:
    """Each rule's score as a bar on one axis from 0 to 100 %. Rows are (name, share, note beside the share)."""
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
