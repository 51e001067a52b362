"""Grading: completions a second on one core, alongside math-verify alone on the same texts.

    python -m benchmarks.evaluator.grading perl|math_verify TASK ROWS.json     one side, in a process of its own

Texts are worked solutions as people write them. GSM8K's stand in the forms that models answer in: as they are, with
another number, in a sentence, in a box, and cut off halfway. MATH-500's are held against their own golds and against
the next problem's. Each side starts afresh for each turn, so that nothing is remembered from the turn before, keeps to
one core, worker included, and has graded one row before the clock runs.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perl.grading import Grader
from perl.tasks import TASKS
from perl.tasks.schemas import gsm8k_gold

Rows = list[tuple[str, str]]
"""(completion, gold) pairs."""
SIDES = ("perl", "math_verify")


def measure(data: Path, limit: int | None, pairs: int) -> dict[str, Any]:
    """grading_per_s and math_ratio, or a line that says which file is missing."""
    result: dict[str, Any] = {}
    for task, file, make in (
        ("gsm8k", data / "gsm8k" / "test.jsonl", gsm8k_rows),
        ("math500", data / "bench" / "math500.jsonl", math_rows),
    ):
        if not file.is_file():
            print(f"grading: {file} is not there, {task} is left out", flush=True)
            continue
        problems = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        result |= compare(task, make(problems[:limit]), pairs)
    return result


def compare(task: str, rows: Rows, pairs: int) -> dict[str, Any]:
    """Rates of both sides by median, interleaved."""
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        file.write_text(json.dumps(rows), encoding="utf-8")
        for pair in range(pairs):
            for side in SIDES if pair % 2 == 0 else SIDES[::-1]:
                command = [sys.executable, "-m", "benchmarks.evaluator.grading", side, task, str(file)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                rates[side].append(len(rows) / json.loads(done.stdout)["seconds"])
            print(
                f"grading {task}, pair {pair}: perl {rates['perl'][-1]:,.0f}/s, math-verify"
                f" {rates['math_verify'][-1]:,.0f}/s",
                flush=True,
            )
    ratio = statistics.median(ours / theirs for ours, theirs in zip(rates["perl"], rates["math_verify"], strict=True))
    own, other = (round(statistics.median(rates[side])) for side in SIDES)
    if task == "gsm8k":
        return {"grading_per_s": own, "gsm8k_math_verify_per_s": other}
    return {"math_per_s": own, "math_math_verify_per_s": other, "math_ratio": round(ratio, 3)}


def gsm8k_rows(problems: Sequence[dict[str, str]]) -> Rows:
    """Five completions of each problem."""
    rows: Rows = []
    for problem in problems:
        gold = gsm8k_gold(problem["answer"])
        derivation = re.sub(r"<<.*?>>", "", problem["answer"])
        steps = derivation.rsplit("\n####", 1)[0]
        wrong = int(gold.replace(",", "")) + 1
        texts = (
            derivation,
            f"{steps}\n#### {wrong}",
            f"{steps}\nThe answer is ${gold}.",
            f"{steps}\nThe final answer is $\\boxed{{{gold}}}$",
            derivation[: len(derivation) // 2],
        )
        rows += [(text, gold) for text in texts]
    return rows


def math_rows(problems: Sequence[dict[str, str]]) -> Rows:
    """Each solution with its own gold and with the next problem's."""
    golds = [problem["answer"] for problem in problems]
    texts = [problem["solution"] for problem in problems]
    return [*zip(texts, golds, strict=True), *zip(texts, [*golds[1:], golds[0]], strict=True)]


def grade_with_perl(task: str, rows: Rows) -> float:
    """Seconds for `rows`."""
    rubric = TASKS[task].rubric
    with Grader() as grader:
        grader.grade(rubric, ["no answer", "\\boxed{7}"], ["1", "8"])  # starts the worker
        began = time.perf_counter()
        grader.grade(rubric, [text for text, _ in rows], [gold for _, gold in rows])
        return time.perf_counter() - began


def grade_with_math_verify(task: str, rows: Rows) -> float:
    """Seconds for `rows`, with its own defaults and its own time limits."""
    from math_verify import parse, verify

    verify(parse("\\boxed{8}"), parse("\\boxed{7}"))
    began = time.perf_counter()
    for text, gold in rows:
        verify(parse(f"\\boxed{{{gold}}}"), parse(text))
    return time.perf_counter() - began


def main() -> None:
    side, task, file = sys.argv[1:]
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    run: Callable[[str, Rows], float] = grade_with_perl if side == "perl" else grade_with_math_verify
    rows = [(text, gold) for text, gold in json.loads(Path(file).read_text(encoding="utf-8"))]
    print(json.dumps({"seconds": run(task, rows)}))


if __name__ == "__main__":
    main()
