"""Micro-batches of which nothing is computed, on two emulated NPUs: DDP, ZeRO-2, ZeRO-3 and FSDP2 compute as many as
the tokens need, and learn what an update of one micro-batch teaches."""

import pytest
import torch
from safetensors.torch import load_file

from tests.npu.test_training import CONFIGS, launch, zero3_with_nothing_persistent

pytestmark = [pytest.mark.npu, pytest.mark.slow]


def run(run_npu, folder, strategy, rows, micro_batches):
    folder.mkdir(exist_ok=True)
    config = zero3_with_nothing_persistent(folder) if strategy == "zero3" else CONFIGS / f"{strategy}.yaml"
    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": micro_batches}
    settings |= {"max_tokens_per_microbatch": 4096, "logging_steps": 1}
    ranks = launch(run_npu, folder, config, settings, worker="empty_worker")
    return ranks, load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def whole(run_npu, tmp_path_factory):
    """One micro-batch of eight rows."""
    return run(run_npu, tmp_path_factory.mktemp("whole"), "npu_ddp", 8, 1)


@pytest.mark.parametrize("strategy", ["npu_ddp", "npu_4", "zero3", "npu_fsdp2"])  # npu_4: ZeRO-2
def test_an_update_of_eight_micro_batches_computes_one(run_npu, tmp_path, whole, strategy):
    expected, theirs = whole
    ranks, adapter = run(run_npu, tmp_path / "run", strategy, 1, 8)
    for rank, one in zip(ranks, expected, strict=True):
        assert rank["forwards"] == [1, 1, 1]
        assert rank["update/rows_left_out"] == one["update/rows_left_out"]
        assert rank["loss"] == pytest.approx(one["loss"], rel=1e-2, abs=1e-4)
        assert rank["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2, abs=1e-4)
    for name, tensor in theirs.items():
        torch.testing.assert_close(adapter[name], tensor, rtol=1e-2, atol=1e-3, msg=name)
