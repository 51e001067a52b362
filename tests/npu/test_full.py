"""All weights trained by GRPO with AQN and a reference model, on two emulated NPUs: DDP, ZeRO-2, ZeRO-3 and FSDP2."""

import pytest

from tests.npu.test_training import CONFIGS, launch, zero3_with_nothing_persistent
from tests.tiny import save_tiny

pytestmark = [pytest.mark.npu, pytest.mark.slow]


@pytest.mark.parametrize(
    ("strategy", "bf16"),
    [("npu_4", False), ("zero3", False), ("npu_fsdp2", False), ("npu_4", True), ("npu_fsdp2", True), ("npu_ddp", True)],
)
def test_all_weights_move_alike_on_both_ranks_and_are_saved_whole(run_npu, tmp_path, strategy, bf16):
    save_tiny(tmp_path / "base", scale=4.0)
    config = zero3_with_nothing_persistent(tmp_path) if strategy == "zero3" else CONFIGS / f"{strategy}.yaml"
    ranks = launch(run_npu, tmp_path, config, {"bf16": bf16}, worker="full_worker")
    first, second = ranks
    assert first["sums"] == second["sums"]
    assert len(first["moved"]) == 27  # 12 in each of two layers, embedding, final norm, head
    assert all(moved > 1e-3 for moved in first["moved"].values())
    assert first["extra"] == []
    rounded = 2**-8 if bf16 else 0.0  # of weights that are below 2, written in bfloat16
    assert max(first["apart"].values()) <= rounded
    for rank in ranks:
        assert rank["noisy"] == [True] * 3  # two rollouts, and the first once more, to be compared
        assert rank["clean_in_loss"] == [True] * 4
        assert rank["kl"][0] == 0.0 < rank["kl"][1]  # the reference is what the run began with
        assert rank["losses"] == first["losses"]
        assert rank["tolerance"] == (0.2 if bf16 else 1e-3)  # sampler and trainer agreed
        assert rank["dtype"] == ("torch.bfloat16" if bf16 and strategy == "npu_4" else "torch.float32")
