"""What an NVIDIA GPU or an Ascend NPU makes of perl alongside TRL, in one command of ten minutes.

    python -m benchmarks.accelerator [--minutes 10] [--output FILE] [--models qwen2.5-0.5b] [--rows 64] [--skip_tests]

First the tests marked `gpu`, then cases in order of value, each in a process and with a time limit of its own. All
models have random weights in bfloat16, LoRA r 16 on all linears, prompts of 256 tokens in groups of 8, one device.

rollout  completions of one length, as each trainer draws them; no token ends a row before that. A step of one row shows
         what launching kernels takes
step     whole GRPO steps: rollout, reward, loss, backward, optimizer (micro-batches of 8, gradient checkpointing)
update   the update alone, on 16 given completions of log-normal lengths: old log-probabilities, loss and backward
mixed    a rollout whose rows end at random, after 1/4 of the longest in the mean

Each runs by TRL's GRPOTrainer ("trl"), by PerlGRPOTrainer without ("perl") and with captured graphs ("perl_graphs").
A side whose rollout would take too long draws fewer tokens, and its row says of how many its tokens/s are. The limit of
a rollout is what reading the weights and the keys and values of all rows once a step allows, at the bandwidth of a sum
over a large tensor, measured in the same process.

Whatever is measured goes to --output at once, a line of JSON each. At the end: Markdown tables for
docs/performance.md, what was left out and why, and one line of JSON. Exit code 1: a test or a case failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks._side import ANSWER, answer
from benchmarks._workload import (
    FIRST_WORD,
    MODELS,
    SWITCH,
    VOCABULARY,
    Memory,
    Policy,
    StepTimes,
    Workload,
    clock,
    decode_bytes,
    draw,
    draw_lengths,
    draw_workload,
    give,
    make_trainer,
    measure_bandwidth,
)
from perl import device

ROOT = Path(__file__).parents[1]
KINDS = ("rollout", "step", "update", "mixed")
SIDES = ("perl_graphs", "trl", "perl")
"""In this order: what matters most first, should the time run out."""
GROUP, MICRO_BATCH, UPDATE_ROWS = 8, 8, 16
CASE_LIMIT_S = 180
ROLLOUT_S = {"perl_graphs": 24, "trl": 12, "perl": 12}
"""For one rollout of each side, or its counted steps: beyond it fewer tokens are drawn, or a single step is counted."""
LEAST_S = {"tiny": 5, "qwen2.5-0.5b": 25, "qwen2.5-1.5b": 30, "qwen2.5-7b": 40}
"""With less time left a case is not started: it would end before it has measured anything."""


@dataclass(frozen=True)
class Case:
    """What one process measures, by each side."""

    kind: str
    model: str
    shapes: tuple[tuple[int, int], ...]
    """Rows and new tokens."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.model}, rows x new tokens {', '.join(f'{r} x {n}' for r, n in self.shapes)}"

    @property
    def prompt_length(self) -> int:
        return 16 if self.model == "tiny" else 256


def plan(options: argparse.Namespace) -> list[Case]:
    """Cases in order of value: by kind, then by model, as the flags give them."""
    shortest, longest = min(options.new_tokens), max(options.new_tokens)
    most = max(options.rows)
    shapes = {
        "rollout": [
            (rows, n) for rows in options.rows for n in (sorted(options.new_tokens) if rows > 1 else [shortest])
        ],
        "step": [(most, shortest)],
        "update": [(min(UPDATE_ROWS, most), longest)],
        "mixed": [(most, 2 * shortest)],
    }
    return [Case(kind, model, tuple(shapes[kind])) for kind in options.cases for model in options.models]


# In the process of a case


class Captures:
    """Counts the graphs that a side captures, and the seconds that it takes."""

    def __init__(self):
        self._capture = device.capture
        device.capture = self._counted
        self.restart()

    def restart(self) -> None:
        self.count, self.seconds = 0, 0.0

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        started = clock()
        try:
            return self._capture(*args, **kwargs)
        finally:
            self.count += 1
            self.seconds += clock() - started

    def __sub__(self, before: tuple[int, float]) -> dict[str, Any]:
        return {"captures": self.count - before[0], "capture_s": round(self.seconds - before[1], 3)}

    @property
    def now(self) -> tuple[int, float]:
        return self.count, self.seconds


