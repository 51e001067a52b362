"""The README's figure: the reward of a training alongside the scores before and after it.

    python -m benchmarks.readme_figure outputs/quickstart_1_DATE [--output assets/quickstart.svg]

SVG that stands alone, without anything from outside: one file for a light background and one for a dark one.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from perl.base.errors import UserError, report_errors
from perl.base.files import atomic_write
from perl.base.paths import user_path
from perl.reports import figures
from perl.reports.figures import Figure
from perl.reports.page import asset
from perl.reports.sources import Material, read_material
from perl.reports.svg import WIDTH, element, rect, text
from perl.tools.report import compared
from perl.tools.stages import ROOT

PAD, HEAD = 20, 58
"""Space around a chart, and above it for its title and note."""
STYLE = """.frame { fill: var(--card); stroke: var(--line); }
text { font-family: var(--sans); }
.title { font-size: 16px; font-weight: 600; fill: var(--ink); }
.note { font-size: 12.5px; fill: var(--soft); }
"""


def write_figure(material: Material, file: Path) -> list[Path]:
    """Write `file` with _light and _dark before its suffix; return the two paths.

    Raises:
        UserError: the material has no training or no scores before and after; or a file cannot be written.
    """
    if file.suffix != ".svg":
        raise UserError(f"--output {file}: draws SVG; write a name that ends in .svg")
    scores = figures.before_and_after(material.runs, material.pairs)
    reward = figures.of_reward(material.training) if material.training else None
    if scores is None or reward is None:
        missing = (
            "no training" if reward is None else "no scores of an adapter and of its base, sampled in the same way"
        )
        raise UserError(f"DIR: the folders hold {missing}; give those of a run and of both evaluations")
    written = []
    for scheme, palette in palettes().items():
        path = file.with_name(f"{file.stem}_{scheme}.svg")
        try:
            with atomic_write(path) as svg:
                svg.write(alone([reward, scores], palette) + "\n")
        except OSError as error:
            raise UserError(f"--output {path}: {error.strerror}; write another file") from error
        written.append(path)
    return written


def palettes() -> dict[str, dict[str, str]]:
    """The page's colours and fonts by name, light and dark."""
    light, _, dark = asset("palette.css").partition("@media")
    light_colours, dark_colours = (dict(re.findall(r"--([\w-]+):\s*([^;]+);", part)) for part in (light, dark))
    return {"light": light_colours, "dark": light_colours | dark_colours}


def alone(drawn: Sequence[Figure], palette: dict[str, str]) -> Markup:
    """Figures next to each other, as high as the highest."""
    boxes = [re.search(r'viewBox="0 0 \S+ (\S+)"', figure.chart) for figure in drawn]
    heights = [float(box[1]) for box in boxes if box]
    width, height = len(drawn) * (WIDTH + 2 * PAD), max(heights) + HEAD + PAD
    style = asset("charts.css") + STYLE
    style = re.sub(r"var\(--([\w-]+)\)", lambda match: " ".join(palette[match[1]].split()), style)
    parts = [element("style", Markup(style)), rect(0.5, 0.5, width - 1, height - 1, rx=8, class_="frame")]
    for place, (figure, chart_height) in enumerate(zip(drawn, heights, strict=True)):
        x = place * (WIDTH + 2 * PAD) + PAD
        parts.append(text(figure.title, x, 28, class_="title"))
        parts.append(text(figure.note, x, 46, class_="note"))
        box = f' x="{x}" y="{HEAD}" width="{WIDTH}" height="{chart_height:g}"'
        parts.append(Markup(str(figure.chart).replace("<svg", "<svg" + box, 1)))
    label = "; ".join(figure.title for figure in drawn)
    return element(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height:g}",
        width=width,
        height=height,
        role="img",
        aria_label=label,
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Draw the reward and the scores before and after.")
    parser.add_argument("folders", metavar="DIR", nargs="+", help="as after `python -m perl report`")
    parser.add_argument(
        "--output", default=str(ROOT / "assets" / "quickstart.svg"), help="writes _light and _dark before its suffix"
    )
    return parser


def main() -> int:
    with report_errors():
        args = make_parser().parse_args()
        material = compared(read_material([user_path(folder) for folder in args.folders]))
        for file in write_figure(material, user_path(args.output)):
            print(f"{file}: {file.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
