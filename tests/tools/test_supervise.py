"""perl.tools.supervise above a shell that stands for accelerate: signals, what is left behind, the screen."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from perl.base.errors import HELD_BY_LAUNCHER

ROOT = Path(__file__).parents[2]
MAIN = """import sys
from pathlib import Path
from perl.tools import supervise
sys.executable = sys.argv[1]
sys.exit(supervise.main(Path(sys.argv[2]), ["-m", "perl.train"]))
"""
BUSY = """import hashlib, sys
from perl.tools import supervise
sys.executable = sys.argv[1]
print(supervise.Launcher(["-m", "perl.train"]).process.pid, flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
RANK = """import signal, sys, time
from perl.base.errors import hear_signals
signal.signal(signal.SIGTERM, lambda *_: sys.exit({ends_with}))
with hear_signals():
    print("ready", flush=True)
    time.sleep(600)
"""
KILLED = """import os, signal, time
from perl.base.errors import hear_signals
signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
with hear_signals():
    print("ready", flush=True)
    time.sleep(600)
"""
ENDS = """import signal, threading, time
from perl.base.errors import hear_signals
with hear_signals():
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # which may be given a signal too
    time.sleep({looked_at})
print("ready", flush=True)
{then}
"""


@pytest.fixture
def supervise(tmp_path):
    """`supervise(shell)`: starts a supervisor whose launcher is that script."""
    started = []
    (temporary := tmp_path / "temporary").mkdir()

    def begin(shell, program=MAIN, **environment):
        (launcher := tmp_path / "launcher").write_text(f"#!/bin/bash\n{shell}\n")
        launcher.chmod(0o755)
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(launcher), str(tmp_path / "run")],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(temporary)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.send_signal(signal.SIGQUIT)
        process.communicate()
    assert list(temporary.iterdir()) == []


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ready(supervisor, tmp_path):
    """Wait until what it has started has said so."""
    log = tmp_path / "run" / "output.log"
    until(lambda: supervisor.poll() is not None or (log.exists() and "ready" in log.read_text()))
    assert supervisor.poll() is None


def rank(tmp_path, program):
    """A launcher's script, which runs one training process and ends as that does."""
    (tmp_path / "rank.py").write_text(program)
    return f"{sys.executable} {tmp_path / 'rank.py'} -m perl.train"


def test_a_signal_is_passed_on_whatever_the_main_thread_waits_for(supervise):
    """A handler of Python's runs in the main thread, when that is back from the system or a library."""
    supervisor = supervise("exec sleep 600", BUSY)
    launcher = psutil.Process(int(supervisor.stdout.readline()))
    supervisor.send_signal(signal.SIGTERM)
    until(lambda: not launcher.is_running() or launcher.status() == psutil.STATUS_ZOMBIE)
    supervisor.send_signal(signal.SIGQUIT)  # its main thread computes on
    assert supervisor.wait(timeout=60) == 128 + signal.SIGTERM


@pytest.mark.parametrize(("ends_with", "code", "says"), [(143, 143, ""), (1, 1, "training ended with exit code 1;")])
def test_the_exit_code_is_the_trainings_where_a_signal_meets_a_failure(supervise, tmp_path, ends_with, code, says):
    """As of a disk that is full when the checkpoint is written."""
    supervisor = supervise(rank(tmp_path, RANK.format(ends_with=ends_with)))
    ready(supervisor, tmp_path)
    supervisor.send_signal(signal.SIGTERM)
    _, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == code
    assert errors.startswith(says)


def test_a_rank_that_is_killed_after_a_signal_is_no_run_that_was_stopped(supervise, tmp_path):
    """As by the kernel, for want of memory, while it saves."""
    supervisor = supervise(rank(tmp_path, KILLED))
    ready(supervisor, tmp_path)
    supervisor.send_signal(signal.SIGTERM)
    _, errors = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 137
    assert errors.startswith("training ended with exit code 137;")


@pytest.mark.parametrize(
    "shell", [ENDS.format(looked_at=0, then="time.sleep(2)"), ENDS.format(looked_at=2, then="") + "{launcher}"]
)
def test_a_signal_after_the_training_has_ended_changes_nothing(supervise, tmp_path, shell):
    """While the training process is on its way out, and while its launcher is."""
    program, of_launcher, _ = shell.partition("{launcher}")
    supervisor = supervise(rank(tmp_path, program) + ("\nsleep 2" if of_launcher else ""))
    ready(supervisor, tmp_path)
    if of_launcher:
        until(
            lambda: not any("rank.py" in " ".join(p.cmdline()) for p in psutil.Process(supervisor.pid).children(True))
        )
    supervisor.send_signal(signal.SIGTERM)
    _, errors = supervisor.communicate(timeout=60)
    assert (supervisor.returncode, errors) == (0, "")


