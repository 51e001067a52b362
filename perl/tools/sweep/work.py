"""The work of a sweep, one run after the other: the base's score, then each run trained and scored.

What is finished is not repeated, and an interrupted training goes on from its last checkpoint. The first seed of all
values comes before the second one, so that there is something to compare early.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from perl import device
from perl.base.redact import hide
from perl.reports.methods import GREEDY, SAMPLED, Run
from perl.tools.launch import accelerate_config, visible_device
from perl.tools.stages import ROOT, StageError, Where, follow, run_evaluations, say

LAST_LINES = 5
"""Of a log, shown when its stage failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """How the runs of a sweep are trained and scored."""

    program: str
    """perl.train or perl.sft."""
    argv: Callable[[Run], list[str]]
    """Flags of a run's training."""
    processes: int
    kind: device.Kind
    evaluator: Sequence[str]
    """Flags of perl/eval.py but for the model, --n, --temperature and --result_dir."""
    n: int
    where: Where
    """Of trainings and evaluations."""
    console: Console

    @property
    def where_trained(self) -> Where:
        """A training of one process sees one device, and its workers the others."""
        hidden = visible_device(self.kind, self.processes)
        return replace(self.where, variables={**self.where.variables, **hidden})


def work(shop: Workshop, runs: Sequence[Run], bases: Mapping[str, Path], after_each: Callable[[], object]) -> None:
    """Do what is left to do. A run that fails is noted as such, with its last lines on the screen; the others go on.

    Args:
        bases: model -> folder of its scores.
        after_each: called after each run.

    Raises:
        StageError: a base could not be scored.
    """
    for model, folder in bases.items():
        say(shop.console, f"base {model}: score")
        score(shop, ["--model", model], folder)
    ordered = sorted(runs, key=lambda run: run.seed)
    for number, run in enumerate(ordered, start=1):
        place = f"[{number}/{len(ordered)}] {run.name}"
        if run.state.finished:
            say(shop.console, f"{place}: finished before")
            continue
        say(shop.console, f"{place}: train and score")
        try:
            one(shop, run)
        except StageError as error:
            run.note(trained=run.state.trained, error=str(error))
            say(shop.console, f"{place}: failed: {error}")
        after_each()


def one(shop: Workshop, run: Run) -> None:
    if not run.state.trained:
        train(shop, run)
        run.note(trained=True)
    score(shop, trained_flags(run), run.folder)
    run.note(trained=True, finished=True)


def train(shop: Workshop, run: Run) -> None:
    """Train `run`, or go on with it: by the launch script's supervisor, which passes signals on to all processes."""
    flags = [*shop.argv(run), "--config.training.resume_from_checkpoint", "auto"]
    command = [sys.executable, "-u", "-m", "perl.tools.supervise", str(run.train)]
    command += ["--config_file", accelerate_config(shop.kind, shop.processes), "--num_processes", str(shop.processes)]
    command += ["-m", shop.program, *flags, "--config.training.output_dir", str(run.train)]
    log = run.folder / "train.log"
    with explained(shop, log):
        follow(command, log, shop.console, shop.where_trained)


def trained_flags(run: Run) -> list[str]:
    """What the evaluator scores of a finished training: its model, or the adapter on the base that it was trained on,
    which is the training's own where another adapter was merged into it first."""
    if (run.train / "model").is_dir():
        return ["--model", str(run.train / "model")]
    base = run.train / "base"
    return ["--model", str(base) if base.is_dir() else run.model, "--adapter", str(run.train / "adapter")]


def score(shop: Workshop, model: Sequence[str], folder: Path) -> None:
    """Score a model, sampled and greedily: on a CPU at the same time, a core for each. The evaluator goes on with what
    an interrupted one has left."""
    if all((folder / kind / "summary.json").is_file() for kind in (SAMPLED, GREEDY)):
        return
    flags = shop.evaluator if "--adapter" in model else without(shop.evaluator, "--adapter_mode")
    evaluator = [sys.executable, str(ROOT / "perl" / "eval.py"), *model, *flags]
    commands = {
        folder / f"{kind}.log": [*evaluator, "--n", n, "--temperature", heat, "--result_dir", str(folder / kind)]
        for kind, n, heat in ((SAMPLED, str(shop.n), "1.0"), (GREEDY, "1", "0.0"))
    }
    with explained(shop, *commands):
        run_evaluations(commands, shop.console, shop.where, apart=shop.kind != "cpu")


def without(words: Sequence[str], flag: str) -> list[str]:
    """The words but for a flag and its value, written as one word or as two."""
    before = ["", *words]
    return [word for word, last in zip(words, before, strict=False) if word.partition("=")[0] != flag != last]


@contextlib.contextmanager
def explained(shop: Workshop, *logs: Path) -> Iterator[None]:
    """Show the last lines of a stage that fails."""
    try:
        yield
    except StageError as error:
        log = next((log for log in logs if str(log) in str(error)), logs[0])
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]:
            say(shop.console, f"      {hide(line)}")
        raise


def surroundings(kind: device.Kind, processes: int, kept_open: int) -> Where:
    """Stages run in the user's own folder, where relative paths lead, and see the hub as the user does."""
    variables = {"PERL_NUM_PROCESSES": str(processes), **device.start_environment(kind)}
    return Where(folder=Path.cwd(), variables=variables, kept_open=(kept_open,))
