"""The evaluation, read from top to bottom.

Problem -> Sample -> a worker, one engine a device -> Completion -> grading -> SampleRecord in samples.jsonl -> Summary
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from perl.base.errors import UserError
from perl.base.files import write_json
from perl.base.provenance import provenance
from perl.config.evaluation import EvalConfig
from perl.evaluation.as_trained import warn_of_training
from perl.evaluation.candidate_run import CandidateRun
from perl.evaluation.compare import compare, print_comparison, require_common
from perl.evaluation.contamination import warn_of_trained
from perl.evaluation.datasets import load_problem_sets
from perl.evaluation.generate import generate
from perl.evaluation.setup import Setup
from perl.evaluation.store import locked
from perl.evaluation.tables import print_sweep, print_table
from perl.evaluation.tracking import check_tracker, log_results
from perl.evaluation.weights import remove_merged
from perl.scoring.results import COMPARE, RUN, SWEEP, Summary, SweepEntry
from perl.workers.pool import WorkerError

logger = logging.getLogger(__name__)

Summaries = dict[str, Summary]
"""Each dataset's summary, by the name of its folder."""


class SweepError(RuntimeError):
    """Some candidates were not scored, and all others were. One line."""


def evaluate(config: EvalConfig) -> Summaries:
    """Score `config.model`, or it with each of `config.adapter`, on `config.datasets`; print a table.

    Returns:
        Each dataset's summary by the path of its folder below the result folder: "gsm8k", in a sweep
        "checkpoint-10/gsm8k".

    Raises:
        UserError: before any model is loaded, for whatever the user can fix.
        WorkerError: engines that do not start or keep dying; what was done stays, the same command goes on.
        SweepError: some adapters could not be scored; all others were.
    """
    check_tracker(config)
    setup = Setup.of(config)
    require_alike(Path(config.result_dir), setup.is_sweep)
    graded = not (setup.conversations and setup.conversations.source.rewards)
    problem_sets = load_problem_sets(config, setup.template, graded)
    folders = [candidate.adapter or setup.model for candidate in setup.candidates]
    warn_of_training(config, folders)
    for problem_set in problem_sets:
        setup.require_rows(problem_set)
        setup.require_known(problem_set)
        warn_of_trained(folders, problem_set.spec, problem_set.problems)
    if config.compare:
        keys = {each.name: each.keys for each in problem_sets}
        require_common(Path(config.compare), Path(config.result_dir), keys, ("--compare", "--result_dir"))
    with locked_folders(setup):
        runs = [CandidateRun.open(setup, candidate, problem_sets) for candidate in setup.candidates]
        if setup.is_sweep and not (Path(config.result_dir) / SWEEP).is_file():
            write_sweep(setup, runs, {})  # so that the folder says what it holds, however soon this ends
        try:
            generate(setup, runs)
        except WorkerError as error:
            if not all(run.complete for run in runs):
                if setup.is_sweep:
                    report(setup, runs)
                raise
            logger.warning("rows that had failed before were asked again: %s", error)
        summaries = report(setup, runs)
    if failed := [run for run in runs if run.error]:
        raise SweepError(
            f"{len(failed)} of {len(runs)} not scored: "
            + "; ".join(f"{run.candidate.name}: {run.error}" for run in failed)
        )
    return {
        f"{name}/{dataset}".lstrip("/"): summary
        for name, datasets in summaries.items()
        for dataset, summary in datasets.items()
    }


def require_alike(folder: Path, sweep: bool) -> None:
    """Raise a UserError where the result folder holds a single evaluation, and a sweep is to go there, or the other way
    round: what reads it would find one of them alone."""
    if sweep and any(folder.glob(f"*/{RUN}")):
        raise UserError(f"--result_dir {folder}: holds a single evaluation, and this is a sweep; name another folder")
    if not sweep and (folder / SWEEP).is_file():
        raise UserError(f"--result_dir {folder}: holds a sweep, and this is a single evaluation; name another folder")


@contextlib.contextmanager
def locked_folders(setup: Setup) -> Iterator[None]:
    """Keep other evaluations out of the result folder and each candidate's."""
    with contextlib.ExitStack() as stack:
        for folder in dict.fromkeys([Path(setup.config.result_dir), *map(setup.folder, setup.candidates)]):
            stack.enter_context(locked(folder))
        yield


def report(setup: Setup, runs: Sequence[CandidateRun]) -> dict[str, Summaries]:
    """Write and print the summaries of all runs that are complete; return them by candidate."""
    console, folder = Console(), Path(setup.config.result_dir)
    summaries: dict[str, Summaries] = {}
    for run in runs:
        name = run.candidate.name
        if run.complete:
            summaries[name] = run.summarize(setup)
            remove_merged(setup, run.candidate)
    if setup.is_sweep:
        print_sweep(write_sweep(setup, runs, summaries), console)
    else:
        print_table(summaries[""], console)
    if setup.config.compare:
        for name in summaries:
            try:
                comparison = compare(Path(setup.config.compare), folder / name)
            except UserError as error:  # after hours of work: say so, and keep the numbers
                logger.warning("%s", error)
                continue
            print_comparison(comparison, console)
            write_json(folder / name / COMPARE, asdict(comparison))
    log_results(setup.config, setup.candidates, summaries)
    return summaries


def write_sweep(setup: Setup, runs: Sequence[CandidateRun], summaries: dict[str, Summaries]) -> list[SweepEntry]:
    """sweep.json, its table returned."""
    entries = [sweep_entry(run, summaries.get(run.candidate.name)) for run in runs]
    file = Path(setup.config.result_dir) / SWEEP
    write_json(file, {"model": setup.config.model, "candidates": entries, "provenance": provenance()})
    return entries


def sweep_entry(run: CandidateRun, summaries: Summaries | None) -> SweepEntry:
    candidate = run.candidate
    metrics = {name: summary["metrics"] for name, summary in summaries.items()} if summaries is not None else None
    return {
        "name": candidate.name,
        "adapter": str(candidate.adapter) if candidate.adapter else None,
        "adapter_hash": candidate.adapter_hash,
        "step": candidate.step,
        "error": run.error,
        "metrics": metrics,
    }
