"""A course of two trainings, scored after each, of the commands `real` and `retool`:

    fetch  ->  score the base  ->  perl.sft  ->  score  ->  perl.train (GRPO, the same adapter further)  ->  score
    ->  table, the path of the run page, JSON as the last line

A stage that has finished is not repeated and an interrupted one goes on: run the same command again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perl import device
from perl.base.errors import UserError, lookup, stopped_by_signals
from perl.base.files import add_row, read_json, read_rows, write_json
from perl.base.paths import user_path
from perl.models.folders import resolve_model
from perl.records import Sampling
from perl.tools import stages
from perl.tools.fetch import MODELS, RECORD
from perl.tools.stages import (
    AGAIN,
    LOCK,
    STAGE_LOCK,
    Engine,
    Evaluation,
    Scores,
    StageError,
    Where,
    alone,
    evaluate,
    read_scores,
    report,
    say,
    train,
)

MODEL = "smollm2"
SAMPLES = 8
"""Completions of each problem at temperature 1."""
SETTINGS, STAGES = "real.json", "stages.jsonl"
"""In the folder: what run it is, and which of its stages have ended."""
TRAININGS = {"sft": "perl.sft", "grpo": "perl.train"}
LOCKS = {LOCK, STAGE_LOCK}
MEASURED = {"dtype"}
"""Settings that make no other run."""
TOKENS, GAIN = 256, 1.25
"""Rows of the product that is measured, and how much faster bfloat16 has to be: autocast casts weights too."""
MOST_PROCESSES = 4
"""Of an evaluation: each has the model in its memory, 0.6 GB in float32 and as much for oneDNN's copy."""
MOST_ROWS = 100_000
"""That a script makes: with so many held-out ones a score's interval is 0.3 points wide at most to each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What every run of a course is: another one needs another folder."""

    seed: int
    model: str
    """A key of MODELS, or the absolute path of another model's folder."""
    data: str
    """SHA-256 over the rows for each training and for scoring."""
    sft_rows: int
    sft_steps: int | None
    grpo_steps: int | None
    held_out: int | None
    dtype: Literal["bfloat16", "float32"] | None = None
    """What a CPU trains in, measured before the first training. None: not yet, or the device decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a command takes its course with."""

    settings: Run
    rows: Mapping[str, Sequence[str]]
    """Lines of JSON, by the stem of their file: "sft" and "grpo" are trained on, "test" is scored."""
    recipes: Mapping[str, Path]
    """Of each of TRAININGS."""
    title: str
    """Of the table."""
    max_new_tokens: int
    """Of a completion that is scored."""
    engine: Engine = "hf"
    """What scores."""
    base: str = "after_base"
    """Folder of the base's scores, in the run's."""
    more: tuple[str, ...] = ()
    """Of `rows`, those that may be there besides; they are scored greedily alone."""
    train_flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further flags of TRAININGS."""
    eval_flags: tuple[str, ...] = ()
    prepare: Callable[[Path], None] | None = None
    """Is given the run's folder once the model is there."""
    note: str = ""
    """A line on the screen, before the first stage."""
    result: Mapping[str, Any] = field(default_factory=dict)
    """What the JSON line says besides."""


def require_few(args: argparse.Namespace, *names: str) -> None:
    """Raise a UserError where a flag asks for more rows of a script than a run can use: they are made one by one, and
    held in memory, before anything is written."""
    for name in names:
        if (count := getattr(args, name)) > MOST_ROWS:
            raise UserError(f"--{name} {count}: a script makes these rows, {MOST_ROWS} at most; write less")


def run(course: Course, output_dir: str) -> int:
    """Take the course in a folder, or what of it is left; the command's exit code."""
    folder = user_path(output_dir).absolute()
    is_of_this_run(folder, course.settings)
    console = Console()
    say(console, f"everything goes to {folder}")
    try:
        with stopped_by_signals(AGAIN), alone(folder, "--output_dir", console) as kept_open:
            open_folder(folder, course.settings)
            if course.note:
                say(console, course.note)
            write_data(folder / "data", course.rows)
            result = take(course, folder, console, Where(kept_open=(kept_open,)))
    except StageError as error:
        print(f"error: {error}; the same command goes on from there", file=sys.stderr)
        return 1
    write_json(folder / "result.json", result)
    print(json.dumps(result))
    return 0


