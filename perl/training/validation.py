"""Validation: the evaluator's tasks, prompts, seeds and grading, on the live model as it is trained, without noise.

    set_up_validation  before the model is loaded (validation_setup.py): problems -> samples
    Validation         at a step that is `due`
        share_of       which samples are this process's
        complete       samples -> rollout engine -> grader -> records
        gather         the records of all processes, in every process
        metrics        val-core/<data source>/acc/mean@n, …
        write          RUN/validation/step-N/DATASET as perl/eval.py leaves a dataset: samples.jsonl, summary.json;
                       of the policy above a quantised base RUN/validation/step-N/quantized/DATASET
        keep_best      RUN/best: the adapter, or the model, with the best score so far

Nothing of the training changes by it: samples bring their own seeds, and the engine's state is one of its own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerCallback

from perl import device
from perl.base.errors import UserError
from perl.base.files import SAVING, json_line, read_json, write_json
from perl.base.provenance import text_hash
from perl.engines.base import Engine, PolicyEngine
from perl.environments.scored import converse, row_of_sample, trajectory_of
from perl.grading import Grader, rules_hash
from perl.models import folders
from perl.records import Completion, Sample, Weights
from perl.rewards.functions import grade_rows
from perl.runs.checkpoints import drop_bests, put_in_place, replace_best
from perl.runs.together import failing_together
from perl.scoring.problem_sets import ProblemSet
from perl.scoring.results import (
    BEST,
    BEST_FILE,
    METRICS,
    SAMPLES,
    SUMMARY,
    VALIDATION,
    Best,
    Generation,
    Made,
    SampleRecord,
    Summary,
    read_metrics,
)
from perl.scoring.samples import record_of, text_of_completion
from perl.scoring.statistics import best_at_k
from perl.scoring.summary import logged, problem_scores, summary_of
from perl.tasks import TASKS
from perl.training.validation_setup import ValidationSetup
from perl.workers.conversations import identity_of

log = logging.getLogger(__name__)

QUANTIZED = "quantized"
"""In names of metrics, and of the folder: of the policy above the quantised base."""


class Validation(TrainerCallback):
    """Validates a run. Asks for it after the steps that are due, as a callback of the trainer, which calls `run`.

    Args:
        setup: what on, and how.
        grader: the run's.
        run_dir: where the samples, and the best adapter, are kept. What it holds of this run is taken up: steps in its
            metrics.jsonl are not validated again, and the best score stands.
        rank, world_size: of this process, and how many there are.
    """

    def __init__(self, setup: ValidationSetup, grader: Grader, run_dir: Path, rank: int, world_size: int):
        self.setup, self.grader, self.run_dir = setup, grader, run_dir
        self.rank, self.world_size = rank, world_size
        self.labels = labels(setup.problem_sets)
        first = setup.problem_sets[0]
        label = self._label(first.name, first.sources[0], setup.scored[0])
        self.chosen_by = f"val-core/{label}/acc/mean@{first.sampling.n}"
        """The metric of the best adapter."""
        progress = [logged_steps(run_dir / METRICS, self.chosen_by), best_so_far(run_dir, self.chosen_by)]
        self.done, self.best = broadcast_object_list(progress)  # rank 0 decides: others may not see the folder
        for problem_set in setup.problem_sets:
            count, sources = len(problem_set.samples), ", ".join(problem_set.sources)
            log.info("validation on %s: %d samples of %s", problem_set.spec, count, sources)
        if setup.scored != ("none",):
            *both, quantization = setup.scored
            of = "the policy as it is trained, and of that above" if both else "the policy above"
            log.info("validation: scores are of %s the %s base (…/%s/…)", of, quantization, QUANTIZED)
        if setup.config.save_best:
            log.info(
                "validation: the %s with the highest %s is kept in %s", setup.trained, self.chosen_by, run_dir / BEST
            )

    def due(self, step: int, last: int) -> bool:
        """Whether the adapter after `step` of `last` optimizer steps is to be validated, and has not been."""
        if step in self.done:
            return False
        if step == 0:
            return self.setup.config.before_train
        every = self.setup.config.every_steps
        return (step == last and self.setup.config.after_train) or (every is not None and step % every == 0)

    def on_train_begin(self, args, state, control, **kwargs):
        """What was logged for later steps is of an attempt that this one leaves behind at its checkpoint."""
        self.done = {step for step in self.done if step <= state.global_step}

    def on_step_end(self, args, state, control, **kwargs):
        stopping = control.should_training_stop and state.global_step < state.max_steps  # the resumed run will do it
        if self.due(state.global_step, state.max_steps) and not stopping:
            control.should_evaluate = True

    def on_save(self, args, state, control, **kwargs):
        """Checkpoints may have gone, and with them who needs an earlier best adapter."""
        if self.rank == 0:
            drop_bests(self.run_dir)

    def on_train_end(self, args, state, control, **kwargs):
        self.on_save(args, state, control)

    def run(self, step: int, engine: PolicyEngine, save_adapter: Callable[[Path], None]) -> dict[str, float]:
        """Validate the adapter after `step` steps; every process must come here, and all get the metrics.

        Args:
            save_adapter: saves it into a folder; every process must call it.
        """
        started = time.perf_counter()
        engine.publish(Weights(version=step))
        scored = {quantization: self._scored(engine, quantization) for quantization in self.setup.scored}
        scores: dict[str, float] = {}
        for quantization, (records, _) in scored.items():
            scores |= self.metrics(records, quantization)
        with failing_together("validation: what it leaves"):
            if self.rank == 0:
                self.write(step, scored)
        if self.setup.config.save_best and (step > 0 or self.setup.start):  # a new adapter without a step is the base
            with failing_together("validation: what it leaves"):
                self.keep_best(step, scores, save_adapter)
        self.done.add(step)
        return scores | {"timing/validation": time.perf_counter() - started}

    def _scored(self, engine: PolicyEngine, quantization: str) -> Scored:
        """Above the base of this quantisation. Every process must come here."""
        started, setup = time.perf_counter(), self.setup
        quantised = quantization != "none"
        with contextlib.closing(
            engine.evaluating(setup.eos_token_ids, setup.context, quantised=quantised)
        ) as evaluator:
            records = {each.name: self._records(each, evaluator) for each in setup.problem_sets}
        for name, of_set in records.items():
            failed = [record["error"] for record in of_set if record["error"] is not None and "conversation" in record]
            if failed:
                log.warning(
                    "validation on %s: %d of %d conversations have failed, the first one: %s",
                    name, len(failed), len(of_set), failed[0],
                )  # fmt: skip
        return records, time.perf_counter() - started

    def _label(self, dataset: str, source: str, quantization: str) -> str:
        return self.labels[dataset, source] + ("" if quantization == "none" else f"/{QUANTIZED}")

    def _records(self, problem_set: ProblemSet, engine: Engine) -> list[SampleRecord]:
        """Every sample's, by whichever process, in the order of the samples."""
        share = share_of(problem_set.samples, self.rank, self.world_size, self.setup.context)
        by_id = {(record["key"], record["sample"]): record for record in gather_object(self.complete(share, engine))}
        return [by_id[sample.key, sample.index] for sample in problem_set.samples]

    def complete(self, share: Share, engine: Engine) -> list[SampleRecord]:
        """The graded records of this process's samples. Grading begins while others are drawn."""
        started, drawn = time.perf_counter(), dict[int, Completion]()
        for place, completion in self._stream(share.asked, engine):
            if place < share.local:
                drawn[place] = replace(completion, seconds=time.perf_counter() - started)
                if (problem := share.asked[place].problem).gradable:
                    text = text_of_completion(self.setup.tokenizer, completion)
                    self.grader.start(TASKS[problem.task].rubric, text, problem.gold)
        completions = [drawn[place] for place in range(share.local)]
        completions += [Completion.failed(self._too_long(sample)) for sample in share.overlong]
        samples = [*share.asked[: share.local], *share.overlong]
        problems = [sample.problem for sample in samples]
        texts = [text_of_completion(self.setup.tokenizer, completion) for completion in completions]
        grades = grade_rows(self.grader, texts, [p.gold for p in problems], [p.task for p in problems])
        return [record_of(*row, self.setup.engine) for row in zip(samples, completions, texts, grades, strict=True)]

    def _stream(self, samples: list[Sample], engine: Engine) -> Iterator[tuple[int, Completion]]:
        """As `Engine.stream`."""
        if self.setup.conversations is None:
            return engine.stream(list(samples))
        rows = (trajectory_of(s, s.key, s.index, row_of_sample(s), self.setup.context) for s in samples)
        return converse(self.setup.conversations, engine, rows)

    def _too_long(self, sample: Sample) -> str:
        return f"the prompt has {len(sample.token_ids)} tokens, the context {self.setup.context}"

    def metrics(self, records: Mapping[str, Sequence[SampleRecord]], quantization: str = "none") -> dict[str, float]:
        """Of each data source, as verl names them. Metrics of all n samples of a problem stand under val-core, those
        of fewer under val-aux."""
        metrics: dict[str, float] = {}
        for problem_set in self.setup.problem_sets:
            by_source: dict[str, list[SampleRecord]] = defaultdict(list)
            for sample, record in zip(problem_set.samples, records[problem_set.name], strict=True):
                by_source[sample.problem.data_source].append(record)
            for source, source_records in by_source.items():
                label = self._label(problem_set.name, source, quantization)
                metrics |= metrics_of(label, source_records, problem_set.sampling.n)
        return metrics

    def write(self, step: int, scored: Mapping[str, Scored]) -> None:
        """Leave the records of each dataset where perl/eval.py's readers find them: all, or none.

        Args:
            scored: by quantisation.
        """
        name = f"step-{step}"
        folder, made = self.run_dir / VALIDATION / name, self.run_dir / SAVING / name
        shutil.rmtree(made, ignore_errors=True)  # of a start that was killed before its first log
        for quantization, (records, seconds) in scored.items():
            place = made if quantization == "none" else made / QUANTIZED
            for each in self.setup.problem_sets:
                (place / each.name).mkdir(parents=True)
                with (place / each.name / SAMPLES).open("w", encoding="utf-8", errors="backslashreplace") as file:
                    file.writelines(map(json_line, records[each.name]))
                summary = self.summary(step, each, records[each.name], seconds, quantization)
                write_json(place / each.name / SUMMARY, summary)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        put_in_place(made, folder)

    def summary(
        self, step: int, problem_set: ProblemSet, records: Sequence[SampleRecord], seconds: float, quantization: str
    ) -> Summary:
        setup = self.setup
        trained = str(self.run_dir / f"checkpoint-{step}") if step else None
        whole = trained if setup.trained == "model" else None
        adapter = None if whole else trained or setup.start
        tokens = sum(record["tokens"] for record in records)
        generation: Generation = {
            "engine": setup.engine,
            "executor": "training",
            "dp_size": self.world_size // setup.tp_size,
            "tp_size": setup.tp_size,
            "device": device.detect().kind,
            "rows": len(records),
            "tokens": tokens,
            "start_s": 0.0,
            "wall_s": round(seconds, 2),
            "tokens_per_s": round(tokens / seconds, 1),
            "worker_restarts": 0,
        }
        if setup.dtype is not None:
            generation["dtype"] = setup.dtype
        made: Made = {
            **problem_set.asked,
            "generation": generation,
            "model": whole or str(setup.model),
            "adapter": adapter,
            "step": step,
            "split": None,
            "base_hash": "" if whole else _base_hash(setup.model),
            "adapter_hash": None,
            "adapter_mode": ("merge" if quantization == "none" else "lora") if adapter else None,
            "dtype": "auto",
            "quantization": None if quantization == "none" else quantization,
            "max_model_len": None,
            "chat_template_hash": text_hash(setup.tokenizer.chat_template),
            "environment": identity_of(setup.conversations.config) if setup.conversations else None,
            "merge": None,
            "chat_template": setup.tokenizer.chat_template,
            "grading_hash": rules_hash(),
        }
        return summary_of(records, problem_set, made)

    def keep_best(self, step: int, metrics: dict[str, float], save_adapter: Callable[[Path], None]) -> None:
        """Save the adapter as RUN/best where it is better than all before; of equal ones the first stays."""
        value = metrics[self.chosen_by]
        if self.best is not None and value <= self.best:
            return
        self.best = value
        folder, made = self.run_dir / BEST, self.run_dir / SAVING / BEST
        save_adapter(made)
        if self.rank == 0:
            core = {name: number for name, number in metrics.items() if name.startswith("val-")}
            best: Best = {"step": step, "metric": self.chosen_by, "value": value, "metrics": core}
            write_json(made / BEST_FILE, best)
            replace_best(self.run_dir, made)
        log.info(
            "validation: the best %s so far is that of step %d (%.4f): %s", self.setup.trained, step, value, folder
        )


