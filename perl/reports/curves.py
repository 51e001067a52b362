"""Curves of training runs, whoever trained: `read_curves` asks READERS in turn who knows a file or folder.

A format is a function that returns Curves, or None where a path is not of its format, and a line in READERS. Metrics
get our names (NAMES). Nothing else of a file is kept but what places its steps: a log of Ray may hold secrets.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from perl.base.errors import UserError
from perl.base.files import typed
from perl.base.paths import step_of_checkpoint
from perl.reports.sources import find
from perl.reports.training_run import (
    CONFIG,
    Config,
    Environment,
    Training,
    is_training_run,
    number,
    read_settings,
)
from perl.scoring.results import METRICS, Logged, last_attempt, read_metrics

NAMES: dict[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean", "critic/rewards/mean"),
    "loss": ("actor/pg_loss",),
    "reward/max": ("critic/score/max", "critic/rewards/max"),
    "reward/min": ("critic/score/min", "critic/rewards/min"),
    "entropy": ("actor/entropy", "actor/entropy_loss"),
    "kl": ("actor/kl_loss",),
    "approx_kl": ("actor/ppo_kl",),
    "kl_in_reward": ("actor/reward_kl_penalty",),
    "kl_in_reward/coefficient": ("actor/reward_kl_penalty_coeff",),
    "clip_ratio/region_mean": ("actor/pg_clipfrac",),
    "grad_norm": ("actor/grad_norm",),
    "learning_rate": ("actor/lr",),
    "advantages/mean": ("critic/advantages/mean",),
    "critic/vf_loss": ("critic/vf_loss",),
    "critic/vf_clipfrac": ("critic/vf_clipfrac",),
    "critic/vpred_mean": ("critic/vpred_mean",),
    "critic/values_mean": ("critic/values/mean",),
    "critic/values_max": ("critic/values/max",),
    "critic/values_min": ("critic/values/min",),
    "critic/returns_mean": ("critic/returns/mean",),
    "critic/returns_max": ("critic/returns/max",),
    "critic/returns_min": ("critic/returns/min",),
    "critic/explained_variance": ("critic/vf_explained_var",),
    "critic/grad_norm": ("critic/grad_norm",),
    "advantages/max": ("critic/advantages/max",),
    "advantages/min": ("critic/advantages/min",),
    "completions/mean_length": ("response_length/mean",),
    "completions/max_length": ("response_length/max",),
    "completions/min_length": ("response_length/min",),
    "completions/clipped_ratio": ("response_length/clip_ratio",),
    "prompts/mean_length": ("prompt_length/mean",),
    "prompts/max_length": ("prompt_length/max",),
    "prompts/min_length": ("prompt_length/min",),
    "timing/rollout": ("timing_s/gen", "timing/gen"),
    "timing/reward": ("timing_s/reward",),
    "timing/old_logps": ("timing_s/old_log_prob", "timing_s/ref", "timing/ref"),
    "timing/advantages": ("timing_s/adv", "timing/adv"),
    "timing/update": ("timing_s/update_actor", "timing/update_actor"),
    "timing/step": ("timing_s/step",),
    "perf/throughput": (),
    "perf/mfu": ("perf/mfu/actor",),
    "perf/max_memory_allocated_gb": (),
}
"""Our name of a metric, which is TRL's where it has one -> verl's names, of which the first that is logged counts."""
TRAINER_STATE = "trainer_state.json"
VERLS = (
    "critic/score/", "critic/rewards/", "critic/advantages/", "actor/", "response_length/", "prompt_length/",
    "timing_s/",
)  # fmt: skip
"""What names begin with that only verl logs."""
UNIT = re.compile(r"(.+)\((1e[-+]?\d{1,3})\)")
"""A name with the unit of its values, as verl to 0.2 has: actor/lr(1e-4)."""
SCORE = "val-core/"
"""What names of scores of validations begin with, verl's and ours."""
OLD_SCORE = re.compile(r"val/test_score/(.+)|val-core/(.+)/reward/(mean@\d+)")
"""verl's names of a mean score in versions to 0.2, and where a reward function returns no acc besides its score."""
TRAINED = ("reward", "loss", "timing/rollout")
"""What a step of verl logs when it trained: step 0 may be a validation alone."""


