"""How the time of a rollout grows with the group and with the completions, and how near it comes to the machine.

    python -m benchmarks.scaling [--groups 1 2 4 8 16] [--lengths 64 128 256 512 1024] [--threads 1]

Rollouts by TRL's GRPOTrainer and by PerlGRPOTrainer, all completions of one length: first 4 prompts with each group
size at the first length, then one prompt in a group of 8 with each length. Two limits are measured in the same run.
Memory: a decode step reads all weights and the rows' keys and values once, at the bandwidth of a sum over 512 MB.
Arithmetic: 2 operations a weight and token, at the rate of a product of as many rows with weights of the model's
size. The shares are the measured tokens/s, prefill included, over what each limit allows.
Ends in a Markdown table and a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import torch

from benchmarks._workload import (
    ForcedLengths,
    Policy,
    Workload,
    add_policy_arguments,
    clock,
    decode_bytes,
    decode_flops,
    draw,
    draw_workload,
    force_lengths,
    make_trainer,
    measure_bandwidth,
    measure_flops,
)

SIDES = ("trl", "ours")
COLUMNS = (
    "rows",
    "length",
    "trl_s",
    "ours_s",
    "ratio",
    "trl_tokens_s",
    "ours_tokens_s",
    "bandwidth_share",
    "flops_share",
)


class Sides:
    """The trainer of each side, ready for any workload."""

    def __init__(self, policy: Policy, longest: int, prompt_length: int):
        self.policy = policy
        work = draw_workload(4, 16, prompt_length, "equal", longest, longest)
        self.processor = ForcedLengths(work)
        self.trainers: dict[str, Any] = {}
        for side in SIDES:
            folder = tempfile.mkdtemp()
            trainer = make_trainer(side, policy, work, folder, lambda **_: None, per_device_train_batch_size=64)
            force_lengths(trainer, self)  # type: ignore[arg-type]
            trainer.model.train()
            self.trainers[side] = trainer

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return self.processor(input_ids, scores)

    def seconds(self, side: str, work: Workload) -> float:
        """Of one rollout."""
        trainer, self.processor = self.trainers[side], ForcedLengths(work)
        trainer.generation_config.max_new_tokens = work.longest
        started = clock()
        completions = draw(trainer, work, work.longest)
        seconds = clock() - started
        trainer.state.global_step += 1
        assert [len(completion) for completion in completions] == work.lengths
        return seconds


def limits(policy: Policy, work: Workload, bandwidth: float, flops: float) -> tuple[float, float]:
    """Tokens a second that memory and that arithmetic allow while `work` is decoded."""
    rows, context = len(work.lengths), len(work.prompts[0]) + work.longest / 2
    return rows * bandwidth / decode_bytes(policy, rows, context), flops / decode_flops(policy)


def measure(sides: Sides, work: Workload, bandwidth: float, repeats: int) -> dict[str, Any]:
    """One row of the table: the best of `repeats` rollouts of each side."""
    best = {side: min(sides.seconds(side, work) for _ in range(repeats)) for side in SIDES}
    tokens = sum(work.lengths)
    by_memory, by_arithmetic = limits(sides.policy, work, bandwidth, measure_flops(sides.policy, len(work.lengths)))
    reached = tokens / best["ours"]
    return {
        "prompts": len(work.prompts),
        "group_size": work.group_size,
        "rows": len(work.lengths),
        "length": work.longest,
        "trl_s": round(best["trl"], 2),
        "ours_s": round(best["ours"], 2),
        "ratio": round(best["trl"] / best["ours"], 2),
        "trl_tokens_s": round(tokens / best["trl"]),
        "ours_tokens_s": round(reached),
        "bandwidth_share": round(reached / by_memory, 2),
        "flops_share": round(reached / by_arithmetic, 2),
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--prompt_length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    add_policy_arguments(parser)
    return parser


def main() -> None:
    options = make_parser().parse_args()
    torch.set_num_threads(options.threads)
    policy = Policy.of(options)
    sides = Sides(policy, max(options.lengths), options.prompt_length)
    bandwidth = measure_bandwidth()
    shapes = [(4, group, options.lengths[0]) for group in options.groups]
    shapes += [(1, 8, length) for length in options.lengths]
    warm_up = draw_workload(1, 2, options.prompt_length, "equal", 4, 4)
    measure(sides, warm_up, bandwidth, 1)
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    table = []
    for prompts, group, length in shapes:
        work = draw_workload(prompts, group, options.prompt_length, "equal", length, length)
        table.append(measure(sides, work, bandwidth, options.repeats))
        print("| " + " | ".join(str(table[-1][name]) for name in COLUMNS) + " |", flush=True)
    arguments = {name: value for name, value in vars(options).items() if name not in ("groups", "lengths")}
    machine = {"bandwidth_gb_s": round(bandwidth / 1e9, 1), "gflops": round(measure_flops(policy) / 1e9, 1)}
    print(json.dumps({"benchmark": "scaling", **arguments, **machine, "table": table}))


if __name__ == "__main__":
    main()
