"""Calls of the Python tool a second and core, with sympy imported.

    python -m benchmarks.python_tool [--calls 1000]

One thread calls; a call's processor time is that of every process behind it and of this one. "wall" depends on what
else runs on the machine, "core" (calls a second of processor time) hardly. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from perl.environments.python_tool import PythonTool

CODES = {"print": "print(1 + 1)", "sympy": "from sympy import Symbol, solve\nx = Symbol('x')\nsolve(x**2 - 5*x + 6)"}


def processor_s() -> float:
    """Of this process and, below it, all that live or have been waited for."""
    fields = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields[int(stat.parent.name)] = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
    family = {os.getpid()}
    while more := {pid for pid, values in fields.items() if int(values[1]) in family} - family:
        family |= more
    return sum(int(value) for pid in family for value in fields[pid][11:15]) / os.sysconf("SC_CLK_TCK")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    return parser


def main() -> None:
    calls = make_parser().parse_args().calls
    with PythonTool() as python:
        result: dict[str, object] = {"level": python.level, "calls": calls}
        for name, code in CODES.items():
            python(code)
            begin, begin_processor = time.monotonic(), processor_s()
            for _ in range(calls):
                python(code)
            wall, processor = time.monotonic() - begin, processor_s() - begin_processor
            result[name] = {"wall": round(calls / wall, 1), "core": round(calls / processor, 1)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
