"""The rollouts that a checkpoint keeps for later updates, and who may go on with them."""

import pytest
import torch

from perl.errors import UserError
from perl.training import rollout_state
from perl.training.rollout_state import RolloutState

NOW = {"gradient_accumulation_steps": 2, "num_iterations": 1}


def write(folder, processes, buffered):
    for rank in range(processes):
        state = RolloutState(step=3, buffered_inputs=buffered, processes=processes, settings=NOW)
        rollout_state.save(folder, rank, state)


def test_what_was_saved_comes_back(tmp_path):
    write(tmp_path, 2, [{"advantages": torch.tensor([1.0, -1.0])}])
    state = rollout_state.load(tmp_path, 1, 2, NOW)
    assert state.step == 3
    assert state.buffered_inputs[0]["advantages"].tolist() == [1.0, -1.0]
    assert state.buffered_inputs[0]["advantages"].device.type == "cpu"


def test_a_checkpoint_without_one_is_trls_own(tmp_path):
    assert rollout_state.load(tmp_path, 0, 1, NOW) is None


@pytest.mark.parametrize("processes", [1, 3])
def test_another_number_of_processes(tmp_path, processes):
    """At a window's end there is nothing that belongs to a process; within it every rank refuses, also one that has a
    file of its own."""
    write(tmp_path, 2, None)
    assert [rollout_state.load(tmp_path, rank, processes, NOW).step for rank in range(processes)] == [0] * processes
    write(tmp_path, 2, [{}])
    for rank in range(processes):
        with pytest.raises(UserError, match=f"in the middle of a generation window, with 2 processes, now {processes}"):
            rollout_state.load(tmp_path, rank, processes, NOW)


def test_other_settings(tmp_path):
    """Another number of micro-batches in an update: at a window's end the next one begins a window, as it should; in
    the middle of one, half a rollout would be lost, and every later update would mix two."""
    doubled = NOW | {"gradient_accumulation_steps": 4}
    write(tmp_path, 1, None)
    assert rollout_state.load(tmp_path, 0, 1, doubled).step == 0
    write(tmp_path, 1, [{}])
    with pytest.raises(UserError, match="with gradient_accumulation_steps 2, now 4; go on as it was begun"):
        rollout_state.load(tmp_path, 0, 1, doubled)


def test_a_checkpoint_of_an_earlier_version_names_no_number_of_processes(tmp_path):
    for rank in range(2):
        torch.save({"step": 5, "buffered_inputs": [{}]}, rollout_state.state_file(tmp_path, rank))
    assert rollout_state.load(tmp_path, 1, 2, NOW).step == 5
    with pytest.raises(UserError, match="with 2 processes, now 1"):
        rollout_state.load(tmp_path, 0, 1, NOW)
