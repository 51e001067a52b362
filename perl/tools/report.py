"""python -m perl report: write report.html of a training, of evaluations, or of both."""

from __future__ import annotations

import argparse
from dataclasses import replace

from perl.base.files import target
from perl.base.paths import user_path
from perl.evaluation.compare import compare
from perl.reports.page import NAME, write_page
from perl.reports.sources import Material, read_material, untrained_like


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a run's folder, the --result_dir of an evaluation, or a folder that holds such; several make one page"
    parser.add_argument("folders", metavar="DIR", nargs="+", help=what)
    parser.add_argument("--output", help=f"file to write; default: {NAME} in the first DIR")


def run(args: argparse.Namespace) -> int:
    material = compared(read_material([user_path(folder) for folder in args.folders]))
    output = user_path(args.output) if args.output else material.folder / NAME
    write_page(material, target(output) if args.output else output)
    print(f"{output}: {output.stat().st_size / 1e3:,.0f} kB, needs no network")
    return 0


def compared(material: Material) -> Material:
    """Each adapter's scores compared with those of its base where both are given, unless compare.json has it already
    and in a sweep, which shows the base among its checkpoints."""
    if material.label != "evaluation":
        return material
    runs = list(material.runs)
    for index, run in enumerate(runs):
        before = untrained_like(run, runs)
        if before is None or run.comparison:
            continue
        comparison = compare(runs[before].folder, run.folder, flags=("DIR", "DIR"))
        shown = {scored.dataset for scored in run.scored}
        datasets = {name: paired for name, paired in comparison.datasets.items() if name in shown}
        runs[index] = replace(run, comparison=replace(comparison, datasets=datasets))
    return replace(material, runs=runs)
