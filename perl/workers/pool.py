"""One queue of requests, as many workers as there are devices, each topped up as its requests finish.

    with WorkerPool(make_executor("local", 2), EngineJob("hf", {}), logs=folder) as pool:
        pool.submit(weights, requests)
        while pool.unfinished:
            for request_id, completion in pool.poll(timeout=0.5): ...

The queue grows with each `submit`; a worker replaces the weights in its engine when it comes to the first request that
needs others. (With `newest` the weights of the last `submit` complete whatever is handed out.) The requests of a worker
that dies are tried again (perl.workers.retries), and it is started again. One that keeps dying without finishing
anything is given up. Where all requests are needed, an error that comes back ends the work.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import pickle
import queue
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from perl.records import Completion
from perl.workers.executors import Executor, Link
from perl.workers.retries import Retries
from perl.workers.worker import (
    Failed,
    Job,
    Ready,
    Request,
    RequestBatch,
    RequestId,
    Restart,
    Result,
    WorkerEvent,
    WorkerSpec,
    Working,
)

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
"""A worker whose engine fails to start again more often than this, in a row, is given up."""
MAX_DEATHS_WITHOUT_PROGRESS = 16
"""So is one that dies more often than this without finishing a request. While those that kill are being found, a
healthy worker may die several times in a row."""
MAX_ENDED = 4
"""Workers that something from outside, such as the kernel where memory is used up, ends at one request: where all are
needed, the work ends then."""
SHUTDOWN_TIMEOUT_S = 10.0
"""How long workers get to end by themselves once the work is done."""
PAUSE_S = 2.0
"""Where so long nobody looked, this process was stopped, and what workers said meanwhile is still to be read."""
PREFETCH = 1.25
"""A worker holds this many times what its engine works on at once, rounded down, so that the engine never waits for the
parent. (With `newest` once, as what it has not begun would be drawn by an older policy.)"""


class WorkerError(RuntimeError):
    """No worker is left that could do the rest, an engine did not start, or none has completed a row. One line; nothing
    that was done is lost."""


Finished = tuple[RequestId, Any]
"""A request, and its completion as its job makes them: a Completion with an error where it kills its workers."""


class Payload(NamedTuple):
    """What weights are made of."""

    number: int
    payload: Any
    shared: Any
    """As the executor shares it."""


class NotStarted:
    """The link of a worker for which this machine has had no process, thread or file left."""

    def __init__(self, why: str):
        self._why = why

    def send(self, batch: RequestBatch | None) -> None:
        pass

    def join(self, timeout: float) -> None:
        pass

    def kill(self) -> None:
        pass

    def exit_reason(self) -> str:
        return self._why


@dataclass(eq=False)
class Worker:
    """The parent's side of one worker."""

    index: int
    log: Path
    weights: Any = None
    """What it was started with last."""
    given: int | None = None
    """Number of the payload that it was sent last."""
    link: Link | None = None
    """None: it is to be started, or was given up."""
    to_start: bool = True
    """With the weights of the next pending request."""
    max_num_seqs: int | None = None
    """Requests that its engine works on at once; None until the engine is loaded."""
    held: dict[RequestId, Request] = field(default_factory=dict)
    """What it has and has not finished."""
    retrying: bool = False
    """What it holds is a group of Retries: it gets nothing else until that is done."""
    starts: int = 0
    failed_starts: int = 0
    """In a row."""
    deaths_without_progress: int = 0
    """Since it last finished a request."""
    failure: Failed | None = None
    stuck: bool = False
    """Its process does not end, and has its device."""
    heard: float = 0.0
    """time.monotonic() of its start, of its last event, or of the first request that it got since."""

    def kill(self) -> str:
        """End it. Returns why it ended, as far as is known, and where to read more."""
        assert self.link is not None
        process = self.link.kill()
        reason = self.failure.message if self.failure is not None else self.link.exit_reason()
        self.link, self.max_num_seqs, self.failure, self.retrying, self.given = None, None, None, False, None
        self.held.clear()
        if process is not None:
            self.stuck = True
            reason += f"; SIGKILL does not end its process {process}, which has its device"
        return f"{reason} (log: {self.log})"


def alike(message: str) -> list[str]:
    """What two messages of one error have in common: amounts and addresses differ."""
    return [word for word in message.split() if not any(letter.isdigit() for letter in word)]