KNOWN = {name for ours, verls in NAMES.items() for name in (ours, *verls)}


class TrainerState(TypedDict):
    """What is read of trainer_state.json."""

    log_history: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """The metrics that one training logged, under our names."""

    source: Path
    """What was read."""
    format: str
    """A key of READERS."""
    metrics: dict[str, dict[int, float]]
    """Value by step, steps ascending from 1; NaN where NaN, infinity or null was logged. A step is an optimizer step,
    verl's a rollout with all the updates that are made from it."""
    updates: int | None
    """Steps of `metrics` from one rollout to the next: 1 for verl; None where the file does not tell."""
    scores: dict[str, dict[int, float]] = field(default_factory=dict)
    """Scores of validations by name (val-core/…), then by the step after which they were made; 0 is before the
    first."""


def read_curves(path: Path, flag: str) -> Curves:
    """The curves at `path`. A UserError that names `flag` where nothing there is a training's log."""
    if not path.exists():
        raise UserError(f"{flag} {path}: no such file or folder; write a run's folder, or the log of a training")
    if path.is_file() and not path.stat().st_size:
        raise UserError(f"{flag} {path}: the file is empty; write the log of a training")
    try:
        for reader in READERS.values():
            if (curves := reader(path)) is not None:
                if not curves.metrics:
                    raise UserError("it logs no metric that is known here, such as reward or critic/score/mean")
                return curves
    except UserError as error:
        raise UserError(f"{flag} {path}: {error}") from error
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise UserError(f"{flag} {path}: the package {package} reads this format; pip install {package}") from error
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}") from error
    if path.suffix == ".wandb" or any(path.glob("**/*.wandb")):
        raise UserError(f"{flag} {path}: W&B has no reader of its .wandb files; write the run's metrics.jsonl or"
                        " trainer_state.json, its TensorBoard files, or verl's console log")  # fmt: skip
    raise UserError(f"{flag} {path}: no log of a training that is known here; known: {', '.join(READERS)} logs")


def curves(path: Path, kind: str, rows: Iterable[tuple[int, Mapping[str, Any]]], updates: int | None = None) -> Curves:
    """Curves out of what a file says.

    Args:
        kind: key of READERS.
        rows: (step, {name: value}) in the order in which they were logged. What is logged for a step later counts: a
            resumed run repeats the steps after its checkpoint.
        updates: optimizer steps from one rollout to the next, where the settings tell.
    """
    logged: dict[str, dict[int, float]] = {}
    rows = list(rows)
    before = {score_name(name) for step, row in rows if step == 0 and not row.keys() & KNOWN for name in row}
    for step, row in rows:
        for name, value in row.items():
            known, unit = number(value), UNIT.fullmatch(name)
            value = math.nan if known is None else known * float(unit[2]) if unit else known
            logged.setdefault(score_name(unit[1] if unit else name.removeprefix("train/")), {})[step] = value
    verl = any(name.startswith(VERLS) for name in logged)
    names = {ours: next((n for n in (ours, *verls) if n in logged), None) for ours, verls in NAMES.items()}
    metrics = {ours: dict(sorted(logged[name].items())) for ours, name in names.items() if name}
    # Older versions of verl call their first step 0, newer ones have only the validation before training there.
    shift = int(verl and any(0 in metrics.get(name, {}) for name in TRAINED))
    metrics = {name: {s + shift: v for s, v in values.items() if s + shift > 0} for name, values in metrics.items()}
    metrics = {name: values for name, values in metrics.items() if values}
    scores = {
        name: {step + (0 if step == 0 and name in before else shift): value for step, value in sorted(values.items())}
        for name, values in sorted(logged.items())
        if name.startswith(SCORE)
    }
    updates = 1 if verl else updates or observed_updates(metrics)
    return Curves(source=path, format=kind, metrics=metrics, updates=updates, scores=scores)


def is_known(name: str) -> bool:
    return name in KNOWN or score_name(name).startswith(SCORE)


