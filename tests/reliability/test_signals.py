"""Ctrl-C, SIGTERM and SIGHUP in each phase of a run, and a clock that is set back."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from perl.__main__ import main as perl_command
from perl.base.errors import report_errors
from perl.runs.checkpoints import last_whole_checkpoint
from perl.tools import fetch
from perl.train import main
from tests.reliability.place import Place, originals

NUMBERS = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129}
PHASES = {
    "rollout": "perl.engines.torch_policy.TorchPolicyEngine.stream",
    "update": "perl.training.trainer.PerlGRPOTrainer.compute_loss",
    "checkpoint": "perl.runs.process_state.save",
    "validation": "perl.training.validation.Validation.complete",
}
"""Phase -> a function that is called in it."""

SAVES = {"merge": "copy_side_files", "fetch": "save"}
"""Command -> a function that is called while its folder is written."""


@pytest.fixture(autouse=True)
def _hears_sighup():
    """Under nohup, too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def run(monkeypatch, capfd, words):
    """(exit code, what stands on stderr) of perl.train in the folder that is current."""
    monkeypatch.setattr(sys, "argv", ["perl.train", *words])
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, capfd.readouterr().err


def signalled(monkeypatch, function: str, number: int, call: int = 1) -> None:
    """The `call`-th call of `function` begins with a signal to this process."""
    from pydoc import locate

    owner, _, name = function.rpartition(".")
    calls, own = [], getattr(locate(owner), name)

    def wrapped(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return own(*args, **kwargs)

    monkeypatch.setattr(locate(owner), name, wrapped)


@pytest.mark.parametrize(
    "sign", ["SIGTERM", *(pytest.param(sign, marks=pytest.mark.slow) for sign in ("SIGINT", "SIGHUP"))]
)
def test_a_signal_while_the_model_is_loaded(sign, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    signalled(monkeypatch, "perl.training.grpo.load_model", signal.Signals[sign])
    code, said = run(monkeypatch, capfd, Place(tmp_path).train())
    assert code == NUMBERS[sign]
    assert said == f"stopped: {sign} before the first step; there was nothing to save\n"


@pytest.mark.parametrize(
    ("phase", "sign"),
    [
        pytest.param(phase, sign, marks=[pytest.mark.slow] if (phase, sign) != ("rollout", "SIGTERM") else [])
        for phase in PHASES
        for sign in NUMBERS
    ],
)
def test_a_signal_ends_the_step_and_saves_it(phase, sign, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path)
    validated = {"validation__datasets": '["data.jsonl"]', "validation__before_train": "false"}
    words = place.train(
        None,
        training__max_steps=4,
        training__save_steps=1,
        **(
            validated | {"validation__every_steps": 1, "validation__max_new_tokens": 4} if phase == "validation" else {}
        ),
    )
    signalled(monkeypatch, PHASES[phase], signal.Signals[sign])
    code, said = run(monkeypatch, capfd, words)
    last = last_whole_checkpoint(tmp_path / "run")
    assert last is not None
    step = int(last.name.rpartition("-")[2])
    assert code == NUMBERS[sign]
    assert said == (
        f"stopped: {sign} after step {step} of 4, checkpoint-{step} is saved; run again to go on: the same flags and"
        " --config.training.output_dir run --config.training.resume_from_checkpoint auto\n"
    )
    assert step in (1, 2)
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_terminal_that_is_gone(tmp_path):
    """A run in the foreground of it, which prints afterwards: it died without a line and a checkpoint."""
    master, slave = os.openpty()
    script = (
        "import fcntl, sys, termios, time\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "from perl.runs.callbacks import StopOnSignal\n"
        "with StopOnSignal() as stop:\n"
        "    stop.on_train_begin(None, None, None)\n"
        "    print('begun', flush=True)\n"
        "    while not stop.received: time.sleep(0.01)\n"
        "    print('a line of progress', file=sys.stdout, flush=True)\n"
        "    print('a warning', file=sys.stderr, flush=True)\n"
        "    sys.exit(128 + stop.received)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    assert os.read(master, 100).strip() == b"begun"
    os.close(master)
    assert process.wait(60) == 129


def test_a_signal_while_the_result_is_saved(tmp_path, monkeypatch, capfd):
    """It was promised a checkpoint after a step."""
    monkeypatch.chdir(tmp_path)
    words = Place(tmp_path).train()
    signalled(monkeypatch, "perl.runs.run.save_result", signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["perl.train", *words])
    main()  # ends as it would have without the signal
    said = (
        "stopping: SIGTERM: the run has made its last step, and ends when its result is saved; a second signal ends it"
    )
    assert said in capfd.readouterr().out
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_clock_that_is_set_back(tmp_path, monkeypatch, capfd):
    """An hour lies before the second half of a run that keeps one checkpoint: it goes on from the newest one, keeps
    that, and no step takes a negative time."""
    monkeypatch.chdir(tmp_path)
    words = Place(tmp_path).train(
        None, training__max_steps=2, training__save_steps=1, training__save_total_limit=1, training__logging_steps=1
    )
    signalled(monkeypatch, PHASES["rollout"], signal.SIGTERM)
    code, _ = run(monkeypatch, capfd, words)
    assert code == 143
    later = time.time() + 3600
    os.utime(tmp_path / "run" / "checkpoint-1", (later, later))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["perl.train", *words, "--config.training.resume_from_checkpoint", "true"])
    main()
    assert [folder.name for folder in tmp_path.glob("run/checkpoint-*")] == ["checkpoint-2"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["timing/step"] > 0 for row in rows if "timing/step" in row)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT], ids=lambda sign: sign.name)
@pytest.mark.parametrize("command", ["merge", "fetch"])
def test_a_model_that_is_written_at_a_signal_leaves_nothing(command, sign, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in a script's background ignores it
    words = [f"--model={originals()}/model", f"--adapter={originals()}/adapter"]
    if command == "fetch":
        words = [next(iter(fetch.MODELS))]
        monkeypatch.setattr(fetch, "require_tools", lambda: None)
        monkeypatch.setattr(fetch, "download", lambda *_: None)
        monkeypatch.setattr(fetch, "read_gguf", lambda *_: (None, None))
    signalled(monkeypatch, f"perl.{'adapters' if command == 'merge' else 'tools'}.{command}.{SAVES[command]}", sign)
    try:
        with pytest.raises(SystemExit) as end, report_errors():
            sys.exit(perl_command([command, *words, "--output", "made"]))
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.value.code == 128 + sign
    assert capfd.readouterr().err.endswith(f"stopped: {sign.name}; what was not finished is removed\n")
    assert list(tmp_path.iterdir()) == []
