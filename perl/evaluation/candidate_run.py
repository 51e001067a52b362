"""One candidate's share of an evaluation: its samples, where they are stored, how far they are, what became of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from perl import device
from perl.base.files import read_json, write_json
from perl.config.evaluation import vllm_options
from perl.evaluation.candidates import Candidate
from perl.evaluation.contamination import trained_on
from perl.evaluation.setup import Setup
from perl.evaluation.store import Store
from perl.records import Completion, Sample
from perl.scoring.problem_sets import ProblemSet
from perl.scoring.results import SUMMARY, Generation, Made, Summary
from perl.scoring.summary import summary_of
from perl.workers.pool import WorkerPool
from perl.workers.worker import WeightsSpec, computed_in


@dataclass(eq=False)
class CandidateRun:
    """One candidate's samples."""

    candidate: Candidate
    problem_sets: list[ProblemSet]
    stores: dict[str, Store]
    """By `Sample.dataset`."""
    missing: list[Sample]
    """Not on disk when the command began."""
    failed: list[Sample]
    """On disk with an error, and asked again."""
    overlong: list[Sample]
    """Missing too, and without room for a completion."""
    remaining: int = 0
    """Submitted, and not completed."""
    tokens: int = 0
    """Of what was completed."""
    began: float = 0.0
    """time.monotonic() when they were submitted."""
    dtype: str = ""
    """That they are computed in."""
    generation: Generation | None = None
    """How they were completed this time; None: nothing was."""
    error: str | None = None
    """Why it cannot be scored."""

    @classmethod
    def open(cls, setup: Setup, candidate: Candidate, problem_sets: Sequence[ProblemSet]) -> CandidateRun:
        """Open the candidate's folders. Raises a UserError for one that holds other results."""
        served = candidate.served(setup.config.adapter_mode)
        own_sets = [each.of_candidate(candidate.name, served) for each in problem_sets]
        folder = setup.folder(candidate)
        stores = {each.dataset: Store(folder / each.name, setup.identity(candidate, each)) for each in own_sets}
        run = cls(candidate, own_sets, stores, [], [], [])
        for sample in (sample for each in own_sets for sample in each.samples):
            record, room = stores[sample.dataset].records.get((sample.key, sample.index)), setup.has_room(sample)
            if record is None:
                (run.missing if room else run.overlong).append(sample)
            elif record["error"] is not None and room:
                run.failed.append(sample)
        return run

    @property
    def runnable(self) -> list[Sample]:
        """What may kill its worker again comes last."""
        return [*self.missing, *self.failed]

    @property
    def complete(self) -> bool:
        return all((s.key, s.index) in self.stores[s.dataset] for each in self.problem_sets for s in each.samples)

    def begin(self, weights: WeightsSpec) -> None:
        """What is runnable is submitted."""
        self.remaining, self.began, self.dtype = len(self.runnable), time.monotonic(), computed_in(weights)

    def count(self, completion: Completion) -> None:
        self.tokens += len(completion.content_ids)
        self.remaining -= 1

    def end(self, setup: Setup, pool: WorkerPool, since: float) -> float:
        """The last one is completed.

        Args:
            since: time.monotonic() when the command began, or the run before had ended.

        Returns:
            As `since`, for the next run.
        """
        config, ended = setup.config, time.monotonic()
        first = max(pool.first_ready or ended, self.began, since)
        self.generation = cast(
            "Generation",
            {
                "engine": setup.engine,
                "executor": config.executor,
                "dp_size": config.dp_size,
                "tp_size": config.tp_size,
                **vllm_options(config),
                **({"dtype": self.dtype} if setup.executor.devices.kind == device.detect().kind else {}),
                "device": setup.executor.devices.kind,
                "rows": len(self.runnable),
                "tokens": self.tokens,
                "start_s": round(first - since, 2),
                "wall_s": round(ended - first, 2),
                "tokens_per_s": round(self.tokens / max(ended - first, 1e-9), 1),
                "worker_restarts": pool.restarts,
            },
        )
        return ended

    def fail(self, error: Exception) -> None:
        self.error = " ".join(str(error).split())

    def summarize(self, setup: Setup) -> dict[str, Summary]:
        """Compute each dataset's summary, where all samples are on disk, and write the files summary.json."""
        summaries = {each.name: self._summarize_dataset(setup, each) for each in self.problem_sets}
        write_json(setup.folder(self.candidate) / SUMMARY, summaries)
        return summaries

    def _summarize_dataset(self, setup: Setup, problem_set: ProblemSet) -> Summary:
        store = self.stores[problem_set.dataset]
        file = store.folder / SUMMARY
        generation = self.generation
        if (generation is None or not self.missing) and file.is_file():  # the speed of the time before stands
            generation = read_json(file, hint="remove it", kind=Summary)["generation"] or generation
        made: Made = {
            **setup.identity(self.candidate, problem_set),
            "grading_hash": store.grading_hash,
            "generation": generation,
            "model": setup.config.model,
            "adapter": str(self.candidate.adapter) if self.candidate.adapter else None,
            "step": self.candidate.step,
            "trained_on": trained_on(self.candidate.adapter or setup.model, problem_set.problems),
            "merge": setup.merge_report(self.candidate),
            "chat_template": setup.tokenizer.chat_template,
        }
        records = [store.records[s.key, s.index] for s in problem_set.samples]
        summary = summary_of(records, problem_set, made)
        write_json(file, summary)
        return summary
