"""Short programs on emulated NPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import REPOSITORY


@pytest.fixture(scope="session")
def fork(npu_env, tmp_path_factory) -> Any:
    """`fork(code, devices)`: what a program printed, run in a fork of one process (tests/npu/forks.py)."""
    folder = tmp_path_factory.mktemp("forks")
    command = [sys.executable, "-m", "tests.npu.forks"]
    server = subprocess.Popen(
        command, cwd=REPOSITORY, env=npu_env(2), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def run(code: str, devices: int) -> str:
        out, err = folder / "stdout", folder / "stderr"
        request = {"program": code, "environment": {"NPUEMU_DEVICES": str(devices)}, "timeout": 120}
        server.stdin.write(json.dumps(request | {"stdout": str(out), "stderr": str(err)}) + "\n")
        server.stdin.flush()
        exit_code = server.stdout.readline().strip()
        if exit_code != "0":
            pytest.fail(f"exit code {exit_code}: {code}\n{out.read_text()[-4000:]}\n{err.read_text()[-8000:]}")
        return out.read_text()

    yield run
    server.stdin.close()
    server.wait(timeout=60)


@pytest.fixture(scope="session")
def answer(run_npu, fork) -> Callable[..., Any]:
    """`answer(program, devices=2, **variables)`: what a program left in its variable `answer`, a JSON value.

    With variables, which the emulation may read as it is loaded, the program has a new process instead of a fork.
    """

    def run(program: str, devices: int = 2, **variables: str | int) -> Any:
        code = f"import json, os, torch\n{textwrap.dedent(program)}\nprint('\\n' + json.dumps(answer))"
        if variables:
            printed = run_npu([sys.executable, "-c", code], devices=devices, timeout=120, **variables).stdout
        else:
            printed = fork(code, devices)
        return json.loads(printed.splitlines()[-1])

    return run
