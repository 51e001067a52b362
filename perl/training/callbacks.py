"""What a run shows and leaves while it trains: metrics.jsonl and the progress line."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

PROGRESS = "progress: "
"""Mark of a progress line: the launch script shows these lines on the screen and keeps everything in output.log."""

SHOWN = {
    "reward": "reward {:.3f}",
    "loss": "loss {:.4f}",
    "completions/mean_length": "len {:.0f}",
    "aqn/sigma": "sigma {:.3g}",
    "perf/throughput": "{:.0f} tok/s",
    "perf/max_memory_allocated_gb": "{:.1f} GB",
}
"""What the line shows, in this order; a metric that this device has not is left out."""


class MetricsWriter(TrainerCallback):
    """Appends every log of the trainer to metrics.jsonl, one object a line, from the main process."""

    def __init__(self, path: Path):
        self.path = path

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        row = {"step": state.global_step, "time": time.time(), **finite(logs)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class ProgressLine(TrainerCallback):
    """One line at each log: step, the metrics in SHOWN, seconds a step and the time that is left."""

    def __init__(self) -> None:
        self.first_step, self.started = 0, 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.first_step, self.started = state.global_step, time.perf_counter()

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        done = state.global_step - self.first_step
        if not state.is_world_process_zero or not logs or "reward" not in logs or done <= 0:
            return
        seconds = (time.perf_counter() - self.started) / done
        left = seconds * (state.max_steps - state.global_step)
        shown = [text.format(logs[name]) for name, text in SHOWN.items() if isinstance(logs.get(name), float)]
        parts = [f"step {state.global_step}/{state.max_steps}", *shown, f"{seconds:.1f} s/step", f"left {clock(left)}"]
        print(PROGRESS + "  ".join(parts), file=sys.stdout, flush=True)


def finite(logs: dict[str, Any]) -> dict[str, Any]:
    """The logs with NaN and infinity as null, which JSON has no numbers for."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in logs.items()}


def clock(seconds: float) -> str:
    """h:mm:ss"""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"
