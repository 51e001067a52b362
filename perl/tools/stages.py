"""Stages of a longer run: each is the command that a user would type, in its own process, with its output in a log."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Literal

from rich.console import Console

from perl import device
from perl.base.errors import EXIT_NOT_ALL_GENERATED, UserError
from perl.base.files import lock_now, open_lock
from perl.records import PROGRESS, Sampling
from perl.scoring.results import read_summary
from perl.scoring.statistics import Estimate

ROOT = Path(__file__).resolve().parents[2]
Engine = Literal["hf", "vllm"]
STEP = re.compile(rf"(?:{PROGRESS})?step (\d+)/(\d+) ")
WATCH = 'read ended || kill -s TERM -- "-$0"'
"""Of a shell: what ends without a word was killed, and its stage, the process group $0, is to end too."""
SHOWN_STEPS = 10
"""Every step is logged, for the report's curves; the screen shows every tenth, and the last."""


LOCK, STAGE_LOCK = "run.lock", "stage.lock"
AGAIN = "the same command goes on from here"


class StageError(Exception):
    """A stage that ended with another exit code than 0: which, and where its log is."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Accuracies on the held-out problems."""

    sampled: Estimate
    """avg@n: n completions of each problem at temperature 1."""
    greedy: Estimate
    more: Mapping[str, Estimate] = field(default_factory=dict)
    """Greedy accuracy on `Evaluation.more`, by the name of the data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How all stages of one run are scored."""

    model: Path
    held_out: Path
    """File of problems; its stem is the data set's name in the results."""
    sampled: Sampling
    greedy: Sampling
    engine: Engine
    seed: int
    more: tuple[Path, ...] = ()
    """Files of other problems, which are scored greedily alone."""
    dp_size: int = 1
    """Processes that share the sampled completions, which are several times as many as the greedy ones."""
    flags: tuple[str, ...] = ()
    """Further ones of perl/eval.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What a stage runs in."""

    folder: Path = ROOT
    variables: Mapping[str, str] = field(default_factory=lambda: {"HF_HUB_OFFLINE": "1"})
    """Of its environment, over this process's own."""
    kept_open: tuple[int, ...] = ()
    """File descriptors that the stage keeps open as long as it runs, such as that of a lock."""


HERE = Where()


def evaluate(
    how: Evaluation, folder: Path, console: Console, adapter: Path | None = None, where: Where = HERE
) -> Scores:
    """Score the base model, or the base with `adapter`: sampled and greedy at the same time, but for vLLM on an
    accelerator, where each engine takes nearly all of the first device's memory. The evaluator goes on with what an
    interrupted one has left in `folder`."""
    command = [sys.executable, str(ROOT / "perl" / "eval.py"), "--model", str(how.model)]
    command += ["--seed", str(how.seed), *how.flags]
    command += ["--adapter", str(adapter)] if adapter else []
    command += ["--use_vllm"] if how.engine == "vllm" else []
    commands = {}
    for name, sampling, more, dp_size in (
        ("sampled", how.sampled, (), how.dp_size),
        ("greedy", how.greedy, how.more, 1),
    ):
        flags = {
            "dp_size": dp_size,
            "n": sampling.n,
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
        }
        flags["dataset"] = ",".join(map(str, (how.held_out, *more)))
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        commands[folder / f"{name}.log"] = [*command, *words, "--result_dir", str(folder / name)]
    run_evaluations(commands, console, where, apart=how.engine == "vllm" and device.detect().kind != "cpu")
    scores = read_scores(how, folder)
    shown = [f"avg@{how.sampled.n} {scores.sampled}", f"greedy {scores.greedy}"]
    shown += [f"{name} greedy {score}" for name, score in scores.more.items()]
    say(console, "      " + "  ".join(shown))
    return scores


def run_evaluations(commands: Mapping[Path, Sequence[str]], console: Console, where: Where, *, apart: bool) -> None:
    """Run commands of perl/eval.py, each with its log: at the same time, or `apart`, one after the other. Rows without
    a completion count as wrong, and a line says so. Raises a StageError where one fails otherwise."""
    with console.status("evaluating"):
        for together in [{log: command} for log, command in commands.items()] if apart else [commands]:
            codes = run_at_once(together, "evaluation", where, (0, EXIT_NOT_ALL_GENERATED))
            for log in [log for log, code in codes.items() if code]:
                say(console, f"      rows without a completion count as wrong; read {log}")