class CaseRun:
    """Measures a case; `report` gets each result.

    Args:
        seconds: that it may take, all in all.
    """

    def __init__(
        self, case: Case, seconds: float, merge: str, sides: Sequence[str], report: Callable[[dict[str, Any]], None]
    ):
        self.case, self.merge, self.sides, self.report = case, merge, sides, report
        self.share = min(1.0, seconds / CASE_LIMIT_S)
        """Of the usual time."""
        self.captures = Captures()

    def run(self) -> None:
        measure = {"step": self.steps, "update": self.updates}.get(self.case.kind, self.rollouts)
        if measure == self.rollouts:
            self.bandwidth = measure_bandwidth(16 if self.case.model == "tiny" else 2048)
            self.report({"kind": "bandwidth", "gb_s": round(self.bandwidth / 1e9, 1)})
        nothing_to_capture = self.case.kind == "update" or device.detect().kind == "cpu"
        for side in ("perl", "trl") if nothing_to_capture else self.sides:
            self.captures.restart()
            with tempfile.TemporaryDirectory() as folder, self.attempt(side, self.case.shapes):
                measure(side, folder)
            gc.collect()
            device.empty_cache()

    @contextlib.contextmanager
    def attempt(self, side: str, shapes: Sequence[tuple[int, int]]) -> Iterator[None]:
        """What fails here costs these shapes of this side, and leaves the other numbers alone."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # see above
            traceback.print_exc()
            reason = "out of memory" if device.is_out_of_memory(error) else _first_line(error)
            for shape in shapes:
                self.tell(side, shape, {"error": reason})

    def tell(self, side: str, shape: tuple[int, int], result: dict[str, Any]) -> None:
        rows, new_tokens = shape
        fields = {"kind": self.case.kind, "model": self.case.model, "rows": rows, "new_tokens": new_tokens}
        self.report(fields | {"side": side} | result)

    def policy(self, side: str, eos: tuple[int, ...] = ()) -> Policy:
        never = MODELS[self.case.model]["vocab_size"]  # no token: the model can't draw it
        return Policy(
            model=self.case.model,
            dtype="bfloat16",
            merge_adapter=SWITCH[self.merge],
            capture_graphs=side == "perl_graphs",
            eos=(never, *eos),
        )

    def workload(self, rows: int, longest: int) -> Workload:
        group, prompt_length = min(GROUP, rows), 16 if self.case.model == "tiny" else 256
        return draw_workload(rows // group, group, prompt_length, "equal", longest, longest)

    def trainer(self, side: str, policy: Policy, work: Workload, folder: str, **settings: Any) -> Any:
        def reward(completions: list, **_: Any) -> list[float]:
            return [float(i % 2) for i in range(len(completions))]

        settings = {"shuffle_dataset": False, "logging_strategy": "no"} | settings
        return make_trainer("trl" if side == "trl" else "ours", policy, work, folder, reward, **settings)

    # Rollouts

    def rollouts(self, side: str, folder: str) -> None:
        """Of all shapes by one trainer. A first one of four tokens, in which everything happens for the first time, is
        not counted."""
        held = Memory().before
        rows, longest = map(max, zip(*self.case.shapes, strict=True))
        mixed = self.case.kind == "mixed"
        ends = 4 * MODELS[self.case.model]["vocab_size"] // longest if mixed else 0  # of tokens about equally likely
        policy = self.policy(side, tuple(range(FIRST_WORD, FIRST_WORD + ends)))
        trainer = self.trainer(
            side, policy, self.workload(rows, longest), folder, per_device_train_batch_size=max(2, rows)
        )
        trainer.model.train()

        def play(rows: int, new_tokens: int) -> dict[str, Any]:
            """A rollout, as the trainer does them while it trains."""
            work = self.workload(rows, new_tokens)
            trainer.generation_config.max_new_tokens = trainer.max_completion_length = new_tokens
            captures, memory, started = self.captures.now, Memory(), clock()
            completions = draw(trainer, work, new_tokens)
            seconds = clock() - started
            trainer.state.global_step += 1
            lengths = [len(completion) for completion in completions]
            if max(lengths) > new_tokens or (min(lengths) < new_tokens and not mixed):
                raise ValueError(f"asked for completions of {new_tokens} tokens, got {min(lengths)} to {max(lengths)}")
            peak = round((memory.peak()["peak_mb"] - held) / 1024, 3)
            earlier = {"earlier_captures": captures[0], "earlier_capture_s": round(captures[1], 3)}
            return {"tokens": sum(lengths), "seconds": seconds, "peak_gib": peak} | self.captures - captures | earlier

        merged = seen_merged(trainer.model)
        first = round(play(rows, 4)["seconds"], 3)
        extra = {"first_s": first, "merged": merged()}
        for rows in dict.fromkeys(rows for rows, _ in self.case.shapes):
            shapes = [shape for shape in self.case.shapes if shape[0] == rows]
            with self.attempt(side, shapes):
                self._rollouts_of(side, policy, shapes, play, extra)
            gc.collect()
            device.empty_cache()

    def _rollouts_of(
        self,
        side: str,
        policy: Policy,
        shapes: list[tuple[int, int]],
        play: Callable[[int, int], dict[str, Any]],
        extra: dict[str, Any],
    ) -> None:
        """The shapes with one number of rows; what is drawn once serves all that have to do with it. A rollout that had
        to capture graphs is done again, as the next one of a run would be, where the budget allows it."""
        rows, budget_s = shapes[0][0], ROLLOUT_S[side] * self.share
        play(rows, 4)  # of so many rows, the first
        few = play(rows, 4)["seconds"]
        step_s = max(1e-6, (play(rows, 20)["seconds"] - few) / 16)
        done: dict[int, dict[str, Any]] = {}
        for _, new_tokens in shapes:
            measured = affordable(step_s, few, new_tokens, min(n for _, n in shapes), budget_s)
            found = done.get(measured) or play(rows, measured)
            if found["captures"] and measured not in done and found["seconds"] < budget_s:
                found = play(rows, measured)
            done[measured] = found
            reached = found["tokens"] / found["seconds"]
            result = {"measured_new_tokens": measured, "tokens_s": round(reached, 1)}
            if self.case.kind != "mixed":
                after_few = (found["seconds"] - few) / (measured - 4) if measured > 20 else step_s
                result["step_ms"] = round(1000 * after_few, 3)
                result["limit_tokens_s"] = round(self.limit(policy, rows, new_tokens))
                result["limit_share"] = round(reached / self.limit(policy, rows, measured), 4)
            self.tell(side, (rows, new_tokens), result | found | {"seconds": round(found["seconds"], 3)} | extra)

    def limit(self, policy: Policy, rows: int, new_tokens: int) -> float:
        """Tokens/s at the measured bandwidth."""
        context = len(self.workload(rows, new_tokens).prompts[0]) + new_tokens / 2
        return rows * self.bandwidth / decode_bytes(policy, rows, context)

    # Steps and updates

    def steps(self, side: str, folder: str) -> None:
        """One step that is not counted, and up to two that are."""
        held, captures = Memory().before, self.captures.now
        ((rows, new_tokens),) = self.case.shapes
        trainer = self.trainer(
            side, self.policy(side), self.workload(rows, new_tokens), folder, **micro_batches(rows), max_steps=3
        )
        steps = train(trainer, first=1, budget_s=ROLLOUT_S[side] * self.share)
        found = {
            name: round(statistics.median(s[name] for s in steps), 3) for name in ("wall_s", "rollout_s", "update_s")
        }
        found["peak_gib"] = round((max(step["peak_mb"] for step in steps) - held) / 1024, 3)
        self.tell(side, (rows, new_tokens), found | {"steps": len(steps)} | self.captures - captures)

    def updates(self, side: str, folder: str) -> None:
        """Two updates on each batch (num_iterations): before the first the old log-probabilities are computed, the
        second is nothing but an update. The first batch is not counted."""
        held = Memory().before
        ((rows, longest),) = self.case.shapes
        settings = micro_batches(rows) | {"num_iterations": 2, "max_steps": 4}
        trainer = self.trainer(side, self.policy(side), self.workload(rows, longest), folder, **settings)
        lengths = draw_lengths("lognormal", rows, longest / 4, longest)
        words = VOCABULARY - FIRST_WORD
        given = [[FIRST_WORD + (7 * i + row) % words for i in range(length)] for row, length in enumerate(lengths)]
        give(trainer, given)
        old_s = [0.0]

        def timed(forward: Any, *args: Any, **kwargs: Any) -> Any:
            started = clock()
            result = forward(*args, **kwargs)
            old_s.append(clock() - started)
            return result

        if side == "trl":
            logps = trainer._get_per_token_logps_and_entropies

            def without_the_losses(*args: Any, **kwargs: Any) -> Any:
                return (logps if torch.is_grad_enabled() else functools.partial(timed, logps))(*args, **kwargs)

            trainer._get_per_token_logps_and_entropies = without_the_losses
        else:
            passes = trainer.step.passes
            trainer.step.passes = Timed(passes, functools.partial(timed, passes.logps))
        steps = train(trainer, first=2)
        peak = round((max(step["peak_mb"] for step in steps) - held) / 1024, 3)
        seconds = {"old_logps_s": round(old_s[-1], 3), "update_s": round(steps[-1]["wall_s"], 3)}
        self.tell(side, (rows, longest), {"tokens": sum(lengths), **seconds, "peak_gib": peak})


class Timed:
    """Passes whose passes without gradient are timed."""

    def __init__(self, passes: Any, logps: Any):
        self.passes, self.logps = passes, logps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.passes, name)


def micro_batches(rows: int) -> dict[str, Any]:
    """Settings by which one optimizer step takes `rows` rows."""
    size = min(MICRO_BATCH, rows)
    sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": rows // size}
    return sizes | {"gradient_checkpointing": True}


def train(trainer: Any, first: int, budget_s: float = math.inf) -> list[dict[str, float]]:
    """Times of the steps from number `first` on: all of the run, or as many as the budget allows, at least one."""
    steps: list[dict[str, float]] = []

    def report(times: dict[str, float], control: Any) -> None:
        steps.append(times)
        counted = steps[first:]
        if counted and sum(step["wall_s"] for step in counted) + times["wall_s"] > budget_s:
            control.should_training_stop = True

    StepTimes(trainer, report)
    trainer.train()
    return steps[first:]


def affordable(step_s: float, fixed_s: float, wanted: int, shortest: int, budget_s: float) -> int:
    """New tokens to draw: `wanted` where the budget allows it, else the `shortest` that is asked for where twice the
    budget does, else a power of two, at least 32."""
    if wanted <= 32 or fixed_s + step_s * wanted <= budget_s:
        return wanted
    if fixed_s + step_s * shortest <= 2 * budget_s:
        return shortest
    allowed = max(32, int((budget_s - fixed_s) / step_s))
    return min(shortest, 1 << (allowed.bit_length() - 1))


def seen_merged(model: Any) -> Callable[[], bool | None]:
    """Whether the adapter is merged when a forward comes by; None where none does. The call ends the watch."""
    from peft.tuners.lora import LoraLayer

    layer: Any = next(module for module in model.modules() if isinstance(module, LoraLayer))
    seen: list[bool] = []
    hook = layer.register_forward_pre_hook(lambda module, args: seen.append(bool(module.merged)) if not seen else None)

    def answer() -> bool | None:
        hook.remove()
        return seen[0] if seen else None

    return answer


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or repr(error)).splitlines()[0]}"[:300]


def machine() -> dict[str, Any]:
    """What the numbers hang on."""
    versions = {}
    for package in ("torch", "torch_npu", "transformers", "trl", "peft", "accelerate"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    memory = device.peak_memory()
    total = None if memory is None else round(memory.total / 2**30, 1)
    return {"device": device.name(), "memory_gib": total, "python": platform.python_version(), "versions": versions}


# In the command


class Command:
    """Runs the tests and the cases, and keeps what they gave."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.ends_at = time.monotonic() + 60 * options.minutes
        self.started = time.monotonic()
        self.results: list[dict[str, Any]] = []
        self.left_out: list[dict[str, str]] = []
        self.failed: list[dict[str, str]] = []
        self.machine: dict[str, Any] = {}
        self.tests: dict[str, Any] | None = None
        self.env = os.environ | device.worker_environment(0) | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        options.output.parent.mkdir(parents=True, exist_ok=True)

    @property
    def left_s(self) -> float:
        return self.ends_at - time.monotonic()

    def run(self) -> int:
        cases = plan(self.options)
        self.say(f"{len(cases)} cases in {self.options.minutes:g} minutes; results go to {self.options.output}")
        try:
            if not self.options.skip_tests:
                self.run_tests()
            while cases:
                self.run_case(cases[0])
                del cases[0]
        except KeyboardInterrupt:
            for case in cases:
                self.leave_out(case, "interrupted")
        self.show()
        return int(bool(self.failed or (self.tests or {}).get("failed")))

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.started:4.0f} s] {line}", flush=True)

    def keep(self, row: dict[str, Any]) -> None:
        with self.options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def leave_out(self, case: Case, reason: str) -> None:
        self.left_out.append({"case": case.name, "reason": reason})
        self.keep({"kind": "skipped", **self.left_out[-1]})
        self.say(f"skipped: {case.name}: {reason}")

    def run_tests(self) -> None:
        if importlib.util.find_spec("pytest") is None:
            self.tests = {"skipped_because": "pytest is not installed"}
        else:
            limit = min(180.0, self.left_s / 3)
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-m",
                "gpu",
                "-q",
                "-rfEs",
                "-p",
                "no:cacheprovider",
                "tests/gpu",
            ]
            lines: list[str] = []
            end = run(command, self.env, limit, lines.append)
            self.tests = summary_of_tests(lines) | ({"cut_off": True, "failed": 1} if end.killed else {})
            self.tests["seconds"] = round(end.seconds, 1)
            for line in lines:
                if line.startswith(("FAILED", "ERROR", "SKIPPED")):
                    self.say(line[:200])
            if self.tests.get("failed"):
                print("\n".join(lines[-60:]), file=sys.stderr)
        self.keep({"kind": "tests", **self.tests})
        self.say(f"tests: {self.tests}")

    def run_case(self, case: Case) -> None:
        needed = LEAST_S.get(case.model, 30)
        if self.left_s < needed:
            self.leave_out(case, f"{max(0, self.left_s):.0f} s are left, it needs {needed}")
            return
        limit = min(CASE_LIMIT_S, self.left_s)
        self.say(f"{case.name}, {limit:.0f} s at most")
        command = [sys.executable, "-m", "benchmarks.accelerator", "--case", json.dumps(asdict(case))]
        command += ["--seconds", f"{limit:.0f}", "--merge_adapter", self.options.merge_adapter]
        command += ["--sides", *self.options.sides]
        failed = len(self.failed)
        end = run(command, self.env, limit, self.take)
        if len(self.failed) > failed or end.returncode:
            print(end.log[-5000:], file=sys.stderr)
        if end.killed:
            self.leave_out(case, f"cut off after {end.seconds:.0f} s; what it had measured by then is kept")
        elif end.returncode:
            self.failed.append({"case": case.name, "reason": end.last_words})
            self.keep({"kind": "failed", **self.failed[-1]})
            self.say(f"failed: {case.name}: {end.last_words}")

    def take(self, line: str) -> None:
        """A line that a case printed: a result, or what a library says."""
        if not line.startswith(ANSWER):
            return
        row = json.loads(line.removeprefix(ANSWER))
        if row["kind"] == "machine":
            self.machine = self.machine or {name: value for name, value in row.items() if name != "kind"}
        else:
            self.results.append(row)
            if row.get("error"):
                self.failed.append({"case": f"{row['kind']} {row['model']} by {row['side']}", "reason": row["error"]})
        self.keep(row)
        self.say(json.dumps(row))

    def show(self) -> None:
        bandwidths = [row["gb_s"] for row in self.results if row["kind"] == "bandwidth"]
        self.machine |= {"bandwidth_gb_s": max(bandwidths)} if bandwidths else {}
        print("\n" + "\n".join(tables(self.results, self.machine)))
        for row in self.left_out:
            print(f"\nSkipped: {row['case']}: {row['reason']}.")
        for row in self.failed:
            print(f"\nFailed: {row['case']}: {row['reason']}.")
        result = {"benchmark": "accelerator", "machine": self.machine, "tests": self.tests}
        result["minutes"] = round((time.monotonic() - self.started) / 60, 2)
        result["results"] = [row for row in self.results if row["kind"] != "bandwidth"]
        last = json.dumps(result | {"skipped": self.left_out, "failed": self.failed})
        print("\n" + last, flush=True)
        self.keep({"kind": "end", "minutes": result["minutes"]})


