"""The evaluation, read from top to bottom.

problems -> prompts -> rows owed -> workers, one engine a device -> grading -> samples.jsonl -> summary.json
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from perl.config.evaluation import EvalConfig
from perl.evaluation.plan import Plan, Row, make_plans
from perl.evaluation.progress import Progress
from perl.evaluation.record import Finished, Recorder
from perl.evaluation.setup import MERGED, Setup, worker_specs
from perl.evaluation.store import Store, locked, write_json
from perl.evaluation.summary import print_table, summarize
from perl.evaluation.workers import Batch, Workers
from perl.provenance import provenance

logger = logging.getLogger(__name__)


def evaluate(config: EvalConfig) -> dict[str, dict[str, Any]]:
    """Score `config.model` on `config.datasets`; print a table, return each dataset's summary.

    Raises:
        UserError: before any model is loaded, for whatever the user can mend.
        WorkerError: engines that do not start or keep dying; what was done stays, the same command goes on.
    """
    setup = Setup.of(config)
    plans = make_plans(config, setup.tokenizer)
    result_dir = Path(config.result_dir)
    with locked(result_dir):
        stores = {plan.name: Store(result_dir / plan.name, setup.identity(plan)) for plan in plans}
        owed = [row for plan in plans for row in plan.rows if (row.key, row.sample) not in stores[plan.name]]
        generation: dict[str, Any] | None = None
        if owed:
            total = sum(len(plan.rows) for plan in plans)
            with Progress(total, total - len(owed), Console(stderr=True)) as progress:
                generation = generate(setup, owed, stores, progress)
        summaries = {plan.name: conclude(setup, plan, stores[plan.name], generation) for plan in plans}
        write_json(result_dir / "summary.json", summaries)
        shutil.rmtree(result_dir / MERGED, ignore_errors=True)
    print_table(summaries, Console())
    return summaries


def generate(setup: Setup, owed: Sequence[Row], stores: dict[str, Store], progress: Progress) -> dict[str, Any] | None:
    """Complete, grade and store the rows that are owed; return the speed (None: there was nothing to complete)."""
    engine = "vllm" if setup.config.use_vllm else "hf"
    fitting = [row for row in owed if setup.context is None or len(row.prompt.token_ids) < setup.context]
    began = time.monotonic()
    with Recorder(stores, engine, progress.add) as recorder:
        skip_overlong(setup, owed, recorder)
        tokens, ended = 0, began
        if not fitting:
            return None
        specs = worker_specs(setup, engine, fitting)
        with Workers(specs, setup.executor) as workers:
            for finished in workers.complete(iter([Batch(specs[0].load, fitting)]), progress.refresh):
                recorder.add(finished)
                tokens += len(finished.completion.token_ids)
                ended = time.monotonic()
            ready = workers.generation_began or ended
    return {
        "engine": engine,
        "executor": setup.config.executor,
        "dp_size": setup.config.dp_size,
        "tp_size": setup.config.tp_size,
        "device": setup.executor.devices.kind,
        "rows": len(fitting),
        "tokens": tokens,
        "start_s": round(ready - began, 2),
        "wall_s": round(ended - ready, 2),
        "tokens_per_s": round(tokens / max(ended - ready, 1e-9), 1),
        "worker_restarts": workers.restarts,
    }


def skip_overlong(setup: Setup, owed: Sequence[Row], recorder: Recorder) -> None:
    """Record a prompt that leaves no room for a completion as an empty, truncated one, saying so."""
    if setup.context is None:
        return
    overlong = [row for row in owed if len(row.prompt.token_ids) >= setup.context]
    for row in overlong:
        error = f"the prompt has {len(row.prompt.token_ids)} tokens, the context {setup.context}"
        recorder.add(Finished.without_completion(row, error))
    if overlong:
        logger.warning(
            "%d prompts fill the context of %d tokens and get no completion (the first: %s); they count as wrong",
            len(overlong), setup.context, overlong[0].problem.source,
        )  # fmt: skip


def conclude(setup: Setup, plan: Plan, store: Store, generation: dict[str, Any] | None) -> dict[str, Any]:
    """Compute a dataset's summary and write its summary.json."""
    file = store.folder / "summary.json"
    if generation is None and file.is_file():  # nothing was generated this time: the speed of the time before stands
        generation = json.loads(file.read_text(encoding="utf-8"))["generation"]
    summary = {
        **summarize(plan, [store.records[row.key, row.sample] for row in plan.rows]),
        "generation": generation,
        "tasks": list(plan.tasks),
        "model": setup.config.model,
        "adapter": setup.config.adapter,
        **setup.identity(plan),
        "merge": setup.merge_report(),
        "chat_template": setup.tokenizer.chat_template,
        "provenance": provenance(),
    }
    write_json(file, summary)
    return summary
