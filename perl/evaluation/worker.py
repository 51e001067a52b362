"""A worker: one process with its own devices and its own engine, fed through a pipe (perl.evaluation.executors).

torch and vLLM are imported after the worker's environment is set, so that they see its devices only.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.records import Completion, Prompt, Sampling

if TYPE_CHECKING:
    from perl.engines import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a worker is started with."""

    index: int
    workers: int
    engine: str
    """Key of ENGINES."""
    model: str
    options: dict[str, Any]
    """Keyword arguments of the engine's builder."""
    environment: dict[str, str]
    """Set before anything heavy is imported."""
    log: Path
    """Gets what the worker and the libraries in it print."""


@dataclass(frozen=True, slots=True)
class Job:
    tag: int
    prompt: Prompt
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded."""

    slots: int
    """Rows that the engine works on at once."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    tag: int
    completion: Completion
    seconds: float
    """From the engine's taking the row to its end."""
    slots: int
    """As in Ready, now."""


@dataclass(frozen=True, slots=True)
class Failed:
    message: str
    traceback: str


Message = Ready | Done | Failed
"""What a worker says."""


def run_worker(spec: WorkerSpec, connection: Connection) -> None:
    """Body of the worker's process."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    os.environ.update(spec.environment)
    _log_to(spec.log)
    inbox = Inbox(connection)
    started = time.monotonic()
    try:
        from perl import device
        from perl.engines import ENGINES

        device.pin_cpu(spec.index, spec.workers)
        engine = ENGINES[spec.engine](spec.model, **spec.options)
        connection.send(Ready(engine.slots, time.monotonic() - started))
        for done in completed(engine, inbox):
            connection.send(done)
        engine.close()
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent has to hear of it
        traceback.print_exc()
        text = str(error).strip() or type(error).__name__
        connection.send(Failed(text.splitlines()[0], traceback.format_exc()))
        sys.exit(1)


def completed(engine: Engine, inbox: Inbox) -> Iterator[Done]:
    """Put jobs through the engine as they come."""
    feed = Feed(inbox)
    for position, completion in engine.stream(feed):
        yield feed.finish(position, completion, engine.slots)


@dataclass
class Inbox:
    """Jobs that the parent has sent. When the pipe closes the parent is gone, and this whole process group with it:
    the engine's own processes too."""

    connection: Connection
    jobs: deque[Job] = field(default_factory=deque)
    ended: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self):
        threading.Thread(target=self._receive, daemon=True).start()

    def take(self, *, wait: bool = True) -> list[Job]:
        """All jobs that are there; with `wait`, at least one, or none when no more will come."""
        with self.changed:
            while wait and not self.jobs and not self.ended:
                self.changed.wait()
            jobs = list(self.jobs)
            self.jobs.clear()
            return jobs

    def _receive(self) -> None:
        while True:
            try:
                message = self.connection.recv()
            except (EOFError, OSError):
                os.killpg(0, signal.SIGKILL)
                return
            with self.changed:
                if message is None:
                    self.ended = True
                else:
                    self.jobs.extend(message)
                self.changed.notify()


class Feed:
    """The inbox as an engine's feed (see Engine.stream): None when there is nothing now, but rows under way."""

    def __init__(self, inbox: Inbox):
        self.inbox = inbox
        self.fresh: deque[Job] = deque()
        self.under_way: dict[int, tuple[Job, float]] = {}
        self.given = 0

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> tuple[Prompt, Sampling] | None:
        if not self.fresh:
            self.fresh.extend(self.inbox.take(wait=not self.under_way))
        if not self.fresh:
            if self.under_way:
                return None
            raise StopIteration
        job = self.fresh.popleft()
        self.under_way[self.given] = (job, time.monotonic())
        self.given += 1
        return job.prompt, job.sampling

    def finish(self, position: int, completion: Completion, slots: int) -> Done:
        job, started = self.under_way.pop(position)
        return Done(job.tag, completion, time.monotonic() - started, slots)


def _log_to(path: Path) -> None:
    """Send file descriptors 1 and 2 to `path`: native libraries print there too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
