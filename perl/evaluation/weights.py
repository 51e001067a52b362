"""The weights that complete a candidate's samples: the base, or a model that is merged alongside generation."""

from __future__ import annotations

import logging
import shutil
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from perl.adapters.merge import MergeReport, adapter_effect, merge_adapter, read_report
from perl.base.errors import UserError
from perl.base.files import write_json
from perl.engines.base import resolve_dtype
from perl.evaluation.candidate_run import CandidateRun
from perl.evaluation.candidates import Candidate
from perl.evaluation.setup import MERGE_REPORT, Setup
from perl.models.folders import load_config
from perl.workers.worker import WeightsSpec

logger = logging.getLogger(__name__)

MERGED = ".merged"
"""Below a candidate's folder, removed at the end. No data set's folder is named so, nor should a user's be."""


class WeightsAhead:
    """Each run's weights, one after another, made in a thread. Use as a context manager."""

    def __init__(self, setup: Setup, runs: Sequence[CandidateRun]):
        self._setup = setup
        self._waiting = deque(runs)
        self._current: tuple[CandidateRun, Future[WeightsSpec]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    def __enter__(self) -> WeightsAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def __bool__(self) -> bool:
        """Some are still to come."""
        return bool(self._waiting) or self._current is not None

    def take(self, under_way: int) -> tuple[CandidateRun, WeightsSpec] | None:
        """The next run with its weights; None: they are not there yet, or it cannot be scored. In a sweep such a
        candidate fails alone, else its error is raised.

        Args:
            under_way: runs whose weights were taken and that are not done. With none this waits; with two nothing is
                begun, so that no more than two merged models lie on disk.
        """
        if self._current is None and self._waiting and under_way < 2:
            run = self._waiting.popleft()
            self._current = run, self._thread.submit(weights_of, self._setup, run.candidate)
        if self._current is None or (under_way and not self._current[1].done()):
            return None
        (run, future), self._current = self._current, None
        try:
            return run, future.result()
        except (UserError, RuntimeError) as error:
            if not self._setup.is_sweep:
                raise
            run.fail(error)
            logger.error("%s is not scored: %s", run.candidate.name, run.error)
            return None


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
    if dtype == "auto" and report.note:
        # The rounding that a float32 merge avoids is nothing to that of quantised weights.
        quantised = setup.config.quantization != "none"
        dtype = resolve_dtype(dtype, load_config(setup.model)) if quantised else report.dtype
    return WeightsSpec(str(folder.resolve()), dtype)


def merged_model(setup: Setup, candidate: Candidate, adapter: Path) -> MergeReport:
    """Merge into the candidate's folder, or use what an interrupted run of the same model, adapter and --dtype has
    left."""
    output = setup.folder(candidate) / MERGED
    report = read_report(output)
    usable = (
        report is not None
        and (report.base_hash, report.adapter_hash) == (setup.base_hash, candidate.adapter_hash)
        and setup.config.dtype == report.asked
    )
    if report is None or not usable:
        for left in output.parent.glob(f"[_.]{MERGED}.*.partial"):  # of an evaluation that was killed while it merged
            shutil.rmtree(left, ignore_errors=True)
        report = merge_adapter(setup.model, adapter, output, setup.config.dtype)
    write_json(output.parent / MERGE_REPORT, asdict(report))
    return report


def remove_merged(setup: Setup, candidate: Candidate) -> None:
    if candidate.adapter is not None:
        shutil.rmtree(setup.folder(candidate) / MERGED, ignore_errors=True)
