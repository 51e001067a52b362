"""What a training loses when it is killed again and again and the same command goes on.

Runs of 40 steps of the quickstart's recipe, with checkpoints every 3 steps in the middle of generation windows and
between two logs, validation and AQN, are killed with SIGKILL while the model loads, in a rollout, in an update, while
a checkpoint is written and in a validation; a tenth of the kills hit one of two processes that train together, whose
launcher must end the other. The same command goes on each time; where a run ends before all kills are done another one
begins. Each is compared with an undisturbed run of as many processes: the adapter bit for bit, metrics.jsonl but for
times, the prompts of each step, and what the last checkpoint says of the stream: its place, and the batches ahead.

With `pool` two workers draw, two generation batches ahead. Two kills of three hit one of them, at a random moment after
a log, the others the command. The undisturbed run has one worker.

With `environment` each conversation has three turns, between which it is answered after 0.2 s, and every kill comes
while some are: without validation. With both, the workers are those that converse.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks._nodes import alive, children, workers_below
from perl.base.files import SAVING
from perl.scoring.results import METRICS

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S, GONE_WITHIN_S = 240.0, 60.0
STEPS, VALIDATE, LOG = 40, 8, 2
TIMES = ("timing/", "perf/", "time", "step_time", "train_runtime", "train_samples_per", "train_steps_per",
         "pool/trainer_waited", "pool/workers_idle", "pool/tokens_per_s", "pool/restarts",
         "pool/queue", "pool/trainer_ms")  # fmt: skip
SAMPLERS = ("rollout/logp_", "aqn/kl")
"""With an environment, and without workers, whose pieces are in step: which rows are decoded together, on which a
log-probability's last bits depend, follows its time."""
REWARD = """import json, os

def prompts(prompts, trainer_state, **columns):
    row = [trainer_state.global_step, int(os.environ.get("RANK", "0")), [str(each) for each in prompts]]
    with open(os.environ["KILLS_PROMPTS"], "a") as file:
        file.write(json.dumps(row) + "\\n")
    return [0.0] * len(prompts)
"""
ENVIRONMENT = """import os, time

class Asks:
    def reset(self, row):
        self.turns = 0
        return row["prompt"]

    def step(self, message):
        self.turns += 1
        if self.turns == 3:
            return None
        with open(os.environ["KILLS_ANSWERED"], "a") as file:
            file.write(".")
        time.sleep(0.2)
        return [{"role": "user", "content": f"Check {self.turns} times."}]
"""
PHASES = ("load", "rollout", "update", "saving", "validation")
TOOL = "tool"
"""In the place of a phase: while the environment answers."""
WORKER = "worker"
"""In the place of a phase: a worker is killed, and the command goes on."""
LAG, PIECE = 2, 8


