"""perl's evaluator as a user runs it: the command, its seconds, and what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perl.config.evaluation import EvalConfig, parse
from perl.evaluation.datasets import load_problem_sets
from perl.prompts import ChatTemplate
from perl.records import Sample

ROOT = Path(__file__).resolve().parents[2]
CACHE_GIB = 1
"""For keys and values of each engine, on every side."""

Flags = dict[str, Any]


def environment() -> dict[str, str]:
    """What every engine runs with, on every side: one thread a process, the same cache."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


@dataclass(frozen=True)
class Run:
    """One evaluation."""

    wall_s: float
    """Of the whole command."""
    generation: dict[str, Any]
    """Speed after start-up, as in summary.json."""
    records: list[dict[str, Any]]


def words(flags: Flags) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))] + ["--use_vllm"]


def rows_of(flags: Flags) -> Sequence[Sample]:
    """The rows that the command makes of these flags."""
    from transformers import AutoTokenizer

    config: EvalConfig = parse(words(flags))
    (problem_set,) = load_problem_sets(config, ChatTemplate(AutoTokenizer.from_pretrained(config.model)))
    return problem_set.samples


def evaluate(flags: Flags, result_dir: Path) -> Run:
    """Run perl/eval.py with vLLM into a new folder."""
    command = [sys.executable, str(ROOT / "perl" / "eval.py"), *words(flags), "--result_dir", str(result_dir)]
    began = time.perf_counter()
    run_logged(command, result_dir.with_suffix(".log"))
    wall = time.perf_counter() - began
    (dataset,) = json.loads((result_dir / "summary.json").read_text(encoding="utf-8"))
    lines = (result_dir / dataset / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    summary = json.loads((result_dir / dataset / "summary.json").read_text(encoding="utf-8"))
    return Run(wall, summary["generation"], [json.loads(line) for line in lines])


def run_logged(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command in the repository's root. Its output is shown only when it fails."""
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.call(command, cwd=ROOT, env=env or environment(), stdout=file, stderr=subprocess.STDOUT)
    if code:
        print(log.read_text(encoding="utf-8")[-3000:], file=sys.stderr)
        raise SystemExit(f"error: {' '.join(command)} ended with exit code {code}")
