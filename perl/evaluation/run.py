"""The evaluation, read from top to bottom.

problems -> prompts -> rows owed -> workers, one engine a device -> grading -> samples.jsonl -> summary.json
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from perl.config.evaluation import EvalConfig, vllm_options
from perl.engines.vllm import lora_rank
from perl.errors import UserError
from perl.evaluation.compare import compare, print_comparison, require_common
from perl.evaluation.contamination import warn_of_trained
from perl.evaluation.parts import Part, batches, conclude
from perl.evaluation.plan import make_plans
from perl.evaluation.progress import Progress
from perl.evaluation.record import Finished, Recorder
from perl.evaluation.setup import Setup, worker_specs
from perl.evaluation.store import locked
from perl.evaluation.summary import print_table
from perl.evaluation.sweep import SweepError, print_sweep, sweep_entry
from perl.evaluation.tracking import check_tracker, log_results
from perl.evaluation.workers import WorkerError, Workers
from perl.provenance import provenance
from perl.results import COMPARE, SWEEP, write_json

logger = logging.getLogger(__name__)

Summaries = dict[str, dict[str, Any]]
"""Each dataset's summary, by the name of its folder."""


def evaluate(config: EvalConfig) -> Summaries:
    """Score `config.model`, or it with each of `config.adapter`, on `config.datasets`; print a table.

    Returns:
        Each dataset's summary by the path of its folder below the result folder: "gsm8k", in a sweep
        "checkpoint-10/gsm8k".

    Raises:
        UserError: before any model is loaded, for whatever the user can mend.
        WorkerError: engines that do not start or keep dying; what was done stays, the same command goes on.
        SweepError: some adapters could not be scored; all others were.
    """
    check_tracker(config)
    setup = Setup.of(config)
    plans = make_plans(config, setup.tokenizer)
    for plan in plans:
        adapters = [candidate.adapter for candidate in setup.candidates]
        warn_of_trained(adapters, plan.spec, config.split, {row.key for row in plan.rows})
    if config.compare:
        keys = {plan.name: {row.key for row in plan.rows} for plan in plans}
        require_common(Path(config.compare), Path(config.result_dir), keys, ("--compare", "--result_dir"))
    with locked_folders(setup):
        parts = [Part.of(setup, candidate, plans) for candidate in setup.candidates]
        try:
            generations = generate(setup, parts)
        except WorkerError:
            if setup.is_sweep:
                report(setup, parts, {})
            raise
        found = report(setup, parts, generations)
    if failed := [part for part in parts if part.error]:
        raise SweepError(
            f"{len(failed)} of {len(parts)} not scored: "
            + "; ".join(f"{part.candidate.name}: {part.error}" for part in failed)
        )
    return {f"{name}/{dataset}".lstrip("/"): s for name, summaries in found.items() for dataset, s in summaries.items()}


@contextlib.contextmanager
def locked_folders(setup: Setup) -> Iterator[None]:
    """Keep other evaluations out of the result folder and each candidate's."""
    with contextlib.ExitStack() as stack:
        for folder in dict.fromkeys([Path(setup.config.result_dir), *map(setup.folder, setup.candidates)]):
            stack.enter_context(locked(folder))
        yield


def generate(setup: Setup, parts: Sequence[Part]) -> dict[str, dict[str, Any]]:
    """Complete, grade and store the rows that are owed; return the speed of each candidate that had some."""
    config, engine = setup.config, "vllm" if setup.config.use_vllm else "hf"
    total, owed = sum(len(plan.rows) for part in parts for plan in part.plans), sum(len(part.owed) for part in parts)
    todo = [part for part in parts if part.fitting]
    of_dataset = {dataset: part for part in parts for dataset in part.stores}
    stores = {dataset: store for part in parts for dataset, store in part.stores.items()}
    began = time.monotonic()
    if not owed:
        return {}
    require_served(setup, todo)
    todo = [part for part in todo if not part.error]
    with (
        Progress(total, total - owed, Console(stderr=True)) as progress,
        Recorder(stores, engine, progress.add) as recorder,
    ):
        for part in parts:
            skip_overlong(setup, part, recorder)
        if not todo:
            return {}
        specs = worker_specs(setup, engine, [row for part in todo for row in part.fitting])
        with contextlib.closing(batches(setup, todo)) as source, Workers(specs, setup.executor) as workers:
            for finished in workers.complete(source, progress.refresh):
                recorder.add(finished)
                of_dataset[finished.row.dataset].add(finished)
                if not of_dataset[finished.row.dataset].left:
                    of_dataset[finished.row.dataset].close(setup)
    return {
        part.candidate.name: {
            "engine": engine,
            "executor": config.executor,
            "dp_size": config.dp_size,
            "tp_size": config.tp_size,
            **vllm_options(config),
            "device": setup.executor.devices.kind,
            **part.speed(began if part is todo[0] else part.began, workers.generation_began),
            "worker_restarts": workers.restarts,
        }
        for part in todo
        if not part.error
    }


def require_served(setup: Setup, parts: Sequence[Part]) -> None:
    """Fail the parts whose adapter vLLM can't serve unmerged; in a single evaluation that is a UserError."""
    for part in parts:
        if part.candidate.adapter is not None and setup.config.adapter_mode == "lora":
            try:
                lora_rank(str(part.candidate.adapter))
            except UserError as error:
                if not setup.is_sweep:
                    raise
                part.fail(error)


def skip_overlong(setup: Setup, part: Part, recorder: Recorder) -> None:
    """Record a prompt that leaves no room for a completion as an empty, truncated one, saying so."""
    fitting = {id(row) for row in part.fitting}
    overlong = [row for row in part.owed if id(row) not in fitting]
    for row in overlong:
        error = f"the prompt has {len(row.prompt.token_ids)} tokens, the context {setup.context}"
        recorder.add(Finished.without_completion(row, error))
    if overlong:
        logger.warning(
            "%d prompts fill the context of %d tokens and get no completion (the first: %s); they count as wrong",
            len(overlong), setup.context, overlong[0].problem.source,
        )  # fmt: skip


def report(setup: Setup, parts: Sequence[Part], generations: dict[str, dict[str, Any]]) -> dict[str, Summaries]:
    """Write and print the summaries of all parts that are complete; return them by candidate."""
    console, folder = Console(), Path(setup.config.result_dir)
    found: dict[str, Summaries] = {}
    for part in parts:
        name = part.candidate.name
        if part.complete:
            found[name] = conclude(setup, part, generations.get(name))
            part.close(setup)
    if setup.is_sweep:
        entries = [sweep_entry(part.candidate, found.get(part.candidate.name), part.error) for part in parts]
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