class Training:
    """A run, one command after the other."""

    def __init__(self, folder: Path, processes: int, workers: int, environment: bool = False):
        self.folder, self.processes, self.workers, self.environment = folder, processes, workers, environment
        self.prompts_file, self.answered_file = folder.with_suffix(".prompts"), folder.with_suffix(".answered")
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        reward = self.folder.parent / "prompts.py"
        reward.write_text(REWARD)
        settings = {
            "training.output_dir": self.folder,
            "training.resume_from_checkpoint": "auto",
            "training.max_steps": STEPS,
            "training.per_device_train_batch_size": 32 // self.processes,
            "training.steps_per_generation": 2,
            "training.save_strategy": "steps",
            "training.save_steps": 3,
            "training.save_total_limit": 2,
            "training.logging_steps": LOG,
            "dataset.example_numbers": 96,
            "reward.functions": json.dumps(["accuracy", f"{reward}:prompts"]),
        }
        if self.environment:
            asks = self.folder.parent / "asks.py"
            asks.write_text(ENVIRONMENT)
            settings |= {"environment.factory": f"{asks}:Asks", "environment.max_turns": 4}
            settings |= {"training.max_completion_length": 96}
        else:
            settings |= {
                "validation.datasets": json.dumps([str(ROOT / "assets" / "quickstart-data" / "test.jsonl")]),
                "validation.max_samples": 32,
                "validation.every_steps": VALIDATE,
                "validation.save_best": "true",
            }
        if self.workers:
            settings |= {"rollout.workers": self.workers, "rollout.lag": LAG, "rollout.piece_size": PIECE}
        words = ["--recipe", str(ROOT / "recipes" / "quickstart.yaml")]
        words += [word for name, value in settings.items() for word in (f"--config.{name}", str(value))]
        command = [sys.executable, "-m", "perl.train"]
        if self.processes > 1:
            launcher = ["-m", "perl.tools.accelerate_launch", "--config_file", ROOT / "scripts/accelerate/cpu.yaml"]
            command = [sys.executable, *map(str, launcher), "--num_processes", str(self.processes), "-m", "perl.train"]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "KILLS_PROMPTS": str(self.prompts_file),
            "KILLS_ANSWERED": str(self.answered_file),
        }
        with self.folder.with_suffix(".log").open("a") as log:
            self.process = subprocess.Popen([*command, *words], cwd=ROOT, env=environment, stdout=log, stderr=log)

    def running(self) -> bool:
        """Whether a command is under way. One that has failed without being killed is an error."""
        if self.process is None:
            return False
        if (code := self.process.poll()) not in (None, 0):
            raise RuntimeError(f"the command ended with {code}; see {self.folder}.log")
        return code is None

    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl without times."""
        lines = (self.folder / METRICS).read_text().splitlines() if (self.folder / METRICS).exists() else []
        left_out = TIMES + SAMPLERS if self.environment and not self.workers else TIMES
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(left_out)} for line in lines]

    def asked(self) -> dict[tuple[int, int], list[str]]:
        """The prompts of each step and process, those of its last attempt."""
        found = {}
        for line in self.prompts_file.read_text().splitlines():
            try:
                step, rank, prompts = json.loads(line)
                found[step, rank] = prompts
            except ValueError:  # torn by a kill
                continue
        return found

    def adapter(self) -> bytes:
        return (self.folder / "adapter" / "adapter_model.safetensors").read_bytes()

    def stream(self) -> Any:
        """Of the last checkpoint: the stream's place, and the first position of each batch that was drawn ahead."""
        last = max(self.folder.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
        states = [torch.load(file)["rollout"] for file in sorted(last.glob("process_state_*.pt"))]
        return last.name, [(state["stream"], [batch["first"] for batch in state["ahead"]]) for state in states]

    def finish(self) -> None:
        if self.process is None:
            self.start()
        deadline = time.monotonic() + PATIENCE_S
        while self.running():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no end after {PATIENCE_S:.0f} s; see {self.folder}.log")
            time.sleep(0.1)


def wait_for(training: Training, phase: str, rng: random.Random) -> bool:
    """Until a random moment of `phase`; False where the command ends before."""
    metrics, load_s = training.folder / METRICS, 12.0
    signs: dict[str, Callable[[], Any]] = {
        "load": lambda: 0,
        "rollout": lambda: _size(metrics),
        WORKER: lambda: _size(metrics),
        TOOL: lambda: _size(training.answered_file) > answers,
        "update": lambda: _size(training.prompts_file),
        "saving": lambda: any((training.folder / SAVING).glob("checkpoint-*")),
        "validation": lambda: _logged(metrics) % VALIDATE == 0 and _size(metrics),
    }
    answers = _size(training.answered_file) + rng.randrange(600)  # of 2,560 in a run
    sign = signs[phase]
    before, deadline = sign(), time.monotonic() + PATIENCE_S
    while phase != "load" and (sign() == before or not sign()):
        if not training.running():
            return False
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing of {phase} for {PATIENCE_S:.0f} s; see {training.folder}.log")
        time.sleep(0.002)
    time.sleep(rng.uniform(0, {"load": load_s, "saving": 0.05, "validation": 0.4, WORKER: 2.0}.get(phase, 0.2)))
    return training.running()


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _logged(metrics: Path) -> int:
    """The step that was logged last; 1 where there is none."""
    try:
        return json.loads(metrics.read_text().splitlines()[-1])["step"] or 1
    except (OSError, ValueError, IndexError):
        return 1


def kill(training: Training, rng: random.Random) -> int:
    """Of the command, or of one of its processes; how many processes outlive it."""
    assert training.process is not None
    below = children(training.process.pid)
    pid = rng.choice(below) if training.processes > 1 and below else training.process.pid
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + GONE_WITHIN_S
    while training.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    while any(map(alive, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = sum(map(alive, below)) + (training.process.poll() is None)
    training.process = None
    return left


def kill_worker(training: Training, rng: random.Random) -> list[int]:
    """Returns all processes below the command."""
    assert training.process is not None
    while training.running():
        if workers := workers_below([training.process.pid]):
            below = children(training.process.pid)
            os.kill(rng.choice(workers), signal.SIGKILL)
            return below
        time.sleep(0.05)
    return []


def disturb(
    folder: Path, processes: int, workers: int, kills: int, rng: random.Random, environment: bool = False
) -> tuple[Counter[str], list[Training], int]:
    """Kill so often; kills by phase, the runs, brought to their end, and how many processes outlived a kill or the
    end."""
    done: Counter[str] = Counter()
    runs = [Training(folder / f"disturbed-{processes}-0", processes, workers, environment)]
    left = 0
    seen: set[int] = set()
    while done.total() < kills:
        training = runs[-1]
        if not training.running():
            if training.process is not None:  # it has ended
                runs.append(Training(folder / f"disturbed-{processes}-{len(runs)}", processes, workers, environment))
                training = runs[-1]
            training.start()
        of_command = done.total() - done[WORKER]
        phase = TOOL if environment else PHASES[of_command % len(PHASES)]
        sign = phase
        if workers and done[WORKER] < 2 * (of_command + 1):
            phase, sign = WORKER, TOOL if environment else WORKER
        if wait_for(training, sign, rng):
            if phase == WORKER:
                seen.update(kill_worker(training, rng))
            else:
                left += kill(training, rng)
            done[phase] += 1
            print(f"kill {done.total()} of {kills}, {processes} process(es): {phase}, {_where(training)}", flush=True)
    for training in runs:
        training.finish()
    return done, runs, left + sum(map(alive, seen))


def _where(training: Training) -> str:
    rows = training.rows()
    return f"step {rows[-1]['step']} of {STEPS}" if rows else "before the first log"


def compare(quiet: Training, runs: list[Training]) -> Counter[str]:
    """Sums over the runs."""
    found: Counter[str] = Counter()
    expected, asked = quiet.rows(), Counter(prompt for row in quiet.asked().values() for prompt in row)
    for training in runs:
        rows, prompts = training.rows(), Counter(prompt for row in training.asked().values() for prompt in row)
        found["runs"] += 1
        found["adapters_equal"] += training.adapter() == quiet.adapter()
        found["rows"] += len(rows)
        found["rows_different"] += sum(a != b for a, b in zip(rows, expected, strict=False))
        found["rows_different"] += abs(len(rows) - len(expected))
        found["prompts_lost"] += (asked - prompts).total()
        found["prompts_twice"] += (prompts - asked).total()
        found["steps_of_other_prompts"] += training.asked() != quiet.asked()
        found["streams_equal"] += training.stream() == quiet.stream()
    return found


def measure(folder: Path, kills: int, seed: int, pool: bool, environment: bool) -> dict[str, Any]:
    rng, of_ranks = random.Random(seed), 0 if pool else kills // 10
    total: Counter[str] = Counter()
    done: dict[str, int] = {}
    for processes, count in ((1, kills - of_ranks), (2, of_ranks)):
        if count:
            quiet = Training(folder / f"quiet-{processes}", processes, int(pool), environment)
            quiet.finish()
            killed, runs, left = disturb(folder, processes, 2 * int(pool), count, rng, environment)
            total += compare(quiet, runs) + Counter(processes_left=left)
            done |= {f"{phase}_{processes}": number for phase, number in killed.items()}
    names = ("rows_different", "prompts_lost", "prompts_twice", "steps_of_other_prompts", "processes_left")
    return {"kills": kills, "of_one_rank_of_two": of_ranks, "phases": done, "steps": STEPS} | {
        name: total[name] for name in ("runs", "adapters_equal", "streams_equal", "rows", *names)
    }
