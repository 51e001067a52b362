"""One candidate's share of an evaluation: its samples, the weights that complete them, where they are stored, and what
became of it."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perl.adapters.merge import MergeReport, adapter_effect, merge_adapter, read_report
from perl.base.errors import UserError
from perl.base.files import read_json, write_json
from perl.base.provenance import provenance
from perl.evaluation.candidates import Candidate
from perl.evaluation.contamination import trained_on
from perl.evaluation.setup import MERGE_REPORT, Setup
from perl.evaluation.store import Store
from perl.records import Completion, Sample
from perl.scoring.problem_sets import ProblemSet
from perl.scoring.results import SUMMARY, Generation, Summary
from perl.scoring.summary import grading_of, summarize
from perl.workers.worker import Batch, WeightsSpec

logger = logging.getLogger(__name__)

MERGED = ".merged"
"""Below a candidate's folder, removed at the end. No data set's folder is named so, nor should a user's be."""


@dataclass(eq=False)
class CheckpointRun:
    """One candidate's samples."""

    candidate: Candidate
    problem_sets: list[ProblemSet]
    stores: dict[str, Store]
    """By `Sample.dataset`."""
    pending: list[Sample]
    """Not on disk when the command began."""
    runnable: list[Sample]
    """Those of them that leave room for a completion."""
    error: str | None = None
    """Why it cannot be scored."""
    tokens: int = 0
    """Generated for it this time."""
    remaining: int = 0
    """Of the runnable samples."""
    began: float = 0.0
    """time.monotonic() when its samples joined the queue."""
    ended: float = 0.0
    """time.monotonic() when its last sample was completed."""
    done: threading.Event = field(default_factory=threading.Event)
    """Nothing remains."""

    @classmethod
    def open(cls, setup: Setup, candidate: Candidate, problem_sets: Sequence[ProblemSet]) -> CheckpointRun:
        """Open the candidate's folders. Raises a UserError for one that holds other results."""
        served = candidate.served(setup.config.adapter_mode)
        own = [each.of_candidate(candidate.name, served) for each in problem_sets]
        folder = setup.folder(candidate)
        stores = {each.dataset: Store(folder / each.name, setup.identity(candidate, each)) for each in own}
        pending = [s for each in own for s in each.samples if (s.key, s.index) not in stores[s.dataset]]
        runnable = [s for s in pending if setup.context is None or len(s.token_ids) < setup.context]
        run = cls(candidate, own, stores, pending, runnable, remaining=len(runnable))
        if not runnable:
            run.done.set()
        return run

    @property
    def complete(self) -> bool:
        return all((s.key, s.index) in self.stores[s.dataset] for each in self.problem_sets for s in each.samples)

    def count(self, completion: Completion) -> None:
        """One of the runnable samples is completed."""
        self.tokens += len(completion.content_ids)
        self.ended = time.monotonic()
        self.remaining -= 1

    def speed(self, since: float, ready: float | None) -> dict[str, Any]:
        """Samples and tokens completed this time, and how long it took, fields of Generation.

        Args:
            since: time.monotonic() when its start began.
            ready: when the first engine was; None: none was.
        """
        first = max(ready or self.ended, self.began)
        return {
            "rows": len(self.runnable),
            "tokens": self.tokens,
            "start_s": round(first - since, 2),
            "wall_s": round(self.ended - first, 2),
            "tokens_per_s": round(self.tokens / max(self.ended - first, 1e-9), 1),
        }

    def fail(self, error: Exception) -> None:
        self.error = " ".join(str(error).split())
        self.remaining = 0
        self.done.set()

    def close(self, setup: Setup) -> None:
        """Remove what was only needed to complete the samples."""
        self.done.set()
        if self.candidate.adapter is not None:
            shutil.rmtree(setup.folder(self.candidate) / MERGED, ignore_errors=True)

    def summarize(self, setup: Setup, generation: Generation | None) -> dict[str, Summary]:
        """Compute each dataset's summary, where all samples are on disk, and write the files summary.json.

        Args:
            generation: None where nothing was generated this time.
        """
        summaries = {each.name: self._summarize_dataset(setup, each, generation) for each in self.problem_sets}
        write_json(setup.folder(self.candidate) / SUMMARY, summaries)
        return summaries

    def _summarize_dataset(self, setup: Setup, problem_set: ProblemSet, generation: Generation | None) -> Summary:
        store = self.stores[problem_set.dataset]
        file = store.folder / SUMMARY
        if generation is None and file.is_file():  # the speed of the time before stands
            generation = read_json(file)["generation"]
        summary: Summary = {
            **summarize([store.records[s.key, s.index] for s in problem_set.samples], problem_set.sampling.n),
            "generation": generation,
            "tasks": list(problem_set.tasks),
            "model": setup.config.model,
            "adapter": str(self.candidate.adapter) if self.candidate.adapter else None,
            "step": self.candidate.step,
            "trained_on": trained_on(
                self.candidate.adapter or setup.model, problem_set.spec, setup.config.split, problem_set.keys
            ),
            **setup.identity(self.candidate, problem_set),
            "merge": setup.merge_report(self.candidate),
            "chat_template": setup.tokenizer.chat_template,
            "grading": grading_of(problem_set.tasks),
            "grading_hash": store.grading_hash,
            "provenance": provenance(),
        }
        write_json(file, summary)
        return summary


