"""Every PEFT method on two emulated NPUs, in one launch for each way to spread the weights."""

import pytest

from perl.adapters import ADAPTERS
from tests.npu.test_training import CONFIGS, launch, zero3_with_nothing_persistent
from tests.tiny import save_tiny

pytestmark = [pytest.mark.npu, pytest.mark.slow]


@pytest.mark.parametrize("strategy", ["npu_ddp", "npu_4", "zero3", "npu_fsdp2"])  # npu_4: ZeRO-2
def test_every_method_trains_alike_on_both_ranks_or_is_refused(run_npu, tmp_path, strategy):
    save_tiny(tmp_path / "base", scale=4.0, layers=1)
    config = zero3_with_nothing_persistent(tmp_path) if strategy == "zero3" else CONFIGS / f"{strategy}.yaml"
    first, second = launch(run_npu, tmp_path, config, worker="methods_worker")
    key = {"zero3": "zero3", "npu_fsdp2": "fsdp2"}.get(strategy, "")
    assert first.keys() == ADAPTERS.keys()
    for name, adapter in ADAPTERS.items():
        if key in adapter.refused:
            assert "can't be trained with" in first[name]["refused"], name
            continue
        assert first[name]["sums"] == second[name]["sums"], name
        assert (first[name]["device"], second[name]["device"]) == ("npu:0", "npu:1")
        if name != "none":
            assert first[name]["effect"] > 1e-4, name  # plain PEFT loads what was saved, on the base as it was
            assert first[name]["frozen"] == second[name]["frozen"], name
    for name in ("pissa", "milora"):
        assert first[name].get("still", "refused" in first[name]), name
    if "adalora" in first and "ranks" in first["adalora"]:
        assert sum(first["adalora"]["ranks"].values()) == 2 * 7
        assert first["adalora"]["zeros"] == 2 * 7
        assert first["adalora"]["ranks"] == second["adalora"]["ranks"]
