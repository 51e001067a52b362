"""Does the engine change what is learned? Reward curves of the quickstart's problem with TRL's sampler and with ours.

    python -m benchmarks.reward_curves [--seeds 5] [--steps 40]
    python -m benchmarks.reward_curves --real outputs/real_1 [--steps 60] [--noise]

GRPOTrainer and PerlGRPOTrainer (engine fast, no noise) train the same adapter on the same problems in the same order;
the seed of the sampling alone differs from run to run. A run's number is its mean reward over the steps. The last
line is JSON: "between_samplers" is the difference of the two sides' means over their runs, "between_trl_seeds" the
mean difference of two of TRL's own runs; "p_value" is the share of all ways
to deal the runs out to two sides that differ at least as much. "…_smoothed" are the same two differences step by
step: mean absolute difference of two runs' curves, averaged over ten steps, first of a run of each side, then of two
of TRL's.

`--real` trains the second stage of `python -m perl real` once on each side, from the adapter that SFT left in that
folder: same model, rows, rewards and number of steps; `--noise` leaves AQN on ours, as `perl real` has it. The line of
JSON has both curves, the seconds of each step and "ratio", TRL's median over ours; it goes to --output too, and the
curves to assets/reward_curves_real.svg.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import TrainerCallback
from trl import GRPOTrainer

from benchmarks._learning import panels
from perl import device
from perl.adapters import ADAPTERS
from perl.base.errors import report_errors
from perl.base.files import write_json
from perl.config.load import Config, parse
from perl.grading import Grader
from perl.prompts import ChatTemplate
from perl.rewards.functions import build_rewards, reward_context
from perl.runs.setup import build_dataset, load_model, load_tokenizer
from perl.tools import course, real
from perl.tools.stages import ROOT
from perl.training.trainer import PerlGRPOTrainer

WINDOW = 10
RESULTS, CURVES = ROOT / "docs" / "results" / "reward_curves_real.json", ROOT / "assets" / "reward_curves_real.svg"


@dataclass(frozen=True, slots=True)
class Run:
    """What one training leaves."""

    rewards: list[float]
    """Mean of all rewards, weighted, of each step."""
    accuracy: list[float]
    """Mean of the reward `accuracy` of each step."""
    seconds: list[float]
    """Of each step."""


class SamplingSeed(TrainerCallback):
    """Sets the seed of TRL's sampling, after the run's own has decided the order of the problems and the adapter."""

    def __init__(self, seed: int):
        self.seed = seed

    def on_train_begin(self, args, state, control, **kwargs):
        torch.manual_seed(self.seed)


class Seconds(TrainerCallback):
    """Of each step."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(round(time.perf_counter() - self.begun, 3))


def quickstart_flags() -> list[str]:
    """recipes/quickstart.yaml without noise."""
    return [*words_of(recipe="recipes/quickstart.yaml", noise="false"), "--config.rollout.engine", "fast"]


def real_flags(folder: Path, noise: bool) -> list[str]:
    """The GRPO stage of a folder of `python -m perl real`, whose SFT has finished."""
    settings = real.read_run(folder, "sft", "--real")
    own = words_of(recipe=str(real.RECIPES["grpo"]), noise=str(noise).lower())
    return [*own, *course.flags_of(settings, folder.absolute(), "grpo")]


def words_of(recipe: str, noise: str) -> list[str]:
    return ["--recipe", recipe, "--config.noise_injection.enabled", noise]


def configure(flags: Sequence[str], steps: int | None, folder: str) -> Config:
    own = {"output_dir": folder, "logging_steps": 1, "save_strategy": "no"}
    own |= {} if steps is None else {"max_steps": steps}
    words = [word for name, value in own.items() for word in (f"--config.training.{name}", str(value))]
    return parse([*flags, *words]).build()


