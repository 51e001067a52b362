"""The quickstart: score the base model, train an adapter with GRPO and AQN, score again, side by side.

    perl/eval.py  ->  accelerate launch -m perl.train  ->  perl/eval.py --adapter  ->  python -m perl report
    ->  table, the path of the report, and JSON as the last line

Each stage is the command that a user would type, in its own process, with its output in a log of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perl.config.parser import Parser
from perl.config.types import NonNegativeInt
from perl.errors import report_errors
from perl.records import PROGRESS
from perl.tools.quickstart.base import BASE_FOLDER, GREEDY, SAMPLED
from perl.tools.quickstart.problems import DATA_FOLDER

ROOT = Path(__file__).resolve().parents[3]
HELD_OUT = DATA_FOLDER / "test.jsonl"
Engine = Literal["hf", "vllm"]
PROGRESS_STEP = re.compile(rf"{PROGRESS}step (\d+)/")
SHOWN_STEPS = 10
"""Every step is logged, for the report's curves; the screen shows every tenth."""


class StageError(Exception):
    """A stage that ended with another exit code than 0: which, and where its log is."""


@dataclass(frozen=True, slots=True)
class Score:
    """Accuracy on the held-out problems as a fraction, with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f}  [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True, slots=True)
class Scores:
    sampled: Score
    """avg@8: eight completions of each problem at temperature 1."""
    greedy: Score


def quickstart(seed: int, engine: Engine, folder: Path, console: Console) -> dict[str, float | int]:
    """Run the stages and show the table; returns what the JSON line holds. `folder` gets everything."""
    started = time.monotonic()
    console.print(f"[1/4] score the base model on held-out problems, {SAMPLED.n} samples each and greedily")
    before = evaluate(folder / "before", engine, seed, console)
    console.print("[2/4] train a LoRA adapter with GRPO and AQN (recipes/quickstart.yaml)")
    adapter = train(folder / "train", seed, console)
    console.print("[3/4] score the base model with the adapter, on the same problems")
    after = evaluate(folder / "after", engine, seed, console, adapter)
    console.print("[4/4] write the report (python -m perl report)")
    page = report(folder)
    console.print(comparison(before, after))
    console.print(f"report: {page}", highlight=False, markup=False, soft_wrap=True)
    return {
        "before": round(before.sampled.value, 4),
        "after": round(after.sampled.value, 4),
        "greedy_before": round(before.greedy.value, 4),
        "greedy_after": round(after.greedy.value, 4),
        "seed": seed,
        "wall_s": round(time.monotonic() - started, 1),
    }


def evaluate(folder: Path, engine: Engine, seed: int, console: Console, adapter: Path | None = None) -> Scores:
    """Score the base model, or the base with `adapter`: sampled and greedy at the same time, a core for each."""
    command = [sys.executable, str(ROOT / "perl" / "eval.py"), "--model", str(BASE_FOLDER)]
    command += ["--dataset", str(HELD_OUT), "--seed", str(seed)]
    command += ["--adapter", str(adapter)] if adapter else []
    command += ["--use_vllm"] if engine == "vllm" else []
    running = []
    for name, sampling in (("sampled", SAMPLED), ("greedy", GREEDY)):
        flags = {"n": sampling.n, "temperature": sampling.temperature, "max_new_tokens": sampling.max_new_tokens}
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        running.append(start([*command, *words, "--result_dir", str(folder / name)], folder / f"{name}.log"))
    with console.status("evaluating"):
        for process, _ in running:
            process.wait()
    for process, log in running:
        finish(process, log, "evaluation")
    scores = Scores(sampled=read_score(folder / "sampled"), greedy=read_score(folder / "greedy"))
    console.print(f"      avg@{SAMPLED.n} {scores.sampled}  greedy {scores.greedy}", highlight=False, markup=False)
    return scores


def train(folder: Path, seed: int, console: Console) -> Path:
    """Train by recipes/quickstart.yaml and return the adapter's folder."""
    command = [sys.executable, "-u", "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(ROOT / "scripts" / "accelerate" / "single.yaml"), "-m", "perl.train"]
    command += ["--recipe", str(ROOT / "recipes" / "quickstart.yaml"), "--config.common.seed", str(seed)]
    process, log = start([*command, "--config.training.output_dir", str(folder)], folder.with_suffix(".log"), pipe=True)
    assert process.stdout is not None
    with log.open("a", encoding="utf-8") as file:
        for line in process.stdout:
            file.write(line)
            if (found := PROGRESS_STEP.match(line)) and int(found[1]) % SHOWN_STEPS == 0:
                console.print("      " + line.removeprefix(PROGRESS).strip(), highlight=False, soft_wrap=True)
    finish(process, log, "training")
    return folder / "adapter"


def report(folder: Path) -> Path:
    """One page of the training and of all evaluations; returns its path."""
    process, log = start([sys.executable, "-m", "perl", "report", str(folder)], folder / "report.log")
    finish(process, log, "the report")
    return folder / "report.html"


def start(command: Sequence[str], log: Path, *, pipe: bool = False) -> tuple[subprocess.Popen[str], Path]:
    """Start a stage in the repository's root. Its output goes to `log`, or to the caller with `pipe`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("w", encoding="utf-8") as file:
        output: int | IO[str] = subprocess.PIPE if pipe else file
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return process, log


def finish(process: subprocess.Popen[str], log: Path, stage: str) -> None:
    """Wait for a stage; raise a StageError when it failed."""
    if code := process.wait():
        raise StageError(f"{stage} ended with exit code {code}; read {log}")


def read_score(result_dir: Path) -> Score:
    """The accuracy in the summary.json that perl/eval.py left."""
    summary = json.loads((result_dir / HELD_OUT.stem / "summary.json").read_text(encoding="utf-8"))
    return Score(**summary["metrics"]["accuracy"])


def comparison(before: Scores, after: Scores) -> Table:
    table = Table(title=escape("Accuracy on held-out problems in %  [95 % confidence interval]"))
    for heading in ("", "before", "after", "points"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, old, new in (
        (f"avg@{SAMPLED.n}, temperature 1", before.sampled, after.sampled),
        ("greedy", before.greedy, after.greedy),
    ):
        table.add_row(name, escape(str(old)), escape(str(new)), f"{100 * (new.value - old.value):+.1f}")
    return table


def main() -> int:
    parser = Parser(prog="python -m perl.tools.quickstart.run", description="Train and evaluate a tiny model.")
    parser.add_argument("--seed", type=NonNegativeInt, default=1, help="of training and evaluation")
    parser.add_argument("--engine", type=Engine, default="hf", help="what evaluates: transformers or vLLM")
    parser.add_argument("--output_dir", type=str, default=None, help="default: outputs/quickstart_<seed>_<date>")
    with report_errors():
        args = parser.parse_args()
        default = ROOT / "outputs" / f"quickstart_{args.seed}_{time.strftime('%Y%m%d_%H%M%S')}"
        folder = Path(args.output_dir).absolute() if args.output_dir else default
        console = Console()
        console.print(f"everything goes to {folder}", highlight=False, soft_wrap=True)
        try:
            result = quickstart(int(args.seed), args.engine, folder, console)
        except StageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        line = json.dumps(result)
        (folder / "result.json").write_text(line + "\n", encoding="utf-8")
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
