"""Grading and storing beside generation: a thread takes finished rows, grades them, and appends them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from perl.evaluation.plan import Row
from perl.evaluation.store import Store
from perl.grading import Grader
from perl.records import Completion, Grade
from perl.results import SampleRecord
from perl.tasks import TASKS

BATCH = 256


@dataclass(frozen=True, slots=True)
class Finished:
    row: Row
    completion: Completion
    seconds: float
    """What the engine took; 0 for a row that was never generated."""
    error: str | None = None
    """Why the row was never generated."""

    @classmethod
    def without_completion(cls, row: Row, error: str) -> Finished:
        """A row that gets an empty, truncated completion."""
        return cls(row, Completion(token_ids=(), text="", finish_reason="length"), 0.0, error)


class Recorder:
    """Grade rows and write them to their dataset's store, in the order in which they finish.

    A context manager: leaving it waits until everything handed in is on disk, also when an exception is on its way.
    An error of the thread is raised at the next `add` or on leaving.
    """

    def __init__(
        self, stores: Mapping[str, Store], engine: str, on_record: Callable[[SampleRecord], None] = lambda record: None
    ):
        self._stores = stores
        self._engine = engine
        self._on_record = on_record
        self._queue: queue.Queue[Finished | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()
        if kind is None:
            self._raise()

    def add(self, finished: Finished) -> None:
        self._raise()
        self._queue.put(finished)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with Grader() as grader:
                while (batch := self._take()) is not None:
                    self._record(grader, batch)
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits for us
            self._error = error

    def _take(self) -> list[Finished] | None:
        """What has come in, waiting for one at least; None at the end."""
        batch = []
        item = self._queue.get()
        while item is not None:
            batch.append(item)
            if len(batch) == BATCH or self._queue.empty():
                return batch
            item = self._queue.get()
        if batch:
            self._queue.put(None)
            return batch
        return None

    def _record(self, grader: Grader, batch: Sequence[Finished]) -> None:
        for task in dict.fromkeys(finished.row.problem.task for finished in batch):
            mine = [finished for finished in batch if finished.row.problem.task == task]
            texts = [finished.completion.text for finished in mine]
            golds = [finished.row.problem.gold for finished in mine]
            grades = grader.grade(TASKS[task].rubric, texts, golds)
            records = [record_of(f, grade, self._engine) for f, grade in zip(mine, grades, strict=True)]
            for dataset in dict.fromkeys(finished.row.dataset for finished in mine):
                own = [r for f, r in zip(mine, records, strict=True) if f.row.dataset == dataset]
                self._stores[dataset].append(own)
            for record in records:
                self._on_record(record)


def record_of(finished: Finished, grade: Grade, engine: str) -> SampleRecord:
    """A line of samples.jsonl."""
    row, completion = finished.row, finished.completion
    return {
        "key": row.key,
        "sample": row.sample,
        "seed": row.prompt.seed,
        "task": row.problem.task,
        "source": row.problem.source,
        "prompt": row.prompt_text,
        "gold": row.problem.gold,
        "completion": completion.text,
        "score": grade.score,
        "scores": grade.scores,
        "extracted": grade.extracted,
        "reason": grade.reason,
        "prompt_tokens": len(row.prompt.token_ids),
        "tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "time": round(finished.seconds, 4),
        "engine": engine,
        "error": finished.error,
    }
