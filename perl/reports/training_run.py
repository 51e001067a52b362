"""What a training left in its folder (perl.runs.rundir, perl.runs.callbacks), as a report shows it."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, TypedDict, TypeVar

import yaml
from msgspec import Meta

from perl.algorithms.titles import algorithm_of, title_of
from perl.base.errors import UserError, one_line
from perl.base.files import typed
from perl.records import clock
from perl.scoring.results import METRICS, read_metrics

logger = logging.getLogger(__name__)

OF_A_STEP = ("reward", "loss", "eval_loss")
"""A row that has one of these is of a step, and not another evaluation's or the summary at the end."""


CONFIG = "config.yaml"
LARGEST = 1e300
"""Of what charts hold: beyond it stand infinity and whole numbers that no float is."""

T = TypeVar("T")
Size = Annotated[int, Meta(ge=1, le=2**31)]


class Common(TypedDict, total=False):
    seed: int | None


class Model(TypedDict, total=False):
    model_name_or_path: str | None


class Dataset(TypedDict, total=False):
    dataset_name_or_path: str | list[str] | None


class Named(TypedDict, total=False):
    name: str


class Peft(TypedDict, total=False):
    type: str | None


class Noise(TypedDict, total=False):
    enabled: bool | None


class Training(TypedDict, total=False):
    """Fields of TRL's GRPOConfig and SFTConfig."""

    max_steps: Annotated[int, Meta(ge=-1, le=2**53)]
    per_device_train_batch_size: Size
    gradient_accumulation_steps: Size
    steps_per_generation: Size | None
    generation_batch_size: Size | None
    num_iterations: Size | None


class Config(TypedDict, total=False):
    """What is read of config.yaml (perl.config)."""

    common: Common | None
    model: Model | None
    dataset: Dataset | None
    peft: Peft | None
    noise_injection: Noise | None
    algorithm: Named | None
    reward: dict[str, Any] | None
    training: Training | None


class Environment(TypedDict, total=False):
    """What is read of environment.json (perl.runs.rundir)."""

    command: list[str]
    folder: str
    git_commit: str | None
    machine: str
    device: str
    num_processes: Size
    packages: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """The logs of one training, and what it was made with."""

    folder: Path
    steps: list[int]
    """Optimizer steps that were logged or validated, ascending, each once; 0 is before the first."""
    metrics: dict[str, list[float | None]]
    """By name, a value for each of `steps`; None where a step did not log it, or logged NaN or infinity."""
    config: Config
    """Empty without one that can be read, as is `environment`."""
    environment: Environment

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one metric where it was logged."""
        values = self.metrics.get(name, ())
        return [(step, value) for step, value in zip(self.steps, values, strict=False) if value is not None]

    def setting(self, group: str, name: str) -> Any:
        """`config.group.name`, None where it is not set."""
        return (self.config.get(group) or {}).get(name)


def is_training_run(folder: Path) -> bool:
    return (folder / METRICS).is_file()


def read_training_run(folder: Path) -> TrainingRun:
    """Read the folder of a run, finished or not; of one that was resumed, the last attempt.

    Raises:
        UserError: metrics.jsonl has no step yet.
    """
    rows, scores = {}, {}
    for step, row in read_metrics(folder / METRICS):
        if validated := {name: value for name, value in row.items() if name.startswith("val-")}:
            scores[step] = validated
        if any(name in row for name in OF_A_STEP):  # else the summary at the end
            evaluated = {name: value for name, value in (rows.get(step) or {}).items() if name.startswith("eval_")}
            rows[step] = rows.get(step, {}) | row if "eval_loss" in row else evaluated | row
    if not rows:
        raise UserError(f"{folder / METRICS}: no step is logged there yet; wait for --config.training.logging_steps")
    for step, validated in scores.items():
        rows[step] = rows.get(step, {}) | validated
    steps = sorted(rows)
    names = dict.fromkeys(name for step in steps for name in rows[step])
    return TrainingRun(
        folder=folder,
        steps=steps,
        metrics={name: [number(rows[step].get(name)) for step in steps] for name in names},
        config=read_settings(folder / CONFIG, Config),
        environment=read_settings(folder / "environment.json", Environment),
    )


def number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and abs(value) < LARGEST else None


def read_settings(file: Path, kind: type[T]) -> T:
    """config.yaml or environment.json; empty, with a line, where it is missing or of another form."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no mapping")
        return typed(content, kind)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(str(error))
        logger.warning("report: %s is left out: %s", file, reason)
        return kind()


