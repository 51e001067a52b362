"""Workers of a training of several processes: all have their rows, and a resumed run is the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import reports
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[2]


def run(folder: Path, lags: str, settings: str) -> list[dict]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file"]
    launcher += [str(ROOT / "scripts/accelerate/cpu.yaml"), "-m", "tests.training.pool_worker"]
    model = save_tiny(folder / "model", scale=4.0)
    done = subprocess.run(
        [*launcher, str(folder), str(model), lags, settings],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        timeout=600,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return reports(folder)


@pytest.mark.slow
def test_two_processes_draw_by_workers_and_go_on_from_a_checkpoint(tmp_path):
    first, second = run(tmp_path, "[0, 1]", "{}")
    assert first == second  # the same adapter on both
    assert first["0"]["staleness"] == [0.0] * 5
    assert first["1"]["staleness"] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert all(run["same"] and run["mismatch"] < 1e-5 for run in first.values())


@pytest.mark.slow
def test_two_processes_whose_workers_are_lost_go_on_with_the_batch_that_was_not_drawn(tmp_path):
    """The checkpoint that the line named ended each resumed run."""
    first, second = run(tmp_path, "[0]", '{"lost_at": 2}')
    assert first == second
    assert first["0"]["same"]


@pytest.mark.slow
def test_processes_wait_for_a_worker_for_longer_than_for_each_other(tmp_path):
    first, second = run(tmp_path, "[0]", '{"patience_s": 30, "late_s": 60}')
    assert first == second
    assert first["0"]["same"]
