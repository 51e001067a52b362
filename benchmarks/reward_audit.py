"""The audit of all of reasoning-gym's generators and of our own rubrics (docs/reward_audit.md).

    python -m benchmarks.reward_audit [--rows 6] [--data ../shared/data] [--output docs/results/reward_audit.json]

Each generator's first held-out problems with its default settings, graded as an evaluation grades them: the answer in
`<answer>`, the generator's own scoring, all of a point or nothing. One that does not make the same problems twice, and
in two processes, is refused too. What may be drawn from is written to perl/tasks/reasoning_gym.json. Each row is
written when it is known: a run that is cut off goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from perl.base.files import write_json
from perl.grading import Grader
from perl.records import Problem
from perl.rewards.functions import RewardContext, build_rewards
from perl.tasks import load_problems, problem_of_row
from perl.tasks.reasoning_gym import AUDITED, TASK, generated_rows
from perl.tools.audit.probes import PROBES
from perl.tools.audit.rows import make_rows
from perl.tools.audit.verdict import Audit, audit

ROOT = Path(__file__).parents[1]
OWN = {
    "gsm8k": "gsm8k/test.jsonl",
    "svamp": "svamp/test.jsonl",
    "dapo-math": "dapo_math/processed_en_2000.jsonl",
    "math500": "bench/math500.jsonl",
    "aime24": "bench/aime24.jsonl",
    "aime25": "bench/aime25.jsonl",
    "amc23": "bench/amc23.jsonl",
}
FURTHER = 2
"""Problems besides the rows, for wrong answers."""
COMPARED = 8
"""Problems that two processes have to make alike."""
REPEATED, REPEATED_S = 100, 5.0
"""Problems that are made twice in this process, and the seconds for it."""
MAKES_S = 300
"""Seconds that a generator has for its problems."""


def problems_of(name: str, count: int) -> list[Problem]:
    rows = itertools.islice(generated_rows(f"{TASK}:{name}", None, None, audited=False), count)
    return [problem_of_row(row, where, TASK) for row, where in rows]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"takes more than {seconds:g} s to make the problems")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def digest(problems: list[Problem]) -> str:
    text = json.dumps([(problem.question, problem.gold) for problem in problems])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def row_of(found: Audit) -> dict[str, Any]:
    return {
        "verdict": found.verdict,
        "faults": list(found.faults),
        "rows": found.rows,
        "false_passes": [found.false_passes.count, found.false_passes.texts, *found.false_passes.rate],
        "refusals": [found.refusals.count, found.refusals.texts, *found.refusals.rate],
        "paid": {
            name: share.count for name, share in found.probes.items() if PROBES[name].expected == "less" and share.count
        },
        "ms_median": round(found.ms_median, 3),
        "ms_max": round(found.ms_max, 1),
    }


def repeats(name: str) -> bool:
    """Whether making the problems twice gives the same, as many as REPEATED, or as REPEATED_S has time for."""
    until = time.monotonic() + REPEATED_S
    once, twice = (generated_rows(f"{TASK}:{name}?size={REPEATED}", None, None, audited=False) for _ in range(2))
    pairs = itertools.takewhile(lambda _: time.monotonic() < until, zip(once, twice, strict=True))
    return all(one == two for one, two in pairs)


def of_generator(name: str, rows: int, reward: Any, again: str) -> dict[str, Any]:
    """
    Args:
        again: the digest of its problems in another process.
    """
    try:
        with within(MAKES_S):
            problems = problems_of(name, rows + FURTHER)
            same = again == digest(problems[:COMPARED]) and repeats(name)
    except Exception as error:  # noqa: BLE001  # whatever a generator raises
        return {"verdict": "faulty", "faults": [f"makes no problems: {' '.join(str(error).split())}"]}
    found = row_of(audit(name, reward, make_rows(problems, limit=rows)))
    if not same:
        found["verdict"], found["faults"] = "faulty", ["makes other problems of the same seed", *found["faults"]]
    return found


def digests(count: int) -> dict[str, str]:
    """Of each generator's first problems; empty where it makes none."""
    from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]

    found = {}
    for name in sorted(DATASETS):
        try:
            with within(MAKES_S):
                found[name] = digest(problems_of(name, count))
        except Exception:  # noqa: BLE001
            found[name] = ""
    return found


def reason(faults: list[str]) -> str:
    """The fault that says most: what is paid, where it pays for something wrong."""
    return next((fault for fault in faults if "wrong texts" in fault), faults[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of our tasks' data")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "reward_audit.json")
    parser.add_argument("--digests", action="store_true", help="print those of the generators' problems instead")
    options = parser.parse_args()
    if options.digests:
        found = json.dumps(digests(COMPARED))
        print(f"\n{found}")  # bf leaves dots on the line
        return
    from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]

    version = metadata.version("reasoning-gym")
    known = json.loads(options.output.read_text(encoding="utf-8")) if options.output.is_file() else {}
    if known.get("version") != version or known.get("rows") != options.rows:
        known = {"version": version, "rows": options.rows, "own": {}, "generators": {}}
    with Grader(deadline_s=3.0) as grader:
        context = RewardContext(grader=grader, max_completion_length=4096, overlong_cache_length=1024)
        (reward,) = build_rewards(["accuracy"], context)
        for task, file in OWN.items():
            if task not in known["own"] and (options.data / file).is_file():
                rows = make_rows(
                    load_problems(str(options.data / file), limit=options.rows + 20, task=task), limit=options.rows
                )
                known["own"][task] = row_of(audit(task, reward, rows))
                write_json(options.output, known)
        command = [sys.executable, "-m", "benchmarks.reward_audit", "--digests"]
        other = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ | {"PYTHONHASHSEED": "7"})
        again = json.loads(other.stdout.splitlines()[-1])
        for name in sorted(DATASETS):
            if name not in known["generators"]:
                known["generators"][name] = of_generator(name, options.rows, reward, again[name])
                write_json(options.output, known)
                print(name, known["generators"][name]["verdict"], flush=True)
    found = known["generators"]
    sound = [name for name, row in found.items() if row["verdict"] == "sound"]
    refused = {name: reason(row["faults"]) for name, row in found.items() if row["verdict"] != "sound"}
    write_json(AUDITED, {"version": version, "sound": sound, "refused": refused})
    print(f"{len(sound)} of {len(found)} generators are sound")


if __name__ == "__main__":
    main()
