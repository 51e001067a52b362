"""`accelerate launch`, with the exit code of the training process that failed first and no traceback of its own.

accelerate itself ends with code 1 and a traceback whatever its processes end with, so that a user's mistake (2), a
signal (143) and a crash could not be told apart.
"""

from __future__ import annotations

import subprocess
import sys

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(argv: list[str]) -> int:
    try:
        launch_command(launch_command_parser().parse_args(argv))
    except subprocess.CalledProcessError as error:
        code = error.returncode
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
    else:
        code = 0
    return 128 - code if code < 0 else code  # ended by a signal: as a shell says it


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
