"""A long run: does it leak, slow down, or lose a step?

    python -m benchmarks.soak [--steps 2000] [--output docs/results/soak.json]

The quickstart's training with everything on that a run may have: validation, checkpoints of which the last three stay,
metrics.jsonl, and TensorBoard where it is installed. The memory of the run's processes (resident) is read as each step
is logged; `--output` is written every hundred steps and at the end.

What a step takes depends on its data (rows with zero advantage are left out of the update) and on what else the
machine does, so that a late step is not comparable to an early one. Whether a process gets slower with its age is
therefore measured apart: after the last of the `--steps`, the run is suspended, and a young process resumes a copy of
its folder. Both then make the same hundred steps, bit for bit, in turns of five: while one runs, the other is
suspended, so that each has the machine as the run had it.

The last line is JSON:

    rss_mb_per_100_steps   growth of memory after the first --warm_up steps, by the median of the slopes between any two
                           steps with as many processes; second_half_…: of the later half of them
    step_s_first, _last    median seconds of a step among the first and the last hundred after the warm-up, from one log
                           to the next; steps with a validation or a checkpoint are left out
    step_timed_s_first, _last    the same by `timing/step` (perl/runs/metrics.py), which counts no logging
    last_over_first        step_s_last over step_s_first
    old_over_young         `timing/step` of the old process over that of the young one, in the same step: the median,
                           without the first ten steps, the last one, and those in which a process was suspended; null
                           where --steps is no multiple of --every, and so leaves no checkpoint to resume
    old_over_young_quartiles  half of the steps lie between them
    compared_steps         how many steps these are
    lost, doubled          steps that metrics.jsonl does not hold, or holds twice
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import numpy as np
import psutil

from perl.base.provenance import versions
from perl.scoring.results import METRICS

ROOT = Path(__file__).resolve().parents[1]
EVERY = 100
"""Steps between two validations, two checkpoints, and two writings of the result; and that both processes make."""
COMPARED = 100
"""Steps whose median stands for the beginning, and for the end."""
SETTLING = 10
"""Steps of a young process that are not compared."""
TURN = 5
"""Steps that one process makes while the other is suspended."""
NO_WORK = ("time", "step_time", "timing/", "perf/")
"""How the names of a row's values begin that are of the machine, not of the work."""

Row = dict[str, Any]


class Step(NamedTuple):
    number: int
    logged_at: float
    """Unix time."""
    timed_s: float
    """timing/step."""
    rss_mb: float
    """Of the training process and its children, when its line was read."""
    processes: int
    """How many these were."""


def settings(folder: Path, steps: int, every: int) -> dict[str, Any]:
    return {
        "training.output_dir": folder,
        "training.resume_from_checkpoint": "auto",
        "training.max_steps": steps,
        "training.save_strategy": "steps",
        "training.save_steps": every,
        "training.save_total_limit": 3,
        "training.report_to": "tensorboard" if importlib.util.find_spec("tensorboard") else "none",
        "validation.datasets": json.dumps([str(ROOT / "assets" / "quickstart-data" / "test.jsonl")]),
        "validation.every_steps": every,
        "validation.max_samples": 64,
        "validation.save_best": "true",
    }


