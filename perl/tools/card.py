"""python -m perl card: write the evaluator's scores of an adapter into its model card."""

from __future__ import annotations

import argparse

from perl.base.paths import user_path
from perl.runs.model_card import CARD, add_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", metavar="ADAPTER", help="folder of the adapter whose README.md is written")
    parser.add_argument(
        "--results",
        required=True,
        nargs="+",
        metavar="RESULT_DIR",
        help="what --result_dir of perl/eval.py was; several: the card holds the scores of all of them. Scores of the"
        " base that lie there stand in the table too",
    )


def run(args: argparse.Namespace) -> int:
    adapter = user_path(args.adapter)
    results = add_results(adapter, [user_path(folder) for folder in args.results])
    print(f"{adapter / CARD}: {len(results)} results")
    return 0
