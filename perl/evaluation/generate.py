"""The samples that are missing are completed by the workers, graded and stored."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from perl.base.errors import UserError
from perl.config.evaluation import vllm_options
from perl.engines.vllm import lora_rank
from perl.environments.scored import row_of_sample
from perl.evaluation.candidate_run import CandidateRun
from perl.evaluation.progress import Progress
from perl.evaluation.recorder import Recorder
from perl.evaluation.setup import Setup
from perl.evaluation.weights import WeightsAhead, remove_merged
from perl.prompts import ChatTemplate
from perl.records import Completion, Sample
from perl.workers.conversations import Talks
from perl.workers.pool import WorkerPool
from perl.workers.worker import EngineJob, Request, RequestId

logger = logging.getLogger(__name__)

CONTEXT_STEP = 1024
"""vLLM compiles a model again for each length of context, and keeps what it has compiled: few lengths, few times."""


def generate(setup: Setup, runs: Sequence[CandidateRun]) -> None:
    """Complete, grade and store the samples that are pending."""
    since = time.monotonic()
    total = sum(len(each.samples) for run in runs for each in run.problem_sets)
    pending = sum(len(run.runnable) + len(run.overlong) for run in runs)
    if not pending:
        return
    stores = {dataset: store for run in runs for dataset, store in run.stores.items()}
    engine_works = any(not record["error"] for store in stores.values() for record in store.records.values())
    candidates = [run for run in runs if run.runnable and is_served(setup, run)]
    samples: dict[RequestId, Sample] = {sample.id: sample for run in candidates for sample in run.runnable}
    with (
        Progress(total, total - pending, Console(stderr=True)) as progress,
        Recorder(stores, setup.tokenizer, setup.engine, progress.add) as recorder,
    ):
        for run in runs:
            skip_overlong(setup, run, recorder)
        if not samples:
            return
        job, logs = make_job(setup, samples.values()), Path(setup.config.result_dir) / "logs"
        run_of = {dataset: run for run in candidates for dataset in run.stores}
        with (
            WeightsAhead(setup, candidates) as weights,
            WorkerPool(setup.executor, job, logs, engine_works) as pool,
        ):
            while weights or pool.unfinished:
                if ready := weights.take(sum(run.remaining > 0 for run in candidates)):
                    run, spec = ready
                    run.begin(spec)
                    pool.submit(spec, requests_of(setup, run.runnable))
                for sample_id, completion in pool.poll(timeout=0.5):
                    sample = samples[sample_id]
                    if completion.error:
                        where = sample.problem.source or sample.key
                        logger.warning("%s, sample %d: %s; it counts as wrong", where, sample.index, completion.error)
                    recorder.add(sample, completion)
                    run = run_of[sample.dataset]
                    run.count(completion)
                    if not run.remaining:
                        since = run.end(setup, pool, since)
                        remove_merged(setup, run.candidate)
                progress.refresh()


def is_served(setup: Setup, run: CandidateRun) -> bool:
    """Whether vLLM can serve the run's adapter, where that is to be served unmerged. Else the run fails; in a single
    evaluation that is a UserError."""
    if run.candidate.adapter is not None and setup.config.adapter_mode == "lora":
        try:
            lora_rank(str(run.candidate.adapter))
        except UserError as error:
            if not setup.is_sweep:
                raise
            run.fail(error)
    return run.error is None


def skip_overlong(setup: Setup, run: CandidateRun, recorder: Recorder) -> None:
    """Record a prompt that leaves no room for a completion as an empty, truncated one, saying so."""
    for sample in run.overlong:
        error = f"the prompt has {len(sample.token_ids)} tokens, the context {setup.context}"
        recorder.add(sample, Completion.failed(error))
    if run.overlong:
        logger.warning(
            "%d prompts fill the context of %d tokens and get no completion (the first: %s); they count as wrong",
            len(run.overlong), setup.context, run.overlong[0].problem.source,
        )  # fmt: skip


def make_job(setup: Setup, samples: Collection[Sample]) -> EngineJob:
    """What the workers do to complete `samples`."""
    config, talks = setup.config, None
    options: dict[str, Any] = {"tp_size": config.tp_size, "max_model_len": needed_context(setup, samples)}
    if config.max_batch_tokens:
        options["max_batch_tokens"] = config.max_batch_tokens
    if config.quantization != "none":
        options["quantization"] = config.quantization
    if served := sorted({sample.adapter for sample in samples if sample.adapter is not None}):
        options["adapters"] = served
    if setup.conversations is not None:
        options["ends"] = [setup.conversations.template.end]
        talks = Talks.of(config.environment, ChatTemplate(setup.tokenizer, config.chat_template_kwargs))
    return EngineJob(setup.engine, options | vllm_options(config), talks, setup.context)


def requests_of(setup: Setup, samples: Iterable[Sample]) -> list[Request]:
    talks = setup.conversations is not None
    return [Request(sample.id, sample.prompt, row_of_sample(sample) if talks else None) for sample in samples]


def needed_context(setup: Setup, samples: Iterable[Sample]) -> int:
    """Tokens of the longest prompt and completion of `samples`, within what is allowed: a cache for a context of 128k
    that nobody uses would not fit. Rounded up for vLLM, to CONTEXT_STEP. All that is allowed where an environment's
    reset may add to the prompts."""
    if setup.config.environment.factory is not None and setup.context:
        return setup.context
    needed = max(len(sample.token_ids) + sample.sampling.max_new_tokens for sample in samples)
    if setup.config.use_vllm:
        needed = math.ceil(needed / CONTEXT_STEP) * CONTEXT_STEP
    return min(needed, setup.context) if setup.context else needed
