"""The folder of a run: what cannot be written in it is one line that names it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from perl.base.errors import UserError
from perl.config.load import parse
from perl.runs import rundir
from perl.runs.rundir import check_folder, held, prepare, require_free
from perl.runs.tracking import WandbRunWriter


@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
def test_a_folder_in_the_place_of_a_file_is_one_line(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"^--config.training.output_dir {tmp_path}: {name}: Is a directory; give"):
        prepare(tmp_path, parse([]), 1)


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(UserError, match=f"^--config.training.output_dir {tmp_path}/run: File exists; give another"):
        held(tmp_path / "run", resuming=False).__enter__()


def test_the_name_of_the_wandb_run_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "run", SimpleNamespace(id="abc", project="p", entity=None))
    (tmp_path / "wandb_run.json").mkdir()
    args, state = SimpleNamespace(report_to=["wandb"]), SimpleNamespace(is_world_process_zero=True)
    with pytest.raises(UserError, match=f"output_dir {tmp_path}: wandb_run.json: Is a directory"):
        WandbRunWriter(tmp_path).on_train_begin(args, state, None)


def test_a_second_training_in_a_folder_is_one_line_that_names_the_first(tmp_path):
    told = rf"output_dir {tmp_path}: another training works in it \(process {os.getpid()}\); wait"
    with held(tmp_path, resuming=False):
        with pytest.raises(UserError, match=told):
            require_free(tmp_path, resuming=False)
        with pytest.raises(UserError, match=told):
            held(tmp_path, resuming=False).__enter__()
        (tmp_path / "metrics.jsonl").touch()
    require_free(tmp_path, resuming=False)
    with held(tmp_path, resuming=False), pytest.raises(UserError, match="already holds a run"):
        check_folder(tmp_path, resuming=False)


def test_a_folder_with_checkpoints_and_no_metrics_holds_a_run(tmp_path):
    """A run that is stopped before its first log; the next one rotated its own checkpoints away, of lower steps."""
    (tmp_path / "checkpoint-7").mkdir()
    with pytest.raises(UserError, match="already holds a run; give another folder"):
        check_folder(tmp_path, resuming=False)
    check_folder(tmp_path, resuming=True)


STARTS = """import os, sys
from pathlib import Path
from perl.base.errors import report_errors
from perl.runs.rundir import check_folder, held
folder, (waiting, start), (others, trying) = Path(sys.argv[1]), os.pipe(), os.pipe()
for _ in range(int(sys.argv[2])):
    if os.fork() == 0:
        os.close(start)
        os.read(waiting, 1)
        with report_errors(), held(folder, resuming=False):
            check_folder(folder, resuming=False)
            os.close(trying)
            os.read(others, 1)
            print("goes on", flush=True)
            if sys.argv[3] == "fails":
                sys.exit(2)
            (folder / "metrics.jsonl").touch()
        sys.exit()
os.close(trying)
os.close(start)
print(sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(int(sys.argv[2]))))
"""


@pytest.mark.parametrize("ends", ["well", "fails"])
@pytest.mark.parametrize("count", [2, 8])
def test_of_starts_at_the_same_instant_one_goes_on_and_the_others_are_one_line_each(tmp_path, count, ends):
    folder, env = tmp_path / "outputs" / "run", os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", STARTS, folder, str(count), ends]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    codes = [2 if ends == "fails" else 0] + [2] * (count - 1)
    assert done.stdout == f"goes on\n{sorted(codes)}\n"
    line = rf"error: --config.training.output_dir {folder}: another training works in it \(.*\); wait until .*"
    assert len(done.stderr.splitlines()) == count - 1
    assert all(re.fullmatch(line, each) for each in done.stderr.splitlines())
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ([] if ends == "fails" else ["_lock", "metrics.jsonl"])


def test_a_lock_that_a_refused_start_has_taken_away_holds_nobody(tmp_path, monkeypatch):
    def taken_away(lock):
        monkeypatch.undo()
        (tmp_path / "run" / "_lock").unlink()
        (tmp_path / "run").rmdir()

    monkeypatch.setattr(rundir, "lock_now", taken_away)
    with held(tmp_path / "run", resuming=False), pytest.raises(UserError, match="another training works in it"):
        held(tmp_path / "run", resuming=False).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_a_link_is_one_line(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "_lock").symlink_to(tmp_path / "victim")
    for look in (lambda: require_free(tmp_path, resuming=True), held(tmp_path, resuming=True).__enter__):
        with pytest.raises(UserError, match=r"_lock is a link; delete it; give another folder"):
            look()
    assert (tmp_path / "victim").read_text() == "mine"


HOLDS = """import os, sys, time
from pathlib import Path
from perl.runs.rundir import held
with held(Path(sys.argv[1]), resuming=False):
    if os.fork() == 0:
        print("held", os.getpid(), flush=True)
        time.sleep(600)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A training in the folder, whose forked child outlives it."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    child = int(process.stdout.readline().removeprefix("held"))
    yield process
    process.kill()
    os.kill(child, signal.SIGKILL)
    process.wait()


def test_after_sigkill_the_folder_is_free_while_forked_children_live(tmp_path, holder):
    with pytest.raises(UserError, match=rf"\(process {holder.pid}\)"):
        require_free(tmp_path, resuming=False)
    holder.kill()
    holder.wait()
    require_free(tmp_path, resuming=False)
    with held(tmp_path, resuming=False):
        pass


def test_a_run_that_goes_on_waits_for_its_last_attempt(tmp_path, holder, monkeypatch, caplog):
    monkeypatch.setattr(rundir, "LAST_ATTEMPT_S", 0.5)
    with pytest.raises(UserError, match="another training works in it"):
        require_free(tmp_path, resuming=True)
    monkeypatch.setattr(rundir, "LAST_ATTEMPT_S", 60.0)
    caplog.clear()
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (holder.kill(), sleep(seconds)))
    require_free(tmp_path, resuming=True)
    (record,) = caplog.records
    assert record.getMessage() == f"{tmp_path}: waiting for its last attempt to end (process {holder.pid})"