@dataclass(frozen=True)
class End:
    """How a process ended."""

    returncode: int
    killed: bool
    """Because its time was up."""
    seconds: float
    log: str
    """Its stderr."""

    @property
    def last_words(self) -> str:
        lines = self.log.strip().splitlines()
        return lines[-1][:300] if lines else f"ended with {self.returncode}"


def run(command: list[str], env: dict[str, str], limit_s: float, take: Callable[[str], None]) -> End:
    """Run a command; `take` gets each line of its stdout as it comes. It and all that it started are killed when the
    time is up, and when we are interrupted."""
    started = time.monotonic()
    killed = threading.Event()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def time_is_up() -> None:
            killed.set()
            kill()

        timer = threading.Timer(limit_s, time_is_up)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                take(line.rstrip("\n"))
            process.wait()
        finally:
            timer.cancel()
            kill()
            process.wait()
        log.seek(0)
        return End(process.returncode, killed.is_set(), time.monotonic() - started, log.read())


def summary_of_tests(lines: list[str]) -> dict[str, Any]:
    """Counts out of pytest's last line."""
    last = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|skipped|error)", line)), "")
    found: dict[str, Any] = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for count, name in re.findall(r"(\d+) (passed|failed|skipped|error)", last):
        found["failed" if name == "error" else name] += int(count)
    return found if last else found | {"failed": 1, "said": " ".join(lines[-3:])[:300]}


