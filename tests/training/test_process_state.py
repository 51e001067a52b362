"""What a checkpoint keeps of a process, and who may go on with it."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerState

from perl.base.errors import UserError
from perl.runs import process_state
from perl.runs.adapter_trainer import AdapterTrainer
from perl.runs.process_state import ProcessState, RolloutState

NOW = {"gradient_accumulation_steps": 2, "num_iterations": 1}
RUN = {"total_loss": 1.5, "tokens": 7, "skipped": 2, "in_a_row": 1, "entropy": [0.1, 2.0], "loss": torch.tensor(0.5)}

STREAM = {"rows": 4, "next": 2, "equal_share": 0.0}


def write(folder, processes, buffered):
    for rank in range(processes):
        rollout = RolloutState(step=3, buffered_inputs=buffered, settings=NOW, stream=STREAM)
        process_state.save(folder, rank, processes, ProcessState(run=RUN, rollout=rollout))


def test_what_was_saved_comes_back(tmp_path):
    write(tmp_path, 2, [{"advantages": torch.tensor([1.0, -1.0])}])
    state = process_state.load(tmp_path, 1, 2, NOW)
    assert state.rollout.step == 3
    assert state.rollout.buffered_inputs[0]["advantages"].tolist() == [1.0, -1.0]
    assert state.run == RUN


def test_policies_of_batches_drawn_ahead_stay_in_memory_and_end_with_the_start(tmp_path):
    """They lay on the accelerator for the whole run."""
    ahead = [{"first": 0, "weights": {"version": 2}, "policy": torch.zeros(4)}]
    rollout = RolloutState(step=3, buffered_inputs=[{"old": torch.ones(2)}], settings=NOW, stream=STREAM, ahead=ahead)
    process_state.save(tmp_path, 0, 1, ProcessState(run=RUN, rollout=rollout))
    policies, callbacks, restored = [], [], []

    def restore(state):
        assert state.buffered_inputs[0]["old"].device.type == "meta"
        assert state.ahead[0]["policy"].device.type == "cpu"
        policies.append(weakref.ref(state.ahead[0]["policy"]))

    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(process_index=0, world_size=1, device="meta"),
        add_callback=callbacks.append,
        _window_settings=lambda: NOW,
        _restore_rollout=restore,
        _restore_run_state=restored.append,
    )
    AdapterTrainer._take_up(trainer, tmp_path)
    gc.collect()
    assert policies[0]() is None
    told = SimpleNamespace(logging_steps=2, eval_steps=None, save_steps=0.5)
    callbacks[0].on_train_begin(told, state := TrainerState(max_steps=6, save_steps=1), None)
    assert (state.logging_steps, state.save_steps) == (2, 3)
    assert restored[0]["loss"].device.type == "meta"


def test_a_checkpoint_of_trls_own_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"it has no process_state_0\.pt; name a checkpoint that perl has written"):
        process_state.load(tmp_path, 0, 1, NOW)


@pytest.mark.parametrize("processes", [1, 3])
def test_another_number_of_processes(tmp_path, processes):
    """At a window's end there is nothing that belongs to a process but what it has measured; within it every rank
    refuses, also one that has a file of its own."""
    write(tmp_path, 2, None)
    for rank in range(processes):
        state = process_state.load(tmp_path, rank, processes, NOW)
        assert state.rollout.step == 0
        assert state.run == {name: value for name, value in RUN.items() if name != "loss"}
    write(tmp_path, 2, [{}])
    for rank in range(processes):
        with pytest.raises(UserError, match=f"in the middle of a generation window, with 2 processes, now {processes}"):
            process_state.load(tmp_path, rank, processes, NOW)


def test_other_settings(tmp_path):
    """Another number of micro-batches in an update: at a window's end the next one begins a window, as it should; in
    the middle of one, half a rollout would be lost, and every later update would mix two."""
    doubled = NOW | {"gradient_accumulation_steps": 4}
    write(tmp_path, 1, None)
    assert process_state.load(tmp_path, 0, 1, doubled).rollout.step == 0
    write(tmp_path, 1, [{}])
    with pytest.raises(UserError, match="with gradient_accumulation_steps 2, now 4; go on as it was begun"):
        process_state.load(tmp_path, 0, 1, doubled)


@pytest.mark.parametrize("stream", [None, {"rows": 4, "next": 2, "skipped": [1]}])
def test_a_checkpoint_of_a_version_before_0_13_is_refused(tmp_path, stream):
    state = ProcessState(run=RUN, rollout=RolloutState(step=3, buffered_inputs=None, settings=NOW, stream=stream))
    process_state.save(tmp_path, 0, 1, state)
    with pytest.raises(UserError, match=r"a version before 0\.13 has written it; finish the run with that version"):
        process_state.load(tmp_path, 0, 1, NOW)
