"""benchmarks.retool: equal tokens and time, by hand; its table; what it refuses."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks import retool
from perl.base.errors import UserError


def line(arm: str, seed: int, grpo: float) -> dict:
    scores = {stage: {"avg@8": 0.25, "greedy": 0.5} for stage in ("base", "sft")}
    return {**scores, "grpo": {"avg@8": grpo, "greedy": 0.5}, "arm": arm, "seed": seed, "steps": 60, "wall_s": 600.0}


def test_as_many_tokens_and_seconds():
    assert retool.as_many([100, 100, 50, 100], 250) == 3
    assert retool.as_many([100, 100, 50, 100], 249) == 2
    assert retool.as_many([100], 5) == 1
    assert retool.steps_in(600.0, [10.0, 12.0, 90.0]) == 50
    assert retool.steps_in(1.0, [10.0]) == 1


def test_the_table_and_the_differences():
    """60 - 30 and 70 - 50 points: 25 on average; half the interval is 12.706 x 7.0711 / 2^0.5 = 63.5. Over SFT's 25:
    in writing 5 and 25, so half of it 12.706 x 14.142 / 2^0.5 = 127.1; the tool 35, 45 and -15, 4.3027 x 32.146 / 3^0.5
    = 79.9."""
    rows = [
        line("text", 1, 0.3),
        line("tool", 1, 0.6),
        line("tool", 2, 0.7),
        line("text", 2, 0.5),
        line("tool", 3, 0.1),
    ]
    *table, over_sft, in_writing, lead = retool.table(rows).split("\n\n")
    last = table[-1].splitlines()[-1]
    assert last == "| tool | 3 | 25.0 | 25.0 | 10.0 | 50.0 | 50.0 | 50.0 | 60 | 10 |"
    assert over_sft == "GRPO over SFT, tool, avg@8: +21.7 points [-58.2, +101.5]."
    assert in_writing == "GRPO over SFT, text, avg@8: +15.0 points [-112.1, +142.1]."
    assert lead == "The tool's lead after GRPO, avg@8: +25.0 points [-38.5, +88.5]."
    assert "lead" not in retool.table(rows[:2])


def test_in_writing_needs_the_tools_line(tmp_path):
    with pytest.raises(UserError, match="no line of the tool with seed 1"):
        retool.run_all(["text"], [1], tmp_path, tmp_path / "results.jsonl")


def test_sigterm_ends_the_run_that_it_has_started(tmp_path):
    command = [sys.executable, "-m", "benchmarks.retool", "--arms", "tool", "--seeds", "1"]
    command += ["--work", str(tmp_path / "runs"), "--output", str(tmp_path / "retool.jsonl")]
    with subprocess.Popen(command, cwd=retool.ROOT, stderr=subprocess.PIPE, text=True) as process:
        here, started = psutil.Process(process.pid), []
        while len(started) < 3:  # the run's own stages too
            assert process.poll() is None
            time.sleep(0.05)
            started = here.children(recursive=True)
        process.terminate()
        assert process.communicate(timeout=60)[1].endswith("stopped: SIGTERM; the same command goes on\n")
    assert process.returncode == 128 + signal.SIGTERM
    assert psutil.wait_procs(started, timeout=30)[1] == []
