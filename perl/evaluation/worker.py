"""A worker: one process with its own devices and its own engine, fed through a pipe (perl.evaluation.executors).

torch and vLLM are imported after the worker's environment is set, so that they see its devices only.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl import device
from perl.device import Kind
from perl.errors import UserError
from perl.records import Completion, Prompt, Sampling

if TYPE_CHECKING:
    from perl.engines import Engine


@dataclass(frozen=True, slots=True)
class Load:
    """The weights that an engine holds."""

    model: str
    """Folder of a whole model."""
    dtype: str
    """As --dtype."""
    adapter: str | None = None
    """What is served beside it to all rows under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a worker is started with."""

    index: int
    device: Kind
    """What it is to compute on."""
    engine: str
    """Key of ENGINES."""
    load: Load
    """What the engine starts with."""
    options: dict[str, Any]
    """Keyword arguments of the engine's builder, but for the dtype."""
    environment: dict[str, str]
    """Set before anything heavy is imported."""
    cores: tuple[int, int] | None = None
    """(which share of this machine's cores it keeps to on a CPU, of how many); None: all that it may use."""
    log: Path
    """Gets what the worker and the libraries in it print."""

    @property
    def paths(self) -> list[str]:
        """What has to be there where the worker runs."""
        return [self.load.model, *self.options.get("adapters", ())]


@dataclass(frozen=True, slots=True)
class Job:
    tag: int
    prompt: Prompt
    sampling: Sampling
    load: Load
    """What is in the engine while it completes this."""


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
class Renew:
    """The next job needs another engine than this worker has: it is to be started anew with `load`."""

    load: Load
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    message: str
    traceback: str


Message = Ready | Done | Renew | Failed
"""What a worker says."""
Deliver = Callable[[Message | None], None]
"""Takes what a worker says, in its order, from any thread; None when it is gone."""


def run_worker(spec: WorkerSpec, connection: Connection) -> None:
    """Body of the worker's process."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    os.environ.update(spec.environment)
    _log_to(spec.log)
    inbox = Inbox(connection)
    started = time.monotonic()
    try:
        from perl.engines import ENGINES

        require_device(spec.device, device.detect().kind)
        if spec.cores is not None:
            device.pin_cpu(*spec.cores)
        engine = ENGINES[spec.engine](spec.load.model, dtype=spec.load.dtype, **spec.options)
        connection.send(Ready(engine.max_num_seqs, time.monotonic() - started))
        for message in completed(engine, spec.load, inbox):
            connection.send(message)
        engine.close()
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent has to hear of it
        traceback.print_exc()
        text = str(error).strip() or type(error).__name__
        connection.send(Failed(text.splitlines()[0], traceback.format_exc()))
        sys.exit(1)


def require_device(wanted: Kind, found: Kind) -> None:
    """Raise a UserError when a scheduler counts another kind of device than there is."""
    if found != wanted:
        raise UserError(
            f"node {socket.gethostname()} was to give this worker a device of kind {wanted}, but has kind {found}: what"
            f" was registered there is wrong; ray stop --force, then ray start with {device.RAY_RESOURCE[found]} in"
            " --resources"
        )


def completed(engine: Engine, held: Load, inbox: Inbox) -> Iterator[Done | Renew]:
    """Put jobs through the engine as they come. Between jobs of different loads the engine runs empty and gets the
    other weights; where it can't take them, a Renew is the last thing that comes."""
    feed = Feed(inbox)
    while (load := feed.next_load()) is not None:
        if load != held and (reason := replace_weights(engine, held, load)):
            yield Renew(load, reason)
            return
        held = load
        for position, completion in engine.stream(feed):
            yield feed.finish(position, completion, engine.max_num_seqs)


def replace_weights(engine: Engine, held: Load, load: Load) -> str | None:
    """Put the weights of `load` into the engine, but for adapters, which it has beside them. Returns why that can't be,
    or None when it is done."""
    if (load.model, load.dtype) == (held.model, held.dtype):
        return None
    if load.dtype != held.dtype:
        return f"{load.model} is computed in another dtype ({load.dtype}) than {held.model} ({held.dtype})"
    return engine.replace_weights(load.model)


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
    """The inbox as an engine's feed (see Engine.stream): None when there is nothing now, but rows under way. It ends
    before the first job that needs other weights; `next_load` begins it anew."""

    def __init__(self, inbox: Inbox):
        self.inbox = inbox
        self.fresh: deque[Job] = deque()
        self.under_way: dict[int, tuple[Job, float]] = {}
        self.given = 0
        self.load: Load | None = None

    def next_load(self) -> Load | None:
        """What the next job needs, waiting for one; None when no more will come."""
        if not self.fresh:
            self.fresh.extend(self.inbox.take())
        self.load, self.given = (self.fresh[0].load if self.fresh else None), 0
        return self.load

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> tuple[Prompt, Sampling] | None:
        if not self.fresh:
            self.fresh.extend(self.inbox.take(wait=not self.under_way))
        if not self.fresh and self.under_way:
            return None
        if not self.fresh or self.fresh[0].load != self.load:
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
