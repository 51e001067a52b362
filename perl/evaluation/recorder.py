"""Grading and storing alongside generation: a thread takes completions, grades them, and appends them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perl.evaluation.store import Store
from perl.grading import Grader
from perl.records import Completion, Sample
from perl.rewards.functions import grade_rows
from perl.scoring.results import SampleRecord
from perl.scoring.samples import record_of, text_of_completion

MAX_BATCH = 256


class Recorder:
    """Grade completions and write them to their dataset's store, in the order in which they come.

    A context manager: leaving it waits until everything handed in is on disk, also when an exception is on its way.
    An error of the thread is raised at the next `add` or on leaving.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        tokenizer: Any,
        engine: str,
        on_record: Callable[[SampleRecord], None] = lambda record: None,
    ):
        """Args:
        stores: by `Sample.dataset`.
        tokenizer: or processor, which makes text of completions.
        engine: key of ENGINES.
        on_record: called in the thread, for each record that is on disk.
        """
        self._stores = stores
        self._tokenizer, self._engine = tokenizer, engine
        self._on_record = on_record
        self._queue: queue.Queue[tuple[Sample, Completion] | None] = queue.Queue()
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

    def add(self, sample: Sample, completion: Completion) -> None:
        self._raise()
        self._queue.put((sample, completion))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with Grader() as grader:
                while batch := self._take():
                    self._record(grader, batch)
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits for us
            self._error = error

    def _take(self) -> list[tuple[Sample, Completion]]:
        """What has come in, waiting for one at least; empty at the end."""
        batch = []
        while (item := self._queue.get()) is not None:
            batch.append(item)
            if len(batch) == MAX_BATCH or self._queue.empty():
                return batch
        if batch:
            self._queue.put(None)  # for the next call
        return batch

    def _record(self, grader: Grader, batch: Sequence[tuple[Sample, Completion]]) -> None:
        texts = [text_of_completion(self._tokenizer, completion) for _, completion in batch]
        problems = [sample.problem for sample, _ in batch]
        grades = grade_rows(grader, texts, [p.gold for p in problems], [p.task for p in problems])
        records: dict[str, list[SampleRecord]] = {}
        for (sample, completion), text, grade in zip(batch, texts, grades, strict=True):
            record = record_of(sample, completion, text, grade, self._engine)
            records.setdefault(sample.dataset, []).append(record)
        for dataset, lines in records.items():
            self._stores[dataset].append(lines)
            for record in lines:
                self._on_record(record)
