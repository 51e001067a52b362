"""The command: gather, check, print."""

from __future__ import annotations

import argparse

from perl.tools.doctor.checks import diagnose
from perl.tools.doctor.findings import as_json, as_text, exit_code
from perl.tools.doctor.probes import gather


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument(
        "--fix-hints",
        "--fix_hints",
        action="store_true",
        help="print the mending commands once more at the end, as a script to paste",
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0 when nothing fails, else 1."""
    machine = gather()
    findings = diagnose(machine)
    show = as_json if args.json else as_text
    print(show(machine, findings, args.fix_hints))
    return exit_code(findings)
