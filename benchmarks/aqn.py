"""What does AQN do? The same training without noise and with each schedule, over several seeds.

    python -m benchmarks.aqn [--arms "none;linear, clean"] [--seeds 1,2,3,4,5,6,7,8] [--steps 60]
    python -m benchmarks.aqn --real outputs/real_1 [outputs/real_2 ...] [--arms ...]
    python -m benchmarks.aqn --draw

The first trains the quickstart. The second trains the second stage of `python -m perl real` once more for each arm,
from the adapter that SFT left in those folders, whose seeds it takes. Each run adds a line of JSON to --output
(docs/results/aqn.jsonl): model, arm, seed, flags, versions, reward, entropy and sigma of each step, and the scores on
held-out problems at temperature 1. A run that stands there is not repeated, so that the list can be worked off in
parts, by several commands at once too. Runs of another number of steps need a file of their own. `--draw` writes, of
each model in --output, the table in docs/aqn.md and the curves assets/aqn_MODEL_STEPS.svg.

The table gives means over seeds with Student's t intervals of 95 %, and for each arm the mean difference from `none`
at the same seed with the p-value of a paired t-test (two-sided, not corrected for the number of arms).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks._learning import is_there, learn, markdown, panels, rows_to_draw, write_between
from perl.base.errors import report_errors
from perl.base.files import add_row
from perl.scoring.statistics import seeds_reach, t_tails
from perl.tools import real
from perl.tools.quickstart import run as quickstart
from perl.tools.quickstart.base import BASE_FOLDER, GREEDY, SAMPLED
from perl.tools.stages import ROOT, Evaluation

RESULTS = ROOT / "docs" / "results" / "aqn.jsonl"
PAGE = ROOT / "docs" / "aqn.md"
LAST = 10
"""Steps at the end of a training whose entropy is averaged."""


SCHEDULES: dict[str, dict[str, object]] = {
    "linear": {},
    "exponential": {"schedule": "exponential", "warmup_stage": "true"},
    "relative": {"relative": "true"},
    "target_kl": {"schedule": "target_kl"},
}
ARMS: dict[str, dict[str, object]] = {
    "none": {"enabled": "false"},
    **{
        f"{name}, {old_logps}": {"enabled": "true", "num_stages": 10, "old_logps": old_logps, **settings}
        for old_logps in ("clean", "noisy")
        for name, settings in SCHEDULES.items()
    },
}
"""Schedule and old log-probabilities -> fields of noise_injection, but for sigma."""


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
    """The first one of the arms `relative`."""


def quickstart_start(seed: int) -> Start:
    flags = ("--config.common.seed", str(seed))
    how = Evaluation(
        model=BASE_FOLDER, held_out=quickstart.HELD_OUT, sampled=SAMPLED, greedy=GREEDY, engine="hf", seed=seed
    )
    return Start("quickstart", quickstart.RECIPE, flags, how, 0.05, 0.05)  # the guides'; these norm weights are 1


def real_start(folder: Path) -> Start:
    """From a folder of `perl real` whose SFT has finished. Noise begins at 2 % of its norm weights, whose RMS is 0.23:
    the guides' 0.05 silences the reward."""
    settings = real.read_run(folder, "sft", "--real")
    flags = real.grpo_flags(settings, folder)
    name = Path(settings.model).name
    return Start(name, real.GRPO_RECIPE, flags, real.evaluation(settings, folder), 0.005, 0.02)


def noise_flags(arm: str, start: Start) -> list[str]:
    settings = dict(ARMS[arm])
    if arm != "none":
        first = start.sigma_relative if "relative" in settings else start.sigma
        settings |= {"sigma_start": first, "sigma_end": first / 100}
    return [word for name, value in settings.items() for word in (f"--config.noise_injection.{name}", str(value))]


