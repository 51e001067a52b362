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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks._learning import (
    MEASURES,
    Row,
    difference_of,
    is_there,
    learn_once,
    markdown,
    mean_of,
    panels,
    quickstart_evaluation,
    rows_to_draw,
    validated,
    write_between,
)
from perl.base.errors import report_errors
from perl.tools import real
from perl.tools.quickstart import run as quickstart
from perl.tools.stages import ROOT, Evaluation

RESULTS = ROOT / "docs" / "results" / "aqn.jsonl"
PAGE = ROOT / "docs" / "aqn.md"


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
    how = quickstart_evaluation(seed)
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
            learn_once(start.recipe, flags, run, max_steps, output)


# Drawing

HEADS = ("arm, old_logps", "seeds", "at temperature 1, %", "pass@8, %", "mean reward over all steps",
         "entropy at the end", "points over none (p)", "mean reward over none (p)")  # fmt: skip


def table(results: Sequence[Row], heads: Sequence[str]) -> str:
    """Markdown: a row for each arm."""
    by_arm = {arm: [row for row in results if row["arm"] == arm] for arm in ARMS}
    lines = []
    for arm, runs in by_arm.items():
        if runs:
            base = by_arm["none"] if arm != "none" else []
            cells = [arm, str(len(runs)), *(mean_of(runs, name) for name in MEASURES)]
            lines.append([*cells, *(difference_of(runs, base, name) for name in ("accuracy", "reward"))])
    return markdown(heads, lines)


def draw(results: Sequence[Row]) -> None:
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
