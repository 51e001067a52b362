"""Work flows: one queue of rows, as many workers as there are devices, each topped up as its rows finish.

A worker that dies gives its rows back to the queue and is started again, a bounded number of times.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from perl.evaluation.plan import Row
from perl.evaluation.worker import Done, Failed, Job, Ready, WorkerSpec, run_worker
from perl.records import Completion

logger = logging.getLogger(__name__)

RESTARTS_PER_WORKER = 3
FAREWELL_S = 10.0
"""How long workers get to end by themselves once the work is done."""
AHEAD = 1.25
"""A streaming worker holds this many times its engine's slots, so that a freed slot never waits for the parent."""


class WorkerError(RuntimeError):
    """No worker is left that could do the rest, or an engine did not start. One line; nothing that was done is lost."""


@dataclass
class Worker:
    """The parent's side of one worker process."""

    spec: WorkerSpec
    process: Any = None
    connection: Connection | None = None
    ready: Ready | None = None
    held: set[int] = field(default_factory=set)
    """Tags of the rows that it has and has not finished."""
    restarts: int = 0
    failure: Failed | None = None

    @property
    def alive(self) -> bool:
        return self.connection is not None

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.ready, self.failure = None, None
        self.process = context.Process(target=run_worker, args=(self.spec, theirs), name=f"worker-{self.spec.index}")
        self.process.start()
        theirs.close()

    def send(self, jobs: list[Job] | None) -> None:
        """Send; a worker that is gone is noticed when its pipe is read."""
        assert self.connection is not None
        self.held.update(job.tag for job in jobs or ())
        try:
            self.connection.send(jobs)
        except OSError:
            logger.debug("worker %d is gone", self.spec.index)

    def kill(self) -> None:
        """End the worker's whole process group: the engine may have processes of its own."""
        if self.process is None or self.process.pid is None:
            return
        for end in (os.killpg, os.kill):
            try:
                end(self.process.pid, signal.SIGKILL)
                break
            except ProcessLookupError:  # no group of its own yet, or gone already
                continue
        self.process.join()
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def last_words(self) -> str:
        """Why it ended, as far as is known, and where to read more."""
        if self.failure is not None:
            return f"{self.failure.message} (log: {self.spec.log})"
        code = self.process.exitcode if self.process is not None else None
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return f"{how} (log: {self.spec.log})"


class Workers:
    """The workers of one evaluation. Use as a context manager: on exit no process of theirs is left."""

    def __init__(self, specs: Sequence[WorkerSpec]):
        self.workers = [Worker(spec) for spec in specs]
        self.generation_began: float | None = None
        """time.monotonic() when the first engine was ready."""
        self.restarts = 0

    def __enter__(self) -> Workers:
        for worker in self.workers:
            worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()

    def complete(
        self, rows: Sequence[Row], on_wait: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Row, Completion, float]]:
        """Yield (row, completion, seconds) as rows finish, each exactly once.

        Args:
            on_wait: called at least every half second, to look after the screen.

        Raises:
            WorkerError: an engine failed to start, or workers died more often than they are restarted.
        """
        waiting = deque(range(len(rows)))
        unfinished = set(waiting)
        while unfinished:
            self._top_up(rows, waiting, len(unfinished))
            for worker, message in self._messages(timeout=0.5):
                if isinstance(message, Done):
                    worker.held.discard(message.tag)
                    if message.tag in unfinished:
                        unfinished.remove(message.tag)
                        yield rows[message.tag], message.completion, message.seconds
                elif isinstance(message, Ready):
                    worker.ready = message
                    self.generation_began = self.generation_began or time.monotonic()
                elif isinstance(message, Failed):
                    worker.failure = message
                else:
                    waiting.extendleft(sorted(worker.held, reverse=True))
                    self._bury(worker, len(unfinished))
            on_wait()
        self._dismiss()

    def _dismiss(self) -> None:
        """Let the workers end by themselves, so that what their libraries hold is given back in order."""
        living = [worker for worker in self.workers if worker.alive]
        for worker in living:
            worker.send(None)
        deadline = time.monotonic() + FAREWELL_S
        for worker in living:
            worker.process.join(max(0.0, deadline - time.monotonic()))

    def _top_up(self, rows: Sequence[Row], waiting: deque[int], unfinished: int) -> None:
        able = [worker for worker in self.workers if worker.alive and worker.ready]
        for worker in able:
            wanted = self._share(worker, len(waiting), unfinished)
            tags = [waiting.popleft() for _ in range(min(wanted, len(waiting)))]
            if tags:
                worker.send([Job(tag, rows[tag].prompt, rows[tag].sampling) for tag in tags])

    def _share(self, worker: Worker, waiting: int, unfinished: int) -> int:
        """How many more rows `worker` gets now. Never more than an even share of what is left, so that nobody hoards
        rows that another could begin."""
        assert worker.ready is not None
        living = sum(other.alive for other in self.workers)
        if worker.ready.slots is not None:
            goal = min(math.ceil(worker.ready.slots * AHEAD), math.ceil(unfinished / living))
            return max(0, goal - len(worker.held))
        if worker.held:
            return 0
        # An engine that takes chunks: half an even share at a time, until shares are too small to fill a batch.
        share = waiting / living
        return math.ceil(share if living == 1 or share < 64 else share / 2)

    def _messages(self, timeout: float) -> Iterator[tuple[Worker, Done | Ready | Failed | None]]:
        """(worker, message) of each message there is; None for a worker that is gone."""
        by_connection = {worker.connection: worker for worker in self.workers if worker.connection is not None}
        for connection in wait(list(by_connection), timeout):
            worker = by_connection[connection]  # pyright: ignore[reportArgumentType]
            assert worker.connection is not None
            try:
                while worker.connection.poll():
                    yield worker, worker.connection.recv()
            except (EOFError, OSError):
                yield worker, None

    def _bury(self, worker: Worker, unfinished: int) -> None:
        """Clear up after a dead worker and start it again, if that makes sense."""
        never_ready, lost = worker.ready is None, len(worker.held)
        worker.kill()
        worker.held.clear()
        words = worker.last_words()
        if never_ready and worker.failure is not None and not worker.restarts:  # once it ran: its device is at fault
            raise WorkerError(f"the engine of worker {worker.spec.index} did not start: {words}")
        if worker.restarts < RESTARTS_PER_WORKER:
            worker.restarts += 1
            self.restarts += 1
            logger.warning("worker %d died: %s; its %d rows go back, it starts again", worker.spec.index, words, lost)
            worker.start()
        elif any(other.alive for other in self.workers):
            logger.warning("worker %d died again: %s; the others go on without it", worker.spec.index, words)
        else:
            raise WorkerError(
                f"all workers died, the last one: {words}; {unfinished} rows are left, the same command does them"
            )
