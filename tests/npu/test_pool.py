"""Workers on the emulated NPUs behind those of the trainer's two processes: DDP, ZeRO-2, ZeRO-3 and FSDP2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.npu.test_training import CONFIGS, zero3_with_nothing_persistent
from tests.ranks import reports
from tests.reliability.place import Place
from tests.test_launch_script import SCRIPT
from tests.tiny import save_tiny

SMALL = {"training__max_steps": 2, "training__per_device_train_batch_size": 4}
SMALL |= {"training__gradient_accumulation_steps": 1, "training__max_completion_length": 8}
pytestmark = [pytest.mark.npu, pytest.mark.slow]


def by_workers(run_npu: Any, folder: Path, strategy: str, lag: int, noise: bool, **rollout: Any) -> dict[str, Any]:
    """What tests.training.pool_worker says of two processes, which say the same."""
    model = save_tiny(folder / "model", scale=4.0)
    config = zero3_with_nothing_persistent(folder) if strategy == "zero3" else CONFIGS / f"{strategy}.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file"]
    settings = {"bf16": False, "noise": noise, "rollout": rollout}
    command = [*launcher, str(config), "-m", "tests.training.pool_worker", str(folder), str(model), f"[{lag}]"]
    run_npu([*command, json.dumps(settings)], devices=4, timeout=500)
    first, second = reports(folder)
    assert first == second
    return first[str(lag)]


@pytest.mark.parametrize("strategy", ["npu_ddp", "npu_4", "zero3", "npu_fsdp2"])  # npu_4: ZeRO-2
def test_two_processes_draw_by_workers_and_go_on_from_a_checkpoint(run_npu, tmp_path, strategy):
    """Without noise nothing else drops what FSDP2 keeps gathered."""
    said = by_workers(run_npu, tmp_path, strategy, 1, noise=strategy in ("npu_ddp", "npu_4"))
    assert said["same"]
    assert said["staleness"] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert said["mismatch"] < 1e-5


@pytest.mark.parametrize("strategy", ["zero3", "npu_fsdp2"])
def test_split_weights_reach_workers_that_draw_with_the_newest_and_its_noise(run_npu, tmp_path, strategy):
    said = by_workers(run_npu, tmp_path, strategy, 0, noise=True, max_staleness=2, piece_size=None)
    assert len(said["staleness"]) == 5
    assert all(0.0 <= staleness <= 2.0 for staleness in said["staleness"])
    assert said["mismatch"] < 1e-5


@pytest.mark.parametrize(
    ("processes", "workers", "said"),
    [
        ("", 1, None),
        ("1", 1, None),
        ("2", 1, "--config.rollout.workers 1: the training's 2 processes leave 0 npu devices of this machine"),
    ],
)
def test_the_launch_script_leaves_workers_their_devices(run_npu, tmp_path, processes, workers, said):
    words = Place(tmp_path).train(None, rollout__workers=workers, **SMALL)
    variables = {"PYTHON": sys.executable, "NUM_PROCESSES": processes}
    done = run_npu(["bash", str(SCRIPT), *words], devices=2, check=False, cwd=tmp_path, **variables)
    if said is None:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "num_processes: 1\n" in (tmp_path / "run" / "output.log").read_text()
        return
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "run").exists()
