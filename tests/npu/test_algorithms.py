"""REINFORCE++ with KL in reward and loss on two emulated NPUs: ZeRO-2 and FSDP2 learn what DDP learns, and a run that
goes on from a checkpoint is the same run."""

import pytest
import torch
from safetensors.torch import load_file

from tests.npu.test_training import CONFIGS, launch

pytestmark = [pytest.mark.npu, pytest.mark.slow]


def run(run_npu, folder, strategy):
    """By part, "whole" and "resumed": the report and the adapter."""
    ranks = launch(run_npu, folder, CONFIGS / f"{strategy}.yaml", worker="algorithm_worker")
    parts = {}
    for part in ("whole", "resumed"):
        first, second = (rank[part] for rank in ranks)
        assert [first.pop("device"), second.pop("device")] == ["npu:0", "npu:1"]
        for name in ("kl_in_reward", "kl_in_reward/coefficient", "advantages/std"):  # of all processes
            assert first[name] == second[name]
        parts[part] = first, load_file(folder / part / "adapter" / "adapter_model.safetensors")
    return parts


@pytest.fixture(scope="module")
def ddp(run_npu, tmp_path_factory):
    report, adapter = run(run_npu, tmp_path_factory.mktemp("ddp"), "npu_ddp")["whole"]
    assert report["kl_in_reward/coefficient"][0] == 0.1 != report["kl_in_reward/coefficient"][-1]
    # whitened over the tokens of both processes, with Bessel's correction
    assert report["advantages/std"] == pytest.approx([1.0] * 4, abs=0.05)
    return report, adapter


@pytest.mark.parametrize("strategy", ["npu_4", "npu_fsdp2"])  # ZeRO-2, FSDP2
def test_every_way_to_spread_the_weights_learns_the_same_and_goes_on(run_npu, tmp_path, ddp, strategy):
    expected, theirs = ddp
    parts = run(run_npu, tmp_path, strategy)
    (report, adapter), (resumed, again) = parts["whole"], parts["resumed"]
    for name, values in expected.items():
        assert report[name] == pytest.approx(values, rel=1e-2, abs=1e-4), name
    assert adapter.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(adapter[name], tensor, rtol=1e-2, atol=1e-3, msg=name)
    assert resumed["kl_in_reward/coefficient"] == report["kl_in_reward/coefficient"]
    for name, tensor in adapter.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
