"""`python -m perl.tools.doctor`: the doctor without jsonargparse, which may not be installed yet."""

import argparse
import sys

from perl.base.errors import report_errors
from perl.tools.doctor.cli import add_arguments, run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bash scripts/check_npu_env.sh",
        description="Check this machine for training and evaluation on Ascend NPUs (also right on CUDA and CPU).",
        epilog="Exit code 0: nothing fails; 1: something fails; 2: the doctor could not run.",
    )
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    with report_errors():
        sys.exit(main())
