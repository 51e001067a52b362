"""Whole GRPO steps side by side with TRL's: rollout, reward, loss, backward, optimizer, interleaved pairs.

    python -m benchmarks.train_step [--pairs 5] [--micro_batch 8] [--zero_shares 0 0.4] [--threads 1]
    python -m benchmarks.train_step --before CHECKOUT

"trl" is GRPOTrainer, "ours" PerlGRPOTrainer (engine fast), each in a process of its own, with the same model,
prompts, rewards and forced lengths; the first step of each is not counted. A zero share is the share of groups whose
rewards are all equal, so that their advantages are zero; "ratio" is that of the first one.
The last line is JSON: "ratio" is the median over pairs of TRL's seconds over ours, "cpu_ratio" that of processor time,
which other programs on the machine disturb less, "…_peak_mb" the most memory that
a side's process held in a step (on an accelerator: its tensors), "…_added_mb" how much of that the step added.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks._side import Side, answer, ratio, take_turns, wait_for_turn
from benchmarks._workload import (
    FIRST_MARKER,
    ForcedLengths,
    Policy,
    StepTimes,
    add_policy_arguments,
    draw_workload,
    force_lengths,
    make_trainer,
)

SIDES = ("trl", "ours")
SECONDS = ("wall_s", "rollout_s", "update_s")


def flat_groups(share: float, steps: int, groups: int) -> list[int]:
    """In each of `steps`, how many of its groups have equal rewards, so that `share` of all have them."""
    bounds = [int(share * groups * step + 1e-9) for step in range(steps + 1)]
    return [later - earlier for earlier, later in itertools.pairwise(bounds)]


class StepTurns(StepTimes):
    """Holds the trainer before each optimizer step until it is this side's turn, and answers with its times."""

    def __init__(self, trainer: Any):
        super().__init__(trainer, lambda times, control: answer(times))

    def on_step_begin(self, args, state, control, **kwargs):
        if not wait_for_turn():
            sys.exit()
        super().on_step_begin(args, state, control, **kwargs)


def train(side: str, options: argparse.Namespace) -> None:
    """Train, a step a turn: one that is not counted, then --pairs for each zero share."""
    flat = [0] + [n for share in options.zero_shares for n in flat_groups(share, options.pairs, options.prompts)]
    work = draw_workload(
        options.prompts * len(flat),
        options.group_size,
        options.prompt_length,
        "lognormal",
        options.mean,
        options.longest,
    )

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        """By a completion's number, which is its first token: half of a group right, or all of it."""
        rewards = []
        for ids in completion_ids:
            group, place = divmod(ids[0] - FIRST_MARKER, options.group_size)
            step, group = divmod(group, options.prompts)
            rewards.append(1.0 if group < flat[step] else float(place % 2))
        return rewards

    rows = options.prompts * options.group_size
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            side,
            Policy.of(options),
            work,
            folder,
            reward,
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=rows // options.micro_batch,
            max_steps=len(flat),
            shuffle_dataset=False,
            logging_strategy="no",
        )
        force_lengths(trainer, ForcedLengths(work))
        StepTurns(trainer)
        trainer.train()


def describe(now: list[dict[str, Any]]) -> str:
    theirs, ours = ("/".join(f"{side[field]:.2f}" for field in SECONDS) for side in now)
    return f"step/rollout/update theirs {theirs} s, ours {ours} s, {now[0]['wall_s'] / now[1]['wall_s']:.2f}x"


def compare(sides: list[Side], share: float, pairs: int) -> dict[str, Any]:
    """Figures of `pairs` steps with that share of zero advantages."""
    print(f"groups with zero advantage: {share:.0%}", flush=True)
    for side in sides:
        side.answers.clear()
    take_turns(sides, pairs, describe)
    figures: dict[str, Any] = {"zero_share": share}
    for field in SECONDS:
        figures |= {f"{side.name}_{field}": side.median(field) for side in sides}
        figures["ratio" if field == "wall_s" else field.replace("_s", "_ratio")] = ratio(sides[0], sides[1], field)
    figures["cpu_ratio"] = ratio(sides[0], sides[1], "cpu_s")
    return figures | {f"{side.name}_{field}": side.most(field) for side in sides for field in ("peak_mb", "added_mb")}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--prompt_length", type=int, default=128)
    parser.add_argument("--mean", type=float, default=65)
    parser.add_argument("--longest", type=int, default=192)
    parser.add_argument("--zero_shares", type=float, nargs="+", default=[0.0, 0.4])
    parser.add_argument("--threads", type=int, default=1)
    add_policy_arguments(parser)
    parser.add_argument("--before", type=Path, help="checkout of another commit, instead of TRL")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = make_parser().parse_args()
    if options.side:
        torch.set_num_threads(options.threads)
        train(options.side, options)
        return
    ours = Side("benchmarks.train_step", "ours", options.threads)
    theirs = Side("benchmarks.train_step", "ours" if options.before else "trl", options.threads, options.before)
    sides = [theirs, ours]
    for side in sides:
        side.round()  # not counted
    results = [compare(sides, share, options.pairs) for share in options.zero_shares]
    for side in sides:
        side.close()
    arguments = {name: value for name, value in vars(options).items() if name not in ("side", "before", "zero_shares")}
    print(json.dumps({"benchmark": "train_step", **arguments, "by_zero_share": results, "ratio": results[0]["ratio"]}))


if __name__ == "__main__":
    main()
