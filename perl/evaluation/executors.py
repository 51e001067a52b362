"""Where workers run. EXECUTORS names the ways to start one; what it says afterwards comes through one function.

An Executor starts workers; the Link that it returns is the parent's way to one of them:

    parent -> worker   list[Job], as often as there is work; None: no more will come
    worker -> parent   Ready, Done for each job, Failed; None when it is gone, whatever ended it
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Protocol

from perl.evaluation.worker import Job, Message, WorkerSpec, run_worker

logger = logging.getLogger(__name__)

EXIT_S = 1.0

Deliver = Callable[[Message | None], None]
"""Takes what a worker says, in its order, from any thread."""


class Link(Protocol):
    """One started worker."""

    def send(self, jobs: list[Job] | None) -> None:
        """Send; that a worker is gone is delivered, not raised."""
        ...

    def join(self, timeout: float) -> None:
        """Wait until the worker has ended."""
        ...

    def kill(self) -> None:
        """End the worker and all its processes now. A second call does nothing."""
        ...

    def last_words(self) -> str:
        """How it ended, as far as is known."""
        ...


class Executor(Protocol):
    """A way to start workers."""

    def start(self, spec: WorkerSpec, deliver: Deliver) -> Link: ...

    def close(self) -> None:
        """Give back what the executor itself holds; the workers have been killed before."""
        ...


class ProcessLink:
    """A worker that is a process of this machine, at the other end of a pipe."""

    def __init__(self, spec: WorkerSpec, deliver: Deliver):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run_worker, args=(spec, theirs), name=f"worker-{spec.index}")
        self._process.start()
        theirs.close()
        self._deliver = deliver
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def send(self, jobs: list[Job] | None) -> None:
        try:
            self._connection.send(jobs)
        except OSError:
            logger.debug("%s is gone", self._process.name)

    def join(self, timeout: float) -> None:
        self._process.join(timeout)

    def kill(self) -> None:
        """End the worker's whole process group: the engine may have processes of its own."""
        if self._connection.closed:
            return
        assert self._process.pid is not None
        for end in (os.killpg, os.kill):
            try:
                end(self._process.pid, signal.SIGKILL)
                break
            except ProcessLookupError:  # no group of its own yet, or gone already
                continue
        self._listener.join(2 * EXIT_S)
        self._process.join()
        self._connection.close()

    def last_words(self) -> str:
        code = self._process.exitcode
        return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"

    def _listen(self) -> None:
        try:
            while True:
                self._deliver(self._connection.recv())
        except (EOFError, OSError):
            self._process.join(EXIT_S)  # a process closes its pipes before it has an exit code
            self._deliver(None)


class LocalExecutor:
    """Workers are processes of this machine."""

    def start(self, spec: WorkerSpec, deliver: Deliver) -> Link:
        return ProcessLink(spec, deliver)

    def close(self) -> None:
        pass
