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
    """The report of the whole run, what it has trained, and what the one has that went on from its checkpoint."""
    config = zero3_with_nothing_persistent(folder) if strategy == "zero3" else CONFIGS / f"{strategy}.yaml"
    ranks = launch(run_npu, folder, config, SETTINGS | settings, worker="critic_worker")
    for part in ("whole", "resumed"):
        first, second = (rank[part] for rank in ranks)
        assert [first["device"], second["device"]] == ["npu:0", "npu:1"]
        assert first["vf_loss"] == second["vf_loss"]
        assert all(report["left"] == [] and report["finite"] for report in (first, second))
    return ranks[0]["whole"], saved(folder / "whole"), saved(folder / "resumed")


@pytest.fixture(scope="module")
def ddp(run_npu, tmp_path_factory):
    """With nothing split over the devices and nothing computed twice."""
    return run(run_npu, tmp_path_factory.mktemp("ddp"), "npu_ddp")


def test_ddp_trains_both(ddp):
    report, weights, _ = ddp
    assert report["values"][0] == 0.0
    assert report["values"][1] != 0.0
    assert sum("lora_B" in name for name in weights) == sum(name.endswith(".b") for name in weights) == 14
    assert all(tensor.abs().max() > 0 for name, tensor in weights.items() if "lora_B" in name or name.endswith(".b"))


def assert_same(again, whole):
    assert again.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_a_run_under_ddp_that_goes_on_is_the_same_run(ddp):
    _, whole, resumed = ddp
    assert_same(resumed, whole)


@pytest.mark.parametrize("strategy", ["npu_4", "zero3", "npu_fsdp2"])
def test_every_way_to_spread_the_weights_trains_the_same_and_goes_on(run_npu, tmp_path, ddp, strategy):
    report, weights, resumed = run(run_npu, tmp_path, strategy, gradient_checkpointing=True)
    expected, theirs, _ = ddp
    for name in ("vf_loss", "values", "rewards"):
        assert report[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name
    assert weights.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-2, atol=1e-3, msg=name)
    assert_same(resumed, weights)