def take(course: Course, folder: Path, console: Console, where: Where) -> dict[str, Any]:
    """Run what is left of the stages and show the table; returns what the JSON line holds."""
    get_model(course.settings.model, folder, console, where)
    if course.prepare is not None:
        course.prepare(folder)
    settings = with_dtype(course.settings, folder, console)
    how = evaluation(course, folder)
    each = threads(where, cores() // (how.dp_size + 1))  # the greedy process runs next to those of the sampled part
    places = {"base": folder / course.base, **{name: folder / f"after_{name}" for name in TRAININGS}}

    def score(name: str, adapter: Path | None = None) -> None:
        once(folder, f"score {name}", console, lambda: evaluate(how, places[name], console, adapter, where=each))

    score("base")
    for name, module in TRAININGS.items():
        number = settings.sft_steps if name == "sft" else settings.grpo_steps
        flags = [*flags_of(settings, folder, name), *steps(number), *course.train_flags.get(name, ())]
        training = partial(train_on, module, course.recipes[name], flags, folder / name, console, where)
        once(folder, name, console, training)
        score(name, folder / name / "adapter")

    page = report([folder / "grpo", *places.values()], folder / "report.html")
    scores = {name: read_scores(how, place) for name, place in places.items()}
    console.print(table(course.title, scores))
    say(console, f"report: {page}")
    return {**result_of(scores, settings, folder), **course.result}


def result_of(scores: dict[str, Scores], settings: Run, folder: Path) -> dict[str, Any]:
    """What the JSON line of a run says."""
    numbers = {
        name: {f"avg@{SAMPLES}": round(s.sampled.value, 4), "greedy": round(s.greedy.value, 4)}
        | {f"{other}_greedy": round(score.value, 4) for other, score in s.more.items()}
        for name, s in scores.items()
    }
    return {**numbers, "wall_s": round(sum(row["seconds"] for row in read_stages(folder)), 1), "seed": settings.seed}


def once(folder: Path, name: str, console: Console, stage: Callable[[], object]) -> None:
    """Do a stage unless it has finished before. The time that it takes is noted, that of a failed attempt too."""
    if any(row["stage"] == name and row["finished"] for row in read_stages(folder)):
        console.print(f"{name}: finished before")
        return
    console.print(f"{name} ...")
    started, finished = time.monotonic(), False
    try:
        stage()
        finished = True
    finally:
        row = {"stage": name, "seconds": round(time.monotonic() - started, 1), "finished": finished}
        add_row(folder / STAGES, row)


class Stage(TypedDict):
    """What `once` notes."""

    stage: str
    seconds: float
    finished: bool


def read_stages(folder: Path) -> list[Stage]:
    """What `once` noted."""
    return read_rows(folder / STAGES, Stage)


def base_of(model: str) -> str:
    """What `--model` names: a key of MODELS, or the absolute path of a folder, whatever it is called from."""
    if model in MODELS:
        return model
    if not user_path(model).is_dir():
        lookup(MODELS, model, "model", "--model")
    return str(resolve_model(model).absolute())


def model_folder(settings: Run, folder: Path) -> Path:
    """Where the base is: the user's own, or what is fetched into the run's folder."""
    return folder / "model" if settings.model in MODELS else Path(settings.model)


def get_model(model: str, folder: Path, console: Console, where: Where) -> None:
    """Fetch the base into the run's folder, unless it is a folder of the user's own."""
    if model not in MODELS:
        return
    target = folder / "model"

    def fetch() -> None:
        if (target / RECORD).is_file():  # written whole, but ended before it was noted
            return
        command = [sys.executable, "-m", "perl", "fetch", model, "--output", str(target)]
        stages.run(command, folder / "fetch.log", "fetch", where)

    once(folder, "fetch", console, fetch)


def evaluation(course: Course, folder: Path) -> Evaluation:
    """How all stages of a run are scored."""
    return Evaluation(
        model=model_folder(course.settings, folder),
        held_out=folder / "data" / "test.jsonl",
        sampled=Sampling(n=SAMPLES, temperature=1.0, max_new_tokens=course.max_new_tokens),
        greedy=Sampling(n=1, temperature=0.0, max_new_tokens=course.max_new_tokens),
        engine=course.engine,
        seed=course.settings.seed,
        more=tuple(file for name in course.more if (file := folder / "data" / f"{name}.jsonl").is_file()),
        dp_size=min(device.detect().count, MOST_PROCESSES),
        flags=course.eval_flags,
    )


def flags_of(settings: Run, folder: Path, name: str) -> list[str]:
    """Flags of one of TRAININGS, but for its number of steps."""
    flags = {
        "common.seed": str(settings.seed),
        "model.model_name_or_path": str(model_folder(settings, folder)),
        **({"training.bf16": "true"} if settings.dtype == "bfloat16" else {}),
        "dataset.dataset_name_or_path": str(folder / "data" / f"{name}.jsonl"),
        **({"peft.adapter": str(folder / "sft" / "adapter")} if name == "grpo" else {}),
    }
    return [word for flag, value in flags.items() for word in (f"--config.{flag}", value)]


def steps(number: int | None) -> list[str]:
    return [] if number is None else ["--config.training.max_steps", str(number)]


def train_on(module: str, recipe: Path, flags: list[str], folder: Path, console: Console, where: Where) -> Path:
    """Train from the start, or from the last checkpoint of an attempt that was interrupted. A thread for each core,
    unless the user has set another number: nothing else runs at that time."""
    where = where if os.environ.get("OMP_NUM_THREADS") else threads(where, cores())
    flags = [*flags, "--config.training.resume_from_checkpoint", "auto"]
    return train(module, recipe, flags, folder, console, where)


def threads(where: Where, number: int) -> Where:
    """`where` with so many threads, at least one, for each process of a stage."""
    return replace(where, variables={**where.variables, "OMP_NUM_THREADS": str(max(1, number))})


def cores() -> int:
    return len(os.sched_getaffinity(0))


def with_dtype(settings: Run, folder: Path, console: Console) -> Run:
    """`settings` with what a CPU trains in: float32, or bfloat16 where it multiplies that GAIN times as fast. A run
    that goes on keeps what it began with."""
    if device.detect().kind != "cpu":
        return settings
    if dtype := read_json(folder / SETTINGS, kind=Began).get("dtype"):
        return replace(settings, dtype=dtype)
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(model_folder(settings, folder)).get_text_config()
    size = (TOKENS, config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    times = device.time_products(*size)
    chosen = "bfloat16" if GAIN * times["bfloat16"] <= times["float32"] else "float32"
    measured = " and ".join(f"{each:.2f} ms in {name}" for name, each in times.items())
    say(console, f"trains in {chosen}: a product of {' x '.join(map(str, size))} takes {measured}")
    settings = replace(settings, dtype=chosen)
    write_json(folder / SETTINGS, asdict(settings))
    return settings


class Began(TypedDict, total=False):
    """What is read of SETTINGS."""

    dtype: Literal["bfloat16", "float32"] | None


def hash_of(rows: Mapping[str, Sequence[str]]) -> str:
    return hashlib.sha256("\n\n".join("\n".join(part) for part in rows.values()).encode()).hexdigest()


def write_data(folder: Path, rows: Mapping[str, Sequence[str]]) -> None:
    """A file for each."""
    folder.mkdir(exist_ok=True)
    for name, part in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in part), encoding="utf-8")


