"""The rollouts that a checkpoint keeps for later updates, and who may go on with them."""

import pytest
import torch

from perl.errors import UserError
from perl.training import rollout_state
from perl.training.rollout_state import RolloutState


def write(folder, processes, buffered):
    for rank in range(processes):
        state = RolloutState(step=3, buffered_inputs=buffered, processes=processes)
        rollout_state.save(folder, rank, state)


def test_what_was_saved_comes_back(tmp_path):
    write(tmp_path, 2, [{"advantages": torch.tensor([1.0, -1.0])}])
    state = rollout_state.load(tmp_path, 1, 2)
    assert state.step == 3
    assert state.buffered_inputs[0]["advantages"].tolist() == [1.0, -1.0]
    assert state.buffered_inputs[0]["advantages"].device.type == "cpu"


def test_a_checkpoint_without_one_is_trls_own(tmp_path):
    assert rollout_state.load(tmp_path, 0, 1) is None


@pytest.mark.parametrize("processes", [1, 3])
def test_another_number_of_processes(tmp_path, processes):
    """At a window's end there is nothing that belongs to a process; within it every rank refuses, also one that has a
    file of its own."""
    write(tmp_path, 2, None)
    assert [rollout_state.load(tmp_path, rank, processes).step for rank in range(processes)] == [3] * processes
    write(tmp_path, 2, [{}])
    for rank in range(processes):
        with pytest.raises(UserError, match="written by 2 processes in the middle of a generation window"):
            rollout_state.load(tmp_path, rank, processes)


def test_a_checkpoint_of_an_earlier_version_names_no_number_of_processes(tmp_path):
    for rank in range(2):
        torch.save({"step": 5, "buffered_inputs": [{}]}, rollout_state.state_file(tmp_path, rank))
    assert rollout_state.load(tmp_path, 1, 2).step == 5
    with pytest.raises(UserError, match="written by 2 processes"):
        rollout_state.load(tmp_path, 0, 1)
