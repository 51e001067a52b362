"""`python -m perl.tools.doctor`: the doctor without jsonargparse, which may not be installed yet."""

import argparse
import sys

from perl.base.errors import UserError, report_errors
from perl.tools.doctor.cli import add_arguments, run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bash scripts/check_npu_env.sh",
        description="Check this machine for training and evaluation on Ascend NPUs (also right on CUDA and CPU).",
        epilog="Exit code 0: nothing fails; 1: something fails; 2: the doctor could not run.",
    )
    add_arguments(parser)
    args, unknown = parser.parse_known_args()
    if unknown:
        raise UserError(f"unknown argument {unknown[0]!r}; known: --json, --fix-hints")
    return run(args)


if __name__ == "__main__":
    with report_errors():
        sys.exit(main())
