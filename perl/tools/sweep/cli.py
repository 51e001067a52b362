"""The command: check everything, do what is left, show the comparison."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perl import device
from perl.base.errors import UserError, stopped_by_signals
from perl.base.files import read_json, write_json
from perl.base.paths import user_path
from perl.base.redact import redact
from perl.config.evaluation import EvalConfig, environment_flags
from perl.config.evaluation import parse as parse_evaluation
from perl.config.files import look_for
from perl.config.load import Config
from perl.config.parser import Parser
from perl.config.schema import data_sets
from perl.config.sft import SFTRunConfig
from perl.config.types import PositiveInt
from perl.reports.methods import COMPARISON, PAGE, SAMPLED, SETTINGS, Comparison, Place, Run, as_json, compare
from perl.reports.methods_page import write_comparison
from perl.scoring.problem_sets import named
from perl.scoring.statistics import Change, Estimate
from perl.tasks import TASKS, data_name, load_problems, training_split
from perl.tasks.files import NoSplitError, find_files
from perl.tools.launch import accelerate_config
from perl.tools.recipe_flags import add_recipe_flags, given_flags, program_of
from perl.tools.stages import AGAIN, LOCK, STAGE_LOCK, StageError, alone, say
from perl.tools.sweep.grid import Grid, check, make_grid, slug
from perl.tools.sweep.work import Workshop, surroundings, work

SET_EVAL_FLAGS = ("model", "adapter", "dataset", "result_dir", "n", "temperature", "compare", "rescore")

ANY_ADAPTER = ("--model", "base", "--adapter", "any")
"""What the sweep sets itself, in a check of the other flags."""


def add_arguments(parser: Parser) -> None:
    add_recipe_flags(parser, "every --config.… flag overrides it, for all runs")
    parser.add_argument(
        "--vary",
        action="append",
        default=None,
        metavar="FIELD=VALUE,…",
        help="what to compare, e.g. peft.type=lora,dora; again for a further field: every combination is trained. The"
        " first values are what the others are compared with",
    )
    parser.add_argument(
        "--seeds",
        type=PositiveInt,
        default=1,
        help="trainings of each combination: with the recipe's common.seed, and those after it",
    )
    parser.add_argument(
        "--evaluate",
        nargs="+",
        default=None,
        metavar="DATASET",
        help="what each is scored on, as perl/eval.py's --dataset; default: the recipe's validation.datasets, else what"
        " belongs to its training data: a task's test split, or test.jsonl in the folder of train.jsonl",
    )
    parser.add_argument("--n", type=PositiveInt, default=8, help="completions of each problem at temperature 1")
    parser.add_argument(
        "--eval_flags", default="", help='further flags of perl/eval.py, as one word: "--use_vllm --dp_size 4"'
    )
    parser.add_argument("--output", default=None, help="folder for everything; default: outputs/sweep_<recipe>")
    parser.add_argument("--dry_run", action="store_true", help="check everything, print the runs with their flags, end")
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line, and nothing else")


class Evaluation(TypedDict):
    flags: list[str]
    n: int


class Settings(TypedDict):
    """settings.json."""

    vary: list[str]
    evaluation: Evaluation
    config: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A command that has been checked."""

    grid: Grid
    runs: Sequence[Run]
    output: Path
    datasets: Sequence[str]
    """Names of the folders of their results."""
    evaluator: Sequence[str]
    """Flags of perl/eval.py that all evaluations have."""
    n: int
    kind: device.Kind
    processes: int
    settings: Settings
    notes: Sequence[str]

    @property
    def bases(self) -> dict[str, Path]:
        """Folder of the scores of each base, by model."""
        return {run.model: self.output / "base" / slug(run.model) for run in self.runs}

    def compared(self) -> Comparison:
        """The comparison of what is finished so far, written to comparison.json too."""
        made = compare(self.runs, self.bases, self.datasets, self.grid.recipe, list(self.grid.vary), self.n)
        write_json(self.output / COMPARISON, as_json(made))
        return made


