"""python -m perl compare A B: two evaluations problem by problem, or two trainings curve by curve."""

from __future__ import annotations

import argparse
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perl.base.errors import UserError
from perl.base.files import target, write_json
from perl.base.paths import user_path
from perl.evaluation.compare import compare, print_comparison
from perl.reports.agreement import LIMITS, Comparison, Runs, compare_runs, limit_in_words
from perl.reports.agreement_page import write_agreement
from perl.reports.curves import READERS, read_curves
from perl.reports.page import NAME, write_report
from perl.scoring.results import COMPARE, SAMPLES, SWEEP

log = logging.getLogger(__name__)

TRAINING_FLAGS = ("output", "reward_limit", "loss_limit", "window")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trainings = f"or the log of a training ({', '.join(READERS)}); several seeds of it with commas: run1,run2,run3"
    parser.add_argument("A", help=f"the reference: result folder of an evaluation, {trainings}")
    text = (
        f"what is compared with A; with evaluations compare.json is written here, and {NAME} again where there is one"
    )
    parser.add_argument("B", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    group = parser.add_argument_group("trainings")
    group.add_argument("--output", metavar="FILE.html", help="also write a page with both curves of each metric")
    text = "largest relative MAE of the {}, as a fraction; default: {}"
    group.add_argument("--reward_limit", type=float, help=text.format("reward", LIMITS["reward"]))
    group.add_argument("--loss_limit", type=float, help=text.format("loss", LIMITS["loss"]))
    group.add_argument("--window", type=int, help="steps whose mean is one value of a curve; default: 1")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; of trainings 1 where they are not within the limits."""
    paths = {side: split(getattr(args, side), side) for side in ("A", "B")}
    if any(is_evaluation(path) for side in paths.values() for path in side):
        return compare_evaluations(args, paths["A"], paths["B"])
    return compare_trainings(args, paths)


def split(text: str, flag: str) -> list[Path]:
    """The paths that `text` names: a comma in the name of what exists separates nothing."""
    if os.path.exists(user_path(text)):  # Path.exists raises where the names together are too long for one
        return [user_path(text)]
    names = text.split(",")
    if not all(names):
        raise UserError(f"{flag} {text}: an empty name between commas; write run1,run2")
    return [user_path(name) for name in names]


def is_evaluation(path: Path) -> bool:
    return (path / SWEEP).is_file() or (path / SAMPLES).is_file() or any(path.glob(f"*/{SAMPLES}"))


def compare_evaluations(args: argparse.Namespace, a: list[Path], b: list[Path]) -> int:
    if len(a) + len(b) > 2:
        raise UserError("A, B: several folders a side are for trainings; write one result folder each")
    if flag := next((name for name in TRAINING_FLAGS if getattr(args, name) is not None), None):
        raise UserError(f"--{flag} is for trainings, and these are evaluations; leave it out")
    other, this = a[0], b[0]
    for flag, path in (("A", other), ("B", this)):
        if path.exists() and not is_evaluation(path):
            raise UserError(f"{flag} {path}: is no evaluation, and the other one is; write two of one kind")
    comparison = compare(other, this, flags=("A", "B"))
    content = asdict(comparison)
    if args.json:
        print(json.dumps(content, ensure_ascii=False))
    else:
        print_comparison(comparison, Console())
    try:
        write_json(this / COMPARE, content)
        report = write_report(this) if (this / NAME).is_file() else None
    except (OSError, UserError) as error:
        why = f"{this / COMPARE}: {error.strerror}" if isinstance(error, OSError) else error
        log.warning("not written: %s", why)
        return 0
    if report and not args.json:
        print(f"report: {report}")
    return 0


def compare_trainings(args: argparse.Namespace, paths: dict[str, list[Path]]) -> int:
    check_distinct(paths)
    runs: Runs = {side: [read_curves(path, side) for path in paths[side]] for side in ("A", "B")}
    limits = {name: given(args, f"{name}_limit", limit) for name, limit in LIMITS.items()}
    window = 1 if args.window is None else args.window
    if window < 1:
        raise UserError(f"--window {window}: write 1 or more steps")
    comparison = compare_runs(runs, limits, window)
    if args.json:
        sources = {
            side: [{"source": str(run.source), "format": run.format, "updates": run.updates} for run in runs[side]]
            for side in ("A", "B")
        }
        print(json.dumps({"runs": sources} | comparison.as_json(), ensure_ascii=False))
    else:
        print_trainings(comparison, runs, Console())
    if args.output:
        page = write_agreement(comparison, runs, target(user_path(args.output)))
        if not args.json:
            print(f"report: {page}")
    return 0 if comparison.within else 1


def given(args: argparse.Namespace, name: str, default: float) -> float:
    value = getattr(args, name)
    if value is not None and not value > 0:
        raise UserError(f"--{name} {value:g}: write a fraction above 0, such as {default:g}")
    return default if value is None else value


def check_distinct(paths: dict[str, list[Path]]) -> None:
    """A run that is compared with itself agrees whatever it is."""
    seen: dict[Path, str] = {}
    for side in paths:
        for path in paths[side]:
            if before := seen.get(path.resolve()):
                raise UserError(f"{side} {path}: is given twice, also as {before}; write another run")
            seen[path.resolve()] = side


def print_trainings(comparison: Comparison, runs: Runs, console: Console) -> None:
    """The files, a line a metric with its limit, what else is to be said, and the verdict. 80 columns are enough."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    for side in ("A", "B"):
        for run in runs[side]:
            updates = f", {run.updates} optimizer steps a rollout" if run.updates and run.updates > 1 else ""
            say(f"{side}: {run.source} ({run.format}{updates})")
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("metric", overflow="fold")  # what is too long goes on in the next line
    for column in ("mean A", "mean B", "abs. MAE", "rel. MAE"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for metric in comparison.metrics:
        relative = "–" if metric.relative is None else f"{100 * metric.relative:.2f} %"
        limit = "none" if metric.limit is None else f"{metric.verdict} {limit_in_words(metric)}"
        means = map(short, (metric.mean_a, metric.mean_b, metric.absolute))
        table.add_row(escape(metric.name), *means, relative, limit)
    console.print(table)
    for line in comparison.remarks:
        say(f"- {line}")
    say(comparison.verdict)


def short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
