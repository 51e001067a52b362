"""Validation: the evaluator's tasks, prompts, seeds and grading, on the live model with its adapter and without noise.

    plan_validation   before the model is loaded   problems -> samples
    Validation        at a step that is `due`
        share_of      which samples are this process's
        complete      samples -> rollout engine -> grader -> records
        gather        the records of all processes, in every process
        metrics       val-core/<data source>/acc/mean@n, …
        write         RUN/validation/step-N/DATASET as perl/eval.py leaves a dataset: samples.jsonl, summary.json
        keep_best     RUN/best: the adapter with the best score so far

Nothing of the training changes by it: samples bring their own seeds, and the engine's state is one of its own.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerCallback

from perl import checkpoints, device
from perl.checkpoints import resolve_model
from perl.config.schema import ValidationConfig
from perl.engines.sampling import validate
from perl.errors import UserError
from perl.grading import Grader, rules_hash
from perl.images import tokenizer_of
from perl.pixels import make_images
from perl.provenance import provenance, text_hash
from perl.records import Completion, Sample, Sampling
from perl.results import (
    BEST,
    BEST_FILE,
    METRICS,
    SAMPLES,
    SUMMARY,
    VALIDATION,
    SampleRecord,
    Summary,
    atomic_write,
    json_line,
    read_metrics,
    write_json,
)
from perl.rewards import grade_rows
from perl.scoring.samples import cluster_of, folder_names, make_samples, record_of, sampling_of_task, style_of_task
from perl.scoring.summary import grading_of, problem_scores, shown, summarize
from perl.tasks import TASKS, data_name, load_problems
from perl.training.rollout import EvaluatorRules, RolloutRequest, Sampler, Weights
from perl.training.setup import merged_base

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from perl.config.load import Config

log = logging.getLogger(__name__)

FLAG = "--config.validation."
GIVEN = ("n", "temperature", "max_new_tokens")
"""Fields of Sampling that the group `validation` has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """One of validation.datasets."""

    name: str
    """Of its folder."""
    spec: str
    """As the user wrote it."""
    tasks: tuple[str, ...]
    """The tasks that grade its problems, the commonest first."""
    sampling: Sampling
    styles: dict[str, Any]
    """By task."""
    samples: tuple[Sample, ...]
    """sampling.n of each problem, side by side."""

    @property
    def sources(self) -> list[str]:
        """The data sources of its problems, the commonest first."""
        return [name for name, _ in Counter(s.problem.data_source for s in self.samples).most_common()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPlan:
    """What a run validates on, and by which rules completions end."""

    config: ValidationConfig
    data_sets: tuple[DataSet, ...]
    rules: EvaluatorRules
    model: Path
    """Folder of the base that is trained on; of one that holds an earlier adapter, before it is written."""
    start: str | None
    """The adapter that is trained further; None: a new one, which changes nothing before the first step."""
    tokenizer: Any


def plan_validation(
    config: Config, tokenizer: PreTrainedTokenizerBase, trained: Collection[str]
) -> ValidationPlan | None:
    """The samples of every dataset, None where none is named. A UserError names the flag.

    Args:
        trained: perl.tasks.trained.problem_hash of each problem that the run trains on.
    """
    validation = config.validation
    if not validation.datasets:
        return None
    model = resolve_model(config.model.model_name_or_path, "--config.model.model_name_or_path")
    model_config = checkpoints.load_config(model)
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if config.training.use_vllm and (limit := config.training.vllm_max_model_length):
        context = min(limit, context or limit)
    asked = validation.max_new_tokens
    if asked is not None and context is not None and asked >= context:
        raise UserError(
            f"{FLAG}max_new_tokens {asked}: the model takes {context} tokens of prompt and completion together; write"
            " less"
        )
    data_sets: dict[str, DataSet] = {}
    specs = [data_name(spec) for spec in validation.datasets]
    for spec, name in zip(specs, folder_names(specs), strict=True):
        if name in data_sets:
            raise UserError(
                f"{FLAG}datasets: {spec} and {data_sets[name].spec} would both be written to {name}; leave one out"
            )
        data_sets[name] = _data_set(validation, spec, name, config.dataset.system_prompt, tokenizer)
        if config.training.use_vllm and config.training.vllm_mode == "server":
            _require_greedy(data_sets[name])
        _warn_of_trained(data_sets[name], trained)
    eos_token_ids = checkpoints.eos_token_ids(model, model_config, tokenizer_of(tokenizer))
    merges = config.peft.adapter is not None and config.peft.adapter_mode == "merge"
    return ValidationPlan(
        config=validation,
        data_sets=tuple(data_sets.values()),
        rules=EvaluatorRules(eos_token_ids=eos_token_ids, context=context),
        model=merged_base(config) if merges else model,
        start=None if merges else config.peft.adapter,
        tokenizer=tokenizer,
    )


def _data_set(
    config: ValidationConfig, spec: str, name: str, system_prompt: str | None, tokenizer: PreTrainedTokenizerBase
) -> DataSet:
    try:
        problems = load_problems(spec, limit=config.max_samples)
    except UserError as error:
        raise UserError(f"{FLAG}datasets: {error}") from error
    if ungraded := next((problem for problem in problems if problem.task not in TASKS), None):
        raise UserError(f"{FLAG}datasets {spec}: no task grades {ungraded.source}; leave the file out")
    tasks = tuple(task for task, _ in Counter(problem.task for problem in problems).most_common())
    given = {field: value for field in GIVEN if (value := getattr(config, field)) is not None}
    sampling = sampling_of_task(tasks[0], given, FLAG)
    validate(sampling)
    styles = {task: style_of_task(task, system_prompt) for task in tasks}
    samples = tuple(make_samples(problems, name, sampling, styles, tokenizer))
    return DataSet(name=name, spec=spec, tasks=tasks, sampling=sampling, styles=styles, samples=samples)


def _require_greedy(data_set: DataSet) -> None:
    if data_set.sampling.temperature or data_set.sampling.n > 1:
        raise UserError(
            f"{FLAG}temperature: a vLLM server takes no seed for each completion, so that it can only validate"
            f" greedily, and {data_set.spec} would be sampled; write {FLAG}temperature 0 and n 1, or"
            " --config.training.vllm_mode colocate"
        )


def _warn_of_trained(data_set: DataSet, trained: Collection[str]) -> None:
    keys = {cluster_of(sample.key) for sample in data_set.samples}
    if both := len(keys & set(trained)):
        log.warning("%sdatasets %s: the run trains on %d of its %d problems", FLAG, data_set.spec, both, len(keys))


class Validation(TrainerCallback):
    """Validates a run. Asks for it after the steps that are due, as a callback of the trainer, which calls `run`.

    Args:
        plan: what on.
        grader: the run's.
        run_dir: where the samples, and the best adapter, are kept. What it holds of this run is taken up: steps in its
            metrics.jsonl are not validated again, and the best score stands.
        engine: key of ENGINES for the records.
        rank, world_size: of this process, and how many there are.
    """

    def __init__(self, plan: ValidationPlan, grader: Grader, run_dir: Path, engine: str, rank: int, world_size: int):
        self.plan, self.grader, self.run_dir, self.engine = plan, grader, run_dir, engine
        self.rank, self.world_size = rank, world_size
        self.labels = labels(plan.data_sets)
        first = plan.data_sets[0]
        self.chosen_by = f"val-core/{self.labels[first.name, first.sources[0]]}/acc/mean@{first.sampling.n}"
        """The metric of the best adapter."""
        found = [logged_steps(run_dir / METRICS, self.chosen_by), best_so_far(run_dir, self.chosen_by)]
        self.done, self.best = broadcast_object_list(found)  # rank 0 decides: other nodes may not see the folder
        for data_set in plan.data_sets:
            log.info(
                "validation on %s: %d samples of %s", data_set.spec, len(data_set.samples), ", ".join(data_set.sources)
            )
        if plan.config.save_best:
            log.info("validation: the adapter with the highest %s is kept in %s", self.chosen_by, run_dir / BEST)

    def due(self, step: int, last: int) -> bool:
        """Whether the adapter after `step` of `last` optimizer steps is to be validated, and has not been."""
        if step in self.done:
            return False
        if step == 0:
            return self.plan.config.before_train
        every = self.plan.config.every_steps
        return step == last or (every is not None and step % every == 0)

    def on_train_begin(self, args, state, control, **kwargs):
        """What was logged for later steps is of an attempt that this one leaves behind at its checkpoint."""
        self.done = {step for step in self.done if step <= state.global_step}

    def on_step_end(self, args, state, control, **kwargs):
        stopping = control.should_training_stop and state.global_step < state.max_steps  # the resumed run will do it
        if self.due(state.global_step, state.max_steps) and not stopping:
            control.should_evaluate = True

    def run(self, step: int, sampler: Sampler, save_adapter: Callable[[Path], None]) -> dict[str, float]:
        """Validate the adapter after `step` steps; every process must come here, and all get the metrics.

        Args:
            save_adapter: saves it into a folder; every process must call it.
        """
        started = time.perf_counter()
        records = {data_set.name: self._records(step, data_set, sampler) for data_set in self.plan.data_sets}
        seconds = time.perf_counter() - started
        found = self.metrics(records)
        if self.rank == 0:
            for data_set in self.plan.data_sets:
                self.write(step, data_set, records[data_set.name], seconds)
        if self.plan.config.save_best and (step > 0 or self.plan.start):  # a new adapter without a step is the base
            self.keep_best(step, found, save_adapter)
        self.done.add(step)
        return found | {"timing/validation": time.perf_counter() - started}

    def _records(self, step: int, data_set: DataSet, sampler: Sampler) -> list[SampleRecord]:
        """Every sample's, by whichever process, in the order of the samples."""
        share = share_of(data_set.samples, self.rank, self.world_size, self.plan.rules)
        mine = self.complete(step, data_set, share, sampler)
        by_id = {(record["key"], record["sample"]): record for record in gather_object(mine)}
        return [by_id[sample.key, sample.index] for sample in data_set.samples]

    def complete(self, step: int, data_set: DataSet, share: Share, sampler: Sampler) -> list[SampleRecord]:
        """The graded records of this process's samples. Grading begins while others are drawn."""
        started, ended = time.perf_counter(), dict[int, Completion]()
        decoded = functools.partial(completion_of, self.plan.tokenizer, self.plan.rules.eos_token_ids)

        def grade_early(place: int, token_ids: list[int]) -> None:
            if place < share.own:
                ended[place] = decoded(token_ids, seconds=time.perf_counter() - started)
                problem = share.asked[place].problem
                self.grader.start(TASKS[problem.task].rubric, ended[place].text, problem.gold)

        request = RolloutRequest(
            prompt_ids=[list(sample.token_ids) for sample in share.asked],
            seeds=[sample.seed for sample in share.asked],
            sampling=data_set.sampling,
            weights=Weights(step, 0, 0.0),
            group_size=data_set.sampling.n,
            on_finished=grade_early,
            images=[make_images(self.plan.tokenizer, sample.images) for sample in share.asked],
            rules=self.plan.rules,
        )
        drawn = sampler.complete(request).token_ids[: share.own] if share.asked else []
        whole = time.perf_counter() - started
        completions = [ended.get(place) or decoded(ids, seconds=whole) for place, ids in enumerate(drawn)]
        completions += [Completion.failed(self._too_long(sample)) for sample in share.overlong]
        samples = [*share.asked[: share.own], *share.overlong]
        problems = [sample.problem for sample in samples]
        grades = grade_rows(
            self.grader, [c.text for c in completions], [p.gold for p in problems], [p.task for p in problems]
        )
        return [record_of(*row, self.engine) for row in zip(samples, completions, grades, strict=True)]

    def _too_long(self, sample: Sample) -> str:
        return f"the prompt has {len(sample.token_ids)} tokens, the context {self.plan.rules.context}"

    def metrics(self, records: dict[str, list[SampleRecord]]) -> dict[str, float]:
        """Of each data source, as verl names them. Metrics of all n samples of a problem stand under val-core, those
        of fewer under val-aux."""
        found: dict[str, float] = {}
        for data_set in self.plan.data_sets:
            of_source: dict[str, list[SampleRecord]] = defaultdict(list)
            for sample, record in zip(data_set.samples, records[data_set.name], strict=True):
                of_source[sample.problem.data_source].append(record)
            for source, own in of_source.items():
                found |= metrics_of(self.labels[data_set.name, source], own, data_set.sampling.n)
        return found

    def write(self, step: int, data_set: DataSet, records: Sequence[SampleRecord], seconds: float) -> None:
        """Leave the records where perl/eval.py's readers find them."""
        folder = self.run_dir / VALIDATION / f"step-{step}" / data_set.name
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / SAMPLES) as file:
            file.writelines(map(json_line, records))
        write_json(folder / SUMMARY, self.summary(step, data_set, records, seconds))

    def summary(self, step: int, data_set: DataSet, records: Sequence[SampleRecord], seconds: float) -> Summary:
        plan, sampling = self.plan, asdict(data_set.sampling)
        adapter = str(self.run_dir / f"checkpoint-{step}") if step else plan.start
        tokens = sum(record["tokens"] for record in records)
        sampling.pop("n")
        return {
            **summarize(records, data_set.sampling.n),
            "generation": {
                "engine": self.engine,
                "executor": "training",
                "dp_size": self.world_size,
                "tp_size": 1,
                "device": device.detect().kind,
                "rows": len(records),
                "tokens": tokens,
                "start_s": 0.0,
                "wall_s": round(seconds, 2),
                "tokens_per_s": round(tokens / seconds, 1),
                "worker_restarts": 0,
            },
            "tasks": list(data_set.tasks),
            "model": str(plan.model),
            "adapter": adapter,
            "step": step,
            "dataset": data_set.spec,
            "base_hash": _base_hash(plan.model),
            "adapter_hash": None,
            "adapter_mode": "merge" if adapter else None,
            "dtype": "auto",
            "max_model_len": None,
            "chat_template_hash": text_hash(plan.tokenizer.chat_template),
            "styles": json.loads(json.dumps({task: asdict(style) for task, style in data_set.styles.items()})),
            "sampling": sampling,
            "merge": None,
            "chat_template": plan.tokenizer.chat_template,
            "grading": grading_of(data_set.tasks),
            "grading_hash": rules_hash(),
            "provenance": _provenance(),
        }

    def keep_best(self, step: int, metrics: dict[str, float], save_adapter: Callable[[Path], None]) -> None:
        """Save the adapter as RUN/best where it is better than all before; of equal ones the first stays."""
        value = metrics[self.chosen_by]
        if self.best is not None and value <= self.best:
            return
        self.best = value
        folder, made = self.run_dir / BEST, self.run_dir / f".{BEST}.partial"
        if self.rank == 0:
            shutil.rmtree(made, ignore_errors=True)
        save_adapter(made)
        if self.rank == 0:
            core = {name: number for name, number in metrics.items() if name.startswith("val-")}
            write_json(made / BEST_FILE, {"step": step, "metric": self.chosen_by, "value": value, "metrics": core})
            before = self.run_dir / f".{BEST}.before"
            shutil.rmtree(before, ignore_errors=True)
            if folder.exists():
                folder.rename(before)
            made.rename(folder)
            shutil.rmtree(before, ignore_errors=True)
        log.info("validation: the best adapter so far is that of step %d (%.4f): %s", step, value, folder)


