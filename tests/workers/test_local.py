"""A worker that is a process of this machine."""

import multiprocessing
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType

from benchmarks._nodes import alive
from perl.records import Completion
from perl.workers import local
from perl.workers.local import ProcessLink
from perl.workers.worker import Failed, Ready, RequestBatch, Result, WorkerSpec


class Job:
    unit = "rows"

    def paths(self, weights):
        return []


class Reader(Job):
    """A job that reads what it is sent, and says nothing of it."""

    def serve(self, weights, inbox):
        yield Ready(1)
        while inbox.next_weights(wait=True) is not None:
            inbox.take()


class NotRead:
    """What nobody can unpickle."""

    def __reduce__(self):
        return int, ("no number",)


class Unreadable(Job):
    """A job that answers with what the parent cannot import."""

    def serve(self, weights, inbox):
        module = sys.modules["here_alone"] = ModuleType("here_alone")
        module.Answer = type("Answer", (), {"__module__": "here_alone"})  # type: ignore[attr-defined]
        yield Ready(1)
        yield Result((0,), module.Answer(), 1)  # type: ignore[attr-defined]
        inbox.next_weights(wait=True)


class Forking(Job):
    """A job that has a child, whose process id it answers with, as a tool may have several."""

    def serve(self, weights, inbox):
        if (child := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        yield Result((child,), Completion.failed("none"), 1)
        inbox.next_weights(wait=True)


class Lingering(Job):
    """A job whose process has closed its pipe for a while before it ends by itself, as with a large device."""

    def serve(self, weights, inbox):
        yield Ready(1)
        with socket.socket(fileno=os.dup(inbox._connection.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_WR)
        time.sleep(3.0)
        os._exit(7)


class Starting(Job):
    """A job that has a program ended by SIGTERM, whose exit code it answers with."""

    def serve(self, weights, inbox):
        yield Ready(1)
        while inbox.next_weights(wait=True) is not None:
            inbox.take()
            code = subprocess.run(["sh", "-c", "kill -TERM $$"], check=False).returncode
            yield Result((code,), Completion.failed("none"), 1)


class Unpickled(Job):
    """A job whose unpickling reads a variable, as that of one which holds torch decides what devices it sees."""

    def __init__(self, seen=None):
        self.seen = seen

    def __reduce__(self):
        return unpickled, ()

    def serve(self, weights, inbox):
        yield Result((str(self.seen),), Completion.failed("none"), 1)


class Grouped(Job):
    """A job that makes a process group of its own, as vLLM's engine does."""

    def serve(self, weights, inbox):
        import torch.distributed as dist

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", address, world_size=1, rank=0, timeout=timedelta(seconds=20))
        yield Result((dist.get_world_size(),), Completion.failed("none"), 1)


def unpickled():
    return Unpickled(os.environ.get("PERL_TEST_DEVICE"))


class NotUnpickled(Job):
    def __reduce__(self):
        return int, ("no number",)


def started(job, tmp_path: Path, **environment: str) -> tuple[ProcessLink, queue.SimpleQueue]:
    events: queue.SimpleQueue = queue.SimpleQueue()
    spec = WorkerSpec(
        index=0, device="cpu", job=pickle.dumps(job), weights=None, environment=environment, log=tmp_path / "log"
    )
    return ProcessLink(spec, events.put), events


def test_a_worker_whose_answer_cannot_be_read_counts_as_dead(tmp_path: Path):
    link, events = started(Unreadable(), tmp_path)
    try:
        assert isinstance(events.get(timeout=120), Ready)
        assert events.get(timeout=60) == Failed("what it sent cannot be read: No module named 'here_alone'")
        assert events.get(timeout=60) is None
    finally:
        link.kill()


def test_a_job_is_unpickled_in_the_environment_of_its_worker(tmp_path: Path):
    """torch was imported before: all workers saw the trainer's devices."""
    link, events = started(Unpickled(), tmp_path, PERL_TEST_DEVICE="3")
    try:
        assert events.get(timeout=120).id == ("3",)
    finally:
        link.kill()


def test_a_worker_has_no_place_among_the_processes_of_torchrun(tmp_path: Path, monkeypatch):
    """An engine's process group was a client of a server that nobody had started, and waited half an hour for it."""
    of_torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    for name, value in of_torchrun.items():
        monkeypatch.setenv(name, value)
    link, events = started(Grouped(), tmp_path)
    try:
        assert events.get(timeout=120) == Result((1,), Completion.failed("none"), 1)
    finally:
        link.kill()


def test_a_job_that_cannot_be_unpickled_says_so_in_its_log(tmp_path: Path):
    link, events = started(NotUnpickled(), tmp_path)
    try:
        said = list(iter(lambda: events.get(timeout=120), None))
    finally:
        link.kill()
    assert said[0] == Failed("ValueError: invalid literal for int() with base 10: 'no number'")
    assert "ValueError: invalid literal for int()" in (tmp_path / "log").read_text()


def test_a_worker_that_cannot_read_what_it_is_sent_ends(tmp_path: Path):
    link, events = started(Reader(), tmp_path)
    try:
        assert isinstance(events.get(timeout=120), Ready)
        link.send(RequestBatch(0, [NotRead()]))
        assert events.get(timeout=60) is None
    finally:
        link.kill()
    assert "ValueError: invalid literal for int()" in (tmp_path / "log").read_text()


class TooLarge:
    """What no memory is left to pack."""

    def __reduce__(self):
        raise MemoryError


def test_what_cannot_be_packed_ends_the_worker_that_waits_for_it(tmp_path: Path):
    """It waited until rollout.deadline_s, and the reason was a traceback on stderr."""
    link, events = started(Reader(), tmp_path)
    try:
        assert isinstance(events.get(timeout=120), Ready)
        link.send(RequestBatch(0, [TooLarge()]))
        assert events.get(timeout=60) == Failed("what it is sent cannot be packed: MemoryError")
        assert events.get(timeout=60) is None
    finally:
        link.kill()


def test_the_death_of_a_worker_is_heard_of_though_its_children_live(tmp_path: Path):
    link, events = started(Forking(), tmp_path)
    try:
        (child,) = events.get(timeout=120).id
        os.kill(link._process.pid, signal.SIGKILL)  # as the kernel does where memory is short: it, not its group
        assert events.get(timeout=60) is None
    finally:
        link.kill()
    assert link.exit_reason() == "killed by SIGKILL"
    deadline = time.monotonic() + 60
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_a_worker_that_takes_its_time_to_end_has_ended_by_itself(tmp_path: Path, monkeypatch):
    """It counted as killed from outside. Its process id may be another process's then, and is not killed."""
    killed: list = []
    link, events = started(Lingering(), tmp_path)
    try:
        assert isinstance(events.get(timeout=120), Ready)
        assert events.get(timeout=60) == Failed("exit code 7")
        assert events.get(timeout=60) is None
        monkeypatch.setattr(os, "kill", lambda *_: killed.append(_))
    finally:
        link.kill()
    assert killed == []


def test_a_child_of_the_parent_does_not_hold_on_to_its_workers(tmp_path: Path):
    """As a reward function may fork some: they kept the workers of a killed training alive."""
    link, events = started(Reader(), tmp_path)
    try:
        assert isinstance(events.get(timeout=120), Ready)
        if (child := os.fork()) == 0:
            try:
                os.fstat(link._connection.fileno())
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        link.send(None)
        assert events.get(timeout=60) is None
    finally:
        link.kill()
    assert link.exit_reason() == "exit code 0"


def test_a_worker_that_reads_nothing_holds_nobody_up(tmp_path: Path):
    """More than a pipe holds is sent to a process that was stopped."""
    events = []
    spec = WorkerSpec(
        index=0, device="cpu", job=pickle.dumps(Reader()), weights=None, environment={}, log=tmp_path / "log"
    )
    link = ProcessLink(spec, events.append)
    deadline = time.monotonic() + 120
    while not events and time.monotonic() < deadline:
        time.sleep(0.05)
    assert isinstance(events[0], Ready)
    os.kill(link._process.pid, signal.SIGSTOP)
    for number in range(3):
        link.send(RequestBatch(number, [number], payload=bytes(8_000_000)))
    link.kill()
    assert not link._process.is_alive()
    assert events[1:] == [None]


def test_the_end_of_a_worker_sends_nothing_and_leaves_no_thread(tmp_path: Path):
    """What was still sent came to the next worker, whose pipe may have the same descriptor."""
    before, sent = set(threading.enumerate()), []
    link, events = started(Reader(), tmp_path)
    assert isinstance(events.get(timeout=120), Ready)
    link._connection.send = sent.append
    link.kill()
    assert set(threading.enumerate()) == before
    assert sent == []


def test_signals_to_all_processes_leave_a_worker_at_work_from_its_first_moment_on(tmp_path: Path):
    """Ctrl-C printed a traceback of one that still started, and SIGTERM, as Slurm sends it, ended all."""
    link, events = started(Starting(), tmp_path)
    try:
        for moment in range(2):
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(link._process.pid, number)
            if moment == 0:
                assert isinstance(events.get(timeout=120), Ready)
        link.send(RequestBatch(0, [0]))
        assert events.get(timeout=60).id == (-signal.SIGTERM,)
        link.send(None)
        assert events.get(timeout=60) is None
    finally:
        link.kill()
    assert link.exit_reason() == "exit code 0"


def test_a_process_that_does_not_end_holds_nobody_up(tmp_path: Path, monkeypatch):
    """As one that waits in the kernel: SIGKILL does nothing."""
    link, events = started(Reader(), tmp_path)
    assert isinstance(events.get(timeout=120), Ready)
    process = link._process
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    with monkeypatch.context() as patched:
        patched.setattr(local, "KILL_S", 0.5)
        for name in ("kill", "killpg"):
            patched.setattr(os, name, lambda *_: None)
        assert link.kill() == process.pid
        assert link.kill() is None
        assert process not in multiprocessing.active_children()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
