"""PPO with a critic on two emulated NPUs: DDP, ZeRO-2, ZeRO-3 and FSDP2 train the same policy and critic, and a run
that goes on from a checkpoint is the same run."""

import pytest
import torch
from safetensors.torch import load_file

from tests.npu.test_training import CONFIGS, launch, zero3_with_nothing_persistent

pytestmark = [pytest.mark.npu, pytest.mark.slow]
SETTINGS = {"num_generations": 1, "max_grad_norm": 1e9}  # DeepSpeed clips policy and critic together


def saved(folder):
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    return adapter | load_file(folder / "critic" / "critic.safetensors")


def run(run_npu, folder, strategy, **settings):
    config = zero3_with_nothing_persistent(folder) if strategy == "zero3" else CONFIGS / f"{strategy}.yaml"
    ranks = launch(run_npu, folder, config, SETTINGS | settings, worker="critic_worker")
    assert [rank["device"] for rank in ranks] == ["npu:0", "npu:1"]
    assert ranks[0]["vf_loss"] == ranks[1]["vf_loss"]
    assert all(rank["left"] == [] and rank["finite"] for rank in ranks)
    return ranks[0], saved(folder)


@pytest.fixture(scope="module")
def ddp(run_npu, tmp_path_factory):
    """With nothing split over the devices and nothing computed twice; and where its checkpoints lie."""
    folder = tmp_path_factory.mktemp("ddp")
    return *run(run_npu, folder, "npu_ddp"), folder


def test_ddp_trains_both(ddp):
    report, weights, _ = ddp
    assert report["values"][0] == 0.0
    assert report["values"][1] != 0.0
    assert sum("lora_B" in name for name in weights) == sum(name.endswith(".b") for name in weights) == 14
    assert all(tensor.abs().max() > 0 for name, tensor in weights.items() if "lora_B" in name or name.endswith(".b"))


def goes_on(run_npu, folder, strategy, whole):
    _, again = run(run_npu, folder, strategy, again=True)
    assert again.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_a_run_under_ddp_that_goes_on_is_the_same_run(run_npu, ddp):
    goes_on(run_npu, ddp[2], "npu_ddp", ddp[1])


@pytest.mark.parametrize("strategy", ["npu_4", "zero3", "npu_fsdp2"])
def test_every_way_to_spread_the_weights_trains_the_same_and_goes_on(run_npu, tmp_path, ddp, strategy):
    report, weights = run(run_npu, tmp_path, strategy, gradient_checkpointing=True)
    expected, theirs, _ = ddp
    for name in ("vf_loss", "values", "rewards"):
        assert report[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name
    assert weights.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-2, atol=1e-3, msg=name)
    goes_on(run_npu, tmp_path, strategy, weights)
