"""What a run shows and leaves while it trains: metrics.jsonl, the progress line, a checkpoint when it is stopped."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from perl.base.errors import ONE_SIGNAL_S, Stopped
from perl.base.paths import how_to_go_on
from perl.records import PROGRESS, clock
from perl.runs.checkpoints import AUTO, cut
from perl.runs.model_card import CURVE
from perl.runs.together import fail_with_rank_0

log = logging.getLogger(__name__)

SHOWN = {
    "reward": "reward {:.3f}",
    "loss": "loss {:.4f}",
    "eval_loss": "evaluation loss {:.4f}",
    "completions/mean_length": "len {:.0f}",
    "aqn/sigma": "sigma {:.3g}",
    "aqn/sigma_relative": "({:.0%})",
    "perf/throughput": "{:.0f} tok/s",
    "pool/trainer_waited": "trainer waited {:.0%}",
    "pool/workers_idle": "workers idle {:.0%}",
    "pool/staleness_max": "staleness {:.0f}",
    "perf/max_memory_allocated_gb": "{:.1f} GB",
}
"""What the line shows, in this order; a metric that this device has not is left out."""


HISTORY = ("step", "epoch", "grad_norm", "learning_rate", *CURVE)
"""What stays of a log in the trainer's own history: the model card's part, and little else. It grows with every step,
and each checkpoint writes all of it."""


class MetricsWriter(TrainerCallback):
    """Appends every log of the trainer to metrics.jsonl, one object a line, from the main process. Of a run that goes
    on it keeps the rows up to its checkpoint. A disk that is full ends all processes. What the file holds the trainer's
    history need not hold too: HISTORY alone stays there."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and self.path.is_file():
            cut(self.path, state.global_step)

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        failure = None
        if state.is_world_process_zero and logs:
            row = {"step": state.global_step, "time": time.time(), **finite(logs)}
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                failure = f"{self.path} cannot be written: {error.strerror}"
        fail_with_rank_0(failure, args.device)
        if state.log_history:
            last = state.log_history[-1]
            state.log_history[-1] = {name: last[name] for name in HISTORY if name in last}


class ProgressLine(TrainerCallback):
    """One line at each log: step, the metrics in SHOWN, seconds a step and the time that is left; of a validation its
    scores."""

    def __init__(self) -> None:
        self.first_step, self.started = 0, 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.first_step, self.started = state.global_step, time.perf_counter()
        if state.is_world_process_zero and state.global_step >= state.max_steps:  # of a resumed run
            print(
                f"{PROGRESS}step {state.global_step}/{state.max_steps}  nothing is left to train; more:"
                " --config.training.max_steps, or num_train_epochs",
                flush=True,
            )

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        done = state.global_step - self.first_step
        if state.is_world_process_zero and logs and (scores := validation_scores(logs)):
            seconds = f"{logs['timing/validation']:.1f} s"
            parts = [f"step {state.global_step}/{state.max_steps}", "validation", *scores, seconds]
            print(PROGRESS + "  ".join(parts), file=sys.stdout, flush=True)
        if (
            not state.is_world_process_zero
            or not logs
            or not logs.keys() & {"loss", "reward", "eval_loss"}
            or done <= 0
        ):
            return  # the summary at the end, where nothing of a step is left to show
        seconds = (time.perf_counter() - self.started) / done
        left = seconds * (state.max_steps - state.global_step)
        shown = [text.format(logs[name]) for name, text in SHOWN.items() if isinstance(logs.get(name), float)]
        parts = [f"step {state.global_step}/{state.max_steps}", *shown, f"{seconds:.1f} s/step", f"left {clock(left)}"]
        print(PROGRESS + "  ".join(parts), file=sys.stdout, flush=True)


def validation_scores(logs: dict[str, Any]) -> list[str]:
    """`openai/gsm8k mean@1 0.452` of each data source that a validation has logged (perl.training.validation)."""
    matches = (re.fullmatch(r"val-core/(.+)/acc/(mean@\d+)", name) for name in logs)
    return [f"{match[1]} {match[2]} {logs[match[0]]:.3f}" for match in matches if match]


class StopOnSignal(TrainerCallback):
    """On SIGTERM, as a scheduler sends it, SIGINT, or SIGHUP of a terminal that is gone (nohup has it ignored): the
    step under way is finished, a checkpoint saved, and the training ends. It is enough that one process gets the
    signal.

    A context manager, entered before the folder is made: until the training begins, and at a second signal, the
    signal raises Stopped where it arrives.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self) -> None:
        self.received = 0
        """Number of the signal, on all processes once they have met at the end of a step."""
        self.stopped = False
        """Whether the training was ended before its last step."""
        self._at, self._training, self._pid = 0.0, False, os.getpid()
        self._ended = False
        """Whether the training has made its last step, and its result is being saved."""

    def __enter__(self) -> StopOnSignal:
        heard = [n for n in self.SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._receive) for number in heard}
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: Any) -> None:
        if os.getpid() != self._pid:  # a dataloader's worker, forked with this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGHUP:
            for terminal in self._terminals:  # a write to it would fail
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
        name, now = signal.Signals(number).name, time.monotonic()
        if not self._training:
            raise Stopped(f"{name} before the first step; there was nothing to save", number)
        if not self.received:
            self.received, self._at = number, now
            how = "ends after this step, with a checkpoint"
            if self._ended:
                how = "has made its last step, and ends when its result is saved"
            self._say(f"{name}: the run {how}; a second signal ends it now")
        elif now - self._at > ONE_SIGNAL_S:
            raise Stopped(f"a second signal ({name}); go on from the last checkpoint", number)

    def _say(self, text: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(BrokenPipeError):  # what reads may be gone, as what sends this signal may be
                os.write(sys.stdout.fileno(), f"stopping: {text}\n".encode())  # print is not safe in a handler

    def on_train_begin(self, args, state, control, **kwargs):
        self._training = True

    def on_train_end(self, args, state, control, **kwargs):
        self._ended = True

    def on_step_end(self, args, state, control, **kwargs):
        if args.world_size > 1:
            number = torch.tensor(self.received, device=args.device)
            torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
            if number.item() and not self.received:  # this process's own may still be on its way
                self._at = time.monotonic()
            self.received = int(number.item())
        if self.received and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True

    def on_evaluate(self, args, state, control, **kwargs):
        """A signal during a validation ends the run with the step before it."""
        self.on_step_end(args, state, control)

    def raise_if_stopped(self, args: Any, state: Any, run_dir: Path) -> None:
        """After `trainer.train()`, on every process: Stopped, with how to go on, if a signal has ended the training."""
        if not self.stopped:
            return
        if args.world_size > 1:
            torch.distributed.barrier()  # the launcher ends all processes as soon as one ends
        name = signal.Signals(self.received).name
        raise Stopped(
            f"{name} after step {state.global_step} of {state.max_steps}, checkpoint-{state.global_step} is saved;"
            f" run again to go on: {how_to_go_on(run_dir, args.resume_from_checkpoint == AUTO)}",
            self.received,
        )


def finite(logs: dict[str, Any]) -> dict[str, Any]:
    """The logs with NaN and infinity as null, which JSON has no numbers for."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in logs.items()}
