"""Does each algorithm learn? The quickstart's training with each of them, some seeds, scored before and after.

    python -m benchmarks.algorithms [--algorithms grpo,rloo] [--seeds 1,2,3] [--steps 60] [--keep FOLDER]
    python -m benchmarks.algorithms --draw

Each run adds a line of JSON to docs/results/algorithms.jsonl (--output): the algorithm, seed, flags, versions, the
mean reward of each step, and the accuracy on held-out problems at temperature 1 before and after. A run that stands
there is not repeated, so that the list can be worked off in parts. `--draw` writes the table of docs/algorithms.md,
between its lines "algorithms:begin" and "algorithms:end", and assets/algorithms.svg of it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks._learning import is_there, learn, markdown, panels, rows_to_draw, write_between
from perl.algorithms import ALGORITHMS
from perl.base.errors import report_errors
from perl.base.files import add_row
from perl.tools.quickstart import BASE_FOLDER, GREEDY, HELD_OUT, RECIPE, SAMPLED
from perl.tools.stages import ROOT, Evaluation, evaluate

RESULTS = ROOT / "docs" / "results" / "algorithms.jsonl"
PAGE = ROOT / "docs" / "algorithms.md"
CURVES = ROOT / "assets" / "algorithms.svg"
FLAGS = {
    "dapo": ["--config.reward.functions", '["accuracy"]'],
    "ppo": ["--config.training.num_generations", "1", "--config.critic.lr", "1e-3"],
}
"""Further flags of an algorithm: the quickstart's completions are too short for a punishment of long ones; PPO's
critic needs no group, and with 60 steps a larger learning rate than its default."""


def run(name: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Score, train, and score again; `folder` gets the run."""
    console, started = Console(quiet=True), time.monotonic()
    how = Evaluation(model=BASE_FOLDER, held_out=HELD_OUT, sampled=SAMPLED, greedy=GREEDY, engine="hf", seed=seed)
    before = evaluate(how, folder / "before", console)
    flags = ["--config.common.seed", str(seed), "--config.algorithm.name", name, *FLAGS.get(name, [])]
    found = learn(RECIPE, [*flags, "--config.training.max_steps", str(steps)], folder / "train")
    after = evaluate(how, folder / "after", console, folder / "train" / "adapter")
    scores = {"before": before.sampled.value, "after": after.sampled.value}
    scores |= {"greedy_before": before.greedy.value, "greedy_after": after.greedy.value}
    seconds = {"wall_s": round(time.monotonic() - started, 1)}
    return {"algorithm": name, "seed": seed, "steps": steps, **scores, **found, **seconds}


def table(results: Sequence[dict[str, Any]], heads: Sequence[str]) -> str:
    """Markdown: one row for each algorithm, points of accuracy of each seed."""
    lines = []
    for name in ALGORITHMS:
        runs = sorted((row for row in results if row["algorithm"] == name), key=lambda row: row["seed"])
        if runs:
            points = ", ".join(f"{100 * (row['after'] - row['before']):+.1f}" for row in runs)
            before, after = (statistics.mean(row[key] for row in runs) for key in ("before", "after"))
            seeds = ", ".join(str(row["seed"]) for row in runs)
            lines.append([f"`{name}`", f"{100 * before:.1f}", f"{100 * after:.1f}", points, seeds])
    return markdown(heads, lines)


HEADS = ("algorithm", "before, %", "after, %", "points by seed", "seeds")


def draw(results: Sequence[dict[str, Any]]) -> None:
    write_between(PAGE, "algorithms", table(results, HEADS))
    curves = {name: [row["reward"] for row in results if row["algorithm"] == name] for name in ALGORITHMS}
    CURVES.write_text(panels({name: several for name, several in curves.items() if several}), encoding="utf-8")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="names, separated by commas")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--keep", type=Path, default=None, help="folder for the runs; default: they are removed")
    parser.add_argument("--draw", action="store_true", help="only write the tables and the curves")
    return parser


@report_errors()
def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.draw:
        draw(rows_to_draw(args.output))
        return
    names = args.algorithms.split(",")
    if unknown := sorted(set(names) - set(ALGORITHMS)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(ALGORITHMS)}")
    for seed in map(int, args.seeds.split(",")):
        for name in names:
            if is_there(args.output, {"algorithm": name, "seed": seed}, args.steps):
                continue
            with tempfile.TemporaryDirectory() as removed:
                folder = (args.keep or Path(removed)) / f"{name}_{seed}"
                result = run(name, seed, args.steps, folder)
            add_row(args.output, result)
            print(
                f"{name} seed {seed}: {result['before']:.3f} -> {result['after']:.3f}, {result['wall_s']} s", flush=True
            )


if __name__ == "__main__":
    main()
