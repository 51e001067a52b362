"""The evaluation, read from top to bottom.

Problem -> Sample -> a worker, one engine a device -> Completion -> grading -> SampleRecord in samples.jsonl -> Summary
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from rich.console import Console

from perl.base.errors import UserError
from perl.base.files import write_json
from perl.base.provenance import provenance
from perl.config.evaluation import EvalConfig, vllm_options
from perl.engines.vllm import lora_rank
from perl.evaluation.checkpoint_run import CheckpointRun, batches
from perl.evaluation.compare import compare, print_comparison, require_common
from perl.evaluation.contamination import warn_of_trained
from perl.evaluation.datasets import load_problem_sets
from perl.evaluation.progress import Progress
from perl.evaluation.recorder import Recorder
from perl.evaluation.score_table import print_table
from perl.evaluation.setup import Setup, worker_specs
from perl.evaluation.store import locked
from perl.evaluation.sweep import SweepError, print_sweep, sweep_entry
from perl.evaluation.tracking import check_tracker, log_results
from perl.records import Completion
from perl.scoring.results import COMPARE, SWEEP, Generation, Summary
from perl.workers.pool import WorkerError, WorkerPool

logger = logging.getLogger(__name__)

Summaries = dict[str, Summary]
"""Each dataset's summary, by the name of its folder."""


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
    problem_sets = load_problem_sets(config, setup.tokenizer)
    for problem_set in problem_sets:
        setup.require_known(problem_set)
        folders = [candidate.adapter or setup.model for candidate in setup.candidates]
        warn_of_trained(folders, problem_set.spec, config.split, problem_set.keys)
    if config.compare:
        keys = {each.name: each.keys for each in problem_sets}
        require_common(Path(config.compare), Path(config.result_dir), keys, ("--compare", "--result_dir"))
    with locked_folders(setup):
        runs = [CheckpointRun.open(setup, candidate, problem_sets) for candidate in setup.candidates]
        try:
            generations = generate(setup, runs)
        except WorkerError:
            if setup.is_sweep:
                report(setup, runs, {})
            raise
        found = report(setup, runs, generations)
    if failed := [run for run in runs if run.error]:
        raise SweepError(
            f"{len(failed)} of {len(runs)} not scored: "
            + "; ".join(f"{run.candidate.name}: {run.error}" for run in failed)
        )
    return {f"{name}/{dataset}".lstrip("/"): s for name, summaries in found.items() for dataset, s in summaries.items()}


@contextlib.contextmanager
def locked_folders(setup: Setup) -> Iterator[None]:
    """Keep other evaluations out of the result folder and each candidate's."""
    with contextlib.ExitStack() as stack:
        for folder in dict.fromkeys([Path(setup.config.result_dir), *map(setup.folder, setup.candidates)]):
            stack.enter_context(locked(folder))
        yield


def generate(setup: Setup, runs: Sequence[CheckpointRun]) -> dict[str, Generation]:
    """Complete, grade and store the samples that are pending; return the speed of each candidate that had some."""
    config, engine = setup.config, "vllm" if setup.config.use_vllm else "hf"
    total = sum(len(each.samples) for run in runs for each in run.problem_sets)
    pending = sum(len(run.pending) for run in runs)
    run_of = {dataset: run for run in runs for dataset in run.stores}
    stores = {dataset: store for run in runs for dataset, store in run.stores.items()}
    engine_works = any(not record["error"] for store in stores.values() for record in store.records.values())
    began = time.monotonic()
    if not pending:
        return {}
    todo = [run for run in runs if run.runnable]
    require_served(setup, todo)
    todo = [run for run in todo if not run.error]
    with (
        Progress(total, total - pending, Console(stderr=True)) as progress,
        Recorder(stores, setup.tokenizer, engine, progress.add) as recorder,
    ):
        for run in runs:
            skip_overlong(setup, run, recorder)
        if not todo:
            return {}
        specs = worker_specs(setup, engine, [sample for run in todo for sample in run.runnable])
        with contextlib.closing(batches(setup, todo)) as source, WorkerPool(specs, setup.executor) as pool:
            for sample, completion in pool.complete(source, progress.refresh, engine_works):
                recorder.add(sample, completion)
                run = run_of[sample.dataset]
                run.count(completion)
                if not run.remaining:
                    run.close(setup)
    return {
        run.candidate.name: cast(
            "Generation",
            {
                "engine": engine,
                "executor": config.executor,
                "dp_size": config.dp_size,
                "tp_size": config.tp_size,
                **vllm_options(config),
                "device": setup.executor.devices.kind,
                **run.speed(began if run is todo[0] else run.began, pool.generation_began),
                "worker_restarts": pool.restarts,
            },
        )
        for run in todo
        if not run.error
    }


def require_served(setup: Setup, runs: Sequence[CheckpointRun]) -> None:
    """Fail the runs whose adapter vLLM can't serve unmerged; in a single evaluation that is a UserError."""
    for run in runs:
        if run.candidate.adapter is not None and setup.config.adapter_mode == "lora":
            try:
                lora_rank(str(run.candidate.adapter))
            except UserError as error:
                if not setup.is_sweep:
                    raise
                run.fail(error)


def skip_overlong(setup: Setup, run: CheckpointRun, recorder: Recorder) -> None:
    """Record a prompt that leaves no room for a completion as an empty, truncated one, saying so."""
    runnable = {sample.id for sample in run.runnable}
    overlong = [sample for sample in run.pending if sample.id not in runnable]
    for sample in overlong:
        error = f"the prompt has {len(sample.token_ids)} tokens, the context {setup.context}"
        recorder.add(sample, Completion.failed(error))
    if overlong:
        logger.warning(
            "%d prompts fill the context of %d tokens and get no completion (the first: %s); they count as wrong",
            len(overlong), setup.context, overlong[0].problem.source,
        )  # fmt: skip


def report(setup: Setup, runs: Sequence[CheckpointRun], generations: dict[str, Generation]) -> dict[str, Summaries]:
    """Write and print the summaries of all runs that are complete; return them by candidate."""
    console, folder = Console(), Path(setup.config.result_dir)
    found: dict[str, Summaries] = {}
    for run in runs:
        name = run.candidate.name
        if run.complete:
            found[name] = run.summarize(setup, generations.get(name))
            run.close(setup)
    if setup.is_sweep:
        entries = [sweep_entry(run.candidate, found.get(run.candidate.name), run.error) for run in runs]
        write_json(folder / SWEEP, {"model": setup.config.model, "candidates": entries, "provenance": provenance()})
        print_sweep(entries, console)
    else:
        print_table(found[""], console)
    if setup.config.compare:
        for name in found:
            try:
                comparison = compare(Path(setup.config.compare), folder / name)
            except UserError as error:  # after hours of work: say so, and keep the numbers
                logger.warning("%s", error)
                continue
            print_comparison(comparison, console)
            write_json(folder / name / COMPARE, comparison)
    log_results(setup.config, setup.candidates, found)
    return found