def run(args: Any) -> int:
    """Exit code 0; 1 where a run failed."""
    logging.getLogger("perl").setLevel(logging.WARNING)  # of the checks; a run's own lines go to its log
    sweep, console = read_command(args), Console(stderr=args.json)
    for line in sweep.notes:
        say(console, f"note: {line}")
    if args.dry_run:
        show_runs(sweep, args.json)
        return 0
    try:
        comparison = do(sweep, console)
    except StageError as error:
        print(f"error: {error}; {AGAIN}", file=sys.stderr)
        return 1
    failed = [one for one in sweep.runs if not one.state.finished]
    for dataset in sweep.datasets:
        console.print(table(comparison, dataset))
    for one in failed:
        say(console, f"failed: {one.name}: {one.state.error}")
    say(console, f"report: {sweep.output / PAGE}")
    if args.json:
        print(json.dumps(as_json(comparison), ensure_ascii=False))
    return 1 if failed else 0


def read_command(args: Any) -> Sweep:
    """Check the whole command, the cheap checks first; nothing is written. Raises UserError."""
    output = user_path(args.output or f"outputs/sweep_{Path(args.recipe).stem}").absolute()
    further = read_eval_flags(args.eval_flags)
    flags = given_flags(args)
    recipe, taken = look_for(args.recipe, "recipe")
    program, why = program_of(recipe, flags[::2], args.method)
    notes = [*taken, *why]
    grid = make_grid(program, recipe, flags, args.vary or [], int(args.seeds), output)
    devices = device.detect()
    checked = check(grid, devices)
    accelerate_config(devices.kind, checked.processes)
    datasets = scored_on(args.evaluate, checked.configs[0])
    evaluator = evaluator_flags(datasets, further, checked.configs)
    require_problems(parse_evaluation([*ANY_ADAPTER, *evaluator]))
    settings: Settings = {
        "vary": list(grid.vary),
        "evaluation": {"flags": evaluator, "n": int(args.n)},
        "config": {"program": program.name, **grid.settings},
    }
    check_output(output, settings)
    return Sweep(
        grid=grid,
        runs=checked.runs,
        output=output,
        datasets=list(datasets),
        evaluator=evaluator,
        n=int(args.n),
        kind=devices.kind,
        processes=checked.processes,
        settings=settings,
        notes=[*notes, *checked.warnings],
    )


def do(sweep: Sweep, console: Console) -> Comparison:
    """Everything that is left to do; returns what has come out of it, with the page written. Raises StageError."""
    with stopped_by_signals(AGAIN), alone(sweep.output, "--output", console) as kept_open:
        write_json(sweep.output / SETTINGS, sweep.settings)
        say(console, f"everything goes to {sweep.output}")
        shop = Workshop(
            program=sweep.grid.program.name,
            argv=sweep.grid.argv,
            processes=sweep.processes,
            kind=sweep.kind,
            evaluator=sweep.evaluator,
            n=sweep.n,
            where=surroundings(sweep.kind, sweep.processes, kept_open),
            console=console,
        )
        work(shop, sweep.runs, sweep.bases, sweep.compared)
        comparison = sweep.compared()
        write_comparison(comparison, sweep.output / PAGE)
    return comparison


# What is scored


def scored_on(given: Sequence[str] | None, config: Config | SFTRunConfig) -> dict[str, str]:
    """The datasets that the runs are scored on, by the names of their folders. A UserError where none is named and none
    belongs to the training data."""
    specs = [name.strip() for text in given or () for name in text.split(",") if name.strip()]
    if not (specs := specs or recipe_datasets(config)):
        raise UserError(
            "--evaluate: the recipe names no validation.datasets, and its training data has no test split of its own;"
            " name what to score on, such as gsm8k or data/test.jsonl"
        )
    return named(specs, "--evaluate", "score on one of them alone")


