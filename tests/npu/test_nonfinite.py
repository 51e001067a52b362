"""A loss and a gradient that are NaN on one of two emulated NPUs: both skip the update, or both stop."""

import json

import pytest
from safetensors.torch import load_file

from tests.npu.test_training import CONFIGS, launch, zero3_with_nothing_persistent

pytestmark = [pytest.mark.npu, pytest.mark.slow]


@pytest.mark.parametrize("strategy", ["npu_ddp", "npu_4", "zero3", "npu_fsdp2"])  # npu_4: ZeRO-2
def test_both_ranks_skip_the_same_updates_and_stop_at_the_same_one(run_npu, tmp_path, strategy):
    config = zero3_with_nothing_persistent(tmp_path) if strategy == "zero3" else CONFIGS / f"{strategy}.yaml"
    ranks = launch(run_npu, tmp_path, config, {}, worker="nonfinite_worker")
    for rank in ranks:
        assert rank["moved"] == [False, False, True]
        assert rank["skipped"] == 2
        folder = tmp_path / "stops" / "nonfinite_step_2"
        assert rank["said"].startswith("step 2: the loss and the norm of the gradient are not finite; the batch is in")
        assert str(folder) in rank["said"]
    assert ranks[0]["sum"] == ranks[1]["sum"]
    rows = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert len(rows[0]) == len(rows[1]) == 4
    assert rows[0] != rows[1]
    for rank in (0, 1):
        columns = load_file(folder / f"rank-{rank}.safetensors")
        masks = [mask for name, mask in columns.items() if name.endswith(".mask")]
        assert sum(len(mask) for mask in masks) == 4
        assert all(mask.any(dim=1).all() for mask in masks)
        assert any(name.endswith(".advantages") for name in columns)