def run(side: str, flags: Sequence[str], sampling_seed: int, steps: int | None, grader: Grader) -> Run:
    """Train once as `flags` of perl.train say."""
    with tempfile.TemporaryDirectory() as folder:
        config = configure(flags, steps, folder)
        tokenizer = load_tokenizer(config.model.model_name_or_path)
        model, extra = load_model(config), {"config": config}
        if side != "ours":
            peft_config = None if isinstance(model, PeftModel) else ADAPTERS[config.peft.type].build(config.peft)
            extra = {"args": config.training, "peft_config": peft_config}
        trainer_class: Any = PerlGRPOTrainer if side == "ours" else GRPOTrainer
        clock = Seconds()
        trainer = trainer_class(
            model=model,
            train_dataset=build_dataset(config.dataset, ChatTemplate(tokenizer)),
            processing_class=tokenizer,
            reward_funcs=build_rewards(config.reward.functions, reward_context(config, grader)),
            callbacks=[SamplingSeed(sampling_seed), clock],
            **extra,
        )
        if side == "ours":
            collector = trainer.step.collector
            collector.sampling = replace(collector.sampling, seed=sampling_seed)
        trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    return Run([row["reward"] for row in rows], [row["rewards/accuracy/mean"] for row in rows], clock.seconds)


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
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="of the quickstart")
    parser.add_argument("--steps", type=int, help="default: 40 of the quickstart, the recipe's of --real")
    parser.add_argument("--real", type=Path, help="a folder of `python -m perl real`")
    parser.add_argument("--noise", action="store_true", help="AQN on our side of --real")
    parser.add_argument("--output", type=Path, default=RESULTS, help="of --real")
    return parser


def run_alone(side: str, flags: Sequence[str], seed: int, steps: int | None) -> Run:
    """`run` in a process of its own, as `python -m perl.train` is one."""
    with Grader(deadline_s=5.0) as grader:
        return run(side, flags, seed, steps, grader)


def compare_real(options: argparse.Namespace) -> dict[str, Any]:
    """Both sides once on the pretrained model."""
    seed = real.read_run(options.real, "sft", "--real").seed
    os.environ |= device.start_environment(device.detect().kind) | os.environ
    runs: dict[str, Run] = {}
    for side in ("trl", "ours"):
        flags = real_flags(options.real, options.noise and side == "ours")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:  # glibc reads it once
            runs[side] = process.submit(run_alone, side, flags, seed, options.steps).result()
        seconds = statistics.median(runs[side].seconds[1:])
        print(f"{side}: {seconds:.1f} s a step, accuracy {runs[side].accuracy}", flush=True)
    medians = {side: statistics.median(found.seconds[1:]) for side, found in runs.items()}
    sides = {
        side: {
            "accuracy": found.accuracy,
            "reward": [round(reward, 4) for reward in found.rewards],
            "step_s": found.seconds,
        }
        for side, found in runs.items()
    }
    figures = {
        "ratio": round(medians["trl"] / medians["ours"], 3),
        "step_s": {side: round(median, 2) for side, median in medians.items()},
        "distance_smoothed": round(distance(runs["trl"].accuracy, runs["ours"].accuracy), 4),
    }
    versions = {name: version(name) for name in ("torch", "trl", "transformers", "peft")}
    steps = len(runs["ours"].seconds)
    command = f"python -m benchmarks.reward_curves --real {options.real} --steps {steps}"
    given = {"command": command + " --noise" * options.noise, "threads": os.environ.get("OMP_NUM_THREADS")}
    result = {**figures, **sides, "steps": steps, "seed": seed, "noise": options.noise, **given, "versions": versions}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.output, result)
    if options.output == RESULTS:
        curves = {side: [found.accuracy] for side, found in runs.items()}
        CURVES.write_text(panels(curves | {"both": [found.accuracy for found in runs.values()]}), encoding="utf-8")
    return result


@report_errors()
def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    if options.real is not None:
        if options.steps == 1:
            parser.error("--steps 1: the first step is not timed; write 2 or more")
        print(json.dumps({"benchmark": "reward_curves", "real": str(options.real), **compare_real(options)}))
        return
    if options.seeds < 2:
        parser.error("--seeds 1: two runs of each side at least say how far apart two runs are")
    options.steps = options.steps or 40
    curves: dict[str, list[list[float]]] = {"trl": [], "ours": []}
    with Grader(deadline_s=5.0) as grader:
        for seed in range(1, options.seeds + 1):
            for side, found in curves.items():
                started = time.perf_counter()
                found.append(run(side, quickstart_flags(), seed, options.steps, grader).rewards)
                ends = f"{statistics.fmean(found[-1][:5]):.3f} to {statistics.fmean(found[-1][-5:]):.3f}"
                print(
                    f"{side}, sampling seed {seed}: reward {ends} (means of five steps),"
                    f" {time.perf_counter() - started:.0f} s",
                    flush=True,
                )
    figures = judge(curves["trl"], curves["ours"])
    print(json.dumps({"benchmark": "reward_curves", "seeds": options.seeds, "steps": options.steps, **figures}))


if __name__ == "__main__":
    main()
