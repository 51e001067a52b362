"""A stage and what it starts end with the process that started it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from perl.base.errors import Stopped, UserError, stopped_by_signals
from perl.records import Sampling
from perl.tools import stages
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[2]
PARENT = """
import sys
from pathlib import Path
from perl.tools import stages

# As accelerate does: a launcher that starts the process that computes, and passes no signal on.
launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
works = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
with stages.start([sys.executable, "-c", launcher, works], Path(sys.argv[1])) as process:
    process.wait()
"""
SIGNALLED = """
import signal, subprocess, sys
from pathlib import Path
from perl.base.errors import Stopped, stopped_by_signals
from perl.tools import stages

class AtOnce(subprocess.Popen):
    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        if words[0][0] == sys.argv[2]:
            signal.raise_signal(signal.SIGTERM)

subprocess.Popen = AtOnce
code = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
try:
    with stopped_by_signals("-"), stages.start([sys.executable, "-c", code, sys.argv[1]], Path(sys.argv[1])) as process:
        process.wait()
except Stopped:
    print("stopped")
"""
READS_ITS_LOG = """
import sys, time
from pathlib import Path

print("one")
end = time.monotonic() + 30
while "one\\n" not in Path("grpo.log").read_text():
    if time.monotonic() > end:
        sys.exit("what was printed is not in the log")
    time.sleep(0.02)
print("two")
"""


def alive(pid: int) -> bool:
    """A zombie, which only waits for somebody to ask for its exit code, is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return bool(found)


def test_a_stage_ends_with_its_parent_even_when_that_is_killed(tmp_path):
    log = tmp_path / "stage.log"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(log)], env=environment)
    try:
        assert wait_for(lambda: log.is_file() and log.read_text().endswith("\n"))
        worker = int(log.read_text())
        assert alive(worker)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert wait_for(lambda: not alive(worker))
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.parametrize("started", [sys.executable, "sh"], ids=["stage", "watcher"])
def test_a_signal_while_a_stage_starts_leaves_nothing_running(started, tmp_path):
    """It was raised before anything knew of the process, which ran on when the command had ended."""
    log = tmp_path / "stage.log"
    words = [sys.executable, "-c", SIGNALLED, str(log), started]
    ended = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=60
    )
    left = [each for each in psutil.process_iter(["cmdline"]) if str(log) in (each.info["cmdline"] or [])]
    for each in left:
        each.kill()
    assert (ended.returncode, ended.stdout, ended.stderr, left) == (0, "stopped\n", "", [])


def test_a_stage_that_ends_leaves_nothing_behind(tmp_path):
    with stages.start([sys.executable, "-c", "print('done')"], tmp_path / "stage.log") as process:
        stages.finish(process, tmp_path / "stage.log", "stage")
    assert (tmp_path / "stage.log").read_text() == "done\n"
    mine = subprocess.run(["pgrep", "-P", str(os.getpid()), "-x", "sh"], capture_output=True, text=True, check=False)
    assert not mine.stdout


def test_the_log_of_an_earlier_attempt_stays(tmp_path):
    log = tmp_path / "train.log"
    for said in ("first", "second"):
        with stages.start([sys.executable, "-c", f"print({said!r})"], log, append=True) as process:
            process.wait()
    first, between, second = log.read_text().splitlines()
    assert (first, second) == ("first", "second")
    assert between.startswith("---- ")
    assert between.endswith(": started again")


@pytest.mark.slow
def test_a_row_without_a_completion_counts_as_wrong_and_the_run_goes_on(tmp_path, capsys):
    """perl/eval.py ends with exit code 3 then, and would at each further try."""
    model = save_tiny(tmp_path / "model", scale=8.0)
    rows = [{"question": "1 + 1 " * count, "answer": "#### 2"} for count in (1, 2, 3, 5000)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = stages.Evaluation(
        model=model,
        held_out=tmp_path / "held_out.jsonl",
        sampled=Sampling(n=2, temperature=1.0, max_new_tokens=4),
        greedy=Sampling(n=1, temperature=0.0, max_new_tokens=4),
        engine="hf",
        seed=0,
    )
    scores = stages.evaluate(how, tmp_path / "scores", Console())
    assert 0.0 <= scores.greedy.value <= 0.75
    shown = "".join(capsys.readouterr().out.split())
    assert shown.count("rowswithoutacompletioncountaswrong;read") == 2
    summary = json.loads((tmp_path / "scores" / "greedy" / "held_out" / "summary.json").read_text())
    assert (summary["samples"], summary["not_generated"]) == (4, 1)


def test_the_log_of_a_training_can_be_followed(tmp_path):
    """It stood in a buffer until the training had ended."""
    (tmp_path / "reads_its_log.py").write_text(READS_ITS_LOG)
    where = stages.Where(folder=tmp_path)
    stages.train("reads_its_log", Path("recipe.yaml"), [], tmp_path / "grpo", Console(quiet=True), where)
    assert (tmp_path / "grpo.log").read_text().endswith("one\ntwo\n")


def test_what_is_no_text_ends_no_training(tmp_path):
    """As a library in C may print it."""
    log = tmp_path / "grpo.log"
    command = [sys.executable, "-c", r"import os; os.write(1, b'caf\xe9\nstep 1/1 end\n')"]
    stages.follow(command, log, Console(quiet=True), stages.HERE)
    assert log.read_text(encoding="utf-8") == "caf\ufffd\nstep 1/1 end\n"


def test_one_signal_that_comes_twice_does_not_end_the_cleaning_up():
    """A scheduler sends it to all processes, and the launcher passes it on."""
    done = []
    with pytest.raises(Stopped), stopped_by_signals("-"):  # noqa: PT012
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            done.append("cleaned up")
    assert done == ["cleaned up"]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as error, stages.alone(tmp_path / "file" / "run", "--output_dir", Console()):
        pass
    assert str(error.value) == f"--output_dir {tmp_path}/file/run: Not a directory; write another folder"


def test_what_an_interrupted_training_says_last_is_in_its_log(tmp_path):
    """It was read, so that the stage could end, and thrown away: the line that names the checkpoint, or a traceback."""
    saves = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit('checkpoint saved'));"
        "print('begun', flush=True); time.sleep(300)"
    )
    with stages.start([sys.executable, "-c", saves], tmp_path / "grpo.log", pipe=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
    assert (tmp_path / "grpo.log").read_text() == "checkpoint saved\n"
