"""Work flows: one queue of rows, as many workers as there are devices, each topped up as its rows finish.

The queue grows batch by batch, each with the weights that complete it; a worker replaces those in its engine when it
comes to the first row that needs others.

A worker that dies gives its rows back and is started again, a bounded number of times; a row that kills its worker
whenever it is tried is found (perl.evaluation.suspects) and recorded, and costs the others nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from perl.evaluation.executors import Executor, Link
from perl.evaluation.plan import Row
from perl.evaluation.record import Finished
from perl.evaluation.suspects import Suspects, Trial
from perl.evaluation.worker import Done, Failed, Job, Load, Message, Ready, Renew, WorkerSpec

logger = logging.getLogger(__name__)

RESTARTS_PER_WORKER = 3
BARREN_DEATHS = 16
"""A worker that dies so often without finishing one row is given up, even while a guilty row is looked for."""
FAREWELL_S = 10.0
"""How long workers get to end by themselves once the work is done."""
AHEAD = 1.25
"""A worker holds this many times its engine's slots, so that a freed slot never waits for the parent."""


class WorkerError(RuntimeError):
    """No worker is left that could do the rest, or an engine did not start. One line; nothing that was done is lost."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that the same weights complete."""

    load: Load
    rows: Sequence[Row]


@dataclass
class Queue:
    """The rows of all batches so far. A row's tag is its place in the order in which they came."""

    batches: Iterator[Batch | None]
    rows: list[Row] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    prompts: list[tuple[Load, tuple[int, ...]]] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    """Tags that no worker has had."""
    unfinished: set[int] = field(default_factory=set)
    ended: bool = False

    def refill(self) -> bool:
        """Take the next batch if nothing waits. Returns whether there is, or may come, anything to do."""
        while not self.waiting and not self.ended:
            try:
                batch = next(self.batches)
            except StopIteration:
                self.ended = True
                break
            if batch is None:
                break
            tags = range(len(self.rows), len(self.rows) + len(batch.rows))
            self.rows += batch.rows
            self.loads += [batch.load] * len(tags)
            self.prompts += [(batch.load, row.prompt.token_ids) for row in batch.rows]
            self.waiting += tags
            self.unfinished.update(tags)
        return bool(self.unfinished) or not self.ended

    def job(self, tag: int) -> Job:
        return Job(tag, self.rows[tag].prompt, self.rows[tag].sampling, self.loads[tag])


@dataclass(eq=False)
class Worker:
    """The parent's side of one worker."""

    spec: WorkerSpec
    link: Link | None = None
    """None: it was given up, or not started yet."""
    slots: int | None = None
    """Rows that its engine works on at once; None until the engine is loaded."""
    held: set[int] = field(default_factory=set)
    """Tags of the rows that it has and has not finished."""
    trial: Trial | None = None
    """What it holds is this trial."""
    life: int = 0
    """How often it was started."""
    deaths: int = 0
    """For which no row was found guilty."""
    barren: int = 0
    """Deaths since it last finished a row."""
    failure: Failed | None = None

    @property
    def alive(self) -> bool:
        return self.link is not None

    def kill(self) -> str:
        """End it. Returns why it ended, as far as is known, and where to read more."""
        assert self.link is not None
        self.link.kill()
        words = self.failure.message if self.failure is not None else self.link.last_words()
        self.link, self.slots, self.trial, self.failure = None, None, None, None
        self.held.clear()
        return f"{words} (log: {self.spec.log})"


