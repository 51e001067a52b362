"""The rollout benchmark runs, forces the lengths on both sides, and ends in its JSON line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_small_run():
    command = "-m benchmarks.rollout --pairs 2 --prompts 2 --group_size 3 --prompt_length 9 --mean 6 --longest 12"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=Path(__file__).parents[2],
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == "rollout"
    assert result["ratio"] > 0
    assert 2 * 6 <= result["tokens"] <= 12 * 6