@dataclass(frozen=True, slots=True)
class Share:
    """One process's part of a dataset's samples."""

    asked: list[Sample]
    """What the sampler completes: its own samples, then such that other processes have too, so that all ask for as
    many."""
    own: int
    """How many are its own."""
    overlong: list[Sample]
    """Its own samples whose prompt leaves no room for a completion."""


def share_of(samples: Sequence[Sample], rank: int, world_size: int, rules: EvaluatorRules) -> Share:
    """Problems go round the processes, the samples of one stay together: its prompt is computed once."""
    by_problem: dict[str, list[Sample]] = defaultdict(list)
    overlong: list[Sample] = []
    for sample in samples:
        if rules.room(list(sample.token_ids), 1) < 1:
            overlong.append(sample)
        else:
            by_problem[sample.key].append(sample)
    problems = list(by_problem.values())
    mine = problems[rank::world_size]
    own = [sample for problem in mine for sample in problem]
    missing = -(-len(problems) // world_size) - len(mine)
    return Share([*own, *(problems[0] if missing else [])], len(own), overlong if rank == 0 else [])


def completion_of(
    tokenizer: Any, eos_token_ids: Collection[int], token_ids: Sequence[int], seconds: float = 0.0
) -> Completion:
    """Drawn tokens as an engine of the evaluator gives them back: without the end-of-sequence token."""
    stopped = bool(token_ids) and token_ids[-1] in eos_token_ids
    ids = tuple(token_ids[:-1] if stopped else token_ids)
    return Completion(
        token_ids=ids,
        text=tokenizer.decode(ids, skip_special_tokens=True),
        finish_reason="stop" if stopped else "length",
        seconds=seconds,
    )


def labels(data_sets: Sequence[DataSet]) -> dict[tuple[str, str], str]:
    """What stands in the metrics' names for (dataset, data source): the source, and the dataset's name after it where
    several datasets are of that source."""
    pairs = [(data_set.name, source) for data_set in data_sets for source in data_set.sources]
    count = Counter(source for _, source in pairs)
    return {(name, source): source if count[source] == 1 else f"{source}/{name}" for name, source in pairs}


def metrics_of(label: str, records: Iterable[SampleRecord], n: int) -> dict[str, float]:
    """Metrics of one data source, each a mean over its problems.

    acc/mean@n is verl's, and acc/best@k/mean what verl's 1000 draws with replacement estimate: 1 - (1 - c/n)^k for c
    correct of n. acc/pass@k and acc/maj@k are the evaluator's (perl.scoring.statistics), without replacement.
    """
    by_problem: dict[str, list[SampleRecord]] = defaultdict(list)
    for record in records:
        by_problem[record["key"]].append(record)
    scores = problem_scores(by_problem)
    found: dict[str, float] = {}
    for name in shown(scores):
        kind, _, k = name.partition("@")
        section = "val-core" if int(k) == n else "val-aux"
        found[f"{section}/{label}/acc/{'mean' if kind == 'avg' else kind}@{k}"] = mean(scores[name])
        if kind == "pass":
            best = [1 - (1 - share) ** int(k) for share in scores["accuracy"]]
            found[f"{section}/{label}/acc/best@{k}/mean"] = mean(best)
    rows = [record for own in by_problem.values() for record in own]
    found[f"val-aux/{label}/truncated"] = mean([float(row["finish_reason"] == "length") for row in rows])
    found[f"val-aux/{label}/mean_length"] = mean([float(row["tokens"]) for row in rows])
    return found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def logged_steps(metrics_file: Path, metric: str) -> set[int]:
    """The steps whose validation stands in metrics.jsonl."""
    if not metrics_file.is_file():
        return set()
    return {step for step, row in read_metrics(metrics_file)[0] if metric in row}


def best_so_far(run_dir: Path, metric: str) -> float | None:
    """The score of RUN/best; None where there is none, or one by another metric."""
    try:
        found = json.loads((run_dir / BEST / BEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return float(found["value"]) if found.get("metric") == metric else None


@functools.cache
def _provenance() -> dict[str, Any]:
    return provenance()  # asks git


@functools.cache
def _base_hash(model: Path) -> str:
    return checkpoints.content_hash(model)
