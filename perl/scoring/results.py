"""What an evaluation leaves on disk: the files' names, what stands in them, and how they are read and written.

RESULT_DIR/DATASET/run.json         an Identity
RESULT_DIR/DATASET/samples.jsonl    a SampleRecord a line, only appended to
RESULT_DIR/DATASET/summary.json     a Summary
RESULT_DIR/summary.json             every dataset's Summary by the name of its folder
RESULT_DIR/sweep.json               a Sweep; each candidate then has a RESULT_DIR of its own below this one
RESULT_DIR/compare.json             a Comparison with another folder (perl.scoring.comparison)

RUN/validation/step-N               a RESULT_DIR that a training has left of its own (perl.training.validation)
RUN/best/best.json                  step and scores of the best of them, whose adapter or model lies there
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from perl.base.errors import UserError, one_line
from perl.base.files import read_json, typed
from perl.base.provenance import Provenance

logger = logging.getLogger(__name__)

RUN, SAMPLES, SUMMARY = "run.json", "samples.jsonl", "summary.json"
SWEEP, COMPARE = "sweep.json", "compare.json"
METRICS, VALIDATION = "metrics.jsonl", "validation"
BEST, BEST_FILE = "best", "best.json"
BEST_BEFORE = "_best_before"
"""In a run's folder, with -N behind it: the best of step N, which is that up to a checkpoint; a later one stands in
BEST."""

AGAIN = "the same command of perl/eval.py writes it again"

Count = Annotated[int, Meta(ge=0, le=2**53)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Amount = Annotated[float, Meta(ge=0, le=1e15)]
"""Seconds, tokens and means of them: NaN and what no chart could hold are neither."""
Plain = str | int | float | bool | None

Row = dict[str, Any]
"""What a step of a training logged: value by the metric's name."""


class ConversationRecord(TypedDict):
    """What was said with an environment in a sample."""

    messages: list[dict[str, Any]]
    """Behind the prompt, in OpenAI's form: each turn, its calls apart, and what was observed after it."""
    turns: Count
    observed_tokens: Count
    """Of what tools and environment have said; not in the sample's `tokens`."""
    reward: float | None
    """By the environment itself, where it has one; then the score is that, held between 0 and 1."""


class SampleRecord(TypedDict):
    """A line of samples.jsonl: one completion of one problem, graded."""

    key: str
    """The problem: a hash of its content, and its occurrence among equal ones ("9f0c…-0")."""
    sample: Count
    """Which of the problem's n completions, from 0."""
    seed: Seed
    """Seed of this completion alone."""
    task: str
    """The task that graded it, a key of TASKS."""
    source: str
    """Where the problem came from ("test.jsonl:17"); may be empty."""
    prompt: str
    """As the model saw it, chat template included."""
    gold: str
    """The reference answer."""
    completion: str
    score: Share
    """The primary rule's, 0.0 or 1.0."""
    scores: dict[str, Share]
    """Each rule's, by its name."""
    extracted: str | None
    """The answer that was read; None: none was found."""
    reason: Literal["correct", "wrong", "unextracted", "timeout", "error"]
    prompt_tokens: Count
    tokens: Count
    """Generated, without the end-of-sequence token."""
    finish_reason: Literal["stop", "length"]
    """"length": cut off."""
    time: Amount
    """Seconds in the engine; 0 where nothing was generated."""
    engine: str
    """A key of ENGINES."""
    error: str | None
    """Why nothing was generated, or the conversation could not go on; such a sample counts as wrong."""
    conversation: NotRequired[ConversationRecord]
    """With an environment. `completion` is its last turn then, `tokens` those of all turns."""


class MetricRecord(TypedDict):
    """A mean over problems, as a fraction, with its 95 % interval."""

    value: Share
    low: Share
    high: Share


class RuleRecord(TypedDict):
    """What one grading rule says of the samples that it was asked about."""

    mean: Share
    scored: Count
    """A fallback is not asked about all."""


class Generation(TypedDict):
    """The last run that generated something for a summary."""

    engine: str
    executor: str
    dp_size: Count
    tp_size: Count
    gpu_memory_utilization: NotRequired[float]
    """vLLM's, as far as the user has set it, as is `enforce_eager`."""
    enforce_eager: NotRequired[bool]
    dtype: NotRequired[str]
    """That was computed in, where Identity's is "auto" too; left out where only the workers' machines know it."""
    device: str
    """Kind of device: cpu, cuda, npu."""
    rows: Count
    """Samples completed in that run."""
    tokens: Count
    start_s: Amount
    """Until the first engine was ready."""
    wall_s: Amount
    """From then to the last completion."""
    tokens_per_s: Amount
    worker_restarts: Count


