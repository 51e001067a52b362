"""Short programs on emulated NPUs."""

import json
import sys
import textwrap

import pytest


@pytest.fixture(scope="session")
def answer(run_npu):
    """`answer(program, devices=2, **variables)`: what a program left in its variable `answer`, a JSON value."""

    def run(program: str, devices: int = 2, **variables: str | int):
        code = f"import json, os, torch\n{textwrap.dedent(program)}\nprint('\\n' + json.dumps(answer))"
        done = run_npu([sys.executable, "-c", code], devices=devices, timeout=120, **variables)
        return json.loads(done.stdout.splitlines()[-1])

    return run