def run_all(starts: Sequence[Start], arms: Sequence[str], steps: int | None, output: Path) -> None:
    """Train each arm of each start that is not in `output` yet."""
    for start in starts:
        recipe = yaml.safe_load(start.recipe.read_text(encoding="utf-8"))
        max_steps = steps or recipe["training"]["max_steps"]
        for arm in arms:
            run = {"model": start.model, "arm": arm, "seed": start.how.seed}
            if is_there(output, run, max_steps):
                continue
            flags = [*start.flags, *noise_flags(arm, start), *validated(start.how)]
            flags += ["--config.training.max_steps", str(max_steps)]
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name) / "train"
                found = learn(start.recipe, flags, folder)
                scores = scores_of(folder)
            if not is_there(output, run, max_steps):  # a command beside this one may have been faster
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


# Drawing

COLUMNS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "accuracy": lambda row: 100 * row["accuracy"],
    "pass@8": lambda row: 100 * row["pass@8"],
    "reward": lambda row: statistics.mean(row["reward"]),
    "entropy": lambda row: statistics.mean(row["entropy"][-LAST:]),
}
DIGITS = {"accuracy": 1, "pass@8": 1, "reward": 3, "entropy": 3}
HEADS = ("arm, old_logps", "seeds", "at temperature 1, %", "pass@8, %", "mean reward over all steps",
         "entropy at the end", "points over none (p)", "mean reward over none (p)")  # fmt: skip


def paired_test(differences: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences and the p-value of the two-sided paired t-test: 1 where all are 0, NaN of one."""
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return mean, math.nan
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    if error == 0:
        return mean, 1.0 if mean == 0 else 0.0
    return mean, t_tails(mean / error, len(differences) - 1)


def table(results: Sequence[Mapping[str, Any]], heads: Sequence[str]) -> str:
    """Markdown: a row for each arm."""
    by_arm = {arm: {row["seed"]: row for row in results if row["arm"] == arm} for arm in ARMS}
    lines = []
    for arm, runs in by_arm.items():
        if not runs:
            continue
        cells = [arm, str(len(runs))]
        for name, value in COLUMNS.items():
            values = [value(row) for row in runs.values()]
            reach = f" ± {seeds_reach(values):.{DIGITS[name]}f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.{DIGITS[name]}f}{reach}")
        for name in ("accuracy", "reward"):
            value, none = COLUMNS[name], by_arm["none"]
            differences = [value(row) - value(none[seed]) for seed, row in runs.items() if seed in none]
            mean, p = paired_test(differences) if differences and arm != "none" else (math.nan, math.nan)
            shown = "" if math.isnan(p) else " (< 0.001)" if p < 0.001 else f" ({p:.3f})"
            cells.append("" if math.isnan(mean) else f"{mean:+.{DIGITS[name]}f}{shown}")
        lines.append(cells)
    return markdown(heads, lines)


def draw(results: Sequence[Mapping[str, Any]]) -> None:
    for model in sorted({row["model"] for row in results}):
        rows = [row for row in results if row["model"] == model]
        steps = len(rows[0]["reward"])
        write_between(PAGE, f"aqn-{model}-{steps}", table(rows, HEADS))
        curves = {arm: [row["reward"] for row in rows if row["arm"] == arm] for arm in ARMS}
        found = {arm: several for arm, several in curves.items() if several}
        (ROOT / "assets" / f"aqn_{model}_{steps}.svg").write_text(panels(found, mean=True), encoding="utf-8")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=";".join(ARMS), help="names, separated by semicolons")
    parser.add_argument("--seeds", default="1,2,3,4,5,6,7,8", help="of the quickstart")
    parser.add_argument("--real", type=Path, nargs="+", help="folders of `python -m perl real`")
    parser.add_argument("--steps", type=int, help="default: the recipe's")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--draw", action="store_true", help="only write the tables and the curves")
    return parser


@report_errors()
def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.draw:
        draw(rows_to_draw(args.output))
        return
    arms = args.arms.split(";")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arms: unknown: {'; '.join(unknown)}; known: {'; '.join(ARMS)}")
    if args.real:
        starts = [real_start(folder.absolute()) for folder in args.real]
    else:
        starts = [quickstart_start(seed) for seed in map(int, args.seeds.split(","))]
    run_all(starts, arms, args.steps, args.output)


if __name__ == "__main__":
    main()