class Style(TypedDict):
    """A PromptStyle."""

    template: str
    system_prompt: str | None
    few_shot: list[tuple[str, str]]


class TrainedOn(TypedDict):
    """What the adapter's run has seen of a dataset (perl.evaluation.contamination)."""

    run: str
    """Its folder."""
    problems: Count | None
    """How many of them it trained on; None in results of 0.13 and before: that is not recorded."""


class Rescored(TypedDict):
    """The last --rescore."""

    changed: Count
    """Verdicts."""
    provenance: Provenance


class HowAsked(TypedDict):
    """How the problems of a dataset are asked."""

    dataset: str
    """As after --dataset."""
    styles: dict[str, Style]
    """How prompts are built, by task."""
    sampling: dict[str, int | float]
    """A Sampling but for `n`."""
    chat_template_kwargs: NotRequired[dict[str, Any] | None]
    """What the chat template was given besides; left out, or None, where that is nothing."""


class Identity(HowAsked):
    """run.json: what every sample in a dataset's folder was made with."""

    split: str | None
    """As after --split."""
    base_hash: str
    """Hash of the model without an adapter; "" in a validation of a model whose weights are all trained."""
    adapter_hash: str | None
    adapter_mode: str | None
    dtype: str
    quantization: NotRequired[str | None]
    """Of the weights (perl.engines.quantised.SCHEMES), below an adapter that is served; None: they are of `dtype`."""
    max_model_len: Count | None
    chat_template_hash: str
    environment: NotRequired[dict[str, Any] | None]
    """The settings of what answered between turns, and a hash of its files; None: every sample is one turn."""
    grading_hash: str | None
    """Hash of the code that graded (perl.grading.rules_hash). It alone may differ between the command that began a
    folder and the one that goes on."""


class Statistics(TypedDict):
    """What is computed from a dataset's records."""

    problems: Count
    samples: Count
    n: Annotated[int, Meta(ge=1, le=2**31)]
    """Samples of each problem."""
    metrics: dict[str, MetricRecord]
    """accuracy, avg@n, pass@k, and maj@k where a task grades."""
    rules: dict[str, RuleRecord]
    truncated: Share
    """Share of the samples, as is `unextracted`."""
    unextracted: Share | None
    """None where an environment alone scores: no answer is read."""
    timeouts: Count
    grading_errors: Count
    not_generated: Count
    """Samples with an `error`."""
    mean_tokens: Amount
    max_tokens: Count
    mean_prompt_tokens: Amount
    tokens: Count
    engines: list[str]


class Made(Identity):
    """What a summary tells of how its rows were made."""

    generation: Generation | None
    model: str
    adapter: str | None
    step: Count | None
    """Optimizer steps of training; 0 for the base of a sweep, None where nothing tells."""
    trained_on: NotRequired[TrainedOn | None]
    chat_template: str | dict[str, str] | None
    merge: dict[str, Any] | None
    """merge.json."""


class Summary(Statistics, Made):
    """summary.json of one dataset."""

    tasks: list[str]
    """Those that grade the problems, the commonest first."""
    grading: dict[str, dict[str, Plain | list[str]]]
    """Each task's rubric."""
    rescored: NotRequired[Rescored]
    provenance: Provenance


class Best(TypedDict):
    """best.json: the validation that the adapter, or model, in RUN/best has reached."""

    step: Count
    metric: str
    """By which it is the best."""
    value: float
    metrics: dict[str, float]
    """Of the same validation."""


class SweepEntry(TypedDict):
    """One candidate of a sweep."""

    name: str
    """Its folder below the result folder."""
    adapter: str | None
    """Folder of the adapter; None for the base."""
    adapter_hash: str | None
    step: Count | None
    """As in Summary."""
    error: str | None
    """Why it was not scored."""
    metrics: dict[str, dict[str, MetricRecord]] | None
    """By dataset, as in Summary; None while it is not scored."""


class Sweep(TypedDict):
    """sweep.json."""

    model: str
    candidates: list[SweepEntry]
    """In the order of the command."""
    provenance: Provenance


class Logged(TypedDict):
    """A line of metrics.jsonl, or of the log_history in trainer_state.json: a step, and any metrics."""

    step: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSet:
    """One dataset, scored by one model: what lies in its folder."""

    dataset: str
    summary: Summary
    records: list[SampleRecord]
    """Each problem's samples side by side in the order of their numbers."""


