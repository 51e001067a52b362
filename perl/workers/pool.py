"""One queue of samples, as many workers as there are devices, each topped up as its samples finish.

The queue grows batch by batch, each with the weights that complete it; a worker replaces those in its engine when it
comes to the first sample that needs others.

The samples of a worker that dies are tried again (perl.workers.retries), and it is started again. One that
keeps dying without finishing anything is given up.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from perl.records import Completion, Sample, SampleId
from perl.workers.executors import Executor, Link
from perl.workers.retries import Retries
from perl.workers.worker import Batch, Failed, Message, Ready, Restart, Result, WeightsSpec, WorkerSpec

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
"""A worker whose engine fails to start again more often than this, in a row, is given up."""
MAX_DEATHS_WITHOUT_PROGRESS = 16
"""So is one that dies more often than this without finishing a sample. While those that kill are being found, a healthy
worker may die several times in a row."""
SHUTDOWN_TIMEOUT_S = 10.0
"""How long workers get to end by themselves once the work is done."""
PREFETCH = 1.25
"""A worker holds this many times what its engine works on at once, so that the engine never waits for the parent."""


class WorkerError(RuntimeError):
    """No worker is left that could do the rest, an engine did not start, or none has completed a row. One line; nothing
    that was done is lost."""


@dataclass
class Queue:
    """The samples of all batches so far."""

    batches: Iterator[Batch | None]
    pending: deque[Sample] = field(default_factory=deque)
    """No worker has had them."""
    unfinished: dict[SampleId, Sample] = field(default_factory=dict)
    """Pending, held by a worker, or in `retries`; in the order in which they came."""
    retries: Retries = field(default_factory=Retries)
    weights: dict[str, WeightsSpec] = field(default_factory=dict)
    """What completes the samples of a dataset's folder."""
    ended: bool = False

    def refill(self) -> bool:
        """Take the next batch if nothing is pending. Returns whether there is, or may come, anything to do."""
        while not self.pending and not self.ended:
            try:
                batch = next(self.batches)
            except StopIteration:
                self.ended = True
                break
            if batch is None:
                break
            self.pending.extend(batch.samples)
            self.unfinished |= {sample.id: sample for sample in batch.samples}
            self.weights |= dict.fromkeys({sample.dataset for sample in batch.samples}, batch.weights)
        return bool(self.unfinished) or not self.ended

    def take(self, count: int) -> list[Sample]:
        """Up to `count` pending samples."""
        taken: list[Sample] = []
        while len(taken) < count and self.pending:
            taken += self.retries.without_failed([self.pending.popleft()])
        return taken

    def weights_of(self, sample: Sample) -> WeightsSpec:
        return self.weights[sample.dataset]

    def pop_failed(self) -> Iterator[tuple[Sample, Completion]]:
        """The samples that have failed, each once."""
        for sample_id in sorted(self.retries.failed.keys() & self.unfinished.keys()):
            sample, why = self.unfinished.pop(sample_id), self.retries.failed[sample_id]
            where = sample.problem.source or sample.key
            logger.warning("%s, sample %d: %s; it counts as wrong", where, sample.index, why)
            yield sample, Completion.failed(why)


@dataclass(eq=False)
class Worker:
    """The parent's side of one worker."""

    spec: WorkerSpec
    link: Link | None = None
    """None: it is to be started, or was given up."""
    to_start: bool = True
    """With the weights of the next pending sample."""
    max_num_seqs: int | None = None
    """Samples that its engine works on at once; None until the engine is loaded."""
    held: dict[SampleId, Sample] = field(default_factory=dict)
    """What it has and has not finished."""
    retrying: bool = False
    """What it holds is a group of Retries: it gets nothing else until that is done."""
    starts: int = 0
    failed_starts: int = 0
    """In a row."""
    deaths_without_progress: int = 0
    """Since it last finished a sample."""
    failure: Failed | None = None

    def send(self, samples: Sequence[Sample], weights_of: Callable[[Sample], WeightsSpec]) -> None:
        assert self.link is not None
        self.held |= {sample.id: sample for sample in samples}
        for weights, group in itertools.groupby(samples, weights_of):
            self.link.send(Batch(weights, list(group)))

    def kill(self) -> str:
        """End it. Returns why it ended, as far as is known, and where to read more."""
        assert self.link is not None
        self.link.kill()
        reason = self.failure.message if self.failure is not None else self.link.exit_reason()
        self.link, self.max_num_seqs, self.failure, self.retrying = None, None, None, False
        self.held.clear()
        return f"{reason} (log: {self.spec.log})"