def require_problems(evaluation: EvalConfig) -> None:
    """Raise a UserError for a dataset that can't be read."""
    graded = evaluation.environment.factory is None  # one that gives no reward, the evaluator refuses
    for spec in evaluation.datasets:
        try:
            load_problems(spec, evaluation.split, evaluation.max_samples, evaluation.task, graded)
        except UserError as error:
            raise UserError(f"--evaluate {error}") from error


def recipe_datasets(config: Config | SFTRunConfig) -> list[str]:
    """validation.datasets, else what belongs to the training data: nothing that is trained on."""
    if isinstance(config, Config) and config.validation.datasets:
        return list(config.validation.datasets)
    return beside(config)


def beside(config: Config | SFTRunConfig) -> list[str]:
    """What belongs to the training data."""
    return [dataset for name in data_sets(config.dataset.dataset_name_or_path) if (dataset := held_out(name))]


def held_out(dataset: str) -> str | None:
    """The test split of a task whose training split is another one, or test.jsonl next to train.jsonl."""
    path, name = user_path(dataset), data_name(dataset)
    if name in TASKS:
        hub = TASKS[name].hub
        return name if hub and hub.train_split and hub.train_split != hub.eval_split else None
    if os.path.isfile(path) and (test := path.with_name(f"test{path.suffix}")).is_file() and test != path:
        return str(test)
    if os.path.isdir(path) and training_split(dataset) == "train":
        with contextlib.suppress(NoSplitError):
            find_files(path, "test")
            return dataset
    return None


def evaluator_flags(
    datasets: Mapping[str, str], further: Sequence[str], configs: Sequence[Config | SFTRunConfig]
) -> list[str]:
    """Flags of perl/eval.py that all evaluations have: the same seed, so that equal models have equal scores, and,
    where `further` does not say otherwise, completions as long as in training and the prompts that are trained.

    Raises:
        UserError: the trainings' prompts differ.
    """
    lengths = [config.training.max_completion_length for config in configs if isinstance(config, Config)]
    longest = max((length for length in lengths if length), default=None)
    flags = ["--dataset", ",".join(datasets.values()), "--seed", "0"]
    length = {"max_new_tokens": ["--max_new_tokens", str(longest)] if longest else []}
    own = {*datasets.values()} <= {*beside(configs[0])}
    trained = [length | asked(config, own) for config in configs]
    for name, words in trained[0].items():
        flag = f"--{name.rpartition('.')[2]}"
        if any(word.startswith(flag) for word in further):
            continue
        if any(each[name] != words for each in trained):
            raise UserError(
                f"--vary: the runs differ in {name}, and all are scored alike; write how in --eval_flags ({flag} …)"
            )
        flags += words
    return [*flags, *further]


def asked(config: Config | SFTRunConfig, own: bool) -> dict[str, list[str]]:
    """Field of a training, or group, that makes its prompts -> the evaluator's flags that make the same ones.

    Args:
        own: it is scored on what belongs to its data, and so is of the same task.
    """
    data, given = config.dataset, getattr(config.training, "chat_template_kwargs", None)
    return {
        "dataset.system_prompt": [] if data.system_prompt is None else [f"--system_prompt={data.system_prompt}"],
        "training.chat_template_kwargs": ["--chat_template_kwargs", json.dumps(given)] if given else [],
        "dataset.task": ["--task", data.task] if own and data.task else [],
        "environment": environment_flags(asdict(config.environment)) if isinstance(config, Config) else [],
    }


def read_eval_flags(text: str) -> list[str]:
    """--eval_flags. A UserError for flags that perl/eval.py does not know, or that the sweep sets itself."""
    try:
        words = shlex.split(text)
        for name in SET_EVAL_FLAGS:
            if any(word.partition("=")[0] == f"--{name}" for word in words):
                raise UserError(f"--{name}: the sweep sets it; leave it out")
        parse_evaluation([*ANY_ADAPTER, "--dataset", "any", *words])
    except (UserError, ValueError) as error:
        raise UserError(f"--eval_flags {error}") from error
    return words


# The folder


