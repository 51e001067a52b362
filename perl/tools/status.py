"""python -m perl status: where a training stands, from the files of its folder alone, while it runs or afterwards."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from perl.base.errors import UserError
from perl.base.files import LOCK, process_that_holds
from perl.base.paths import checkpoints_in, user_path
from perl.records import clock
from perl.reports.training_run import OF_A_STEP
from perl.runs.callbacks import SHOWN
from perl.scoring.results import METRICS, read_metrics

WORKERS = {
    "pool/staleness": "mean staleness {:.2f}",
    "rollout/engine_mismatch": "engine mismatch {:.1e} nats",
    "rollout/logp_kl": "drift {:.1e} nats",
    "pool/queue": "queue {:.0f}",
    "pool/tokens_per_s": "workers {:.0f} tok/s",
    "pool/tokens_per_s_min": "slowest {:.0f}",
    "pool/tokens_per_s_max": "fastest {:.0f}",
    "pool/restarts": "{:.0f} restarts",
}
"""What a second line shows of a training with workers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="training.output_dir of a training")


def run(args: argparse.Namespace) -> int:
    folder = user_path(args.folder)
    if not folder.is_dir():
        raise UserError(f"RUN {args.folder}: no such folder; give the training.output_dir of a training")
    if not (folder / LOCK).is_file() and not (folder / METRICS).is_file():
        raise UserError(f"RUN {args.folder}: no training has begun there; give the training.output_dir of one")
    print("\n".join(lines(folder, time.time())))
    return 0


def lines(folder: Path, now: float) -> list[str]:
    process = process_that_holds(folder / LOCK)
    works = f"process {process} works in it" if process else "no process of this machine works in it"
    rows = read_metrics(folder / METRICS) if (folder / METRICS).is_file() else []
    ended = ""
    if not process and any("train_runtime" in row for _, row in rows):
        result = any((folder / name).is_dir() for name in ("adapter", "model"))
        ended = (
            ", it has ended" if result else ", it was stopped: --config.training.resume_from_checkpoint auto goes on"
        )
    found = [f"{folder}: {works}{ended}"]
    if steps := [(step, row) for step, row in rows if any(name in row for name in OF_A_STEP)]:
        step, row = steps[-1]
        when = f", {ago(now, row['time'])}" if isinstance(row.get("time"), float) else ""
        found.append(f"step {step}{when}  {shown(row, SHOWN)}")
        # A step may have drawn nothing (num_iterations).
        drew, row = next((each for each in reversed(steps) if "pool/tokens_per_s" in each[1]), steps[-1])
        if further := shown(row, WORKERS):
            found.append(further if drew == step else f"step {drew}  {further}")
    else:
        found.append("no step is logged yet")
    if checkpoints := checkpoints_in(folder):
        found.append(f"{checkpoints[-1].name}, {ago(now, checkpoints[-1].stat().st_mtime)}")
    for log in sorted((folder / "logs").glob("worker-*.log")):
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        found.append(f"{log.stem}, {ago(now, log.stat().st_mtime)}: {said[-1] if said else 'has said nothing'}")
    return found


def shown(row: dict[str, Any], names: dict[str, str]) -> str:
    return "  ".join(text.format(row[name]) for name, text in names.items() if isinstance(row.get(name), float))


def ago(now: float, then: float) -> str:
    return f"{clock(max(0.0, now - then))} ago"
