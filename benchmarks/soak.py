"""A long run: does it leak, slow down, or lose a step?

    python -m benchmarks.soak [--steps 2000] [--output docs/results/soak.json]

The quickstart's training with everything on that a run may have: validation, checkpoints of which the last three stay,
metrics.jsonl, and TensorBoard where it is installed. The memory of the run's processes (resident) is read as each step
is logged; `--output` is written every hundred steps and at the end. The last line is JSON:

    rss_mb_per_100_steps   growth of memory after the first --warm_up steps, by the median of the slopes between any two
                           steps with as many processes; second_half_…: of the later half of them
    step_s_first, _last    median seconds of a step among the first and the last hundred after the warm-up, from one log
                           to the next; steps with a validation or a checkpoint are left out
    reference_last_over_first  the same of a fixed piece of work in this process, which shares the machine alone: how
                           much of last_over_first is the machine's own
    lost, doubled          steps that metrics.jsonl does not hold, or holds twice

`timing/step` (perl/training/metrics.py) is given too, as step_timed_s_first and _last: it counts no logging.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil

from perl.provenance import versions
from perl.results import METRICS

ROOT = Path(__file__).resolve().parents[1]
EVERY = 100
"""Steps between two validations, two checkpoints, and two writings of the result."""
COMPARED = 100
"""Steps whose median stands for the beginning, and for the end."""


REFERENCE = np.ones((256, 256), dtype=np.float32)


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
    reference_s: float
    """Of a fixed piece of work in this process, then: how fast the machine was."""


def settings(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "training.output_dir": folder,
        "training.max_steps": steps,
        "training.save_strategy": "steps",
        "training.save_steps": EVERY,
        "training.save_total_limit": 3,
        "training.report_to": "tensorboard" if importlib.util.find_spec("tensorboard") else "none",
        "validation.datasets": json.dumps([str(ROOT / "assets" / "quickstart-data" / "test.jsonl")]),
        "validation.every_steps": EVERY,
        "validation.max_samples": 64,
        "validation.save_best": "true",
    }


def train(folder: Path, steps: int) -> Iterator[Step]:
    """The steps of a run in `folder`, as they are logged."""
    words = [word for name, value in settings(folder, steps).items() for word in (f"--config.{name}", str(value))]
    command = [sys.executable, "-m", "perl.train", "--recipe", str(ROOT / "recipes" / "quickstart.yaml"), *words]
    with (folder.parent / "soak.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield from _logged(folder / METRICS, process)
    finally:
        process.kill()
        process.wait()


def _logged(metrics: Path, process: subprocess.Popen[bytes]) -> Iterator[Step]:
    position = 0
    while True:
        code, content = process.poll(), metrics.read_bytes()[position:] if metrics.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        position += len(whole)
        (rss, processes), reference = rss_mb(process.pid), reference_s()
        for row in map(json.loads, whole.splitlines()):
            if "loss" in row:
                yield Step(row["step"], row["time"], row["timing/step"], rss, processes, reference)
        if code is not None:
            if code:
                raise RuntimeError(f"the training ended with {code}; see {metrics.parent.parent}/soak.log")
            return
        time.sleep(0.05)


def rss_mb(pid: int) -> tuple[float, int]:
    """Resident memory of a process and all below it, and how many they are; pages that they share count in each."""
    sizes: list[int] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                sizes.append(each.memory_info().rss)
    return sum(sizes) / 1e6, len(sizes)


def reference_s() -> float:
    began = time.perf_counter()
    np.dot(REFERENCE, REFERENCE)
    return time.perf_counter() - began


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


def result(steps: Sequence[Step], asked: int, warm_up: int) -> dict[str, Any]:
    """What the steps so far show; null where there are too few."""
    counts = Counter(step.number for step in steps)
    kept = [step for step in steps if step.number > warm_up]
    seconds = {
        after.number: after.logged_at - before.logged_at
        for before, after in itertools.pairwise(steps)
        if before.number % EVERY and before.number > warm_up  # what follows a step stands in the next one's time
    }
    timed = [step.timed_s for step in kept]
    enough = len(kept) >= 2 * COMPARED
    logged = list(seconds.values())
    first, last = (median(logged[:COMPARED]), median(logged[-COMPARED:])) if enough else (None, None)
    references = [step.reference_s for step in kept]
    slower = median(references[-COMPARED:]) / median(references[:COMPARED]) if enough else None
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
        "reference_last_over_first": None if slower is None else round(slower, 4),
        "step_timed_s_first": round(median(timed[:COMPARED]), 4) if enough else None,
        "step_timed_s_last": round(median(timed[-COMPARED:]), 4) if enough else None,
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warm_up", type=int, default=None, help="200, or a fifth of the steps where they are few")
    parser.add_argument("--output", type=Path, default=None, help="a file for the result, with the curve of the memory")
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    warm_up = min(200, arguments.steps // 5) if arguments.warm_up is None else arguments.warm_up
    output = arguments.output
    facts = {"packages": versions(), "threads": os.environ.get("OMP_NUM_THREADS"), "cores": os.cpu_count()}
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    steps: list[Step] = []
    for step in train(folder / "run", arguments.steps):
        steps.append(step)
        if step.number % EVERY == 0:
            found = result(steps, arguments.steps, warm_up)
            print(json.dumps(found), flush=True)
            write(output, found | facts)
    found = result(steps, arguments.steps, warm_up) | facts
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
