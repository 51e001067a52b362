"""Workers on the emulated NPUs behind those of the trainer's two processes: DDP, ZeRO-2, ZeRO-3 and FSDP2."""

from __future__ import annotations

import json
import sys

import pytest

from tests.npu.test_training import CONFIGS, zero3_with_nothing_persistent
from tests.ranks import reports
from tests.reliability.place import Place
from tests.test_launch_script import SCRIPT
from tests.tiny import save_tiny

SMALL = {"training__max_steps": 2, "training__per_device_train_batch_size": 4}
SMALL |= {"training__gradient_accumulation_steps": 1, "training__max_completion_length": 8}
pytestmark = [pytest.mark.npu, pytest.mark.slow]


@pytest.mark.parametrize("strategy", ["npu_ddp", "npu_4", "zero3", "npu_fsdp2"])  # npu_4: ZeRO-2
def test_two_processes_draw_by_workers_and_go_on_from_a_checkpoint(run_npu, tmp_path, strategy):
    model = save_tiny(tmp_path / "model", scale=4.0)
    config = zero3_with_nothing_persistent(tmp_path) if strategy == "zero3" else CONFIGS / f"{strategy}.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file"]
    settings = {"bf16": False, "noise": False}  # without noise nothing else drops what FSDP2 keeps gathered
    command = [*launcher, str(config), "-m", "tests.training.pool_worker", str(tmp_path), str(model), "[1]"]
    run_npu([*command, json.dumps(settings)], devices=4, timeout=500)
    first, second = reports(tmp_path)
    assert first == second
    assert first["1"]["same"]
    assert first["1"]["staleness"] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert first["1"]["mismatch"] < 1e-5


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
