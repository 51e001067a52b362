"""Experiments that train the same thing in several ways: a run's row of results, the list of them, and how it is drawn.

train -> score -> one line of JSON in a results file (a run that stands there is not repeated)
results file -> a table between two marks of a page, and panels of reward curves
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

import perl
from perl.base.errors import UserError
from perl.base.files import add_row, read_rows
from perl.scoring.statistics import seeds_reach, t_tails
from perl.tools.quickstart import run as quickstart
from perl.tools.quickstart.base import BASE_FOLDER, GREEDY, SAMPLED
from perl.tools.stages import Evaluation, StageError, train

WIDTH, HEIGHT, LEFT, COLUMNS = 200, 96, 28, 4
"""Of a curve's panel, in pixels; the margin at its left; panels in a row."""
CURVE, MEAN = "#2a6fbb", "#c0392b"
LAST = 10
"""Steps at the end of a training whose entropy is averaged."""


def learn(recipe: Path, flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train by perl.train into `folder`, on one thread unless OMP_NUM_THREADS says otherwise. Returns the mean of the
    reward `accuracy` and the noise of each step, the entropy of those that had an update (over the completions whose
    advantage is not 0), and what the run took; flags are given without paths."""
    started, used = time.monotonic(), cpu_s()
    try:
        train("perl.train", recipe, flags, folder, Console(quiet=True))
    except StageError as error:  # its log goes with the folder
        log = folder.with_suffix(".log").read_text(encoding="utf-8")
        raise StageError(f"{error}, which ended with:\n{log[-3000:]}") from None
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rewards/accuracy/mean" in row]
    return {
        "reward": [round(row["rewards/accuracy/mean"], 4) for row in steps],
        "entropy": [round(row["entropy"], 4) for row in steps if "entropy" in row],
        "sigma": [round(row["aqn/sigma"], 6) for row in steps if "aqn/sigma" in row],
        "logp_kl": [round(row["rollout/logp_kl"], 6) for row in steps if "rollout/logp_kl" in row],
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


def learn_once(recipe: Path, flags: Sequence[str], run: Mapping[str, Any], steps: int, output: Path) -> None:
    """`learn` with flags that have `validated`, and add the row to `output`: `run`, which names it, its scores, and
    what `learn` has found."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "train"
        found = learn(recipe, flags, folder)
        scores = scores_of(folder)
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
        model=BASE_FOLDER, held_out=quickstart.HELD_OUT, sampled=SAMPLED, greedy=GREEDY, engine="hf", seed=seed
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
