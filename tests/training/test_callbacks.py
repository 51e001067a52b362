"""The progress line."""

from types import SimpleNamespace

from perl.training.callbacks import ProgressLine


def test_every_logged_step_has_a_line_and_the_summary_none(capsys):
    """A step that trains on earlier completions (num_iterations above 1) logs no reward."""
    line = ProgressLine()
    state = SimpleNamespace(global_step=0, max_steps=4, is_world_process_zero=True)
    line.on_train_begin(None, state, None)
    state.global_step = 1
    line.on_log(None, state, None, logs={"loss": 0.5, "reward": 0.25})
    state.global_step = 2
    line.on_log(None, state, None, logs={"loss": 0.125})
    line.on_log(None, state, None, logs={"train_loss": 0.3, "train_runtime": 9.0})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("progress: step 1/4  reward 0.250  loss 0.5000")
    assert second.startswith("progress: step 2/4  loss 0.1250")
