"""Dynamic sampling on a set where most groups have equal rewards: tokens drawn over those needed, and time against
rounds.

    python -m benchmarks.dynamic_sampling [--groups 8] [--group_size 8] [--equal 0.7] [--pairs 5] [--threads 1]

A batch of `groups` unequal groups is filled from prompts of which the share `equal` has equal rewards, by a rollout of
PerlGRPOTrainer (engine fast). "one_run" admits a further prompt into the running decode loop for each group found
equal, "rounds" draws what is missing when all of the round before is drawn, with the same decode loop. A logits
processor forces each completion's length (log-normal), so that both draw the same tokens. "needed" is what the shortest
beginning of the prompts' order that fills the batch has. The last line is JSON: "tokens_over_needed" (1 is none too
many), "ratio" the median over pairs of the rounds' seconds over one run's, "cpu_ratio" that of processor time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from typing import Any

import torch

from benchmarks._workload import (
    ForcedLengths,
    Policy,
    add_policy_arguments,
    clock,
    draw_workload,
    force_lengths,
    make_trainer,
)
from perl.config.schema import AlgorithmConfig
from perl.training.rollout import RolloutPolicy


class InRounds(RolloutPolicy):
    @property
    def takes_more(self) -> bool:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_policy_arguments(parser)
    numbers = {"groups": 8, "group_size": 8, "pairs": 5, "threads": 1, "prompt_length": 32, "mean": 48, "longest": 128}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--equal", type=float, default=0.7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    prompts = round(2 * options.groups / (1 - options.equal))
    work = draw_workload(prompts, options.group_size, options.prompt_length, "lognormal", options.mean, options.longest)
    names = [" ".join(f"w{i}" for i in prompt) for prompt in work.prompts]
    unequal = set(random.Random(3).sample(names, round(prompts * (1 - options.equal))))

    def reward(prompts: list[str], **_: Any) -> list[float]:
        return [float(place % 2) if prompt in unequal else 1.0 for place, prompt in enumerate(prompts)]

    policy = Policy.of(options)
    with tempfile.TemporaryDirectory() as folder:
        rows = options.groups * options.group_size
        algorithm = AlgorithmConfig(dynamic_sampling=True)
        trainer = make_trainer(
            "ours", policy, work, folder, reward, algorithm, per_device_train_batch_size=rows, max_steps=1000
        )
        print(json.dumps(result(trainer, work, unequal, options)))


def result(trainer: Any, work: Any, unequal: set[str], options: argparse.Namespace) -> dict[str, Any]:
    trainer.model.train()
    stream, names = trainer.dynamic_sampling.stream, trainer.train_dataset["prompt"]
    order = [stream.row(position) for position in range(len(names))]
    found = groups = needed = 0
    for row in order:
        groups += 1
        needed += sum(work.lengths[row * work.group_size : (row + 1) * work.group_size])
        found += names[row] in unequal
        if found == options.groups:
            break
    sides: dict[str, list[tuple[float, float]]] = {"one_run": [], "rounds": []}
    drawn: set[int] = set()
    for pair in range(options.pairs + 1):
        for side in sides if pair % 2 else reversed(sides):
            trainer.sampler.__class__ = InRounds if side == "rounds" else RolloutPolicy
            force_lengths(trainer, ForcedLengths(work))
            stream.next, stream.skipped = 0, []
            started, cpu = clock(), time.process_time()
            chosen = trainer._collect(trainer.dynamic_sampling)
            sides[side].append((clock() - started, time.process_time() - cpu))
            assert len(chosen.rows) == options.groups * options.group_size
            per_used = trainer._metrics["train"]["dapo/rollout_tokens_per_used_token"][-1]
            drawn.add(round(per_used * sum(map(len, chosen.completions.token_ids))))
        times = {side: f"{seconds[-1][0]:.2f} s" for side, seconds in sides.items()}
        print(f"pair {pair}: {times}" if pair else f"not counted: {times}", flush=True)
    (tokens,) = drawn  # the same in every rollout
    pairs = list(zip(sides["rounds"][1:], sides["one_run"][1:], strict=True))
    return {
        "benchmark": "dynamic_sampling",
        "drawn": tokens,
        "needed": needed,
        "tokens_over_needed": round(tokens / needed, 3),
        "groups_drawn": groups,
        "one_run_s": round(statistics.median(mine for _, (mine, _) in pairs), 3),
        "rounds_s": round(statistics.median(theirs for (theirs, _), _ in pairs), 3),
        "ratio": round(statistics.median(a[0] / b[0] for a, b in pairs), 3),
        "cpu_ratio": round(statistics.median(a[1] / b[1] for a, b in pairs), 3),
    }


if __name__ == "__main__":
    main()