def is_scored(folder: Path) -> bool:
    return (folder / SAMPLES).is_file() and (folder / SUMMARY).is_file()


def read_summary(folder: Path, hint: str = AGAIN) -> Summary:
    """That of the dataset in `folder`. A UserError with the `hint` where it is not readable or lacks the accuracy."""
    summary = read_json(folder / SUMMARY, hint=hint, kind=Summary)
    if "accuracy" not in summary["metrics"] or "temperature" not in summary["sampling"]:
        raise UserError(f"{folder / SUMMARY} lacks metrics.accuracy or sampling.temperature; {hint}")
    return summary


def read_scored(folder: Path) -> ScoredSet:
    """The dataset in `folder`. A UserError where summary.json is not readable, or no sample is."""
    summary = read_summary(folder)
    records = list(read_samples(folder / SAMPLES).values())
    if not records:
        raise UserError(f"{folder / SAMPLES}: holds no whole sample; {AGAIN}")
    place = {key: i for i, key in enumerate(dict.fromkeys(record["key"] for record in records))}
    records.sort(key=lambda record: (place[record["key"]], record["sample"]))
    if len(records) != summary["samples"]:
        logger.warning(
            "%s: samples.jsonl has %d rows, the summary was made from %d (another --n or --max_samples)",
            folder, len(records), summary["samples"],
        )  # fmt: skip
    return ScoredSet(dataset=folder.name, summary=summary, records=records)


def read_samples(file: Path) -> dict[tuple[str, int], SampleRecord]:
    """The records of a samples.jsonl by (key, sample), in the file's order; of two of one sample the first that has no
    error counts. A line that is no record, or has no end (its writer was killed), is left out: one warning tells how
    many, and what is wrong with the first."""
    try:
        *lines, torn = file.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    records: dict[tuple[str, int], SampleRecord] = {}
    broken = []
    for number, line in enumerate(lines, start=1):
        try:
            record = typed(json.loads(line), SampleRecord)
            keep(records, record)
        except (ValueError, RecursionError) as error:
            broken.append(f"line {number}: {one_line(str(error))}")
    if torn:
        broken.append(f"line {len(lines) + 1} has no end")
    if broken:
        logger.warning(
            "%s: %d broken lines left out (%s); the same command of perl/eval.py makes them again",
            file, len(broken), broken[0],
        )  # fmt: skip
    return records


def keep(records: dict[tuple[str, int], SampleRecord], record: SampleRecord) -> bool:
    """Put a record among those of its file, and say whether it counts: it is the first of its sample, or has no error
    where that one has."""
    before = records.get(row := (record["key"], record["sample"]))
    if counts := before is None or (before["error"] is not None and record["error"] is None):
        records[row] = record
    return counts


def read_metrics(file: Path) -> list[tuple[int, Row]]:
    """(step, what was logged) of each line of a run's metrics.jsonl that is of its last attempt. Broken lines, as the
    last one is where the run was killed while it was written, are left out: one warning tells how many."""
    rows: list[tuple[int, Row]] = []
    broken = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
            rows.append((typed(row, Logged)["step"], {name: row[name] for name in row if name != "step"}))
        except (ValueError, RecursionError) as error:
            broken.append(f"line {number}: {one_line(str(error))}")
    if broken:
        logger.warning("%s: %d broken lines left out (%s)", file, len(broken), broken[0])
    return last_attempt(rows)


def last_attempt(rows: Iterable[tuple[int, Row]]) -> list[tuple[int, Row]]:
    """The rows of the last run in a log. One that was started again from a checkpoint, or from the beginning, repeats
    steps; what stands there of them and of later ones is another run's."""
    kept: list[tuple[int, Row]] = []
    for step, row in rows:
        while kept and kept[-1][0] > step:
            kept.pop()
        kept.append((step, row))
    return kept


MODEL = ("model", "adapter", "base_hash", "adapter_hash")
"""Fields of a Summary that say which model was scored."""


def same_model(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both scored the same weights, by their hashes. A validation has none of what is trained: there the name
    counts."""
    hashed = all(side["adapter_hash"] or not side["adapter"] for side in (one, other))
    base = "base_hash" if one["base_hash"] and other["base_hash"] else "model"
    return all(one[name] == other[name] for name in (base, "adapter_hash" if hashed else "adapter"))