def is_of_this_run(folder: Path, settings: Run) -> bool:
    """Whether the folder holds this very run; False where it is new. A UserError where it holds another one, or
    something else."""
    if (folder / SETTINGS).is_file():
        there = read_json(folder / SETTINGS, "--output_dir", "write another folder")
        wanted = [(name, value) for name, value in asdict(settings).items() if name not in MEASURED]
        if other := [f"{name} {there.get(name)}, not {value}" for name, value in wanted if there.get(name) != value]:
            raise UserError(f"--output_dir {folder}: holds a run with {'; '.join(other)}; write another folder")
        return True
    if folder.is_file() or (folder.is_dir() and {file.name for file in folder.iterdir()} - LOCKS):
        raise UserError(f"--output_dir {folder}: holds something else; write a new folder")
    return False


def open_folder(folder: Path, settings: Run) -> None:
    """Have the folder say what run it holds. It is this command's alone now: another may have begun in it before."""
    if not is_of_this_run(folder, settings):
        write_json(folder / SETTINGS, asdict(settings))


def table(title: str, scores: dict[str, Scores]) -> Table:
    shown = Table(title=escape(f"{title} in %  [95 % confidence interval]"))
    more = list(scores["base"].more)
    for heading in ("", f"avg@{SAMPLES}, temperature 1", "greedy", *(f"{name}, greedy" for name in more)):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, score in scores.items():
        shown.add_row(name, *(escape(str(each)) for each in (score.sampled, score.greedy, *score.more.values())))
    return shown