# Tables


def tables(results: list[dict[str, Any]], machine: dict[str, Any]) -> list[str]:
    """Markdown for docs/performance.md."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    lines = [f"{machine.get('device')} ({machine.get('memory_gib')} GiB), Python {machine.get('python')}, {versions};"]
    lines.append(f"measured bandwidth: {machine.get('bandwidth_gb_s')} GB/s.")
    for kinds, head, cells in (
        (("rollout", "mixed"), ROLLOUT_HEAD, rollout_cells),
        (("step",), STEP_HEAD, step_cells),
        (("update",), UPDATE_HEAD, update_cells),
    ):
        rows = list(by_shape(row for row in results if row["kind"] in kinds))
        if rows:
            lines += ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
            lines += ["| " + " | ".join(cells(sides)) + " |" for sides in rows]
    return lines


def by_shape(rows: Any) -> Iterator[dict[str, dict[str, Any]]]:
    """The sides of each shape, in the order in which they came."""
    shapes: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        shape = row["kind"], row["model"], row["rows"], row["new_tokens"]
        shapes.setdefault(shape, {})[row["side"]] = row
    yield from shapes.values()


def shown(row: dict[str, Any] | None, *fields: str) -> str:
    """Fields of a side, or why there are none."""
    if row is None:
        return "–"
    if "error" in row:
        return "out of memory" if row["error"] == "out of memory" else "failed"
    return " / ".join(f"{row[field]:g}" if isinstance(row.get(field), int | float) else "–" for field in fields)


def ratio(sides: dict[str, dict[str, Any]], field: str, more_is_better: bool) -> str:
    """The better of ours and TRL's."""
    ours = [side[field] for name, side in sides.items() if name != "trl" and field in side]
    theirs = sides.get("trl", {}).get(field)
    if not ours or not theirs:
        return "–"
    return f"{max(ours) / theirs:.2f}" if more_is_better else f"{theirs / max(1e-9, min(ours)):.2f}"