class WorkerPool:
    """Workers that complete what is submitted. Use as a context manager: on exit no process of theirs is left."""

    def __init__(
        self,
        executor: Executor,
        job: Job,
        logs: Path,
        engine_works: bool = False,
        deadline_s: float = math.inf,
        newest: bool = False,
        all_needed: bool = False,
    ):
        """Args:
        job: what each worker does.
        logs: folder of worker-N.log.
        deadline_s: one that has work, or starts, and says nothing for so long counts as dead.
        newest: a request that is handed out is completed by the weights of the last `submit`, not those of its own.
        engine_works: it has completed such requests before, so that one that fails now is at fault itself.
        all_needed: the work is lost with a single request, so what ends a worker from outside is no fault of one.
        """
        self.unfinished: dict[RequestId, Request] = {}
        """Pending, held by a worker, or in the retries; in the order in which they were submitted."""
        self.first_ready: float | None = None
        """time.monotonic() when the first engine was ready."""
        self.restarts = 0
        self.workers = [Worker(index, (logs / f"worker-{index}.log").resolve()) for index in range(executor.workers)]
        self._executor, self._job, self._deadline_s = executor, job, deadline_s
        self._engine_works, self._all_needed = engine_works, all_needed
        self._reason = ""
        """Of the last death."""
        self._ended: Counter[RequestId] = Counter()
        """Workers that something from outside has ended, by what they were at."""
        self._raised: list[str] | None = None
        """By a worker at its work, `alike`, since something was completed."""
        self._pending: deque[Request] = deque()
        """No worker has had them."""
        self.newest, self._latest = newest, None
        """`_latest`: the weights of the last `submit`."""
        self._weights: dict[RequestId, Any] = {}
        self._payloads: dict[Any, Payload] = {}
        """Of the weights of unfinished requests."""
        self._numbers = itertools.count()
        self._retries = Retries()
        self._error: WorkerError | None = None
        """To be raised by the next `poll`."""
        self._inbox: queue.SimpleQueue[tuple[Worker | None, int, WorkerEvent | None]] = queue.SimpleQueue()
        self._looked = time.monotonic()
        """For workers that say nothing."""

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        links = [worker.link for worker in self.workers if worker.link is not None]
        if kind is None and not self.unfinished:  # so that what their libraries hold is given back in order
            for link in links:
                link.send(None)
            deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
            for link in links:
                link.join(max(0.0, deadline - time.monotonic()))
        for link in links:
            if (process := link.kill()) is not None:
                logger.warning("SIGKILL does not end a worker's process %d", process)
        self._executor.close()

    def submit(self, weights: Any, requests: Sequence[Any], payload: Any = None) -> None:
        """Add to the queue what `weights` complete. No id may come twice. Workers are started by the next `poll`.

        Args:
            payload: what the weights are made of, where no folder holds them; a worker gets it when it needs it, and
                has not got the same object for other weights.
        """
        self._pending.extend(requests)
        if payload is not None and weights not in self._payloads:
            same = (each for each in self._payloads.values() if each.payload is payload)
            self._payloads[weights] = next(same, None) or Payload(
                next(self._numbers), payload, self._executor.shared(payload)
            )
        self.unfinished |= {request.id: request for request in requests}
        before, self._latest = self._latest, weights
        complete = self._pending if self.newest else requests
        self._weights |= dict.fromkeys((request.id for request in complete), weights)
        self._drop_payload(before)

    @property
    def queued(self) -> int:
        """Requests that no worker has had, or that were taken back from one."""
        return len(self._pending)

    def wake(self) -> None:
        """End the wait of a `poll` in another thread."""
        self._inbox.put((None, 0, None))

    def poll(self, timeout: float) -> list[Finished]:
        """The requests that have finished since the last call, each exactly once; one that kills its workers comes with
        an error. Waits for one thing to happen, and `timeout` seconds at most.

        Raises:
            WorkerError: an engine failed to start, all workers died more often than they are restarted, or all requests
                failed and none was ever completed; where all are needed, an error has come back before anything was
                completed. What finished before comes first.
        """
        if self._error is not None:
            raise self._error
        finished: list[Finished] = []
        try:
            self._dispatch()
            for worker, event in self._events(timeout):
                worker.heard = time.monotonic()
                finished += self._on_event(worker, event)
            self._end_silent(timeout)
            if self.unfinished and self.unfinished.keys() <= self._retries.failed.keys():
                if not self._engine_works:
                    raise WorkerError(
                        f"each of the {len(self.unfinished)} {self._job.unit} killed its worker and none was completed,"
                        f" so the engine itself may be at fault; nothing is recorded; the last one: {self._reason}"
                    )
                finished += self._failed()
        except WorkerError as error:
            if not finished:
                raise
            self._error = error
        return finished

    def _on_event(self, worker: Worker, event: WorkerEvent | None) -> list[Finished]:
        """What finishes with the event; None: the worker is gone."""
        if isinstance(event, Result):
            self._engine_works, self._raised = True, None
            worker.held.pop(event.id, None)
            worker.max_num_seqs, worker.deaths_without_progress = event.max_num_seqs, 0
            if self._finish(event.id):
                return [(event.id, event.completion), *self._failed()]  # not before: the engine may be at fault
        elif isinstance(event, Ready):
            worker.max_num_seqs, worker.failed_starts = event.max_num_seqs, 0
            self.first_ready = self.first_ready or time.monotonic()
        elif isinstance(event, Failed):
            worker.failure = worker.failure or event
        elif isinstance(event, Working):
            pass  # `heard` is all of it
        elif isinstance(event, Restart):
            logger.warning("worker %d starts a new engine: %s", worker.index, event.reason)
            self._go_back(list(worker.held.values()))
            reason = worker.kill()
            if worker.stuck:
                self._give_up(worker, reason)
            else:
                self._start(worker, event.weights)
        else:
            self._on_exit(worker)
        return []

    def _end_silent(self, timeout: float) -> None:
        """Workers that have had no word for too long count as dead: while somebody listened, each `timeout` seconds."""
        before, self._looked = self._looked, time.monotonic()
        if (pause := self._looked - before) > timeout + PAUSE_S:
            for worker in self.workers:
                worker.heard = min(worker.heard + pause, self._looked)
        for worker in self.workers:
            at_work = worker.link is not None and (worker.held or worker.max_num_seqs is None)
            if at_work and time.monotonic() - worker.heard > self._deadline_s:
                worker.failure = Failed(f"it said nothing for --config.rollout.deadline_s {self._deadline_s:g} s")
                self._on_exit(worker, silent=True)

    def _finish(self, request_id: RequestId) -> bool:
        """Whether it was unfinished until now."""
        self._drop_payload(self._weights.pop(request_id, None))
        return self.unfinished.pop(request_id, None) is not None

    def _drop_payload(self, weights: Any) -> None:
        """Of weights that nothing needs any more."""
        if weights not in self._payloads or (self.newest and weights == self._latest):
            return
        if weights not in self._weights.values():
            del self._payloads[weights]

    def _failed(self) -> list[Finished]:
        """The requests that have failed, each once."""
        reasons = self._retries.failed
        return [(id_, Completion.failed(reasons[id_])) for id_ in sorted(reasons) if self._finish(id_)]

    def _start(self, worker: Worker, weights: Any) -> None:
        worker.weights, worker.to_start, worker.heard = weights, False, time.monotonic()
        worker.starts += 1
        spec = WorkerSpec(
            index=worker.index,
            device=self._executor.devices.kind,
            job=pickle.dumps(self._job),
            paths=self._job.paths(weights),
            weights=weights,
            environment=self._executor.environment(worker.index) | {"TOKENIZERS_PARALLELISM": "false"},
            log=worker.log,
        )
        start = worker.starts

        def deliver(event: WorkerEvent | None) -> None:
            self._inbox.put((worker, start, event))

        try:
            worker.link = self._executor.start(spec, deliver)
        except (OSError, RuntimeError) as error:
            worker.link = NotStarted(f"{type(error).__name__}: {error}")
            deliver(None)

    def _events(self, timeout: float) -> Iterator[tuple[Worker, WorkerEvent | None]]:
        """(worker, event) of each event there is, waiting for one; None for a worker that is gone."""
        items = []
        with contextlib.suppress(queue.Empty):
            items.append(self._inbox.get(timeout=timeout))
            for _ in range(self._inbox.qsize()):
                items.append(self._inbox.get_nowait())
        for worker, start, event in items:
            if worker is not None and worker.link is not None and start == worker.starts:
                yield worker, event

    def _dispatch(self) -> None:
        """Give each worker whose engine is loaded as much as it can use: a group to retry when it has nothing else."""
        for worker in self.workers:
            if worker.to_start and self._pending:
                self._start(worker, self._weights[self._pending[0].id])
        living = sum(worker.link is not None for worker in self.workers)
        for worker in self.workers:
            if worker.max_num_seqs is None:
                continue
            requests = []
            if not worker.held:
                requests = self._retries.take(worker.index, only=living == 1)
                worker.retrying = bool(requests)
                self._renew(requests)
            if not worker.retrying:
                # Never more than an even share of what is left, so that nobody hoards what another could begin.
                most = int(worker.max_num_seqs * (1.0 if self.newest else PREFETCH))
                goal = min(most, math.ceil(len(self.unfinished) / living))
                requests = self._take(goal - len(worker.held))
            assert worker.link is not None
            worker.heard = worker.heard if worker.held else time.monotonic()
            worker.held |= {request.id: request for request in requests}
            for weights, group in itertools.groupby(requests, lambda request: self._weights[request.id]):
                payload = self._payloads.get(weights)
                if payload is not None and payload.number != worker.given:
                    worker.link.send(RequestBatch(weights, list(group), payload.shared))
                    worker.given = payload.number
                else:
                    worker.link.send(RequestBatch(weights, list(group)))

    def _take(self, count: int) -> list[Request]:
        """Up to `count` pending requests."""
        taken: list[Request] = []
        while len(taken) < count and self._pending:
            taken += self._retries.without_failed([self._pending.popleft()])
        return taken

    def _go_back(self, requests: Sequence[Request]) -> None:
        """To the front of the queue, as though nobody had had them."""
        self._pending.extendleft(reversed(requests))
        self._renew(requests)

    def _renew(self, requests: Sequence[Request]) -> None:
        """With `newest`, the weights of the last `submit` complete what is to be handed out again."""
        if not self.newest:
            return
        before = {self._weights[request.id] for request in requests}
        self._weights |= dict.fromkeys((request.id for request in requests), self._latest)
        for weights in before:
            self._drop_payload(weights)

    def _on_exit(self, worker: Worker, silent: bool = False) -> None:
        """Clear up after a dead worker, have its requests tried again, and start it again, if that makes sense."""
        index, held, was_ready = worker.index, list(worker.held.values()), worker.max_num_seqs is not None
        # One that hangs, where another has begun, may have met a file system that is slow for it alone.
        hangs = silent and self.first_ready is not None
        # Its weights may have been done, and removed, while it still loaded them.
        wanted = bool(self._weights) if self.newest else worker.weights in self._weights.values()
        broken = worker.starts == 1 and not was_ready and worker.failure is not None and wanted and not hangs
        raised = alike(worker.failure.message) if held and worker.failure is not None and not silent else None
        from_outside = worker.failure is None
        reason = self._reason = worker.kill()
        if broken:  # once it ran, its device is at fault
            raise WorkerError(f"the engine of worker {index} did not start: {reason}")
        if self._all_needed and raised is not None:
            if raised == self._raised:
                raise WorkerError(f"an error came back before anything else was completed: {reason}")
            self._raised = raised
        if self._all_needed and from_outside:  # in the retries each would have an engine for itself
            if held and was_ready:
                at_work = held[0].id
                self._ended[at_work] += 1
                if self._ended[at_work] == MAX_ENDED:
                    raise WorkerError(f"one of the {self._job.unit} ended {MAX_ENDED} workers, the last one: {reason}")
            self._go_back(held)
        else:
            self._retries.bisect(index, held, reason)
        worker.deaths_without_progress += 1
        worker.failed_starts += not was_ready
        given_up = (
            worker.stuck
            or worker.failed_starts > MAX_FAILED_STARTS
            or worker.deaths_without_progress > MAX_DEATHS_WITHOUT_PROGRESS
        )
        if not given_up:
            self.restarts += 1
            logger.warning(
                "worker %d died: %s; its %d %s go back, it starts again", index, reason, len(held), self._job.unit
            )
            if self.unfinished:
                self._start(worker, self._weights[next(iter(self.unfinished))])
            else:  # the next request starts it, with what that needs
                worker.to_start = True
        else:
            self._give_up(worker, reason)

    def _give_up(self, worker: Worker, reason: str) -> None:
        """It is not started again. A WorkerError where it was the last."""
        if any(other.link is not None for other in self.workers):
            logger.warning("worker %d is given up: %s; the others go on without it", worker.index, reason)
        else:
            left = len(self.unfinished)
            raise WorkerError(f"all workers died, the last one: {reason}; {left} {self._job.unit} are left")
