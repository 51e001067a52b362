"""The few pieces of SVG that the charts are made of. Colours and fonts come from report.css, by class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 420
"""Of every chart, in units that are about a pixel: a phone shows it whole and readable."""


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """An element; text and values are escaped, `class_` is class, `text_anchor` is text-anchor."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_number(value))}"' for name, value in attributes.items()
    )
    return Markup("<{tag}{given}>{inner}</{tag}>").format(
        tag=Markup(tag), given=Markup(given), inner=Markup("").join(children)
    )


def _number(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def text(content: str, x: float, y: float, **attributes: object) -> Markup:
    return element("text", content, x=float(x), y=float(y), **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> Markup:
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), **attributes)


def rect(x: float, y: float, width: float, height: float, *children: str, **attributes: object) -> Markup:
    size = {"width": float(max(width, 0)), "height": float(max(height, 0))}
    return element("rect", *children, x=float(x), y=float(y), **size, **attributes)


def title(content: str) -> Markup:
    """Shown while the pointer rests on the parent."""
    return element("title", content)


def drawing(height: float, label: str, *children: str, **attributes: object) -> Markup:
    """A chart. `label` is what a screen reader says in its place."""
    box = f"0 0 {WIDTH} {height:g}"
    attributes = {"viewBox": box, "role": "img", "aria_label": label, "class_": "chart"} | attributes
    return element("svg", *children, **attributes)


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to units."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = 0.5 if self.high == self.low else (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) from at most `low` to at least `high`."""
    if high <= low:
        high = low + max(1, 1e-6 * abs(low))  # low + 1 is low where that is large
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(10, 2 - math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def path(points: Sequence[tuple[float, float]], **attributes: object) -> Markup:
    return element("path", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), **attributes)
