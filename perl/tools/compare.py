"""python -m perl compare A B: two evaluations side by side, problem by problem."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from perl.errors import UserError
from perl.evaluation.compare import compare, print_comparison
from perl.reports.page import NAME, write_report
from perl.results import COMPARE, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("A", help="result folder of an evaluation")
    text = f"result folder that is compared with A; compare.json is written here, and {NAME} again where there is one"
    parser.add_argument("B", help=text)


def run(args: argparse.Namespace) -> int:
    this = Path(args.B).expanduser()
    comparison = compare(Path(args.A).expanduser(), this, flags=("A", "B"))
    try:
        write_json(this / COMPARE, comparison)
    except OSError as error:
        raise UserError(f"{this / COMPARE}: {error.strerror}") from error
    print_comparison(comparison, Console())
    if (this / NAME).is_file():
        print(f"report: {write_report(this)}")
    return 0