def score_name(name: str) -> str:
    """Our name of a validation's score, another name as it is."""
    if match := OLD_SCORE.fullmatch(name):
        return f"{SCORE}{match[1] or match[2]}/acc/{match[3] or 'mean@1'}"
    return name


def spacing(steps: Iterable[int]) -> int | None:
    """The commonest distance of consecutive steps; None for fewer than two."""
    known = list(steps)
    return statistics.mode(b - a for a, b in itertools.pairwise(known)) if len(known) > 1 else None


def observed_updates(metrics: Mapping[str, Mapping[int, float]]) -> int | None:
    """Optimizer steps per rollout, from the log itself: TRL logs the loss at every step and the reward only where it
    sampled, so that it shows where every step was logged."""
    return spacing(metrics.get("reward", ())) if spacing(metrics.get("loss", ())) == 1 else None


def configured_updates(settings: Training, processes: int | None) -> int | None:
    """Optimizer steps per rollout, GRPOConfig's steps_per_generation * num_iterations / gradient_accumulation_steps
    with its defaults; 1 where a step holds several rollouts. None where the settings do not tell."""
    accumulation, whole = settings.get("gradient_accumulation_steps"), settings.get("generation_batch_size")
    rollout = settings.get("steps_per_generation")
    if accumulation and not rollout and whole:
        batch = settings.get("per_device_train_batch_size")
        if batch is None or processes is None:
            return None
        rollout = whole // (batch * processes)
    if not accumulation:
        return None
    return max((rollout or accumulation) * (settings.get("num_iterations") or 1) // accumulation, 1)


def read_perl(path: Path) -> Curves | None:
    """A run's folder, one that holds one (as the quickstart's does), or a metrics.jsonl."""
    if path.is_dir():
        runs = list(find(path, is_training_run))
        if len(runs) > 1:
            raise several(runs)
        if not runs:
            return None
        file = runs[0] / METRICS
    elif path.suffix == ".jsonl":
        file = path
    else:
        return None
    rows = read_metrics(file)
    if not rows:
        raise UserError(f"no step is logged in {file.name} yet; write a training that has logged one")
    return curves(path, "perl", rows, run_updates(file.parent))


def several(runs: Sequence[Path]) -> UserError:
    names = ", ".join(map(str, runs[:3])) + (", …" if len(runs) > 3 else "")
    return UserError(f"holds {len(runs)} runs: {names}; write one of them")


def run_updates(folder: Path) -> int | None:
    """Optimizer steps per rollout, as a run's config.yaml and environment.json tell; None without them."""
    if not (folder / CONFIG).is_file():
        return None
    config, made = read_settings(folder / CONFIG, Config), read_settings(folder / "environment.json", Environment)
    return configured_updates(config.get("training") or {}, made.get("num_processes"))


def read_tensorboard(path: Path) -> Curves | None:
    """A file of TensorBoard's, or a folder with those of one run."""
    pattern = "events.out.tfevents.*"
    files = [path] if path.match(pattern) else [f for inner in ("", "*/", "*/*/") for f in path.glob(inner + pattern)]
    if not files:
        return None
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sizes = {"scalars": 0, "tensors": 0, "images": 1, "audio": 1, "histograms": 1, "compressedHistograms": 1}
    runs = {}
    for source in [path] if path.is_file() else sorted({file.parent for file in files}):
        events = EventAccumulator(str(source), size_guidance=sizes).Reload()
        if events.Tags()["scalars"]:
            runs[source] = events
    if len(runs) > 1:
        raise several(list(runs))
    if not runs:
        raise UserError("no scalars are logged there")
    (events,) = runs.values()
    rows = ((event.step, {tag: event.value}) for tag in events.Tags()["scalars"] for event in events.Scalars(tag))
    updates = None
    if "args/text_summary" in events.Tags()["tensors"]:  # transformers' callback writes TrainingArguments there
        text = events.Tensors("args/text_summary")[-1].tensor_proto.string_val[0]
        try:
            updates = configured_updates(typed(json.loads(text), Training), None)
        except (ValueError, RecursionError) as error:
            raise UserError(f"its args/text_summary is not readable ({error})") from error
    return curves(path, "tensorboard", rows, updates)


def read_trl(path: Path) -> Curves | None:
    """trainer_state.json of transformers, its checkpoint, or a folder of checkpoints, of which the last counts."""
    file = path
    if path.is_dir():
        files = [path / TRAINER_STATE, *path.glob(f"checkpoint-*/{TRAINER_STATE}")]
        known = {step_of_checkpoint(f.parent): f for f in files if f.is_file()}
        if not known:
            return None
        file = known[max(known)]
    elif path.suffix != ".json":
        return None
    try:
        history = typed(json.loads(file.read_text(encoding="utf-8")), TrainerState)["log_history"]
        rows = [(typed(row, Logged)["step"], row) for row in history]
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file.name} is no trainer_state.json of transformers ({error})") from error
    if not rows:
        raise UserError("no step is logged in its log_history")
    return curves(path, "trl", rows, run_updates(file.parent.parent))


ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
RAY = re.compile(r"^[ \t]*\([\w.:]+ pid=\d+[^)\n]*\) ?", re.MULTILINE)
"""(TaskRunner pid=123) or (main_task pid=123, ip=10.0.0.1) before each line of a worker."""
BAR = re.compile(r"(?:[A-Z][\w ()]{0,100}:)?\s{0,100}\d{1,3}%\|[^|\n]{0,400}\|[^\n\[]{0,100}\[[^\]\n]{0,400}\]")
"""A bar of tqdm with its title: on stderr, and so often in front of a step's line. Bounded, so that the time to look
for one grows with the length of a line and not with its square."""
STEP = re.compile(r"(?<![\w/.-])step:(\d{1,15})(?=\s*-\s)|(?<=\d)step:(\d{1,15})(?=\s*-\s)")
"""The head of a step's line, also right after the last value of the step before, where the newline was lost."""
VALUE = re.compile(
    r"-\s+([^\s:]+):(?:np\.\w+\()?([-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|nan|inf))\)?(?=\s|step:|$)"
)