class Workers:
    """The workers of one evaluation. Use as a context manager: on exit no process of theirs is left."""

    def __init__(self, specs: Sequence[WorkerSpec], executor: Executor):
        self.workers = [Worker(spec) for spec in specs]
        self.generation_began: float | None = None
        """time.monotonic() when the first engine was ready."""
        self.restarts = 0
        self._executor = executor
        self._inbox: queue.SimpleQueue[tuple[Worker, object, Message | None]] = queue.SimpleQueue()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            if worker.link is not None:
                worker.link.kill()
        self._executor.close()

    def complete(
        self, batches: Iterator[Batch | None], on_wait: Callable[[], None] = lambda: None
    ) -> Iterator[Finished]:
        """Yield rows as they finish, each exactly once; one that kills its workers comes with an error.

        Args:
            batches: the work, asked for when all rows so far are handed out; None: nothing at the moment. The workers
                start with what the first batch needs.
            on_wait: called at least every half second, to look after the screen.

        Raises:
            WorkerError: an engine failed to start, or workers died more often than they are restarted.
        """
        work = Queue(batches)
        rows, unfinished, suspects = work.rows, work.unfinished, Suspects(work.prompts)
        while work.refill():
            self._top_up(work, suspects)
            for worker, message in self._messages(timeout=0.5):
                if isinstance(message, Done):
                    worker.held.discard(message.tag)
                    worker.slots, worker.barren = message.slots, 0
                    suspects.guilty.pop(message.tag, None)
                    if message.tag in unfinished:
                        unfinished.remove(message.tag)
                        yield Finished(rows[message.tag], message.completion, message.seconds)
                        yield from self._condemned(rows, suspects, unfinished)
                elif isinstance(message, Ready):
                    worker.slots = message.slots
                    self.generation_began = self.generation_began or time.monotonic()
                elif isinstance(message, Failed):
                    worker.failure = message
                elif isinstance(message, Renew):
                    self._renew(worker, message, work)
                else:
                    self._bury(worker, suspects, work)
            if unfinished <= suspects.guilty.keys():
                yield from self._condemned(rows, suspects, unfinished)
            on_wait()
        self._dismiss()

    def _start(self, worker: Worker, load: Load) -> None:
        worker.spec = replace(worker.spec, load=load)
        worker.life += 1
        worker.link = self._executor.start(worker.spec, partial(self._hear, worker, worker.life))

    def _hear(self, worker: Worker, life: int, message: Message | None) -> None:
        self._inbox.put((worker, life, message))

    def _messages(self, timeout: float) -> Iterator[tuple[Worker, Message | None]]:
        """(worker, message) of each message there is, waiting for one; None for a worker that is gone."""
        items = []
        with contextlib.suppress(queue.Empty):
            items.append(self._inbox.get(timeout=timeout))
            for _ in range(self._inbox.qsize()):
                items.append(self._inbox.get_nowait())
        for worker, life, message in items:
            if worker.alive and life == worker.life:
                yield worker, message

    def _top_up(self, work: Queue, suspects: Suspects) -> None:
        """Give each worker whose engine is loaded as much as it can use: a trial when it has nothing else."""
        for worker in self.workers:
            if worker.life == 0 and work.waiting:
                self._start(worker, work.loads[work.waiting[0]])
        living = sum(worker.alive for worker in self.workers)
        for worker in self.workers:
            if worker.slots is None:
                continue
            if not worker.held:
                worker.trial = suspects.next_trial(worker.spec.index, alone=living == 1)
            if worker.trial is not None:
                tags = [] if worker.held else worker.trial.tags
            else:
                # Never more than an even share of what is left, so that nobody hoards rows that another could begin.
                goal = min(math.ceil(worker.slots * AHEAD), math.ceil(len(work.unfinished) / living))
                tags = list(_take(work.waiting, goal - len(worker.held), suspects))
            if tags and worker.link is not None:
                worker.held.update(tags)
                worker.link.send([work.job(tag) for tag in tags])

    def _renew(self, worker: Worker, message: Renew, work: Queue) -> None:
        """Start a worker anew, because its engine can't take the weights that come next."""
        logger.warning("worker %d starts a new engine: %s", worker.spec.index, message.reason)
        work.waiting.extendleft(sorted(worker.held, reverse=True))
        worker.kill()
        self._start(worker, message.load)

    def _bury(self, worker: Worker, suspects: Suspects, work: Queue) -> None:
        """Clear up after a dead worker, accuse what it held, and start it again, if that makes sense."""
        index, trial, held = worker.spec.index, worker.trial, sorted(worker.held)
        never_ready = worker.life == 1 and worker.slots is None and worker.failure is not None
        words = worker.kill()
        if never_ready:  # once it ran, its device is at fault
            raise WorkerError(f"the engine of worker {index} did not start: {words}")
        worker.barren += 1
        if trial is None:
            worker.deaths += 1
            suspects.accuse(index, held)
        elif (case := suspects.convict(trial, index, held)) is not None:
            self.workers[case.worker].deaths -= 1  # it was the row's fault
        if worker.deaths <= RESTARTS_PER_WORKER and worker.barren <= BARREN_DEATHS:
            self.restarts += 1
            logger.warning("worker %d died: %s; its %d rows go back, it starts again", index, words, len(held))
            if work.unfinished:
                self._start(worker, work.loads[min(work.unfinished)])
            else:  # the next batch starts it, with what that needs
                worker.life = 0
        elif any(other.alive for other in self.workers):
            logger.warning("worker %d died again: %s; the others go on without it", index, words)
        else:
            left = len(work.unfinished)
            raise WorkerError(
                f"all workers died, the last one: {words}; {left} rows are left, the same command does them"
            )

    def _condemned(self, rows: Sequence[Row], suspects: Suspects, unfinished: set[int]) -> Iterator[Finished]:
        """The rows found guilty, but for those that a worker is at after all. Called once another row has finished,
        or none is left: before that the engine itself may be at fault."""
        busy = set().union(*(worker.held for worker in self.workers))
        for tag in sorted(suspects.guilty.keys() & unfinished - busy):
            unfinished.remove(tag)
            row, why = rows[tag], suspects.guilty.pop(tag)
            logger.warning("%s, sample %d: %s; it counts as wrong", row.problem.source or row.key, row.sample, why)
            yield Finished.without_completion(row, why)

    def _dismiss(self) -> None:
        """Let the workers end by themselves, so that what their libraries hold is given back in order."""
        living = [worker.link for worker in self.workers if worker.link is not None]
        for link in living:
            link.send(None)
        deadline = time.monotonic() + FAREWELL_S
        for link in living:
            link.join(max(0.0, deadline - time.monotonic()))


def _take(waiting: deque[int], count: int, suspects: Suspects) -> Iterator[int]:
    """Up to `count` waiting rows, without those found guilty meanwhile."""
    while count > 0 and waiting:
        tag = waiting.popleft()
        if tag not in suspects.guilty:
            count -= 1
            yield tag
