"""Every algorithm trains, with all that it sets, and a run that goes on from a checkpoint ends with the same bits."""

import math

import pytest
import torch

from tests.training.every_algorithm import RUNS, train, trained

pytestmark = pytest.mark.usefixtures("quick_collections")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_goes_on_is_the_run_that_never_stopped(tmp_path, name):
    logs = train(name, tmp_path / "run", tmp_path / "whole")
    assert len(logs) == 3
    assert all(math.isfinite(row["loss"]) for row in logs)
    assert max(row["grad_norm"] for row in logs) > 0
    assert name != "dapo" or max(row.get("dapo/resampled_groups", 0) for row in logs) > 0
    again = train(name, tmp_path / "run", tmp_path / "resumed", resumed=True)
    assert [row["loss"] for row in again] == [row["loss"] for row in logs]
    whole, resumed = trained(tmp_path / "whole"), trained(tmp_path / "resumed")
    assert resumed.keys() == whole.keys()
    for tensor_name, tensor in whole.items():
        assert torch.equal(resumed[tensor_name], tensor), tensor_name
