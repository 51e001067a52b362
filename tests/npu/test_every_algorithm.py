"""Every algorithm, all weights and SFT on two emulated NPUs: ZeRO-2 and FSDP2 train what DDP trains, and a run that
goes on from a checkpoint is the same run. One launch for each strategy."""

import pytest
import torch

from tests.npu.test_training import CONFIGS, launch
from tests.training.every_algorithm import RUNS, trained

pytestmark = [pytest.mark.npu, pytest.mark.slow]


@pytest.fixture(scope="module")
def runs(run_npu, tmp_path_factory):
    """`runs(strategy)`: by name, the losses of the run and of the resumed one, and what both have trained."""
    done = {}

    def run(strategy):
        if strategy not in done:
            folder = tmp_path_factory.mktemp(strategy)
            ranks = launch(run_npu, folder, CONFIGS / f"{strategy}.yaml", worker="every_algorithm_worker")
            assert [rank["device"] for rank in ranks] == ["npu:0", "npu:1"]
            assert ranks[0]["losses"] == ranks[1]["losses"]
            done[strategy] = {
                name: (*ranks[0]["losses"][name], *(trained(folder / str(n) / part) for part in ("whole", "resumed")))
                for n, name in enumerate(RUNS)
            }
        return done[strategy]

    return run


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("strategy", ["npu_ddp", "npu_4", "npu_fsdp2"])  # npu_4: ZeRO-2
def test_every_strategy_trains_what_ddp_trains_and_goes_on(runs, strategy, name):
    losses, resumed_losses, whole, resumed = runs(strategy)[name]
    expected, _, theirs, _ = runs("npu_ddp")[name]
    assert losses == pytest.approx(expected, rel=1e-2, abs=1e-4)
    assert resumed_losses == pytest.approx(losses, rel=1e-4, abs=1e-5)
    assert whole.keys() == theirs.keys() == resumed.keys()
    for tensor_name, tensor in theirs.items():
        torch.testing.assert_close(whole[tensor_name], tensor, rtol=1e-2, atol=1e-3, msg=tensor_name)
        torch.testing.assert_close(resumed[tensor_name], whole[tensor_name], rtol=1e-4, atol=1e-5, msg=tensor_name)