def batches(setup: Setup, runs: Sequence[CheckpointRun]) -> Generator[Batch | None]:
    """Each run's samples with the weights that complete them; None while these are being made.

    The weights of the next run are made in a thread alongside generation, once the run before the current one is done,
    so that no more than two merged models lie on disk. A candidate that cannot be scored fails alone in a sweep.
    """
    stopped = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
        ahead: Future[WeightsSpec | None] | None = None
        try:
            for place, run in enumerate(runs):
                while ahead is not None and not ahead.done():
                    yield None
                try:
                    weights = ahead.result() if ahead is not None else weights_of(setup, run.candidate)
                except (UserError, RuntimeError) as error:
                    if not setup.is_sweep:
                        raise
                    run.fail(error)
                    logger.error("%s is not scored: %s", run.candidate.name, run.error)
                    weights = None
                if place + 1 < len(runs):
                    before = runs[place - 1].done if place else None
                    ahead = pool.submit(_weights_after, before, stopped, setup, runs[place + 1].candidate)
                if weights is not None:
                    run.began = time.monotonic()
                    yield Batch(weights, run.runnable)
        finally:
            stopped.set()
            for run in runs:
                run.done.set()


def _weights_after(
    before: threading.Event | None, stopped: threading.Event, setup: Setup, candidate: Candidate
) -> WeightsSpec | None:
    """`weights_of` the candidate, once the run `before` is done; None where the evaluation has ended instead."""
    if before is not None:
        before.wait()
    return None if stopped.is_set() else weights_of(setup, candidate)


def weights_of(setup: Setup, candidate: Candidate) -> WeightsSpec:
    """What completes the samples of `candidate`: the base, or a merged model, made here. Merged or served, the adapter
    is proven to fit and to do something.

    Raises:
        UserError: it does not fit the base, changes nothing, or cannot be merged.
    """
    dtype = setup.config.dtype
    if candidate.adapter is None or setup.config.adapter_mode == "lora":
        if candidate.adapter is not None:
            adapter_effect(setup.model, candidate.adapter)
        return WeightsSpec(str(setup.model.resolve()), dtype, candidate.served(setup.config.adapter_mode))
    report = merged_model(setup, candidate, candidate.adapter)
    folder = setup.folder(candidate) / MERGED
    return WeightsSpec(str(folder.resolve()), report.dtype if dtype == "auto" and report.note else dtype)


def merged_model(setup: Setup, candidate: Candidate, adapter: Path) -> MergeReport:
    """Merge into the candidate's folder, or use what an interrupted run of the same model and adapter has left."""
    output = setup.folder(candidate) / MERGED
    report = read_report(output)
    usable = (
        report is not None
        and (report.base_hash, report.adapter_hash) == (setup.base_hash, candidate.adapter_hash)
        and setup.config.dtype in ("auto", report.dtype)
    )
    if report is None or not usable:
        for left in output.parent.glob(f".{MERGED}.*.partial"):  # of an evaluation that was killed while it merged
            shutil.rmtree(left, ignore_errors=True)
        report = merge_adapter(setup.model, adapter, output, setup.config.dtype)
    write_json(output.parent / MERGE_REPORT, asdict(report))
    return report