Scored = tuple[dict[str, list[SampleRecord]], float]
"""The records by dataset, and the seconds that they took."""


@dataclass(frozen=True, slots=True)
class Share:
    """One process's part of a dataset's samples."""

    asked: list[Sample]
    """What the sampler completes: its own samples, then such that other processes have too, so that all ask for as
    many."""
    local: int
    """How many are its own."""
    overlong: list[Sample]
    """Its own samples whose prompt leaves no room for a completion."""


def share_of(samples: Sequence[Sample], rank: int, world_size: int, context: int | None) -> Share:
    """Problems go round the processes, the samples of one stay together: its prompt is computed once."""
    by_problem: dict[str, list[Sample]] = defaultdict(list)
    overlong: list[Sample] = []
    for sample in samples:
        if context is not None and len(sample.token_ids) >= context:
            overlong.append(sample)
        else:
            by_problem[sample.key].append(sample)
    problems = list(by_problem.values())
    share = problems[rank::world_size]
    asked = [sample for problem in share for sample in problem]
    missing = -(-len(problems) // world_size) - len(share)
    return Share([*asked, *(problems[0] if missing else [])], len(asked), overlong if rank == 0 else [])


def labels(problem_sets: Sequence[ProblemSet]) -> dict[tuple[str, str], str]:
    """What stands in the metrics' names for (dataset, data source): the source, and the dataset's name after it where
    several datasets are of that source; of rows that name no source the dataset's name alone."""
    pairs = [(problem_set.name, source) for problem_set in problem_sets for source in problem_set.sources]
    count = Counter(source for _, source in pairs)
    return {
        (name, source): (source or name) if count[source] == 1 else f"{source}/{name}".lstrip("/")
        for name, source in pairs
    }


def metrics_of(label: str, records: Iterable[SampleRecord], n: int) -> dict[str, float]:
    """Metrics of one data source, each a mean over its problems.

    acc/mean@n is verl's, and acc/best@k/mean what verl's 1000 draws with replacement estimate: the mean of the largest
    of k scores, for c of n correct 1 - (1 - c/n)^k. acc/pass@k and acc/maj@k are the evaluator's
    (perl.scoring.statistics), without replacement.
    """
    by_problem: dict[str, list[SampleRecord]] = defaultdict(list)
    for record in records:
        by_problem[record["key"]].append(record)
    scores = problem_scores(by_problem)
    metrics: dict[str, float] = {}
    for name in logged(scores):
        kind, _, k = name.partition("@")
        section = "val-core" if int(k) == n else "val-aux"
        metrics[f"{section}/{label}/acc/{'mean' if kind == 'avg' else kind}@{k}"] = fmean(scores[name])
        if kind == "pass":
            best = [best_at_k([row["score"] for row in rows], int(k)) for rows in by_problem.values()]
            metrics[f"{section}/{label}/acc/best@{k}/mean"] = fmean(best)
    rows = [record for problem_records in by_problem.values() for record in problem_records]
    metrics[f"val-aux/{label}/truncated"] = fmean([float(row["finish_reason"] == "length") for row in rows])
    metrics[f"val-aux/{label}/mean_length"] = fmean([float(row["tokens"]) for row in rows])
    if talked := [row["conversation"] for row in rows if "conversation" in row]:
        metrics[f"val-aux/{label}/turns"] = fmean([float(each["turns"]) for each in talked])
        metrics[f"val-aux/{label}/failed"] = fmean([float(row["error"] is not None) for row in rows])
    return metrics


def logged_steps(metrics_file: Path, metric: str) -> set[int]:
    """The steps whose validation stands in metrics.jsonl."""
    if not metrics_file.is_file():
        return set()
    return {step for step, row in read_metrics(metrics_file) if metric in row}


def best_so_far(run_dir: Path, metric: str) -> float | None:
    """The score of RUN/best; None where there is none that can be read, or one by another metric."""
    if not (file := run_dir / BEST / BEST_FILE).is_file():
        return None
    try:
        best = read_json(file, kind=Best)
    except UserError as error:
        log.warning("%s; the next validation's score is the best", error)
        return None
    return best["value"] if best["metric"] == metric else None


@functools.cache
def _base_hash(model: Path) -> str:
    return folders.content_hash(model)
