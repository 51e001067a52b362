"""A run of two processes with two workers is ended from outside, in each way and at each process: nothing of it is
left, and the same command goes on to the adapter of a run that nothing happened to."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.folders import adapter_of
from tests.training.small_run import write_inputs

SCRIPT = Path(__file__).parents[2] / "scripts" / "trl" / "openr1" / "dapo_lora_npu.sh"
REWARD = """import os, time
from pathlib import Path


def digits(completions, trainer_state, **_):
    if os.environ.get("RANK") and trainer_state.global_step == 2 and (stop := os.environ.get("STOP_IN")):
        Path(stop, os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(2)
    texts = [c[0]["content"] for c in completions]
    return [sum(x.isdigit() for x in t) / max(len(t), 1) for t in texts]
"""
pytestmark = pytest.mark.slow


def command(folder):
    (folder / "stops.py").write_text(REWARD)
    flags = write_inputs(folder) | {
        "reward.functions": json.dumps([f"{folder}/stops.py:digits"]),
        "rollout.workers": "2",
        "rollout.lag": "1",
        "rollout.piece_size": "4",
        "training.max_steps": "5",
        "training.output_dir": "run",
        "training.per_device_train_batch_size": "4",
        "training.gradient_accumulation_steps": "1",
        "training.report_to": "none",
    }
    return ["bash", str(SCRIPT), *(word for name, value in flags.items() for word in (f"--config.{name}", value))]


def begin(folder, *further, **variables):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "NUM_PROCESSES", "PYTHONPATH", "RANK"))}
    own = {"PYTHON": sys.executable, "NUM_PROCESSES": "2", "OMP_NUM_THREADS": "1", "OF_RUN": str(folder)}
    return subprocess.Popen(
        [*command(folder), *further],
        cwd=folder,
        env=kept | own | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def of_run(folder):
    """Processes that were started for the run, by a variable that all of them inherit."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("OF_RUN") == str(folder):
                found.append(process)
    return found


def adapter(folder):
    return adapter_of(folder / "run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run = begin(folder)
    said = run.communicate(timeout=400)[0]
    assert run.returncode == 0, said
    assert of_run(folder) == []
    return adapter(folder)


ENDS = {
    "the script, SIGTERM": (lambda run, ranks: [run.pid], signal.SIGTERM),
    "the script, SIGKILL": (lambda run, ranks: [run.pid], signal.SIGKILL),
    "rank 0, SIGKILL": (lambda run, ranks: ranks[:1], signal.SIGKILL),
    "the launcher of the ranks, SIGKILL": (lambda run, ranks: [psutil.Process(ranks[0]).ppid()], signal.SIGKILL),
}


@pytest.mark.parametrize("kind", ENDS)
def test_nothing_is_left_and_the_same_command_goes_on(kind, tmp_path, whole):
    whose, sign = ENDS[kind]
    stop = tmp_path / "stop"
    stop.mkdir()
    run = begin(tmp_path, STOP_IN=str(stop))
    until = time.monotonic() + 300
    while not all((stop / rank).exists() and (stop / rank).read_text() for rank in "01"):
        assert run.poll() is None, run.stdout.read()
        assert time.monotonic() < until
        time.sleep(0.05)
    assert len(of_run(tmp_path)) >= 6  # script, supervisor, launcher, two ranks, two workers
    for pid in whose(run, [int((stop / rank).read_text()) for rank in "01"]):
        os.kill(pid, sign)
    said = run.communicate(timeout=120)[0]
    _, alive = psutil.wait_procs(of_run(tmp_path), timeout=60)
    assert alive == [], said
    assert run.returncode == {signal.SIGTERM: 143}.get(sign, run.returncode) != 0, said
    assert "Traceback" not in said

    again = begin(tmp_path, "--config.training.resume_from_checkpoint", "true")
    said = again.communicate(timeout=400)[0]
    assert again.returncode == 0, said
    ended = adapter(tmp_path)
    assert ended.keys() == whole.keys()
    assert all(torch.equal(ended[name], whole[name]) for name in whole)
