"""python -m perl merge: write base and adapter as one model, checked against what PEFT computes."""

from __future__ import annotations

import argparse

from perl.adapters.merge import DTYPES, merge_adapter
from perl.base.paths import user_path
from perl.models.folders import resolve_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder or hub name of the base model")
    parser.add_argument("--adapter", required=True, help="folder of the PEFT adapter")
    parser.add_argument("--output", required=True, help="folder to write; an earlier merge there is replaced")
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="|".join(DTYPES),
        help="auto: the base's own, or float32 where rounding would lose more than a tenth of the update",
    )


def run(args: argparse.Namespace) -> int:
    output = user_path(args.output)
    report = merge_adapter(resolve_model(args.model), user_path(args.adapter), output, args.dtype)
    print(
        f"{output}: {report.method} merged into {report.tensors} weights, written in {report.dtype}; rounding to"
        f" {report.rounding_dtype} loses {report.rounding_error:.1%} of the update; probe logits: adapter's effect"
        f" {report.effect:.3g}, error {report.exact_error:.1g} in float32, {report.written_error:.2g} as written"
    )
    return 0