def train(module: str, recipe: Path, flags: Sequence[str], folder: Path, console: Console, where: Where = HERE) -> Path:
    """Run perl.train or perl.sft by `recipe` and return the adapter's folder; `folder` is the run's."""
    command = [sys.executable, "-u", "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(ROOT / "scripts" / "accelerate" / "single.yaml"), "-m", module]
    command += ["--recipe", str(recipe), *flags, "--config.training.output_dir", str(folder)]
    log = folder.with_suffix(".log")
    where = replace(where, variables={**device.start_environment(device.detect().kind), **where.variables})
    follow(command, log, console, where)
    return folder / "adapter"


def follow(command: Sequence[str], log: Path, console: Console, where: Where) -> None:
    """Run the command of a training, whose output `log` keeps, with some of its steps on the screen."""
    with start(command, log, pipe=True, append=True, where=where) as process, log.open("a", encoding="utf-8") as file:
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            file.flush()  # for who reads it meanwhile
            if (step := STEP.match(line)) and (int(step[1]) % SHOWN_STEPS == 0 or step[1] == step[2]):
                say(console, "      " + line.removeprefix(PROGRESS).strip())
        finish(process, log, "training")


def say(console: Console, text: str) -> None:
    """Print a line as it is: a path may hold what would be markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def report(folders: Sequence[Path], output: Path) -> Path:
    """One page of a training and of evaluations, from the folders that hold them; returns its path, `output`."""
    command = [sys.executable, "-m", "perl", "report", *map(str, folders), "--output", str(output)]
    run(command, output.with_name("report.log"), "the report")
    return output


def run(command: Sequence[str], log: Path, stage: str, where: Where = HERE) -> None:
    """Run a stage to its end; raise a StageError when it failed."""
    with start(command, log, where=where) as process:
        finish(process, log, stage)


def run_at_once(
    commands: Mapping[Path, Sequence[str]], stage: str, where: Where = HERE, accepted: Sequence[int] = (0,)
) -> dict[Path, int]:
    """Run commands, each with its log, at the same time; returns their exit codes, by log. Raises a StageError where
    one is not `accepted`."""
    with contextlib.ExitStack() as stages:
        running = {log: stages.enter_context(start(command, log, where=where)) for log, command in commands.items()}
        for process in running.values():
            process.wait()
    for log, process in running.items():
        finish(process, log, stage, accepted)
    return {log: process.returncode for log, process in running.items()}


@contextlib.contextmanager
def alone(folder: Path, flag: str, console: Console) -> Iterator[int]:
    """Make the folder and hold its locks; yields a file descriptor that stages keep open, so that a command which
    follows one that was killed waits for the stage that this left, which is saving its checkpoint.

    Args:
        flag: where the user has named the folder.

    Raises:
        UserError: another command works in the folder, or it can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = open_lock(folder / LOCK), open_lock(folder / STAGE_LOCK)
    except OSError as error:
        raise UserError(f"{flag} {folder}: {error.strerror}; write another folder") from error
    with files[0] as run_lock, files[1] as stage_lock:
        try:
            lock_now(run_lock)
        except BlockingIOError as error:
            raise UserError(f"{flag} {folder}: another command works in it; wait until it has ended") from error
        try:
            lock_now(stage_lock)
        except BlockingIOError:
            console.print("waiting for what an interrupted command has left running ...")
            fcntl.flock(stage_lock, fcntl.LOCK_EX)
        yield stage_lock.fileno()


@contextlib.contextmanager
def start(
    command: Sequence[str], log: Path, *, pipe: bool = False, append: bool = False, where: Where = HERE
) -> Iterator[subprocess.Popen[str]]:
    """Start a stage. Its output goes to `log`, or to the caller with `pipe`; with `append` what the log holds stays,
    and a line stands between.

    What still runs when the block ends, as after Ctrl-C, gets SIGTERM, the processes that it started too, and is waited
    for: a training saves a checkpoint, and nothing goes on in a folder that the next attempt takes. A shell that waits
    for this process sends the same signal when it is killed: a launcher would not pass on what the kernel sends at the
    death of its parent.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, **where.variables}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with contextlib.ExitStack() as at_end:
        with signals_held(), log.open("a" if append else "w", encoding="utf-8") as file:
            if file.tell():
                file.write(f"---- {time.strftime('%Y-%m-%d %H:%M:%S')}: started again\n")
                file.flush()
            output: int | IO[str] = subprocess.PIPE if pipe else file
            process = subprocess.Popen(
                command,
                cwd=where.folder,
                env=environment,
                pass_fds=where.kept_open,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",  # a library may print what is no text
                start_new_session=True,
            )
            watch = ["sh", "-c", WATCH, str(process.pid)]
            watcher = subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True, text=True)
            at_end.callback(end, process, watcher, log)
        yield process


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """SIGTERM and Ctrl-C take effect when the block has ended: while a process is started, nothing knows of it yet that
    would end it. A signal that this process ignores stays so, for the process that is started too."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    held = {number: handler for number, handler in before.items() if callable(handler)}
    for number in held:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for number in received[:1]:
            signal.raise_signal(number)


def end(process: subprocess.Popen[str], watcher: subprocess.Popen[str], log: Path) -> None:
    """End what still runs of a stage, and wait for it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        if process.stdout is not None:
            with log.open("a", encoding="utf-8") as file:  # up to the end of the last process that can write to it
                file.write(process.stdout.read())
        process.wait()
    watcher.communicate("ended\n")


def finish(process: subprocess.Popen[str], log: Path, stage: str, accepted: Sequence[int] = (0,)) -> None:
    """Wait for a stage; raise a StageError when it failed."""
    if (code := process.wait()) not in accepted:
        raise StageError(f"{stage} ended with exit code {code}; read {log}")


def read_scores(how: Evaluation, folder: Path) -> Scores:
    """What an evaluation left in `folder`."""
    sampled, greedy = (read_score(folder / name, how.held_out.stem) for name in ("sampled", "greedy"))
    return Scores(sampled, greedy, {file.stem: read_score(folder / "greedy", file.stem) for file in how.more})


def read_score(result_dir: Path, dataset: str) -> Estimate:
    """The accuracy in the summary.json that perl/eval.py left."""
    summary = read_summary(result_dir / dataset, hint="delete it, and start the same command again")
    return Estimate(**summary["metrics"]["accuracy"])