def test_what_a_shell_started_before_is_left_alone(tmp_path):
    """`bash -c 'script > >(tee log)'`: bash becomes the supervisor, and tee its child."""
    (launcher := tmp_path / "launcher").write_text("#!/bin/bash\nexit 3\n")
    launcher.chmod(0o755)
    (tmp_path / "main.py").write_text(MAIN)
    command = (
        f"exec {sys.executable} {tmp_path}/main.py {launcher} {tmp_path}/run > >(sleep 1; cat > {tmp_path}/log) 2>&1"
    )
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    until(lambda: (tmp_path / "log").is_file() and (tmp_path / "log").read_text().endswith("output.log\n"))
    assert done.returncode == 3


def test_the_launcher_outlives_a_signal_that_all_processes_get(supervise, tmp_path):
    """Else it would end the training process, which is saving a checkpoint."""
    held = "import signal; print(*sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), sep=chr(10))"
    supervisor = supervise(f"exec {sys.executable} -c '{held}'")
    supervisor.communicate(timeout=60)
    assert (tmp_path / "run" / "output.log").read_text().split() == [
        str(int(number)) for number in sorted(HELD_BY_LAUNCHER)
    ]


@pytest.mark.slow
def test_torchrun_of_a_pod_and_under_nohup(tmp_path):
    """Two real processes: they wait for no other node, and none hears SIGHUP."""
    (tmp_path / "rank.py").write_text(
        "import pathlib, time\nprint('ready', flush=True)\nwhile not pathlib.Path('go').exists(): time.sleep(0.1)\n"
    )
    main = f"{ROOT}/scripts/accelerate/cpu.yaml', '--num_processes', '2', '-m', 'rank"
    program = f"""import sys
from pathlib import Path
from perl.tools import supervise
sys.exit(supervise.main(Path("run"), ['--config_file', '{main}']))
"""
    place = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.255.255.1", "PET_NNODES": "2", "PET_NODE_RANK": "1"}
    environment = os.environ | place | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    supervisor = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    log = tmp_path / "run" / "output.log"
    until(lambda: log.exists() and log.read_text().count("ready") == 2)
    for process in psutil.Process(supervisor.pid).children(recursive=True):
        process.send_signal(signal.SIGHUP)
    time.sleep(1)
    (tmp_path / "go").touch()
    assert supervisor.wait(timeout=120) == 0, log.read_text()


def test_a_signal_while_the_launcher_looks_at_the_machine_ends_it(supervise, tmp_path):
    """accelerate starts nvidia-smi, which is no training process."""
    supervisor = supervise("echo ready; sleep 600; echo 'error: it trains'")
    ready(supervisor, tmp_path)
    supervisor.send_signal(signal.SIGTERM)
    shown, errors = supervisor.communicate(timeout=60)
    assert (supervisor.returncode, shown) == (143, "")
    assert errors == "stopped: SIGTERM; every process was ended at once\n"


@pytest.mark.parametrize("code", [0, 3])
def test_what_a_training_leaves_behind_holds_nothing_up(supervise, code):
    """A server of a reward function has the pipe that its output goes into."""
    supervisor = supervise(f"setsid sleep 600 & echo $!; exit {code}")
    supervisor.communicate(timeout=60)
    assert supervisor.returncode == code


def test_orphans_are_waited_for(supervise, tmp_path):
    """Each is a process less that the container may start."""
    supervisor = supervise("for i in $(seq 20); do (true &); done; echo ready; sleep 600")
    ready(supervisor, tmp_path)
    children = psutil.Process(supervisor.pid).children
    until(lambda: not any(child.status() == psutil.STATUS_ZOMBIE for child in children()))
    assert len(children()) == 1


def test_sigquit_ends_all_at_once(supervise, tmp_path):
    supervisor = supervise(rank(tmp_path, RANK.format(ends_with=0)))
    ready(supervisor, tmp_path)
    processes = psutil.Process(supervisor.pid).children(recursive=True)
    supervisor.send_signal(signal.SIGQUIT)
    supervisor.communicate(timeout=60)
    assert supervisor.returncode == 128 + signal.SIGQUIT
    assert not any(process.is_running() for process in processes)


def test_a_second_signal_ends_it_though_nobody_reads_the_screen(supervise, tmp_path):
    supervisor = supervise("trap '' TERM; while :; do echo 'error: full'; done")
    until(lambda: (tmp_path / "run" / "output.log").exists())
    supervisor.send_signal(signal.SIGTERM)
    time.sleep(1.2)  # signals within a second are one
    if supervisor.poll() is None:
        supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=60) == 143


def test_a_locale_without_the_characters_ends_nothing(supervise, tmp_path):
    warns = f"{sys.executable} -c 'print(\"a WARNING of 数据集\")'"  # which the training's processes write as UTF-8
    supervisor = supervise(warns, PYTHONIOENCODING="latin-1")
    shown, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0
    assert shown.startswith("a WARNING of ???\n")
    assert "数据集" in (tmp_path / "run" / "output.log").read_text(encoding="utf-8")


def test_a_reader_that_has_gone_changes_no_exit_code(tmp_path):
    """`script 2>&1 | head -1`."""
    (launcher := tmp_path / "launcher").write_text("#!/bin/sh\nexit 2\n")
    launcher.chmod(0o755)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", MAIN, str(launcher), str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=writer, timeout=60, check=False)
    os.close(writer)
    assert done.returncode == 2
