"""The progress line, and the signal that ends a run."""

import contextlib
import json
import signal
from types import SimpleNamespace

import torch

from perl.base.errors import Stopped
from perl.runs.callbacks import MetricsWriter, ProgressLine, StopOnSignal


def test_a_signal_that_another_process_had_first_is_not_a_second_one(monkeypatch):
    """The scheduler signals all nodes; this one hears of it from another process before its own signal comes."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda number, op: number.fill_(signal.SIGTERM))
    args, state = SimpleNamespace(world_size=2, device="cpu"), SimpleNamespace(global_step=3, max_steps=9)
    control = SimpleNamespace()
    with StopOnSignal() as stop:
        stop.on_train_begin(args, state, control)
        stop.on_step_end(args, state, control)
        signal.raise_signal(signal.SIGTERM)  # raised Stopped, in the middle of saving the checkpoint
    assert stop.received == signal.SIGTERM
    assert control.should_save


def test_a_signal_passes_those_who_catch_any_exception():
    """check_layers does, whatever a model's own code raises."""
    caught: list[BaseException] = []
    with StopOnSignal():
        try:
            with contextlib.suppress(Exception):
                signal.raise_signal(signal.SIGTERM)
        except Stopped as stopped:
            caught.append(stopped)
    assert caught


def test_every_logged_step_has_a_line_and_the_summary_none(capsys):
    """A step that trains on earlier completions (num_iterations above 1) logs no reward."""
    line = ProgressLine()
    state = SimpleNamespace(global_step=0, max_steps=4, is_world_process_zero=True)
    line.on_train_begin(None, state, None)
    state.global_step = 1
    line.on_log(None, state, None, logs={"loss": 0.5, "reward": 0.25})
    state.global_step = 2
    line.on_log(None, state, None, logs={"loss": 0.125, "pool/workers_idle": 0.5, "pool/staleness_max": 2.0})
    line.on_log(None, state, None, logs={"train_loss": 0.3, "train_runtime": 9.0})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("progress: step 1/4  reward 0.250  loss 0.5000")
    assert second.startswith("progress: step 2/4  loss 0.1250  workers idle 50%  staleness 2  ")


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint(tmp_path):
    """Stopped after step 2, gone on to step 4, killed in the middle of a row; now it goes on from step 3."""
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "loss": step / 2} for step in range(1, 5)]
    rows.insert(2, {"step": 2, "train_runtime": 9.0})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "lo')
    state = SimpleNamespace(global_step=3, max_steps=9, is_world_process_zero=True, log_history=[])
    writer = MetricsWriter(file)
    writer.on_train_begin(None, state, None)
    state.global_step = 4
    writer.on_log(SimpleNamespace(device="cpu"), state, None, logs={"loss": 0.25})
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in found] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 0.25)]
    cut = (tmp_path / "_left_behind" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in cut[:2]] == [2, 4]
    assert cut[2:] == ['{"step": 5, "lo']


def test_the_trainers_history_keeps_little_of_what_metrics_jsonl_holds(tmp_path):
    """transformers keeps every log for the whole run, and writes all of them into each checkpoint."""
    state = SimpleNamespace(global_step=1, is_world_process_zero=True, log_history=[])
    writer, args = MetricsWriter(tmp_path / "metrics.jsonl"), SimpleNamespace(device="cpu")
    for step in (1, 2):
        logs = {"loss": 0.5, "reward": 0.25, "timing/step": 3.0, **{f"rewards/{i}": 1.0 for i in range(50)}}
        state.log_history.append(logs | {"step": step})
        writer.on_log(args, state, None, logs=logs)
    assert state.log_history == [{"step": step, "loss": 0.5, "reward": 0.25} for step in (1, 2)]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [len(row) for row in rows] == [55, 55]  # the logs, the step and the time


def test_a_signal_while_the_result_is_saved_is_told_what_happens(capfd):
    """It was promised a checkpoint after a step, and nothing of it was true."""
    args, state = SimpleNamespace(world_size=1), SimpleNamespace(global_step=9, max_steps=9)
    with StopOnSignal() as stop:
        stop.on_train_begin(args, state, None)
        stop.on_step_end(args, state, SimpleNamespace())
        stop.on_train_end(args, state, None)
        signal.raise_signal(signal.SIGTERM)
        stop.raise_if_stopped(args, state, None)  # nothing is left to go on with
    said = "stopping: SIGTERM: the run has made its last step, and ends when its result is saved; a second signal ends"
    assert capfd.readouterr().out.startswith(said)
