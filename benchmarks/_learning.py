"""Experiments that train the same thing in several ways: a run's row of results, the list of them, and how it is drawn.

train -> score -> one line of JSON in a results file (a run that stands there is not repeated)
results file -> a table between two marks of a page, and panels of reward curves
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml
from rich.console import Console

import perl
from perl.base.errors import UserError
from perl.base.files import add_row, read_rows
from perl.scoring.statistics import seeds_reach, t_tails
from perl.tools import course, quickstart, real
from perl.tools.stages import Evaluation, StageError, train

WIDTH, HEIGHT, LEFT, COLUMNS = 200, 96, 28, 4
"""Of a curve's panel, in pixels; the margin at its left; panels in a row."""
CURVE, MEAN = "#2a6fbb", "#c0392b"
LAST = 10
"""Steps at the end of a training whose entropy is averaged."""
SCHEDULES: dict[str, dict[str, object]] = {
    "linear": {},
    "exponential": {"schedule": "exponential", "warmup_stage": "true"},
    "relative": {"relative": "true"},
    "target_kl": {"schedule": "target_kl"},
}
"""Kinds of AQN -> fields of noise_injection."""


@dataclass(frozen=True, slots=True)
class Start:
    """What all arms of one seed start from."""

    model: str
    """Its name in the results."""
    recipe: Path
    flags: Sequence[str]
    how: Evaluation
    sigma: float
    """The first one; the last is a hundredth of it."""
    sigma_relative: float
    """The first one where noise is relative to the weights."""


def quickstart_start(seed: int) -> Start:
    flags = ("--config.common.seed", str(seed))
    how = quickstart_evaluation(seed)
    return Start("quickstart", quickstart.RECIPE, flags, how, 0.05, 0.05)  # the guides'; these norm weights are 1


def real_start(folder: Path) -> Start:
    """From a folder of `perl real` whose SFT has finished. Noise begins at 2 % of its norm weights, whose RMS is 0.23:
    the guides' 0.05 silences the reward."""
    settings = real.read_run(folder, "sft", "--real")
    flags = course.flags_of(settings, folder, "grpo")
    how = course.evaluation(real.course_of(settings, {}), folder)
    return Start(Path(settings.model).name, real.RECIPES["grpo"], flags, how, 0.005, 0.02)


def noise_settings(kind: str | None, start: Start, old_logps: str = "clean") -> dict[str, object]:
    """The settings of a kind of AQN in ten stages; None: without noise."""
    if kind is None:
        return {"noise_injection.enabled": "false"}
    first = start.sigma_relative if kind == "relative" else start.sigma
    settings = {"enabled": "true", "num_stages": 10, "old_logps": old_logps, **SCHEDULES[kind]}
    settings |= {"sigma_start": first, "sigma_end": first / 100}
    return {f"noise_injection.{name}": value for name, value in settings.items()}


