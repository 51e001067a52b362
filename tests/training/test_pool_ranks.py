"""Workers of a training of several processes: all have their rows, and a resumed run is the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import reports
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_draw_by_workers_and_go_on_from_a_checkpoint(tmp_path):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file"]
    launcher += [str(ROOT / "scripts/accelerate/cpu.yaml"), "-m", "tests.training.pool_worker"]
    model = save_tiny(tmp_path / "model", scale=4.0)
    done = subprocess.run(
        [*launcher, str(tmp_path), str(model), "[0, 1]"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        timeout=600,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = reports(tmp_path)
    assert first == second  # the same adapter on both
    assert first["0"]["staleness"] == [0.0] * 5
    assert first["1"]["staleness"] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert all(run["same"] and run["mismatch"] < 1e-5 for run in first.values())