class Run:
    """A training in a process of its own, from `folder`'s last checkpoint on; a context manager that ends it."""

    def __init__(self, folder: Path, steps: int, every: int):
        self.folder = folder
        self.suspended_at: list[float] = []
        """Unix time."""
        words = [f"--config.{name}={value}" for name, value in settings(folder, steps, every).items()]
        recipe = str(ROOT / "recipes" / "quickstart.yaml")
        with folder.with_suffix(".log").open("wb") as log:
            self._process = psutil.Popen(
                [sys.executable, "-m", "perl.train", "--recipe", recipe, *words], cwd=ROOT, stdout=log, stderr=log
            )
        self._read = len((folder / METRICS).read_bytes()) if (folder / METRICS).exists() else 0

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._process.wait()

    def ended(self) -> bool:
        """Whether it has come to its end. Raises a RuntimeError where that is an error's."""
        code = self._process.poll()
        if code:
            raise RuntimeError(f"the training ended with {code}; see {self.folder.with_suffix('.log')}")
        return code is not None

    def new_rows(self) -> list[Row]:
        """The steps that it has logged since the last call."""
        metrics = self.folder / METRICS
        if not metrics.exists():
            return []
        with metrics.open("rb") as file:
            file.seek(self._read)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        return [row for row in map(json.loads, whole.splitlines()) if "loss" in row]

    def all_rows(self) -> list[Row]:
        rows = map(json.loads, (self.folder / METRICS).read_bytes().splitlines())
        return [row for row in rows if "loss" in row]

    def processes(self) -> list[psutil.Process]:
        """It, and all below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self._process, *self._process.children(recursive=True)]
        return []

    def rss_mb(self) -> tuple[float, int]:
        """Resident memory of all its processes, and how many they are; pages that they share count in each."""
        sizes: list[int] = []
        for each in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                sizes.append(each.memory_info().rss)
        return sum(sizes) / 1e6, len(sizes)

    def suspend(self) -> None:
        self.suspended_at.append(time.time())
        for each in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()

    def go_on(self) -> None:
        for each in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()


def followed(run: Run) -> Iterator[Step]:
    """The steps of a run, as they are logged."""
    while True:
        ended = run.ended()
        rss, processes = run.rss_mb()
        for row in run.new_rows():
            yield Step(row["step"], row["time"], row["timing/step"], rss, processes)
        if ended:
            return
        time.sleep(0.05)


# ----------------------------------------------------------------------------------------------- the old and the young


def old_and_young(old: Run, folder: Path, asked: int, every: int) -> dict[str, Any]:
    """Resume `old` in a young process in `folder`, and compare the steps behind `asked` that both make."""
    wait_until(lambda: (old.folder / f"checkpoint-{asked}").is_dir(), old)
    old.suspend()
    shutil.copytree(old.folder, folder)
    with Run(folder, asked + every, every) as young:
        wait_until(lambda: bool(young.new_rows()), young)
        young.suspend()
        in_turns(old, young)
        numbers = range(asked + 1, asked + every + 1)
        ratios = compare(made(old, numbers), made(young, numbers), old.suspended_at, young.suspended_at)
    quartiles = quantiles(ratios, n=4) if len(ratios) > 1 else None
    return {
        "old_over_young": round(median(ratios), 4) if ratios else None,
        "old_over_young_quartiles": quartiles and [round(quartiles[0], 4), round(quartiles[2], 4)],
        "compared_steps": len(ratios),
    }


def wait_until(condition: Callable[[], bool], run: Run) -> None:
    while not condition():
        if run.ended() and not condition():
            raise RuntimeError(f"the training ended early; see {run.folder.with_suffix('.log')}")
        time.sleep(0.02)


def in_turns(*runs: Run) -> None:
    """Have suspended runs go on to their end, TURN steps of one after TURN steps of the other."""
    while not all(run.ended() for run in runs):
        for run in runs:
            run.go_on()
            steps = 0
            while steps < TURN and not run.ended():
                steps += len(run.new_rows())
                time.sleep(0.005)
            run.suspend()


def made(run: Run, numbers: range) -> list[Row]:
    """The rows of these steps. Raises a RuntimeError where one is missing, or there twice."""
    rows = [row for row in run.all_rows() if row["step"] in numbers]
    if [row["step"] for row in rows] != list(numbers):
        raise RuntimeError(f"{run.folder / METRICS} does not hold the steps {numbers[0]} to {numbers[-1]} once each")
    return rows


def compare(
    old: Sequence[Row], young: Sequence[Row], old_suspended: Sequence[float], young_suspended: Sequence[float]
) -> list[float]:
    """`timing/step` of the old process over the young one's, of each step but the first SETTLING ones, the last one,
    which has a validation and a checkpoint, and those in which a process was suspended.

    Args:
        old, young: the rows of the same steps, in order.
        old_suspended, young_suspended: when the processes were suspended, in Unix time.

    Raises:
        RuntimeError: the two did not do the same work.
    """
    ratios = []
    for index, (one, other) in enumerate(zip(old, young, strict=True)):
        if name := other_work(one, other):
            raise RuntimeError(
                f"step {one['step']}: {name} is {one.get(name)} in the old process and {other.get(name)} in the young"
                " one; a resumed run must make the same steps"
            )
        if SETTLING <= index < len(old) - 1 and not (
            suspended_in(old, index, old_suspended) or suspended_in(young, index, young_suspended)
        ):
            ratios.append(one["timing/step"] / other["timing/step"])
    return ratios


def other_work(one: Row, other: Row) -> str | None:
    """The first value that differs, without seconds, rates and memory."""
    names = [name for name in (*one, *other) if not name.startswith(NO_WORK)]
    return next((name for name in names if one.get(name) != other.get(name)), None)


def suspended_in(rows: Sequence[Row], index: int, suspended: Sequence[float]) -> bool:
    return any(rows[index - 1]["time"] <= at <= rows[index]["time"] for at in suspended)


# ----------------------------------------------------------------------------------------------------------- the result


def growth(steps: Sequence[Step]) -> float | None:
    """MB a step that memory grows by: the median of the slopes between any two steps with as many processes (Theil and
    Sen's estimator), which neither a checkpoint's passing peaks move nor a process that starts. None of too few."""
    slopes = []
    for processes in {step.processes for step in steps}:
        number, rss = np.array([[s.number, s.rss_mb] for s in steps if s.processes == processes]).T
        first, second = np.triu_indices(len(number), 1)
        apart = number[second] != number[first]  # a step may be there twice
        slopes.append((rss[second] - rss[first])[apart] / (number[second] - number[first])[apart])
    found = np.concatenate(slopes) if slopes else np.array([])
    return float(np.median(found)) if len(found) else None


def result(steps: Sequence[Step], asked: int, warm_up: int, every: int = EVERY) -> dict[str, Any]:
    """What the steps so far show; null where there are too few."""
    counts = Counter(step.number for step in steps)
    kept = [step for step in steps if step.number > warm_up]
    seconds = {
        after.number: after.logged_at - before.logged_at
        for before, after in itertools.pairwise(steps)
        if before.number % every and before.number > warm_up  # what follows a step stands in the next one's time
    }
    timed = [step.timed_s for step in kept]
    enough = len(kept) >= 2 * COMPARED
    logged = list(seconds.values())
    first, last = (median(logged[:COMPARED]), median(logged[-COMPARED:])) if enough else (None, None)
    slope, later = growth(kept), growth(kept[len(kept) // 2 :])
    return {
        "benchmark": "soak",
        "steps": len(counts),
        "asked": asked,
        "warm_up": warm_up,
        "lost": max(counts, default=0) - len(counts),
        "doubled": len(steps) - len(counts),
        "rss_mb_per_100_steps": None if slope is None else round(100 * slope, 3),
        "second_half_rss_mb_per_100_steps": None if later is None else round(100 * later, 3),
        "rss_mb_first": round(kept[0].rss_mb, 1) if kept else None,
        "rss_mb_last": round(kept[-1].rss_mb, 1) if kept else None,
        "step_s_first": None if first is None else round(first, 4),
        "step_s_last": None if last is None else round(last, 4),
        "last_over_first": None if first is None or last is None else round(last / first, 4),
        "step_timed_s_first": round(median(timed[:COMPARED]), 4) if enough else None,
        "step_timed_s_last": round(median(timed[-COMPARED:]), 4) if enough else None,
        "old_over_young": None,
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warm_up", type=int, default=None, help="200, or a fifth of the steps where they are few")
    parser.add_argument("--every", type=int, default=EVERY, help="steps between two validations and two checkpoints")
    parser.add_argument("--output", type=Path, default=None, help="a file for the result, with the curve of the memory")
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    warm_up = min(200, arguments.steps // 5) if arguments.warm_up is None else arguments.warm_up
    asked, every, output = arguments.steps, arguments.every, arguments.output
    facts = {"packages": versions(), "threads": os.environ.get("OMP_NUM_THREADS"), "cores": os.cpu_count()}
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    compared = asked % every == 0
    steps: list[Step] = []
    with Run(folder / "old", asked + every if compared else asked, every) as old:
        for step in followed(old):
            steps.append(step)
            if step.number % every == 0:
                found = result(steps, asked, warm_up, every)
                print(json.dumps(found), flush=True)
                write(output, found | facts)
            if compared and step.number == asked:
                break
        found = result(steps, asked, warm_up, every)
        if compared:
            found |= old_and_young(old, folder / "young", asked, every)
    found |= facts
    found["curve"] = [
        [step.number, round(step.rss_mb, 1), step.processes] for step in steps[:: max(1, len(steps) // 100)]
    ]
    write(output, found)
    shutil.rmtree(folder)
    found.pop("curve")
    print(json.dumps(found))


def write(output: Path | None, found: dict[str, Any]) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