def flags_of(settings: Mapping[str, object]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--config.{name}", str(value))]


class Arm(Protocol):
    """One of the ways in which an experiment trains."""

    @property
    def columns(self) -> Mapping[str, object]:
        """What its rows of results say of it besides its name."""
        ...

    def settings(self, start: Start) -> Mapping[str, object]:
        """What it changes of the recipe."""
        ...


AnyArm = TypeVar("AnyArm", bound=Arm)


def learn_all(
    starts: Sequence[Start],
    arms: Mapping[str, AnyArm],
    steps: int | None,
    output: Path,
    *,
    further: Callable[[Start, AnyArm, Path], Mapping[str, Any]] | None = None,
    stop: Path | None = None,
    runs: Path | None = None,
) -> None:
    """Train each arm of each start that is not in `output` yet.

    Args:
        steps: None: the recipe's.
        further: what else a row has, from the run's folder.
        stop: no other run begins once this file is there.
        runs: where runs lie and are gone on with after a kill; None: in folders of no duration.
    """
    for start in starts:
        recipe = yaml.safe_load(start.recipe.read_text(encoding="utf-8"))
        max_steps = steps or recipe["training"]["max_steps"]
        for name, arm in arms.items():
            run = {"model": start.model, "arm": name, "seed": start.how.seed, **arm.columns}
            if is_there(output, run, max_steps):
                continue
            if stop is not None and stop.exists():
                print(f"{stop} is there: no other run begins", flush=True)
                return
            flags = [*start.flags, *flags_of(arm.settings(start)), *validated(start.how)]
            flags += ["--config.training.max_steps", str(max_steps)]

            def also(folder: Path, start: Start = start, arm: AnyArm = arm) -> Mapping[str, Any]:
                return further(start, arm, folder) if further else {}

            learn_once(start.recipe, flags, run, max_steps, output, also, runs)


GOES_ON = flags_of(
    {
        "training.save_strategy": "steps",
        "training.save_steps": 10,
        "training.save_total_limit": 1,
        "training.resume_from_checkpoint": "auto",
    }
)


def learn(recipe: Path, flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train by perl.train into `folder`, on one thread unless OMP_NUM_THREADS says otherwise. Returns the mean of the
    reward `accuracy` and the noise of each step, entropy (over the completions whose advantage is not 0) and KL
    divergences of those that had them, and what the run took, of one that was gone on with from where it was; flags
    are given without paths."""
    started, used = time.monotonic(), cpu_s()
    try:
        train("perl.train", recipe, flags, folder, Console(quiet=True))
    except StageError as error:  # its log goes with the folder
        log = folder.with_suffix(".log").read_text(encoding="utf-8")
        raise StageError(f"{error}, which ended with:\n{log[-3000:]}") from None
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rewards/accuracy/mean" in row]

    def each(name: str, digits: int) -> list[float]:
        return [round(row[name], digits) for row in steps if name in row]

    return {
        "reward": each("rewards/accuracy/mean", 4),
        "entropy": each("entropy", 4),
        "sigma": each("aqn/sigma", 6),
        "logp_kl": each("rollout/logp_kl", 6),
        "noise_kl": each("aqn/kl", 6),
        "quantization_kl": each("rollout/quantization_kl", 6),
        "step_time": round(statistics.median(row["step_time"] for row in steps), 4),
        "train_s": round(time.monotonic() - started, 1),
        "cpu_s": round(cpu_s() - used, 1),
        "flags": [word for pair in zip(flags[::2], flags[1::2], strict=True) if "/" not in pair[1] for word in pair],
        "versions": {"perl": perl.__version__} | {name: version(name) for name in ("torch", "trl", "transformers")},
    }


def cpu_s() -> float:
    """Of all processes that this one has started and that have ended, and of those that they had started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def learn_once(
    recipe: Path,
    flags: Sequence[str],
    run: Mapping[str, Any],
    steps: int,
    output: Path,
    further: Callable[[Path], Mapping[str, Any]],
    runs: Path | None = None,
) -> None:
    """`learn` with flags that have `validated`, and add the row to `output`: `run`, which names it, its scores, and
    what `further` and `learn` have found.

    Args:
        runs: see `learn_all`.
    """
    with contextlib.ExitStack() as stack:
        if runs is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "train"
        else:
            folder = runs.absolute() / "-".join(re.sub(r"\W+", "_", str(value)) for value in run.values())
            folder.parent.mkdir(parents=True, exist_ok=True)
            flags = [*flags, *GOES_ON]
        found = learn(recipe, flags, folder)
        scores = {**scores_of(folder), **further(folder)}
        shutil.rmtree(folder)
    if not is_there(output, run, steps):  # a command beside this one may have been faster
        add_row(output, {**run, **scores, **found})
    print(f"{', '.join(map(str, run.values()))}: {scores}, {found['train_s']} s", flush=True)


def scores_of(folder: Path) -> dict[str, float]:
    """Accuracy at temperature 1 and pass@n that the validation after the last step has left in a run's folder."""
    (file,) = folder.glob("validation/step-*/*/summary.json")
    metrics = json.loads(file.read_text(encoding="utf-8"))["metrics"]
    return {name: metrics[name]["value"] for name in ("accuracy", "pass@8")}


def validated(how: Evaluation) -> list[str]:
    """Flags that score the adapter after the last step, in the training itself: what perl/eval.py would find."""
    settings = {
        "datasets": json.dumps([str(how.held_out)]),
        "n": how.sampled.n,
        "temperature": how.sampled.temperature,
        "max_new_tokens": how.sampled.max_new_tokens,
        "before_train": "false",
    }
    return [word for name, value in settings.items() for word in (f"--config.validation.{name}", str(value))]


def quickstart_evaluation(seed: int) -> Evaluation:
    return Evaluation(
        model=quickstart.BASE_FOLDER,
        held_out=quickstart.HELD_OUT,
        sampled=quickstart.SAMPLED,
        greedy=quickstart.GREEDY,
        engine="hf",
        seed=seed,
    )


def is_there(file: Path, run: Mapping[str, Any], steps: int) -> bool:
    """Whether the results file has a row with these values, so that the run need not be repeated.

    Raises:
        UserError: the file has runs of another number of steps, and a table would mix them.
    """
    rows = [row for row in read_rows(file) if row.get("model") == run.get("model")]
    if other := sorted({len(row["reward"]) for row in rows} - {steps}):
        raise UserError(f"--output {file}: holds runs of {other[0]} steps, not {steps}; write another file, or --steps")
    return any(all(row[name] == value for name, value in run.items()) for row in rows)


def rows_to_draw(file: Path) -> list[dict[str, Any]]:
    """Rows of a results file.

    Raises:
        UserError: there is no such file, and what is drawn of nothing would empty the tables.
    """
    if not file.is_file():
        raise UserError(f"--output {file}: not there; --draw needs rows to draw")
    return read_rows(file)


def write_between(page: Path, mark: str, text: str) -> None:
    """Put `text` between the lines <!-- mark:begin --> and <!-- mark:end --> of a page."""
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    text_before = page.read_text(encoding="utf-8")
    if text_before.count(begin) != 1 or text_before.count(end) != 1:
        raise UserError(f"{page}: it needs the lines {begin} and {end}, once each")
    head, rest = text_before.split(begin)
    _, tail = rest.split(end)
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")


Row = Mapping[str, Any]
MEASURES: dict[str, Callable[[Row], float]] = {
    "accuracy": lambda row: 100 * row["accuracy"],
    "pass@8": lambda row: 100 * row["pass@8"],
    "reward": lambda row: statistics.mean(row["reward"]),
    "entropy": lambda row: statistics.mean(row["entropy"][-LAST:]),
}
"""What is compared of a run."""
DIGITS = {"accuracy": 1, "pass@8": 1, "reward": 3, "entropy": 3}


def paired_test(differences: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences and the p-value of the two-sided paired t-test: 1 where all are 0, NaN of one."""
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return mean, math.nan
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    if error == 0:
        return mean, 1.0 if mean == 0 else 0.0
    return mean, t_tails(mean / error, len(differences) - 1)


def mean_of(rows: Sequence[Row], name: str) -> str:
    """Over seeds: "50.0 ± 1.2", with Student's t interval of 95 % where there are several."""
    values = [MEASURES[name](row) for row in rows]
    reach = f" ± {seeds_reach(values):.{DIGITS[name]}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{DIGITS[name]}f}{reach}"


def difference_of(rows: Sequence[Row], base: Sequence[Row], name: str) -> str:
    """What the rows have over those of `base` with the same seeds: "+3.0 (0.010)", the mean and `paired_test`'s p;
    nothing where no seed is in both."""
    value, others = MEASURES[name], {row["seed"]: row for row in base}
    differences = [value(row) - value(others[row["seed"]]) for row in rows if row["seed"] in others]
    if not differences:
        return ""
    mean, p = paired_test(differences)
    shown = "" if math.isnan(p) else " (< 0.001)" if p < 0.001 else f" ({p:.3f})"
    return f"{mean:+.{DIGITS[name]}f}{shown}"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def core_hours(rows: Sequence[Row]) -> str:
    return f"{len(rows)} runs, {sum(row['cpu_s'] for row in rows) / 3600:.1f} core-hours"


def parser_of(description: str | None, arms: Mapping[str, Arm], output: Path) -> argparse.ArgumentParser:
    """Of a command that trains `arms`, in their order."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=";".join(arms), help="names, separated by semicolons")
    parser.add_argument("--seeds", default="1,2,3,4,5,6,7,8", help="of the quickstart")
    parser.add_argument("--steps", type=int, help="default: the recipe's")
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument("--runs", type=Path, help="where runs lie until they have ended, to be gone on with")
    parser.add_argument("--draw", action="store_true", help="only write the tables and the curves")
    return parser


def chosen(parser: argparse.ArgumentParser, args: argparse.Namespace, arms: Mapping[str, AnyArm]) -> dict[str, AnyArm]:
    names = args.arms.split(";")
    if unknown := [name for name in names if name not in arms]:
        parser.error(f"--arms: unknown: {'; '.join(unknown)}; known: {'; '.join(arms)}")
    return {name: arms[name] for name in names}


def starts_of(args: argparse.Namespace) -> list[Start]:
    """The folders of --real where the command has it and they are named, else the quickstart with each of --seeds."""
    if folders := getattr(args, "real", None):
        return [real_start(folder.absolute()) for folder in folders]
    return [quickstart_start(int(seed)) for seed in args.seeds.split(",")]


def panels(curves: Mapping[str, Sequence[Sequence[float]]], *, mean: bool = False) -> str:
    """SVG: a panel for each name with its curves from 0 to 1 over the steps, and with `mean` their mean on top."""
    rows = -(-len(curves) // COLUMNS)
    step_x, step_y = WIDTH + LEFT + 12, HEIGHT + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {COLUMNS * step_x} {rows * step_y}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{COLUMNS * step_x}" height="{rows * step_y}" fill="#ffffff"/>',
    ]
    for place, (name, several) in enumerate(curves.items()):
        x, y = LEFT + place % COLUMNS * step_x, 24 + place // COLUMNS * step_y
        parts += [
            f'<text x="{x}" y="{y - 8}" fill="#222222">{name}</text>',
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbbbbb"/>',
            f'<text x="{x - 5}" y="{y + 8}" text-anchor="end" fill="#666666">1</text>',
            f'<text x="{x - 5}" y="{y + HEIGHT}" text-anchor="end" fill="#666666">0</text>',
        ]
        parts += [polyline(values, x, y, CURVE, 1) for values in several]
        if mean:
            parts.append(polyline([statistics.mean(step) for step in zip(*several, strict=True)], x, y, MEAN, 2))
    return "\n".join([*parts, "</svg>\n"])


def polyline(values: Sequence[float], x: float, y: float, colour: str, width: int) -> str:
    last = max(len(values) - 1, 1)
    points = " ".join(f"{x + WIDTH * i / last:.1f},{y + HEIGHT * (1 - value):.1f}" for i, value in enumerate(values))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
