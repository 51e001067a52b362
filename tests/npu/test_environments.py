"""Conversations with tools on two emulated NPUs: DDP, ZeRO-3 and FSDP2, alone and by workers behind the trainer's own,
have those of one CPU process, and a run that goes on from a checkpoint has them too. One launch for each strategy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.environments.working import conversations_of, make_place, train
from tests.npu.test_training import CONFIGS, zero3_with_nothing_persistent
from tests.ranks import reports
from tests.training.every_algorithm import trained

SETTINGS = {"bf16": False, "per_device_train_batch_size": 4}
RUNS = ("alone", "workers")
pytestmark = [pytest.mark.npu, pytest.mark.slow]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def ran(run_npu, place, tmp_path_factory):
    """`ran(strategy)`: the folder of its launch, and what both ranks say."""
    done: dict[str, tuple[Path, list[Any]]] = {}

    def run(strategy: str) -> tuple[Path, list[Any]]:
        if strategy not in done:
            folder = tmp_path_factory.mktemp(strategy)
            config = zero3_with_nothing_persistent(folder) if strategy == "zero3" else CONFIGS / f"{strategy}.yaml"
            launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file"]
            command = [*launcher, str(config), "-m", "tests.npu.environments_worker", str(folder), str(place)]
            run_npu([*command, json.dumps(SETTINGS)], devices=4, timeout=500)
            done[strategy] = folder, reports(folder)
        return done[strategy]

    return run


@pytest.fixture(scope="module")
def first_rollout(place, tmp_path_factory) -> dict[str, list[Any]]:
    """The conversations before the first update, of one process on the CPU, by place and sample."""
    rows = {}
    for name, noise in (("alone", {}), ("workers", {"noise": None})):
        _, batches, _ = train(
            place, tmp_path_factory.mktemp("cpu"), max_steps=1, rollout={"piece_size": None}, bf16=False, **noise
        )
        rows[name] = json.loads(json.dumps(conversations_of(batches)))
    return rows


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("strategy", ["npu_ddp", "zero3", "npu_fsdp2"])
def test_every_strategy_converses_and_trains_as_ddp_does_and_goes_on(ran, first_rollout, strategy, name):
    folder, (first, second) = ran(strategy)
    assert (first["device"], second["device"]) == ("npu:0", "npu:1")
    one, other = first["runs"][name], second["runs"][name]
    rows = one["rows"] | other["rows"]
    assert not one["rows"].keys() & other["rows"].keys()
    for row in first_rollout[name]:
        assert words(rows[f"{row[0]}-{row[1]}"]) == words(row)
    assert one["logged"] == other["logged"]
    assert one["logged"][0]["turns/mean"] > 1
    assert one["logged"][0]["tools/failure_frequency"] > 0
    assert all(row["environment/failure_frequency"] == 0 for row in one["logged"])
    resumed = first["runs"][f"{name}_resumed"]["rows"] | second["runs"][f"{name}_resumed"]["rows"]
    assert resumed
    assert {key: words(row) for key, row in resumed.items()} == {key: words(rows[key]) for key in resumed}
    weights, ddps = trained(folder / name), trained(ran("npu_ddp")[0] / name)
    assert weights.keys() == ddps.keys()
    again = trained(folder / f"{name}_resumed")
    for tensor_name, tensor in ddps.items():
        torch.testing.assert_close(weights[tensor_name], tensor, rtol=1e-2, atol=1e-3, msg=tensor_name)
        torch.testing.assert_close(again[tensor_name], weights[tensor_name], rtol=1e-4, atol=1e-5, msg=tensor_name)


@pytest.mark.parametrize("strategy", ["npu_ddp", "zero3", "npu_fsdp2"])
def test_a_rank_none_of_whose_environments_begins_waits_for_the_others(ran, strategy):
    """It draws nothing, where FSDP2 has every forward made by all."""
    first, second = (rank["runs"]["first_rank"] for rank in ran(strategy)[1])
    assert not any(first["failed"])
    assert max(first["turns"]) > 1
    assert all(second["failed"])
    assert not any(second["turns"])
    assert first["logged"] == second["logged"] == [0.5]


def words(row: list[Any]) -> list[Any]:
    """Without the log-probabilities' last bits."""
    return [*row[:5], *row[6:]]
