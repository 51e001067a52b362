"""Runs short programs, each in a fork of one process that has imported torch and not yet used a device: to import it
takes longer than they do. python -m tests.npu.forks, in the environment of the emulated NPU.

Reads a JSON object a line, {"program", "environment", "stdout", "stderr", "timeout"}: source text, variables to set,
files for what it prints, seconds. Answers each with a line that holds the program's exit code, as subprocess has it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any

import tests.engines.models  # noqa: F401 - torch, and what most programs import


def run(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(be_the_program(**request))
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def be_the_program(program: str, environment: dict[str, str], stdout: str, stderr: str, timeout: int) -> int:
    signal.alarm(timeout)  # kills
    for descriptor, file in ((1, stdout), (2, stderr)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ.update(environment)
    code = 0
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except BaseException:  # noqa: BLE001 - SystemExit too: the fork must not go on as the server
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    for line in sys.stdin:
        print(run(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
