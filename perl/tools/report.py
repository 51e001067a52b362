"""python -m perl report: write report.html of a result folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from perl.reports.page import NAME, write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("result_dir", metavar="RESULT_DIR", help="what --result_dir of perl/eval.py was")
    parser.add_argument("--output", help=f"file to write; default: {NAME} in RESULT_DIR")


def run(args: argparse.Namespace) -> int:
    output = Path(args.output).expanduser() if args.output else None
    written = write_report(Path(args.result_dir).expanduser(), output)
    print(f"{written}: {written.stat().st_size / 1e6:.1f} MB, needs no network")
    return 0
