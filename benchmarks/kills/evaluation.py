"""What an evaluation loses when workers, the command itself and Ray nodes are killed again and again.

One evaluation of the quickstart's model and problems is disturbed with SIGKILL: of a worker, of the parent (the same
command then goes on, here or in the Ray cluster, by chance) or of a Ray node (another one joins). Where it ends before
all kills are done, more samples of each problem are asked for. Then its rows are compared with those of an undisturbed
run: kills by kind, rows, lost, doubled, different, orphans (processes left 15 s after the parent was killed).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks._nodes import add_node, alive, kill_node, ray_cluster, raylet, workers_below
from perl.scoring.results import SAMPLES, read_samples

ROOT = Path(__file__).resolve().parents[2]
MORE_SAMPLES = 8
GONE_WITHIN_S = 15.0
PATIENCE_S = 240.0


class Evaluation:
    """The evaluation that is disturbed, one command after the other."""

    def __init__(self, folder: Path, address: str, use_vllm: bool):
        self.folder = folder
        self.samples = MORE_SAMPLES
        self.executor = "local"
        self.process: subprocess.Popen | None = None
        self._address = address
        self._use_vllm = use_vllm

    def start(self, executor: str, **flags: Any) -> None:
        self.executor = executor
        slow = {} if self._use_vllm else {"max_batch_tokens": 300}  # a few rows at once, so that there is time to kill
        settings = {
            "model": ROOT / "assets" / "quickstart-base",
            "dataset": ROOT / "assets" / "quickstart-data" / "test.jsonl",
            "temperature": 1.0,
            "n": self.samples,
            "dp_size": 2,
            "executor": executor,
            "use_vllm": self._use_vllm,
            "result_dir": self.folder,
            **slow,
            **flags,
        }
        words = [sys.executable, str(ROOT / "perl" / "eval.py"), *(f"--{k}={v}" for k, v in settings.items())]
        log = (self.folder.parent / f"{self.folder.name}.log").open("a")
        environment = {**os.environ, "RAY_ADDRESS": self._address, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)

    def rows(self) -> int:
        file = self.folder / "test" / SAMPLES
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def records(self) -> dict[tuple[str, int], dict[str, Any]]:
        records = read_samples(self.folder / "test" / SAMPLES)
        return {row: {k: v for k, v in record.items() if k != "time"} for row, record in records.items()}

    def go_on(self, rows: int) -> bool:
        """Wait for `rows` more rows; False when the command has ended."""
        assert self.process is not None
        goal, deadline = self.rows() + rows, time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            if self.rows() >= goal:
                return True
            if time.monotonic() > deadline:
                raise RuntimeError(f"no progress for {PATIENCE_S:.0f} s; see {self.folder}.log")
            time.sleep(0.05)
        if self.process.returncode:
            raise RuntimeError(f"the command ended with {self.process.returncode}; see {self.folder}.log")
        return False

    def finish(self) -> None:
        while self.go_on(1_000_000):
            pass


def kill_worker(evaluation: Evaluation, cluster: Any, rng: random.Random) -> int:
    while not (workers := _workers(evaluation, cluster)):  # both are starting again
        time.sleep(0.05)
    os.kill(rng.choice(workers), signal.SIGKILL)
    return 0


def kill_parent(evaluation: Evaluation, cluster: Any, rng: random.Random) -> int:
    """Returns how many of its processes outlive it."""
    assert evaluation.process is not None
    workers = _workers(evaluation, cluster)
    evaluation.process.kill()
    evaluation.process.wait()
    deadline = time.monotonic() + GONE_WITHIN_S
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return sum(map(alive, workers))


def kill_random_node(evaluation: Evaluation, cluster: Any, rng: random.Random) -> int:
    node = rng.choice(sorted(cluster.worker_nodes, key=raylet))
    kill_node(node)
    cluster.worker_nodes.remove(node)
    add_node(cluster, num_cpus=1)
    return 0


KINDS = {"worker": kill_worker, "parent": kill_parent, "node": kill_random_node}


def _workers(evaluation: Evaluation, cluster: Any) -> list[int]:
    assert evaluation.process is not None
    roots = [evaluation.process.pid]
    return workers_below([*roots, *(raylet(node) for node in cluster.list_all_nodes())])


def disturb(evaluation: Evaluation, cluster: Any, kills: int, rng: random.Random) -> tuple[Counter[str], int]:
    """Returns how often each kind was killed, and how many processes were orphaned."""
    done: Counter[str] = Counter()
    orphans = 0
    while done.total() < kills:
        if evaluation.process is None or evaluation.process.poll() is not None:
            evaluation.start(rng.choice(["local", "ray"]))
        if not evaluation.go_on(rng.randint(1, 60)):
            evaluation.samples += MORE_SAMPLES
            continue
        kind = rng.choice(["worker", "parent", "node"] if evaluation.executor == "ray" else ["worker", "parent"])
        orphans += KINDS[kind](evaluation, cluster, rng)
        done[kind] += 1
        print(f"kill {done.total()}: {kind} ({evaluation.executor}), {evaluation.rows()} rows", flush=True)
    return done, orphans


def measure(folder: Path, kills: int, seed: int, use_vllm: bool) -> dict[str, Any]:
    with ray_cluster({"num_cpus": 0}, {"num_cpus": 1}, {"num_cpus": 1}) as cluster:
        disturbed = Evaluation(folder / "disturbed", cluster.address, use_vllm)
        done, orphans = disturb(disturbed, cluster, kills, random.Random(seed))
        if disturbed.process is None or disturbed.process.poll() is not None:
            disturbed.start("local")
        disturbed.finish()
        quiet = Evaluation(folder / "quiet", cluster.address, use_vllm)
        quiet.samples = disturbed.samples
        quiet.start("local", **({} if use_vllm else {"max_batch_tokens": 65_536}))
        quiet.finish()
    expected, got = quiet.records(), disturbed.records()
    return {
        "kills": dict(done),
        "rows": len(expected),
        "lost": len(expected.keys() - got.keys()),
        "doubled": disturbed.rows() - len(got),
        "different": sum(got[row] != expected[row] for row in expected.keys() & got.keys()),
        "orphans": orphans,
        "engine": "vllm" if use_vllm else "hf",
    }
