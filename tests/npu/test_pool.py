"""Workers on the emulated NPUs behind those of the trainer's two processes: DDP, ZeRO-2, ZeRO-3 and FSDP2."""

from __future__ import annotations

import json
import sys

import pytest

from tests.npu.test_training import CONFIGS, zero3_with_nothing_persistent
from tests.ranks import reports
from tests.tiny import save_tiny

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
