"""Does each algorithm learn? The quickstart's training with each of them, some seeds, scored before and after.

    python -m benchmarks.algorithms [--algorithms grpo,rloo] [--seeds 1,2,3] [--steps 60] [--keep FOLDER]
    python -m benchmarks.algorithms --draw

Each run adds a line of JSON to docs/results/algorithms.jsonl (--output): the algorithm, seed, flags, versions, the
mean reward of each step, and the accuracy on held-out problems at temperature 1 before and after. A run that stands
there is not repeated, so that the list can be worked off in parts. `--draw` writes the table of docs/algorithms.md and
docs/algorithms_zh.md, between their lines "algorithms:begin" and "algorithms:end", and assets/algorithms.svg of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

import perl
from perl.algorithms import ALGORITHMS
from perl.tools.quickstart.base import BASE_FOLDER, GREEDY, SAMPLED
from perl.tools.quickstart.run import HELD_OUT, RECIPE
from perl.tools.stages import ROOT, Evaluation, evaluate, train

RESULTS = ROOT / "docs" / "results" / "algorithms.jsonl"
PAGES = (ROOT / "docs" / "algorithms.md", ROOT / "docs" / "algorithms_zh.md")
CURVES = ROOT / "assets" / "algorithms.svg"
BEGIN, END = "<!-- algorithms:begin -->", "<!-- algorithms:end -->"
FLAGS = {
    "dapo": ["--config.reward.functions", '["accuracy"]'],
    "ppo": ["--config.training.num_generations", "1", "--config.critic.lr", "1e-3"],
}
"""Further flags of an algorithm: the quickstart's completions are too short for a punishment of long ones; PPO's
critic needs no group, and with 60 steps a larger learning rate than its default."""
WIDTH, HEIGHT, LEFT, COLUMNS = 200, 96, 28, 4
"""Of a curve's panel, in pixels; the margin at its left; panels in a row."""


def run(name: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Train and score; `folder` gets the run."""
    console, started = Console(quiet=True), time.monotonic()
    how = Evaluation(model=BASE_FOLDER, held_out=HELD_OUT, sampled=SAMPLED, greedy=GREEDY, engine="hf", seed=seed)
    before = evaluate(how, folder / "before", console)
    flags = ["--config.common.seed", str(seed), "--config.algorithm.name", name, *FLAGS.get(name, [])]
    flags += ["--config.training.max_steps", str(steps)]
    adapter = train("perl.train", RECIPE, flags, folder / "train", console)
    after = evaluate(how, folder / "after", console, adapter)
    rows = [json.loads(line) for line in (folder / "train" / "metrics.jsonl").read_text().splitlines()]
    return {
        "algorithm": name,
        "seed": seed,
        "steps": steps,
        "before": before.sampled.value,
        "after": after.sampled.value,
        "greedy_before": before.greedy.value,
        "greedy_after": after.greedy.value,
        "reward": [round(row["rewards/accuracy/mean"], 4) for row in rows if "rewards/accuracy/mean" in row],
        "step_time": statistics.median(row["step_time"] for row in rows if "step_time" in row),
        "wall_s": round(time.monotonic() - started, 1),
        "flags": flags,
        "versions": {"perl": perl.__version__} | {name: version(name) for name in ("torch", "trl", "transformers")},
    }


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def table(results: Sequence[dict[str, Any]], heads: Sequence[str]) -> str:
    """Markdown: one row for each algorithm, points of accuracy of each seed."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in ALGORITHMS:
        runs = sorted((row for row in results if row["algorithm"] == name), key=lambda row: row["seed"])
        if runs:
            points = ", ".join(f"{100 * (row['after'] - row['before']):+.1f}" for row in runs)
            before, after = (statistics.mean(row[key] for row in runs) for key in ("before", "after"))
            seeds = ", ".join(str(row["seed"]) for row in runs)
            lines.append(f"| `{name}` | {100 * before:.1f} | {100 * after:.1f} | {points} | {seeds} |")
    return "\n".join(lines)


def curves(results: Sequence[dict[str, Any]]) -> str:
    """SVG: a panel for each algorithm with the mean reward of each step, a line for each seed, 0 to 1."""
    names = [name for name in ALGORITHMS if any(row["algorithm"] == name for row in results)]
    rows = -(-len(names) // COLUMNS)
    step_x, step_y = WIDTH + LEFT + 12, HEIGHT + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {COLUMNS * step_x} {rows * step_y}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{COLUMNS * step_x}" height="{rows * step_y}" fill="#ffffff"/>',
    ]
    for place, name in enumerate(names):
        x, y = LEFT + place % COLUMNS * step_x, 24 + place // COLUMNS * step_y
        parts += [
            f'<text x="{x}" y="{y - 8}" fill="#222222">{name}</text>',
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbbbbb"/>',
            f'<text x="{x - 5}" y="{y + 8}" text-anchor="end" fill="#666666">1</text>',
            f'<text x="{x - 5}" y="{y + HEIGHT}" text-anchor="end" fill="#666666">0</text>',
        ]
        for row in results:
            if row["algorithm"] == name:
                last = max(len(row["reward"]) - 1, 1)
                points = (f"{x + WIDTH * i / last:.1f},{y + HEIGHT * (1 - r):.1f}" for i, r in enumerate(row["reward"]))
                parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="#2a6fbb" stroke-width="1"/>')
    return "\n".join([*parts, "</svg>\n"])


HEADS = {
    "algorithms.md": ("algorithm", "before, %", "after, %", "points by seed", "seeds"),
    "algorithms_zh.md": ("算法", "训练前，%", "训练后，%", "各种子提高的点数", "种子"),
}


def draw(results: Sequence[dict[str, Any]]) -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        head, rest = text.split(BEGIN)
        _, tail = rest.split(END)
        page.write_text(f"{head}{BEGIN}\n{table(results, HEADS[page.name])}\n{END}{tail}", encoding="utf-8")
    CURVES.write_text(curves(results), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="names, separated by commas")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--keep", type=Path, default=None, help="folder for the runs; default: they are removed")
    parser.add_argument("--draw", action="store_true", help="only write the tables and the curves")
    args = parser.parse_args()
    if args.draw:
        draw(read(args.output))
        return
    names = args.algorithms.split(",")
    if unknown := sorted(set(names) - set(ALGORITHMS)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(ALGORITHMS)}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for seed in map(int, args.seeds.split(",")):
        for name in names:
            done = {(row["algorithm"], row["seed"], row["steps"]) for row in read(args.output)}
            if (name, seed, args.steps) in done:
                continue
            with tempfile.TemporaryDirectory() as removed:
                folder = (args.keep or Path(removed)) / f"{name}_{seed}"
                result = run(name, seed, args.steps, folder)
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(
                f"{name} seed {seed}: {result['before']:.3f} -> {result['after']:.3f}, {result['wall_s']} s", flush=True
            )


if __name__ == "__main__":
    main()