def facts(run: TrainingRun) -> dict[str, str]:
    """The run in a few numbers, by name. What was not logged has no entry."""
    planned = number(run.setting("training", "max_steps")) or 0
    shown = {"steps": f"{run.steps[-1]:,}" + (f" of {planned:,.0f}" if planned > 0 else "")}
    metric = "reward" if run.points("reward") else "loss"
    if values := [value for _, value in run.points(metric)]:
        tenth = max(len(values) // 10, 1)
        shown[f"{metric}, first and last tenth"] = f"{fmean(values[:tenth]):.3f} → {fmean(values[-tenth:]):.3f}"
    if truncated := [value for _, value in run.points("completions/clipped_ratio")]:
        shown["truncated, last tenth"] = f"{100 * fmean(truncated[-max(len(truncated) // 10, 1) :]):.1f} %"
    if seconds := run.points("timing/step"):
        every = run.setting("training", "logging_steps")
        counted = isinstance(every, int) and run.setting("training", "logging_strategy") == "steps"
        shown["time in steps"] = clock(time_in_steps(seconds, every if counted else None))
    if speeds := [value for _, value in run.points("perf/throughput")]:
        shown["tokens/s a device"] = f"{fmean(speeds):,.0f}"
    if memory := [value for _, value in run.points("perf/max_memory_allocated_gb")]:
        shown["most memory"] = f"{max(memory):.1f} GB"
    return shown


def time_in_steps(seconds: Sequence[tuple[int, float]], every: int | None) -> float:
    """Seconds in all steps, from (step, mean seconds of the steps since the row before).

    Args:
        every: logging_steps, where those are logged: a run that went on in another folder has not logged the first.
    """
    total, before = 0.0, 0 if every is None else max(seconds[0][0] - every, 0)
    for step, value in seconds:
        total += (step - before) * value
        before = step
    return total


def settings(run: TrainingRun) -> dict[str, str]:
    """What the training was made with besides its configuration, as name -> value; what is not known has no entry."""
    made = run.environment
    processes = made.get("num_processes")
    names, known = run.setting("dataset", "dataset_name_or_path") or "", None
    micro, accumulation = (
        run.setting("training", name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    if all(isinstance(value, int) for value in (micro, accumulation, processes)):
        rows = micro * accumulation * processes
        known = f"{rows:,} (batch {micro} × accumulation {accumulation} × processes {processes})"
    shown = {
        "model": run.setting("model", "model_name_or_path"),
        "dataset": " + ".join(map(str, names)) if isinstance(names, list) else names,
        "algorithm": algorithm(run),
        "completions a step" if reinforced(run) else "rows a step": known,
        "seed": run.setting("common", "seed"),
        "device": made.get("device"),
        "processes": processes,
        "command": shlex.join(map(str, made["command"])) if "command" in made else None,
        "folder": made.get("folder"),
        "commit": made.get("git_commit"),
        "versions": ", ".join(f"{name} {version}" for name, version in made.get("packages", {}).items()),
        "machine": made.get("machine"),
    }
    return {name: str(value) for name, value in shown.items() if value not in (None, "")}


def algorithm(run: TrainingRun) -> str:
    """GRPO, PPO, REINFORCE++, …, or SFT; of a folder without config.yaml, GRPO where there are rewards."""
    return title_of(algorithm_of(run.config)) if run.config else "GRPO" if reinforced(run) else "SFT"


def reinforced(run: TrainingRun) -> bool:
    """By rewards, as perl.train does, and not by worked answers (perl.sft)."""
    return "reward" in run.metrics