class WorkerPool:
    """The workers of one evaluation. Use as a context manager: on exit no process of theirs is left."""

    def __init__(self, specs: Sequence[WorkerSpec], executor: Executor):
        self.workers = [Worker(spec) for spec in specs]
        self.generation_began: float | None = None
        """time.monotonic() when the first engine was ready."""
        self.restarts = 0
        self._executor = executor
        self._inbox: queue.SimpleQueue[tuple[Worker, int, Message | None]] = queue.SimpleQueue()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            if worker.link is not None:
                worker.link.kill()
        self._executor.close()

    def complete(
        self,
        batches: Iterator[Batch | None],
        on_wait: Callable[[], None] = lambda: None,
        engine_works: bool = False,
    ) -> Iterator[tuple[Sample, Completion]]:
        """Yield samples as they finish, each exactly once; one that kills its workers comes with an error. Samples have
        to differ in their `id`.

        Args:
            batches: the work, asked for when all samples so far are handed out; None: nothing at the moment. The
                workers start with what the first batch needs.
            on_wait: called at least every half second, to look after the screen.
            engine_works: samples of this evaluation were completed before, so that one that fails now is at fault
                itself, and not the engine.

        Raises:
            WorkerError: an engine failed to start, all workers died more often than they are restarted, or all samples
                failed and none was ever completed.
        """
        work = Queue(batches)
        while work.refill():
            self._dispatch(work)
            for worker, message in self._messages(timeout=0.5):
                if isinstance(message, Result):
                    engine_works = True
                    worker.held.pop(message.id, None)
                    worker.max_num_seqs, worker.deaths_without_progress = message.max_num_seqs, 0
                    if (sample := work.unfinished.pop(message.id, None)) is not None:
                        yield sample, message.completion
                        yield from work.pop_failed()  # not before: the engine itself may be at fault
                elif isinstance(message, Ready):
                    worker.max_num_seqs, worker.failed_starts = message.max_num_seqs, 0
                    self.generation_began = self.generation_began or time.monotonic()
                elif isinstance(message, Failed):
                    worker.failure = message
                elif isinstance(message, Restart):
                    self._restart(worker, message, work)
                else:
                    self._on_worker_exit(worker, work)
            if work.unfinished and work.unfinished.keys() <= work.retries.failed.keys():
                if not engine_works:
                    raise WorkerError(
                        f"each of the {len(work.unfinished)} rows killed its worker and none was completed, so the"
                        f" engine itself may be at fault; nothing is recorded (log: {self.workers[0].spec.log})"
                    )
                yield from work.pop_failed()
            on_wait()
        self._shut_down()

    def _start(self, worker: Worker, weights: WeightsSpec) -> None:
        worker.spec = replace(worker.spec, weights=weights)
        worker.starts += 1
        worker.to_start = False
        worker.link = self._executor.start(worker.spec, partial(self._deliver, worker, worker.starts))

    def _deliver(self, worker: Worker, start: int, message: Message | None) -> None:
        self._inbox.put((worker, start, message))

    def _messages(self, timeout: float) -> Iterator[tuple[Worker, Message | None]]:
        """(worker, message) of each message there is, waiting for one; None for a worker that is gone."""
        items = []
        with contextlib.suppress(queue.Empty):
            items.append(self._inbox.get(timeout=timeout))
            for _ in range(self._inbox.qsize()):
                items.append(self._inbox.get_nowait())
        for worker, start, message in items:
            if worker.link is not None and start == worker.starts:
                yield worker, message

    def _dispatch(self, work: Queue) -> None:
        """Give each worker whose engine is loaded as much as it can use: a group to retry when it has nothing else."""
        for worker in self.workers:
            if worker.to_start and work.pending:
                self._start(worker, work.weights_of(work.pending[0]))
        living = sum(worker.link is not None for worker in self.workers)
        for worker in self.workers:
            if worker.max_num_seqs is None:
                continue
            samples = []
            if not worker.held:
                samples = work.retries.take(worker.spec.index, only=living == 1)
                worker.retrying = bool(samples)
            if not worker.retrying:
                # Never more than an even share of what is left, so that nobody hoards what another could begin.
                goal = min(math.ceil(worker.max_num_seqs * PREFETCH), math.ceil(len(work.unfinished) / living))
                samples = work.take(goal - len(worker.held))
            if samples:
                worker.send(samples, work.weights_of)

    def _restart(self, worker: Worker, message: Restart, work: Queue) -> None:
        """Start a worker again, because its engine can't take the weights that come next."""
        logger.warning("worker %d starts a new engine: %s", worker.spec.index, message.reason)
        work.pending.extendleft(reversed(list(worker.held.values())))
        worker.kill()
        self._start(worker, message.weights)

    def _on_worker_exit(self, worker: Worker, work: Queue) -> None:
        """Clear up after a dead worker, have its samples tried again, and start it again, if that makes sense."""
        index, held, was_ready = worker.spec.index, list(worker.held.values()), worker.max_num_seqs is not None
        # In a sweep its weights may have been done, and removed, while it still loaded them.
        wanted = any(work.weights_of(sample) == worker.spec.weights for sample in work.unfinished.values())
        broken = worker.starts == 1 and not was_ready and worker.failure is not None and wanted
        reason = worker.kill()
        if broken:  # once it ran, its device is at fault
            raise WorkerError(f"the engine of worker {index} did not start: {reason}")
        work.retries.bisect(index, held)
        worker.deaths_without_progress += 1
        worker.failed_starts += not was_ready
        if worker.failed_starts <= MAX_FAILED_STARTS and worker.deaths_without_progress <= MAX_DEATHS_WITHOUT_PROGRESS:
            self.restarts += 1
            logger.warning("worker %d died: %s; its %d rows go back, it starts again", index, reason, len(held))
            if work.unfinished:
                self._start(worker, work.weights_of(next(iter(work.unfinished.values()))))
            else:  # the next batch starts it, with what that needs
                worker.to_start = True
        elif any(other.link is not None for other in self.workers):
            logger.warning("worker %d died again: %s; the others go on without it", index, reason)
        else:
            left = len(work.unfinished)
            raise WorkerError(
                f"all workers died, the last one: {reason}; {left} rows are left, the same command does them"
            )

    def _shut_down(self) -> None:
        """Let the workers end by themselves, so that what their libraries hold is given back in order."""
        links = [worker.link for worker in self.workers if worker.link is not None]
        for link in links:
            link.send(None)
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        for link in links:
            link.join(max(0.0, deadline - time.monotonic()))
