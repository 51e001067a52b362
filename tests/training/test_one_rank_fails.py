"""One of two processes fails in its reward: the other ends with it within a minute, and one error is shown."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.small_run import write_inputs

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "trl" / "openr1" / "dapo_lora_npu.sh"
FLAG = "--config.reward.functions: "
LATE = "broken has not returned for 4 s (it is at broken.py:12); if it needs longer, raise --config.reward.function"

BROKEN = """import os, re, signal, sys, time
from pathlib import Path


def broken(completions, **_):
    if os.environ.get("RANK", "1") == "1":
        Path("failed").touch()  # in a scratch folder where preflight asks
        what()
    return [float(i % 2) for i in range(len(completions))]

def what():
    {action}
"""

ACTIONS = {
    "killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        "the process of rank {rank} was ended by SIGKILL; the kernel sends it where the machine's memory is used up",
        137,
    ),
    "crashes": ("os.abort()", "the process of rank {rank} was ended by SIGABRT: native code has crashed", 134),
    "raises": ("raise ValueError('no')", "{file}:12: broken raised ValueError on one of ", 1),
    "never returns": ("time.sleep(999)", "{file}:" + LATE, 1),
}


def fail(folder, action, processes):
    """What the launch script shows of a run whose reward fails on the last process, and its exit code."""
    flags = write_inputs(folder)
    (folder / "broken.py").write_text(BROKEN.format(action=action))
    flags |= {
        "reward.functions": json.dumps([f"{folder}/broken.py:broken"]),
        "reward.function_deadline_s": "4",
        "training.output_dir": "run",
        "training.per_device_train_batch_size": str(4 // processes),
        "training.gradient_accumulation_steps": "1",
        "training.report_to": "none",
    }
    words = [word for name, value in flags.items() for word in (f"--config.{name}", value)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "NUM_PROCESSES", "PYTHONPATH", "RANK"))}
    done = subprocess.run(
        ["bash", str(SCRIPT), *words],
        cwd=folder,
        env=kept | {"PYTHON": sys.executable, "NUM_PROCESSES": str(processes)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert (folder / "failed").exists(), done.stdout
    seconds = time.time() - (folder / "failed").stat().st_mtime
    assert seconds < 60, done.stdout
    return done


@pytest.mark.slow
@pytest.mark.parametrize("kind", ACTIONS)
def test_the_other_process_ends_with_it_and_one_error_is_shown(tmp_path, kind):
    action, said, code = ACTIONS[kind]
    done = fail(tmp_path, action, 2)
    lines = [line for line in done.stdout.splitlines() if "rror: " in line]
    assert len(lines) == 1, done.stdout
    assert said.format(rank=1, file=tmp_path / "broken.py") in lines[0]
    assert done.returncode == code
    log = (tmp_path / "run" / "output.log").read_text()
    assert "Traceback" not in log
    if kind == "crashes":
        assert f'File "{tmp_path}/broken.py", line 12 in what' in log


@pytest.mark.slow
def test_a_reward_that_never_returns_ends_a_run_of_one_process(tmp_path):
    done = fail(tmp_path, ACTIONS["never returns"][0], 1)
    (line,) = [line for line in done.stdout.splitlines() if "rror: " in line]
    assert line.startswith(f"error: {FLAG}{tmp_path}/broken.py:{LATE}")
