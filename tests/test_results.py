"""The files of a result folder: what a killed writer leaves, and how a file is replaced."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from perl.__main__ import main
from perl.base.errors import UserError
from perl.base.files import (
    _may_have_open,
    atomic_write,
    lock_now,
    open_lock,
    process_that_holds,
    read_json,
    write_json,
)
from perl.evaluation.store import locked
from perl.models.folders import copy_side_files
from perl.reports.sources import find, is_result_dir
from perl.reports.training_run import read_training_run
from perl.runs.rundir import held
from perl.scoring.results import read_metrics, read_samples
from perl.tools.stages import alone
from tests.results import record, summary


def line(key: str, **changes) -> bytes:
    return json.dumps(record(key, **changes), ensure_ascii=False).encode() + b"\n"


def test_only_whole_lines_with_every_field_are_records(tmp_path, caplog):
    """Of six lines two are records of different samples; the third is the second one again, and does not count."""
    file = tmp_path / "samples.jsonl"
    rows = [line("a", completion="π"), line("a", sample=1), line("a"), b'{"key": "b"}\n', b"\xff\xfe\n", line("c")[:-1]]
    file.write_bytes(b"".join(rows))
    assert list(read_samples(file)) == [("a", 0), ("a", 1)]
    assert read_samples(file)["a", 0]["completion"] == "π"
    assert [record.getMessage().split(": ")[1].split(" left")[0] for record in caplog.records] == ["3 broken lines"] * 2
    assert "(line 4: Object missing required field `sample`)" in caplog.records[0].getMessage()


def test_whole_files_are_read_without_a_word(tmp_path, caplog):
    (tmp_path / "samples.jsonl").write_bytes(line("a"))
    (tmp_path / "none.jsonl").write_text("")
    assert len(read_samples(tmp_path / "samples.jsonl")) == 1
    assert read_samples(tmp_path / "none.jsonl") == {}
    assert caplog.records == []
    with pytest.raises(UserError, match=r"gone\.jsonl: No such file"):
        read_samples(tmp_path / "gone.jsonl")


def test_json_that_is_not_readable_names_file_flag_and_way_out(tmp_path):
    file = tmp_path / "run.json"
    file.write_text("{")
    with pytest.raises(UserError, match=r"^--compare: .*run\.json is not readable \(Expecting .*\); remove it$"):
        read_json(file, "--compare", "remove it")
    with pytest.raises(UserError, match=r"^/.*none\.json is not readable \(.*No such file.*\)$"):
        read_json(tmp_path / "none.json")


def test_a_file_is_replaced_when_the_new_one_is_whole(tmp_path):
    file = tmp_path / "out.json"
    write_json(file, {"a": "π"})

    def fail_halfway() -> None:
        with atomic_write(file) as handle:
            handle.write("half")
            handle.flush()
            assert json.loads(file.read_text()) == {"a": "π"}
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_halfway()
    assert json.loads(file.read_text()) == {"a": "π"}
    with atomic_write(file, "wb") as handle:
        handle.write(b"\x00")
    assert file.read_bytes() == b"\x00"
    assert [path.name for path in Path(tmp_path).iterdir()] == ["out.json"]


def test_of_a_resumed_runs_metrics_the_last_attempt_counts(tmp_path, caplog):
    """It went on from step 2 and has come to step 3; the first attempt had come to step 4, and tore a line."""
    logged = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (3, 0.9)]
    lines = [json.dumps({"step": step, "reward": reward}) for step, reward in logged]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:4], '{"step": 5, "rew', lines[4]]))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [record.getMessage().split(": ")[1].split(" (")[0] for record in caplog.records] == [
        "1 broken lines left out"
    ]
    assert [(step, row["reward"]) for step, row in rows] == [(1, 0.1), (2, 0.2), (3, 0.3), (3, 0.9)]
    run = read_training_run(tmp_path)
    assert (run.steps, run.metrics["reward"]) == ([1, 2, 3], [0.1, 0.2, 0.9])


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    """A pipe, as /dev/stdout is one: no file takes its place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with atomic_write(pipe) as file:
        file.write("a row")
    assert os.read(reader, 100) == b"a row"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_link_in_a_folder_of_results_from_others_overwrites_nothing(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "results"
    folder.mkdir()
    for name in ("report.html", "_report.html.partial", "_lock"):
        (folder / name).symlink_to(victim)
    with atomic_write(folder / "report.html") as file:
        file.write("a page")
    with pytest.raises(OSError, match=r"_lock is a link; delete it"):
        open_lock(folder / "_lock")
    assert victim.read_text() == "mine"
    assert (folder / "report.html").read_text() == "a page"
    assert not (folder / "report.html").is_symlink()


def test_what_processes_at_work_hold_in_a_folder_is_no_result_and_no_side_file(tmp_path):
    names = ["_mine", "_saving", "_merged.77.partial", ".git"]
    for name in names:
        (tmp_path / "run" / name / "sums").mkdir(parents=True)
        for file in ("summary.json", "samples.jsonl"):
            (tmp_path / "run" / name / "sums" / file).write_text("{}")
    assert list(find(tmp_path / "run", is_result_dir)) == [tmp_path / "run" / "_mine"]
    copy_side_files(tmp_path / "run", tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["_mine"]


def test_a_file_keeps_the_mode_that_its_owner_gave_it(tmp_path):
    (tmp_path / "row").touch(mode=0o600)
    (tmp_path / "link").symlink_to(tmp_path / "row")
    for name in ("row", "link"):
        with atomic_write(tmp_path / name) as file:
            file.write("A")
    assert stat.S_IMODE((tmp_path / "row").stat().st_mode) == 0o600
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "link").stat().st_mode == plain.stat().st_mode  # not that of what a link leads to


VERL = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"


def test_a_link_that_the_user_names_is_written_through_and_one_that_lies_there_is_not(tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.jsonl").write_text('{"gold": "3", "output": "#### 3"}\n')
    (tmp_path / "others" / "sums").mkdir(parents=True)
    (tmp_path / "others" / "sums" / "samples.jsonl").write_bytes(line("a"))
    write_json(tmp_path / "others" / "sums" / "summary.json", summary([record("a")], 1))
    kept = tmp_path / "kept"
    for link in ("mine.jsonl", "mine.html", "others/report.html", "from_verl.yaml", "mine.yaml"):
        kept.mkdir(exist_ok=True)
        (kept / Path(link).name).write_text("kept")
        (tmp_path / link).symlink_to(kept / Path(link).name)
    monkeypatch.chdir(tmp_path)
    for words in (
        ["grade", "--task", "gsm8k", "--input", "rows.jsonl", "--output", "mine.jsonl"],
        ["report", "others", "--output", "mine.html"],
        ["report", "others"],
        ["from-verl", "--output", "mine.yaml", VERL],
        ["from-verl", VERL],
    ):
        assert main(words) == 0, capsys.readouterr().err
    named = {path.name for path in kept.iterdir() if path.read_text() != "kept"}
    assert named == {"mine.jsonl", "mine.html", "mine.yaml"}
    assert {path.name for path in tmp_path.rglob("*") if path.is_symlink()} == named


def test_a_pipe_that_the_user_names_by_a_link_is_written_to():
    """/dev/stdout leads to /proc/self/fd/1, and that to no path."""
    program = (
        "from pathlib import Path; from perl.base.files import atomic_write, target\n"
        "with atomic_write(target(Path('/dev/stdout'))) as file: file.write('a page')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("a page", "")


def test_a_file_has_the_mode_that_the_umask_gives_and_a_lock_keeps_its_content(tmp_path):
    with atomic_write(tmp_path / "page") as file:
        file.write("a page")
    (tmp_path / "plain").touch()
    assert (tmp_path / "page").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "lock").write_text("kept")
    open_lock(tmp_path / "lock").close()
    assert (tmp_path / "lock").read_text() == "kept"


def test_what_a_killed_writer_left_goes_with_the_next_one_after_an_hour(tmp_path):
    names = ("_row.new45678.partial", "_other.ab_12cd3.partial", "_row.notes.md.partial")
    for name in ("_row.ab_12cd3.partial", *names):
        (tmp_path / name).touch()
        if "new" not in name:
            os.utime(tmp_path / name, times=(0, 0))
    with atomic_write(tmp_path / "row") as file:
        file.write("A")
    assert {path.name for path in tmp_path.iterdir()} == {"row", *names}


def test_of_two_writers_of_one_file_the_last_one_counts_whole(tmp_path):
    file = tmp_path / "row"
    with atomic_write(file) as first:
        first.write("A" * 20)
        first.flush()
        with atomic_write(file) as second:
            second.write("B")
        assert file.read_text() == "B"
    assert file.read_text() == "A" * 20
    assert [path.name for path in tmp_path.iterdir()] == ["row"]


def test_a_lock_is_held_by_who_has_that_file_open(tmp_path):
    """/proc/locks names a file by its inode, which a file of another disk can have too."""
    with open_lock(tmp_path / "_lock") as lock:
        lock_now(lock)
        assert process_that_holds(tmp_path / "_lock") == os.getpid()
        here = (tmp_path / "_lock").stat()
        elsewhere = os.stat_result([here.st_mode, here.st_ino, here.st_dev + 1, *here[3:10]])
        assert _may_have_open(str(os.getpid()), here)
        assert not _may_have_open(str(os.getpid()), elsewhere)
    assert process_that_holds(tmp_path / "_lock") is None


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
@pytest.mark.parametrize(
    "hold", [locked, lambda folder: held(folder, False), lambda folder: alone(folder, "--out", Console())]
)
def test_a_file_system_without_locks_is_a_line_in_the_log(tmp_path, monkeypatch, caplog, hold, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with hold(tmp_path):
        pass
    why = f"its file system has no locks ({os.strerror(number)})"
    assert set(caplog.messages) == {f"{tmp_path}: nothing keeps another process out of it: {why}"}
