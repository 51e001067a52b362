"""What `python -m perl plan` says of memory against what a real training on the CPU takes.

    python -m benchmarks.memory_plan [--shapes activations checkpointing vocabulary]

Each shape trains two steps in a process of its own: random weights, prompts and completions as long as they may be.
Measured is the most memory of the process in the second step, when the optimizer has its states, beyond what it held
before the model was made: in the rollout, and in the update (the kernel's books: benchmarks._workload.Memory).
A JSON line per shape: MB measured and planned, and "rollout" and "update", planned over measured. The last line has
the worst of them as "ratio".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from transformers import Qwen2Config

from benchmarks._workload import MODELS, PEFT, Memory, Policy, _shape, around_rollouts, draw_workload, make_trainer
from perl.tools.plan.devices import DEVICES
from perl.tools.plan.inputs import shape_of
from perl.tools.plan.memory import Job, items, peak

MB = 2**20


@dataclass(frozen=True)
class Case:
    """A model and a batch."""

    model: dict[str, Any]
    prompts: int
    group: int
    micro_batch: int
    prompt: int
    completion: int
    checkpointing: bool

    @property
    def job(self) -> Job:
        accumulation = self.prompts * self.group // self.micro_batch
        return Job(
            prompt=self.prompt,
            completion=self.completion,
            group=self.group,
            micro_batch=self.micro_batch,
            accumulation=accumulation,
            steps_per_generation=accumulation,
            processes=1,
            parallel="single",
            weight_bytes=4,
            compute_bytes=4,
            checkpointing=self.checkpointing,
        )


CASES = {
    "activations": Case(_shape(32_000, 256, 1024, 8, 4, 2, tied=True), 4, 4, 8, 384, 32, False),
    "checkpointing": Case(_shape(65_536, 512, 1408, 12, 8, 2, tied=True), 4, 8, 16, 128, 32, True),
    "vocabulary": Case(_shape(151_936, 896, 4864, 3, 14, 2, tied=True), 4, 4, 8, 96, 48, False),
}
"""Where the activations, the layers' inputs, and the logits and the cache weigh most."""
WARM_UP = Case(_shape(16_384, 64, 128, 2, 4, 2, tied=True), 1, 4, 4, 16, 4, True)
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Variables with which glibc gives back what is freed: otherwise a process still holds in the update what the rollout
has freed, up to some hundred MB, and how much depends on the order of allocations."""


def measure(case: Case) -> dict[str, float]:
    """MB that rollout and update of the second step take at most, beyond what the process held before."""
    train(WARM_UP)  # libraries that are imported when they are first used
    before = Memory().before
    return {phase: megabytes - before for phase, megabytes in train(case).items()}


def train(case: Case) -> dict[str, float]:
    """Two steps; the most memory in MB that the process held in each phase of the second one."""
    MODELS["planned"] = case.model
    never_drawn = case.model["vocab_size"]
    policy = Policy(model="planned", dtype="float32", merge_adapter="auto", capture_graphs=False, eos=(never_drawn,))
    work = draw_workload(2 * case.prompts, case.group, case.prompt, "equal", case.completion, case.completion)
    phases: dict[str, Memory] = {}
    peaks: dict[str, float] = {}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(place % 2) for place in range(len(completion_ids))]

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            "ours",
            policy,
            work,
            folder,
            reward,
            per_device_train_batch_size=case.micro_batch,
            gradient_accumulation_steps=case.job.accumulation,
            max_completion_length=case.completion,
            gradient_checkpointing=case.checkpointing,
            max_steps=2,
            logging_strategy="no",
        )

        def begin() -> None:
            phases["rollout"] = Memory()

        def end() -> None:
            peaks["rollout"] = phases["rollout"].peak()["peak_mb"]
            phases["update"] = Memory()

        around_rollouts(trainer, begin, end)
        trainer.train()
        peaks["update"] = phases["update"].peak()["peak_mb"]
    return peaks


def plan(case: Case) -> dict[str, float]:
    """MB of both phases' peaks."""
    config = Qwen2Config(**case.model)
    table = items(shape_of(config, PEFT), case.job, DEVICES["cpu"])
    return {phase: peak(table, phase) / MB for phase in ("rollout", "update")}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = make_parser().parse_args()
    if options.measure:
        print(json.dumps(measure(CASES[options.measure])))
        return
    worst = 1.0
    for name in options.shapes:
        command = [sys.executable, "-m", "benchmarks.memory_plan", "--measure", name]
        env = os.environ | RETURN_FREED | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        measured, planned = json.loads(done.stdout.splitlines()[-1]), plan(CASES[name])
        ratios = {phase: round(planned[phase] / measured[phase], 3) for phase in measured}
        line = {"shape": name} | ratios
        line |= {f"{phase}_mb": round(measured[phase]) for phase in measured}
        line |= {f"{phase}_planned_mb": round(planned[phase]) for phase in planned}
        print(json.dumps(line), flush=True)
        worst = max([worst, *ratios.values()], key=lambda ratio: abs(ratio - 1))
    print(json.dumps({"benchmark": "memory_plan", "ratio": worst}))


if __name__ == "__main__":
    main()