def check_output(folder: Path, settings: Settings) -> None:
    """A folder holds one comparison: more values and more seeds may be added to it, all else has to stay.

    Raises:
        UserError: the folder holds something else.
    """
    if folder.is_file():
        raise UserError(f"--output {folder}: is a file; write a folder")
    if not (folder / SETTINGS).is_file():
        if folder.is_dir() and {entry.name for entry in folder.iterdir()} - {LOCK, STAGE_LOCK}:
            raise UserError(f"--output {folder}: holds something else; write a new folder")
        return
    hint = "delete it, or write another folder"
    stored, wanted = flat(read_json(folder / SETTINGS, "--output", hint, Settings)), flat(settings)
    other = [
        f"{name} {stored.get(name, 'left open')}, not {wanted.get(name, 'left open')}"
        for name in sorted({*stored, *wanted})
        if stored.get(name) != wanted.get(name)
    ]
    if other:
        raise UserError(f"--output {folder}: holds a sweep with {'; '.join(other)}; write another folder")


def flat(settings: Settings) -> dict[str, Any]:
    evaluation, config = settings["evaluation"], settings["config"]
    return {
        "--vary": " and ".join(settings["vary"]) or "nothing",
        "--n": evaluation["n"],
        "evaluation": shlex.join(evaluation["flags"]),
        **config,
    }


# The screen


def show_runs(sweep: Sweep, as_line: bool) -> None:
    """The runs in the order in which they are worked off, with the flags of their trainings."""
    grid, ordered = sweep.grid, sorted(sweep.runs, key=lambda run: run.seed)
    if as_line:
        rows = [
            {"values": dict(r.values), "seed": r.seed, "finished": r.state.finished, "flags": redact(grid.argv(r))}
            for r in ordered
        ]
        print(json.dumps({"program": grid.program.name, "runs": rows, "evaluation": list(sweep.evaluator)}))
        return
    for number, each in enumerate(ordered, start=1):
        state = "  (finished before)" if each.state.finished else ""
        print(f"[{number}/{len(ordered)}] {each.name}{state}")
        print(f"      python -m {grid.program.name} {shlex.join(redact(grid.argv(each)))}")
    print(f"each is scored by perl/eval.py {shlex.join(sweep.evaluator)}; one run at a time")


def table(comparison: Comparison, dataset: str) -> Table:
    """A row a base, and a row a set of values, in percent."""
    shown = Table(title=escape(f"{dataset}: accuracy in %  [95 % interval]"))
    for name in comparison.fields or ["recipe"]:
        shown.add_column(name.rpartition(".")[2], overflow="fold")
    shown.add_column("seeds", justify="right")
    places = [place for place in comparison.places if place.dataset == dataset]
    for place in places:
        shown.add_column(comparison.title(place), justify="right", no_wrap=True)
    first = comparison.settings[0]
    if len(comparison.settings) > 1:
        shown.add_column(escape(f"change from {first.name}"), justify="right")
    blanks = [""] * (max(len(comparison.fields), 1) - 1)
    for model, scores in comparison.bases.items():
        name = "base" if len(comparison.bases) == 1 else f"base {Path(model).name}"
        shown.add_row(escape(name), *blanks, "", *[estimate(scores[place]) for place in places])
    for each in comparison.settings:
        seeds = (
            str(len(each.finished))
            if len(each.finished) == len(each.runs)
            else (f"{len(each.finished)}/{len(each.runs)}")
        )
        values = list(each.values.values()) or [each.name]
        scores = [estimate(each.scores.get(place)) for place in places]
        changed = each.changes.get(Place(dataset, SAMPLED))
        shown.add_row(*map(escape, values), seeds, *scores, *([difference(changed)] if each is not first else []))
    return shown


def estimate(score: Estimate | None) -> str:
    return escape(str(score)) if score else "–"


def difference(change: Change | None) -> str:
    if change is None:
        return "–"
    verdict = {"none": ""}.get(change.verdict, f" {change.verdict}")
    return escape(f"{100 * change.value:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]{verdict}")
