"""The charts of a report, as SVG: one of lines (`trend`) and one of bars (`bars`). Scores are fractions, and shown in
percent."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from perl.reports.svg import WIDTH, Scale, drawing, element, line, path, rect, text, ticks, title

COLOURS = 8
"""Of lines in one chart; a further line has the first one's again."""
HEIGHT, ROW = 200, 26
"""Heights of a chart of lines, and of a bar with the space below it."""
SMOOTHED_FROM = 40
"""Logs from which a line is drawn as their running mean, with the logs themselves thin behind it."""
DENSE_FROM = 300
"""Logs from which they are drawn paler."""
PERCENT = ((0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %"))


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
class Bar:
    """One row."""

    name: str
    parts: Sequence[tuple[str, float, str]]
    """(class, length, what it is) of the bar's parts, from zero on."""
    words: str
    """The value, alongside the bar."""
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Bars:
    """Rows under a title."""

    title: str
    rows: Sequence[Bar]


def percent(score: Mapping[str, Any]) -> str:
    """`score` has value, low and high."""
    return f"{100 * score['value']:.1f} % ({100 * score['low']:.1f} to {100 * score['high']:.1f})"


def points(score: Mapping[str, Any]) -> str:
    """The same of a difference."""
    words = f"{100 * score['value']:+.1f} ({100 * score['low']:+.1f} to {100 * score['high']:+.1f})"
    return words.replace("-", "−")


def estimate(name: str, score: Mapping[str, Any], kind: str = "bar first", *, difference: bool = False) -> Bar:
    """A bar with its 95 % interval."""
    words = points(score) if difference else percent(score)
    return Bar(name, [(kind, score["value"], f"{name}: {words}")], words, (score["low"], score["high"]))


def differences(what: str, rows: Sequence[Bar]) -> Markup:
    """Bars to both sides of zero on one axis of percentage points."""
    reach = max(abs(end) for row in rows for end in row.interval or ()) or 0.01
    marks = ticks(-100 * reach, 100 * reach, 3)
    labels = [(mark / 100, f"{mark:+g}".replace("-", "−") if mark else "0") for mark in marks]
    return bars([Bars("", rows)], what, labels)


def bars(groups: Sequence[Bars], what: str, marks: Sequence[tuple[float, str]] = PERCENT) -> Markup:
    """A row a bar on one axis, whose `marks` (place, label) reach from end to end."""
    rows = [row for group in groups for row in group.rows]
    left = min(14 + 6.6 * max(len(row.name) for row in rows), 150)
    scale = Scale(marks[0][0], marks[-1][0], left, WIDTH - min(150, 24 + 6.6 * max(len(row.words) for row in rows)))
    drawn, y, spoken = [], 0, []
    for group in groups:
        if group.title:
            drawn.append(text(group.title, 0, y + 17, class_="name"))
            y += ROW
        end = y + ROW * len(group.rows)
        drawn += [line(scale(mark), y - 2, scale(mark), end - 4, class_="grid") for mark, _ in marks]
        for row in group.rows:
            drawn.append(text(shortened(row.name, 19), left - 8, y + 14, text_anchor="end", class_="tick"))
            start = 0.0
            for kind, length, words in row.parts:
                x, stop = sorted((scale(start), scale(start + length)))
                drawn.append(rect(x, y + 2, stop - x, 16, title(words), rx=2, class_=kind))
                spoken.append(f"{group.title}, {words}" if group.title else words)
                start += length
            if row.interval:
                ends = [scale(place) for place in row.interval]
                drawn.append(line(ends[0], y + 10, ends[1], y + 10, class_="interval"))
                drawn += [line(x, y + 5, x, y + 15, class_="interval") for x in ends]
            drawn.append(text(row.words, WIDTH, y + 14, text_anchor="end", class_="value"))
            y += ROW
    drawn += [text(label, scale(mark), y + 12, text_anchor="middle", class_="tick") for mark, label in marks]
    return drawing(y + 18, f"{what}. {'; '.join(spoken)}", *drawn, class_="chart scores")


def shortened(name: str, longest: int) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"


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
    level: float | None = None,
    pointer: bool = True,
) -> Markup:
    """Lines over steps, each with its band. The page's script finds what it needs for the values under the pointer in
    the data attributes.

    Args:
        unit: of the vertical axis, written above it.
        span: values that the vertical axis shows in any case.
        smooth: draw the running mean where there are many logs.
        x_name: what the horizontal axis counts; its last word is what one of them is called.
        level: drawn across, dashed: what the lines are compared with.
        pointer: the script shows values under the pointer; else each point, a percentage with its interval, has a dot
            that says it.
    """
    top, right, bottom = 30, 14, 36
    x_word = x_name.split()[-1]
    values = [*span, *([] if level is None else [level])]
    values += [value for line in lines for _, value in line.points]
    values += [value for line in lines for _, *reach in line.band for value in reach]
    steps = [step for line in lines for step, _ in line.points]
    levels = ticks(min(values), max(values), 5)
    labels = [f"{mark:,.10g}".replace("-", "−") for mark in levels]
    left = 14 + 6.6 * max(map(len, labels))
    x = Scale(min(steps), max(steps), left, WIDTH - right)
    y = Scale(levels[0], levels[-1], HEIGHT - bottom, top)
    drawn = [text(unit, 0, 12, class_="tick unit"), text("", WIDTH - right, 12, text_anchor="end", class_="readout")]
    for mark, label in zip(levels, labels, strict=True):
        drawn.append(line(left, y(mark), WIDTH - right, y(mark), class_="grid"))
        drawn.append(text(label, left - 6, y(mark) + 4, text_anchor="end", class_="tick"))
    for mark in whole_marks(min(steps), max(steps)):
        label = f"{mark:,}"
        place = min(x(mark), WIDTH - 3.5 * len(label))  # the last one would be cut off at the edge
        drawn.append(line(x(mark), y(levels[0]), x(mark), y(levels[0]) + 4, class_="grid"))
        drawn.append(text(label, place, HEIGHT - bottom + 17, text_anchor="middle", class_="tick"))
    middle = (left + WIDTH - right) / 2
    drawn.append(text(x_name, middle, HEIGHT - 4, text_anchor="middle", class_="tick"))
    if level is not None:
        drawn.append(line(left, y(level), WIDTH - right, y(level), class_="level"))
        drawn.append(text("base", WIDTH - right, y(level) - 5, text_anchor="end", class_="tick"))
    for number, each in enumerate(lines):
        if len(each.band) > 1:
            upper = [(x(step), y(high)) for step, _, high in each.band]
            lower = [(x(step), y(low)) for step, low, _ in reversed(each.band)]
            drawn.append(path([*upper, *lower], class_=f"band s{number % COLOURS}"))
    for number, each in enumerate(lines):
        drawn += trace(each, x, y, number % COLOURS, smooth)
        drawn += [] if pointer else dots(each, x, y, number % COLOURS, x_word)
    drawn.append(line(left, top, left, HEIGHT - bottom, class_="cursor", visibility="hidden"))
    data = {"data_metrics": json.dumps([each.metric for each in lines]),
            "data_plot": json.dumps([x.low, x.high, x.start, x.end])} if pointer else {}  # fmt: skip
    words = "; ".join(in_words(each, x_word) for each in lines)
    return drawing(HEIGHT, f"{what} ({unit}). {words}", *drawn, class_="chart trend", **data)


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


def dots(each: Line, x: Scale, y: Scale, number: int, x_word: str) -> list[Markup]:
    """A dot a point, which says its value and interval."""
    drawn = []
    for (step, value), (_, low, high) in zip(each.points, each.band, strict=True):
        words = title(f"{each.name}, {x_word} {step:,}: {value:.1f} % ({low:.1f} to {high:.1f})")
        drawn.append(line(x(step), y(low), x(step), y(high), class_="interval"))
        drawn.append(element("circle", words, cx=x(step), cy=y(value), r=4, class_=f"dot s{number}"))
    return drawn


def in_words(each: Line, x_word: str) -> str:
    (first, start), (last, end) = each.points[0], each.points[-1]
    return f"{each.name}: {start:.4g} at {x_word} {first:,}, {end:.4g} at {x_word} {last:,}"


def whole_marks(low: int, high: int) -> list[int]:
    """About five round whole numbers from `low` to `high`; `low` itself where there are none."""
    return [int(mark) for mark in ticks(low, high, 5) if low <= mark <= high and mark == int(mark)] or [low]