def shape_cells(sides: dict[str, dict[str, Any]]) -> list[str]:
    row = next(iter(sides.values()))
    longest = f"up to {row['new_tokens']}" if row["kind"] == "mixed" else str(row["new_tokens"])
    return [row["model"], str(row["rows"]), longest]


ROLLOUT_HEAD = (
    *("model", "rows", "new tokens", "TRL, tokens/s", "perl, tokens/s", "perl with graphs, tokens/s", "ratio"),
    *("limit, tokens/s", "of the limit", "a step, ms: TRL", "perl", "graphs", "captures (s): before / in the rollout"),
    *("peak, GiB: TRL", "perl", "graphs"),
)
STEP_HEAD = (
    *("model", "rows", "new tokens", "TRL, step / rollout / update, s", "perl", "perl with graphs", "ratio"),
    *("peak, GiB: TRL", "perl", "graphs"),
)
UPDATE_HEAD = (
    *("model", "rows", "longest", "TRL, old log-probabilities / update, s", "perl", "ratio of updates"),
    *("peak, GiB: TRL", "perl"),
)


def rollout_cells(sides: dict[str, dict[str, Any]]) -> list[str]:
    trl, perl, graphs = (sides.get(name) for name in ("trl", "perl", "perl_graphs"))

    def speed(row: dict[str, Any] | None) -> str:
        said = shown(row, "tokens_s")
        if row is None or "error" in row:
            return said
        if row["measured_new_tokens"] != row["new_tokens"]:
            said += f" (from {row['measured_new_tokens']} new tokens)"
        return said + (", unmerged" if row["side"] != "trl" and row["merged"] is False else "")

    good = [row for row in sides.values() if "error" not in row and row["side"] != "trl"]
    best = max(good, key=lambda row: row["tokens_s"], default=None)
    captures = "–"
    if graphs and "error" not in graphs:
        first, later = ((graphs[f"{when}captures"], graphs[f"{when}capture_s"]) for when in ("earlier_", ""))
        captures = f"{first[0]} ({first[1]:.1f}) / {later[0]} ({later[1]:.1f})"
    return [
        *shape_cells(sides),
        *map(speed, (trl, perl, graphs)),
        ratio(sides, "tokens_s", more_is_better=True),
        shown(best, "limit_tokens_s"),
        shown(best, "limit_share"),
        *(shown(row, "step_ms") for row in (trl, perl, graphs)),
        captures,
        *(shown(row, "peak_gib") for row in (trl, perl, graphs)),
    ]


