"""Each candidate's part of an evaluation: its rows, where they are stored, and what became of it."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from perl.errors import UserError
from perl.evaluation.candidates import Candidate
from perl.evaluation.contamination import trained_on
from perl.evaluation.plan import Plan, Row
from perl.evaluation.record import Finished
from perl.evaluation.setup import MERGED, Setup, weights_of
from perl.evaluation.store import Store
from perl.evaluation.summary import grading_of, summarize
from perl.evaluation.worker import Load
from perl.evaluation.workers import Batch
from perl.provenance import provenance
from perl.results import SUMMARY, read_json, write_json

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Part:
    """One candidate's rows."""

    candidate: Candidate
    plans: list[Plan]
    stores: dict[str, Store]
    """By what its rows name as their dataset."""
    owed: list[Row]
    """Rows that are not on disk."""
    fitting: list[Row]
    """Those of them that leave room for a completion."""
    error: str | None = None
    """Why it cannot be scored."""
    tokens: int = 0
    """Generated for it this time."""
    left: int = 0
    """Of the fitting rows."""
    began: float = 0.0
    """time.monotonic() when its rows joined the queue."""
    ended: float = 0.0
    """time.monotonic() when its last row was completed."""
    through: threading.Event = field(default_factory=threading.Event)
    """No row of it is left."""

    @classmethod
    def of(cls, setup: Setup, candidate: Candidate, plans: Sequence[Plan]) -> Part:
        """Open the candidate's folders. Raises a UserError for one that holds other results."""
        served = candidate.served(setup.config.adapter_mode)
        folder = setup.folder(candidate)
        own = []
        for plan in plans:
            place = f"{candidate.name}/{plan.name}" if candidate.name else plan.name
            rows = (replace(r, dataset=place, prompt=replace(r.prompt, adapter=served)) for r in plan.rows)
            own.append(replace(plan, rows=tuple(rows) if place != plan.name or served else plan.rows))
        stores = {plan.rows[0].dataset: Store(folder / plan.name, setup.identity(candidate, plan)) for plan in own}
        owed = [row for plan in own for row in plan.rows if (row.key, row.sample) not in stores[row.dataset]]
        fitting = [row for row in owed if setup.context is None or len(row.prompt.token_ids) < setup.context]
        part = cls(candidate, own, stores, owed, fitting, left=len(fitting))
        if not fitting:
            part.through.set()
        return part

    @property
    def complete(self) -> bool:
        return all((row.key, row.sample) in self.stores[row.dataset] for plan in self.plans for row in plan.rows)

    def add(self, finished: Finished) -> None:
        """Count a completed row."""
        self.tokens += len(finished.completion.token_ids)
        self.ended = time.monotonic()
        self.left -= 1

    def speed(self, since: float, ready: float | None) -> dict[str, Any]:
        """Rows and tokens completed this time, and how long it took; `ready`: when the first engine was."""
        first = max(ready or self.ended, self.began)
        return {
            "rows": len(self.fitting),
            "tokens": self.tokens,
            "start_s": round(first - since, 2),
            "wall_s": round(self.ended - first, 2),
            "tokens_per_s": round(self.tokens / max(self.ended - first, 1e-9), 1),
        }

    def fail(self, error: Exception) -> None:
        self.error = " ".join(str(error).split())
        self.left = 0
        self.through.set()

    def close(self, setup: Setup) -> None:
        """Remove what was only needed to complete the rows."""
        self.through.set()
        shutil.rmtree(setup.folder(self.candidate) / MERGED, ignore_errors=True)


def batches(setup: Setup, parts: Sequence[Part]) -> Generator[Batch | None]:
    """Each part's rows with the weights that complete them; None while these are being made.

    The weights of the next part are made in a thread beside generation, once the part before the current one is
    through, so that no more than two merged models lie on disk. A part that cannot be scored fails alone in a sweep.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
        ahead: Future[Load] | None = None
        try:
            for place, part in enumerate(parts):
                while ahead is not None and not ahead.done():
                    yield None
                try:
                    load = ahead.result() if ahead is not None else weights_of(setup, part.candidate)
                except (UserError, RuntimeError) as error:
                    if not setup.is_sweep:
                        raise
                    part.fail(error)
                    logger.error("%s is not scored: %s", part.candidate.name, part.error)
                    load = None
                if place + 1 < len(parts):
                    before = parts[place - 1].through if place else None
                    ahead = pool.submit(_weights_after, before, setup, parts[place + 1].candidate)
                if load is not None:
                    part.began = time.monotonic()
                    yield Batch(load, part.fitting)
        finally:
            for part in parts:
                part.through.set()
            if ahead is not None:
                ahead.cancel()


def _weights_after(before: threading.Event | None, setup: Setup, candidate: Candidate) -> Load:
    if before is not None:
        before.wait()
    return weights_of(setup, candidate)


def conclude(setup: Setup, part: Part, generation: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Compute each dataset's summary of a part that is complete, and write the files summary.json."""
    summaries = {}
    for plan in part.plans:
        store = part.stores[plan.rows[0].dataset]
        summaries[plan.name] = _conclude_dataset(setup, part.candidate, plan, store, generation)
    write_json(setup.folder(part.candidate) / SUMMARY, summaries)
    return summaries


def _conclude_dataset(
    setup: Setup, candidate: Candidate, plan: Plan, store: Store, generation: dict[str, Any] | None
) -> dict[str, Any]:
    file = store.folder / SUMMARY
    if generation is None and file.is_file():  # nothing was generated this time: the speed of the time before stands
        generation = read_json(file)["generation"]
    summary = {
        **summarize([store.records[row.key, row.sample] for row in plan.rows], plan.sampling.n),
        "generation": generation,
        "tasks": list(plan.tasks),
        "model": setup.config.model,
        "adapter": str(candidate.adapter) if candidate.adapter else None,
        "step": candidate.step,
        "trained_on": trained_on(candidate.adapter, plan.spec, setup.config.split, {row.key for row in plan.rows}),
        **setup.identity(candidate, plan),
        "merge": setup.merge_report(candidate),
        "chat_template": setup.tokenizer.chat_template,
        "grading": grading_of(plan.tasks),
        "grading_hash": store.grading_hash,
        "provenance": provenance(),
    }
    write_json(file, summary)
    return summary
