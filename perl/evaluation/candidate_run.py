"""One candidate's share of an evaluation: its samples, where they are stored, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perl.base.files import read_json, write_json
from perl.evaluation.candidates import Candidate
from perl.evaluation.contamination import trained_on
from perl.evaluation.setup import Setup
from perl.evaluation.store import Store
from perl.records import Sample
from perl.scoring.problem_sets import ProblemSet
from perl.scoring.results import SUMMARY, Generation, Made, Summary
from perl.scoring.summary import summary_of


@dataclass(eq=False)
class CandidateRun:
    """One candidate's samples."""

    candidate: Candidate
    problem_sets: list[ProblemSet]
    stores: dict[str, Store]
    """By `Sample.dataset`."""
    pending: list[Sample]
    """Not on disk when the command began, or failed."""
    runnable: list[Sample]
    """Those of them that leave room for a completion."""
    generation: Generation | None = None
    """How they were completed this time; None: nothing was."""
    error: str | None = None
    """Why it cannot be scored."""
    retries: bool = False
    """All that is pending has failed before."""

    @classmethod
    def open(cls, setup: Setup, candidate: Candidate, problem_sets: Sequence[ProblemSet]) -> CandidateRun:
        """Open the candidate's folders. Raises a UserError for one that holds other results."""
        served = candidate.served(setup.config.adapter_mode)
        own_sets = [each.of_candidate(candidate.name, served) for each in problem_sets]
        folder = setup.folder(candidate)
        stores = {each.dataset: Store(folder / each.name, setup.identity(candidate, each)) for each in own_sets}
        missing, failed = [], []
        for sample in (sample for each in own_sets for sample in each.samples):
            if (record := stores[sample.dataset].records.get((sample.key, sample.index))) is None:
                missing.append(sample)
            elif record["error"] is not None and setup.has_room(sample):
                failed.append(sample)
        pending = [*missing, *failed]  # what may kill its worker again comes last
        runnable = [sample for sample in pending if setup.has_room(sample)]
        return cls(candidate, own_sets, stores, pending, runnable, retries=not missing)

    @property
    def complete(self) -> bool:
        return all((s.key, s.index) in self.stores[s.dataset] for each in self.problem_sets for s in each.samples)

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
        if (generation is None or self.retries) and file.is_file():  # the speed of the time before stands
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