def step_cells(sides: dict[str, dict[str, Any]]) -> list[str]:
    ordered = [sides.get(name) for name in ("trl", "perl", "perl_graphs")]
    times = [shown(row, "wall_s", "rollout_s", "update_s") for row in ordered]
    return [*shape_cells(sides), *times, ratio(sides, "wall_s", False), *(shown(row, "peak_gib") for row in ordered)]


def update_cells(sides: dict[str, dict[str, Any]]) -> list[str]:
    ordered = [sides.get(name) for name in ("trl", "perl")]
    times = [shown(row, "old_logps_s", "update_s") for row in ordered]
    return [*shape_cells(sides), *times, ratio(sides, "update_s", False), *(shown(row, "peak_gib") for row in ordered)]


def make_parser() -> argparse.ArgumentParser:
    def positive(text: str) -> float:
        if not float(text) > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return float(text)

    def count(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return int(text)

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    real = ["qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-1.5b"]
    parser.add_argument("--minutes", type=positive, default=10, help="what does not fit is skipped, and listed")
    parser.add_argument("--cases", nargs="+", choices=KINDS, default=KINDS, help="in this order")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=real, help="in this order")
    parser.add_argument("--rows", nargs="+", type=count, default=[64, 8, 1], help="each 1 to 8, or a multiple of 8")
    parser.add_argument("--new_tokens", nargs="+", type=count, default=[256, 2048])
    parser.add_argument("--merge_adapter", choices=SWITCH, default="auto", help="rollout.merge_adapter")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="in this order; of rollouts and steps")
    parser.add_argument("--skip_tests", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("outputs/accelerator.jsonl"), help="appended to")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=positive, default=CASE_LIMIT_S, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    if options.case:
        fields = json.loads(options.case)
        answer({"kind": "machine", **machine()})
        case = Case(**(fields | {"shapes": tuple(map(tuple, fields["shapes"]))}))
        CaseRun(case, options.seconds, options.merge_adapter, options.sides, answer).run()
        return 0
    if wrong := [rows for rows in options.rows if rows > GROUP and rows % GROUP]:
        return _refuse(f"--rows {wrong[0]}: completions come in groups of {GROUP}; write 1 to 8, or a multiple of 8")
    if max(options.new_tokens) > 3072:
        return _refuse(f"--new_tokens {max(options.new_tokens)}: the models have 4,096 positions; write at most 3072")
    if device.detect().kind == "cpu" and set(options.models) != {"tiny"}:
        return _refuse("no accelerator is seen here; write --models tiny to see the benchmark at work on a CPU")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was measured is shown
    return Command(options).run()


def _refuse(reason: str) -> int:
    print(f"benchmarks.accelerator: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
