"""`accelerate launch`, with the exit code of the training process that failed first and no traceback of its own.

accelerate itself ends with code 1 and a traceback whatever its processes end with, so that a user's mistake (2), a
signal (143) and a crash could not be told apart. A process that was killed could say nothing: its line is said here.
"""

from __future__ import annotations

import signal
import subprocess
import sys

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from perl.base.redact import hide_secrets_in_tracebacks

CRASHED = ": native code has crashed; the log has the stack of each thread"
WHY = {"SIGKILL": "; the kernel sends it where the machine's memory is used up (dmesg)"}
WHY |= dict.fromkeys(("SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"), CRASHED)


def main(argv: list[str]) -> int:
    hide_secrets_in_tracebacks()
    try:
        launch_command(launch_command_parser().parse_args(argv))
    except subprocess.CalledProcessError as error:
        rank, code = 0, error.returncode
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
    else:
        rank, code = 0, 0
    if code < 0 and -code not in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        name = signal.Signals(-code).name
        why = WHY.get(name, "")
        print(f"error: the process of rank {rank} was ended by {name}{why}", file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code  # ended by a signal: as a shell says it


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
