"""Does the engine change what is learned? Reward curves of the quickstart's problem with TRL's sampler and with ours.

    python -m benchmarks.reward_curves [--seeds 5] [--steps 40]

GRPOTrainer and PerlGRPOTrainer (engine fast, no noise) train the same adapter on the same problems in the same order;
the seed of the sampling alone differs from run to run. A run's number is its mean reward over the steps. The last
line is JSON: "between_samplers" is the difference of the two sides' means over their runs, "between_trl_seeds" the
mean difference of two of TRL's own runs, "equal" whether the first is no larger; "p_value" is the share of all ways
to deal the runs out to two sides that differ at least as much. "…_smoothed" are the same two differences step by
step: mean absolute difference of two runs' curves, averaged over ten steps, first of a run of each side, then of two
of TRL's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from perl.adapters import ADAPTERS
from perl.config.load import Config, parse
from perl.grading import Grader
from perl.rewards import build_rewards, reward_context
from perl.training.setup import build_dataset, load_model, load_tokenizer
from perl.training.trainer import PerlGRPOTrainer

WINDOW = 10


class SamplingSeed(TrainerCallback):
    """Sets the seed of TRL's sampling, after the run's own has decided the order of the problems and the adapter."""

    def __init__(self, seed: int):
        self.seed = seed

    def on_train_begin(self, args, state, control, **kwargs):
        torch.manual_seed(self.seed)


def configure(steps: int, folder: str) -> Config:
    """recipes/quickstart.yaml without noise."""
    flags = {"training.max_steps": steps, "training.output_dir": folder, "training.logging_steps": 1}
    flags |= {"noise_injection.enabled": "false", "rollout.engine": "fast"}
    words = [word for name, value in flags.items() for word in (f"--config.{name}", str(value))]
    return parse(["--recipe", "recipes/quickstart.yaml", *words]).build()


def run(side: str, sampling_seed: int, steps: int, grader: Grader) -> list[float]:
    """Mean reward of each step."""
    with tempfile.TemporaryDirectory() as folder:
        config = configure(steps, folder)
        tokenizer = load_tokenizer(config.model.model_name_or_path)
        adapter = ADAPTERS[config.peft.type]
        extra: dict[str, Any] = {"peft_config": adapter.build(config.peft)}
        if side == "ours":
            extra = {"adapter": adapter, "adapter_config": config.peft}
            extra |= {"noise": config.noise_injection, "rollout": config.rollout}
        trainer_class: Any = PerlGRPOTrainer if side == "ours" else GRPOTrainer
        trainer = trainer_class(
            model=load_model(config),
            args=config.training,
            train_dataset=build_dataset(config.dataset, tokenizer),
            processing_class=tokenizer,
            reward_funcs=build_rewards(config.reward.functions, reward_context(config, grader)),
            callbacks=[SamplingSeed(sampling_seed)],
            **extra,
        )
        if side == "ours":
            trainer.sampling_seed = sampling_seed
        trainer.train()
    return [row["reward"] for row in trainer.state.log_history if "reward" in row]


def smooth(curve: Sequence[float]) -> list[float]:
    """Means over WINDOW steps."""
    window = min(WINDOW, len(curve))
    return [statistics.fmean(curve[i : i + window]) for i in range(len(curve) - window + 1)]


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean absolute difference of two smoothed curves."""
    return statistics.fmean(abs(a - b) for a, b in zip(smooth(one), smooth(other), strict=True))


def p_value(theirs: Sequence[float], mine: Sequence[float]) -> float:
    """Exact permutation test: the share of all divisions into two sides whose means differ at least as much."""
    values, size = [*theirs, *mine], len(theirs)
    found = abs(statistics.fmean(theirs) - statistics.fmean(mine))
    total, hits = 0, 0
    for chosen in itertools.combinations(range(len(values)), size):
        first = [values[i] for i in chosen]
        second = [values[i] for i in range(len(values)) if i not in chosen]
        hits += abs(statistics.fmean(first) - statistics.fmean(second)) >= found - 1e-12
        total += 1
    return hits / total


def judge(theirs: list[list[float]], mine: list[list[float]]) -> dict[str, Any]:
    """The figures of the JSON line, of the curves of each side's runs."""
    their_means, my_means = [statistics.fmean(c) for c in theirs], [statistics.fmean(c) for c in mine]
    between = abs(statistics.fmean(their_means) - statistics.fmean(my_means))
    own, mine_too = (
        statistics.fmean(abs(a - b) for a, b in itertools.combinations(means, 2)) for means in (their_means, my_means)
    )
    return {
        "trl_mean": round(statistics.fmean(their_means), 4),
        "ours_mean": round(statistics.fmean(my_means), 4),
        "between_samplers": round(between, 4),
        "between_trl_seeds": round(own, 4),
        "between_our_seeds": round(mine_too, 4),
        "between_samplers_smoothed": round(statistics.fmean(distance(a, b) for a in theirs for b in mine), 4),
        "between_trl_seeds_smoothed": round(
            statistics.fmean(distance(a, b) for a, b in itertools.combinations(theirs, 2)), 4
        ),
        "p_value": round(p_value(their_means, my_means), 3),
        "equal": between <= own,
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    return parser


def main() -> None:
    options = make_parser().parse_args()
    curves: dict[str, list[list[float]]] = {"trl": [], "ours": []}
    with Grader(deadline_s=5.0) as grader:
        for seed in range(1, options.seeds + 1):
            for side, found in curves.items():
                started = time.perf_counter()
                found.append(run(side, seed, options.steps, grader))
                ends = f"{statistics.fmean(found[-1][:5]):.3f} to {statistics.fmean(found[-1][-5:]):.3f}"
                print(
                    f"{side}, sampling seed {seed}: reward {ends} (means of five steps),"
                    f" {time.perf_counter() - started:.0f} s",
                    flush=True,
                )
    figures = judge(curves["trl"], curves["ours"])
    print(json.dumps({"benchmark": "reward_curves", **vars(options), **figures}))


if __name__ == "__main__":
    main()