def read_verl(path: Path) -> Curves | None:
    """verl's console log (verl/utils/logger/aggregate_logger.py: `step:0 - name:value - …`), as it was redirected to a
    file. Colours, Ray's prefixes, bars of tqdm and other lines in between are passed over; a step's line may have been
    broken after any value."""
    # NUL further on: what a machine that went down leaves at the end of a file.
    if not path.is_file() or b"\0" in (content := path.read_bytes())[:1024]:
        return None
    text = ANSI.sub("", content.decode("utf-8", errors="replace")).replace("\r", "\n")
    text = BAR.sub(" ", RAY.sub("", text))
    heads = list(STEP.finditer(text))
    if not heads:
        return None
    ends = [head.start() for head in heads[1:]] + [len(text)]
    rows = [
        (int(head[1] or head[2]), {name: float(value) for name, value in VALUE.findall(text, head.end(), end)})
        for head, end in zip(heads, ends, strict=True)
    ]
    rows = last_attempt((step, row) for step, row in rows if any(map(is_known, row)))  # others only look like a step's
    if not rows:
        raise UserError("no step there logs a metric that is known here, such as critic/score/mean")
    return curves(path, "verl", rows)


def read_verl_file(path: Path) -> Curves | None:
    """What verl's logger `file` writes (FileLogger in verl/utils/tracking.py): {"step": 1, "data": {…}} a line."""
    if path.suffix != ".jsonl" or not path.is_file() or b'"data":' not in path.read_bytes():
        return None
    rows = [(step, row["data"]) for step, row in read_metrics(path) if isinstance(row.get("data"), dict)]
    return curves(path, "verl_file", rows) if rows else None


READERS: dict[str, Callable[[Path], Curves | None]] = {
    "verl_file": read_verl_file,
    "perl": read_perl,
    "tensorboard": read_tensorboard,
    "trl": read_trl,
    "verl": read_verl,
}
"""Asked in this order: the folder of a run of ours holds most of those below it too."""
