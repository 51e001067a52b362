"""What does a quantised sampler do to a training? The quickstart's, with its base quantised while it draws, with AQN,
and with corrections of the loss, over several seeds.

    python -m benchmarks.quantised_training [--arms "none, no noise, none;int4, linear, token"] [--seeds 1,2]
        [--steps 60] [--stop FILE]
    python -m benchmarks.quantised_training --real outputs/real_1 [outputs/real_2 ...] --output FILE [--arms ...]
    python -m benchmarks.quantised_training --draw

An arm is what the base is while it draws (`rollout.quantization`), a kind of noise (those of benchmarks/aqn.py,
old_logps clean), and what the loss makes of the sampler's log-probabilities: none, token (each token's ratio of trainer
to sampler, cut), exact (token, by the trainer's own log-probabilities of the policy that drew, its noise included and
its quantisation not). Arms that would be others but for rounding are left out: without quantisation exact is token, and
without noise too both are none; without noise exact is none whatever is quantised.

Each run adds a line of JSON to --output (docs/results/quantised.jsonl): arm, quantization, noise, correction, seed,
flags, versions, reward and entropy of each step, its KL divergences (quantisation, noise, sampler to trainer), scores
on held-out problems at temperature 1 by the policy in float32 and, as "sampler_…", by the one that draws, tokens/s of
that in processor time, bytes of its weights, seconds and CPU-seconds. A run that stands there is not repeated, so that
the list can be worked off in parts; with --stop no other one begins once FILE is there. `--draw` writes the tables in
docs/quantised.md and the curves assets/quantised_quickstart.svg.

--real trains the second stage of `python -m perl real --model FOLDER` in the place of the quickstart, from the adapter
that SFT left in those folders: with Qwen2.5-0.5B to 7B the sizes of QeRL's table. On an accelerator vLLM draws, and the
policy that draws is not scored.

The tables give means over seeds, and the mean difference from "none, no noise, none" at the same seed with the p-value
of a paired t-test (two-sided, not corrected for the number of arms).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from peft import PeftModel
from transformers import GenerationConfig

from benchmarks._learning import (
    LAST,
    Row,
    Start,
    chosen,
    core_hours,
    difference_of,
    learn_all,
    markdown,
    mean_of,
    noise_settings,
    panels,
    parser_of,
    rows_to_draw,
    starts_of,
    write_between,
)
from benchmarks.quantised import linear_bytes
from perl import device
from perl.base.errors import report_errors
from perl.config.schema import RolloutConfig
from perl.engines.quantised import Quantisation
from perl.engines.torch_policy import TorchPolicyEngine, TorchRules
from perl.grading import Grader
from perl.models.folders import eos_token_ids, load_model, load_tokenizer
from perl.prompts import ChatTemplate
from perl.records import Completion, Weights
from perl.rewards.functions import grade_rows
from perl.scoring.problem_sets import make_problem_set
from perl.scoring.samples import record_of, text_of_completion
from perl.scoring.summary import summarize
from perl.tasks import load_problems
from perl.tools.stages import ROOT, Evaluation

RESULTS = ROOT / "docs" / "results" / "quantised.jsonl"
PAGE = ROOT / "docs" / "quantised.md"
CURVES = ROOT / "assets" / "quantised_quickstart.svg"
ROWS = 64
"""That are decoded together where the policy that draws is scored: as many as in the quickstart's recipe."""
Correction = Literal["none", "token", "exact"]
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)


@dataclass(frozen=True, slots=True)
class Arm:
    quantization: Quantisation = "none"
    noise: str | None = None
    """A kind of AQN; None: no noise."""
    correction: Correction = "none"

    def __str__(self) -> str:
        return f"{self.quantization}, {self.noise or 'no noise'}, {self.correction}"

    @property
    def columns(self) -> dict[str, object]:
        return {"quantization": self.quantization, "noise": self.noise, "correction": self.correction}

    @property
    def is_another(self) -> bool:
        """By more than rounding than the same arm with a lesser correction."""
        if self.correction == "exact":
            return self.quantization != "none" and self.noise is not None
        return self.correction == "none" or self.quantization != "none" or self.noise is not None

    def settings(self, start: Start) -> dict[str, object]:
        settings = noise_settings(self.noise, start)
        if self.quantization != "none":
            settings["rollout.quantization"] = self.quantization
        vllm, corrected = device.detect().kind != "cpu", self.correction != "none"
        if vllm:
            settings["rollout.engine"] = "vllm"
        if corrected or vllm or self.quantization != "none":
            settings["rollout.importance_correction"] = "token" if corrected else "none"
        return settings | ({"rollout.behaviour": "exact"} if self.correction == "exact" else {})


QUANTIZATIONS: tuple[Quantisation, ...] = ("none", "int8", "int4", "nvfp4")
NOISES = (None, "linear", "exponential", "target_kl")
EVERY = [Arm(q, noise, correction) for q in QUANTIZATIONS for noise in NOISES for correction in CORRECTIONS
         if q != "nvfp4" or correction == "none"]  # fmt: skip
ORDER = sorted(
    (arm for arm in EVERY if arm.is_another),
    key=lambda arm: (arm.correction == "exact", max(1, NOISES.index(arm.noise)), QUANTIZATIONS.index(arm.quantization)),
)
"""As they are trained: what is asked first comes first."""
ARMS = {str(arm): arm for arm in ORDER}
BASE = Arm()


# What draws, scored


def score_sampler(start: Start, arm: Arm, folder: Path) -> dict[str, float]:
    """Of the policy that draws in the run of `folder`, without noise, after its last step."""
    if device.detect().kind != "cpu":
        return {}
    tokenizer = load_tokenizer(start.how.model)
    engine = sampler(start.how, tokenizer, arm.quantization, folder / "adapter")
    return score(engine, start.how, tokenizer) | bytes_of(engine)


def sampler(how: Evaluation, tokenizer: Any, quantization: Quantisation, adapter: Path) -> TorchPolicyEngine:
    policy: Any = PeftModel.from_pretrained(load_model(how.model, dtype=torch.float32), adapter).eval()
    ends = sorted(eos_token_ids(how.model, policy.config, tokenizer))
    generation = GenerationConfig(do_sample=True, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    rules = TorchRules(
        rollout=RolloutConfig(quantization=quantization), processing=tokenizer, generation_config=generation,
        generation_kwargs={},
    )  # fmt: skip
    engine = TorchPolicyEngine(policy, rules)
    engine.publish(Weights(version=1))
    return engine


def score(engine: TorchPolicyEngine, how: Evaluation, tokenizer: Any) -> dict[str, float]:
    """By the samples that a validation draws; tokens of a second of processor time."""
    name, n = str(how.held_out), how.sampled.n
    given = {"n": n, "temperature": how.sampled.temperature, "max_new_tokens": how.sampled.max_new_tokens}
    samples = make_problem_set(load_problems(name), name, how.held_out.stem, ChatTemplate(tokenizer), given).samples
    few = [replace(sample, sampling=replace(sample.sampling, max_new_tokens=2)) for sample in samples[:ROWS]]
    list(engine.stream(iter(few)))  # makes what is made once
    completions: list[Completion] = []
    started = time.process_time()
    for first in range(0, len(samples), ROWS):
        drawn = dict(engine.stream(iter(samples[first : first + ROWS])))
        completions += [drawn[place] for place in range(len(drawn))]
    seconds = time.process_time() - started
    texts = [text_of_completion(tokenizer, completion) for completion in completions]
    problems = [sample.problem for sample in samples]
    with Grader() as grader:
        grades = grade_rows(grader, texts, [p.gold for p in problems], [p.task for p in problems])
    records = [record_of(*row, "fast") for row in zip(samples, completions, texts, grades, strict=True)]
    metrics = summarize(records, n)["metrics"]
    tokens = sum(len(completion.token_ids) for completion in completions)
    scores = {f"sampler_{name}": metrics[name]["value"] for name in ("accuracy", "pass@8")}
    return {**scores, "tokens_per_s": round(tokens / seconds, 1)}


def bytes_of(engine: TorchPolicyEngine) -> dict[str, int]:
    """Of the linear layers as they draw, the head among them, and of the embedding as it is."""
    model: Any = engine.model
    return {"linear_bytes": linear_bytes(engine), "embedding_bytes": model.get_input_embeddings().weight.nbytes}


# Drawing


def table(results: Sequence[Row], measure: str) -> str:
    """Markdown: a row for each quantization and noise, a column for each correction."""
    base = of(results, BASE)
    lines = []
    for quantization in QUANTIZATIONS:
        for noise in NOISES:
            cells = [cell(of(results, Arm(quantization, noise, each)), base, measure) for each in CORRECTIONS]
            if any(cells):
                lines.append([quantization, noise or "no noise", *cells])
    return markdown(("sampler", "noise", *CORRECTIONS), lines)


def cell(runs: Sequence[Row], base: Sequence[Row], measure: str) -> str:
    """The mean, what the runs have over BASE's, and the number of their seeds where BASE has more; of BASE itself the
    mean with its interval."""
    if not runs:
        return ""
    if runs == base:
        return mean_of(runs, measure)
    fewer = f"n={len(runs)}" if len(runs) < len(base) else ""
    mean, over = mean_of(runs, measure).split(" ±")[0], difference_of(runs, base, measure)
    return ", ".join(filter(None, [mean, over, fewer]))


def of(results: Sequence[Row], arm: Arm) -> list[Row]:
    return [row for row in results if row["arm"] == str(arm)]


POLICY_HEADS = ("sampler, noise", "pass@8, %", "entropy", "KL of the quantisation", "of the noise")


def policy_table(results: Sequence[Row]) -> str:
    """Markdown: of the uncorrected arms, what they do to the policy that is trained, and what lies between it and the
    one that draws."""
    base = of(results, BASE)
    lines = []
    for arm in (Arm(quantization, noise) for quantization in QUANTIZATIONS for noise in NOISES):
        if runs := of(results, arm):
            scores = [cell(runs, base, measure) for measure in ("pass@8", "entropy")]
            kls = [kl_of(runs, name) for name in ("quantization_kl", "noise_kl")]
            lines.append([f"{arm.quantization}, {arm.noise or 'no noise'}", *scores, *kls])
    return markdown(POLICY_HEADS, lines)


def kl_of(runs: Sequence[Row], name: str) -> str:
    """Mean of the first LAST steps that have it, and of the last ones, over the runs."""
    series = [row[name] for row in runs if row[name]]
    if not series:
        return ""
    ends = (statistics.mean(statistics.mean(steps) for steps in each) for each in
            ([steps[:LAST] for steps in series], [steps[-LAST:] for steps in series]))  # fmt: skip
    return "→".join(f"{value:.2g}" for value in ends)


SAMPLER_HEADS = (
    "sampler",
    "runs",
    "its accuracy, %",
    "over float32 (p)",
    "tokens/s",
    "linear layers, kB",
    "embedding, kB",
)


def sampler_table(results: Sequence[Row]) -> str:
    """Markdown: of each quantization, over all arms, how the policy that draws scores beside the one in float32 that is
    trained, and what it costs."""
    lines = []
    for quantization in QUANTIZATIONS:
        runs = [row for row in results if row["quantization"] == quantization]
        if not runs:
            continue
        seeds = sorted({row["seed"] for row in runs})
        trained = [averaged(runs, seed, "accuracy") for seed in seeds]
        drawing = [averaged(runs, seed, "sampler_accuracy") for seed in seeds]
        speed = statistics.median(row["tokens_per_s"] for row in runs)
        size = [f"{runs[0][name] / 1000:.0f}" for name in ("linear_bytes", "embedding_bytes")]
        scores = [mean_of(drawing, "accuracy"), difference_of(drawing, trained, "accuracy")]
        lines.append([quantization, str(len(runs)), *scores, f"{speed:.0f}", *size])
    return markdown(SAMPLER_HEADS, lines)


FACTORS_HEADS = ("", "accuracy, points (p)", "mean reward (p)")


def factors_table(results: Sequence[Row]) -> str:
    """Markdown: what one setting changes, averaged over the arms that differ in nothing else, seed by seed."""
    uncorrected = [arm for arm in ORDER if arm.correction == "none"]
    pairs = {
        f"{quantization}, uncorrected": [
            (arm, replace(arm, quantization="none")) for arm in uncorrected if arm.quantization == quantization
        ]
        for quantization in QUANTIZATIONS[1:]
    }
    for noise in NOISES[1:]:
        pairs[f"noise {noise}, uncorrected"] = [
            (arm, replace(arm, noise=None)) for arm in uncorrected if arm.noise == noise
        ]
    for correction in CORRECTIONS[1:]:
        pairs[f"correction {correction}"] = [
            (arm, replace(arm, correction="none")) for arm in ORDER if arm.correction == correction
        ]
    lines = []
    for name, of_name in pairs.items():
        known = [(a, b) for a, b in ((of(results, one), of(results, other)) for one, other in of_name) if a and b]
        if known:
            sides = ([row for runs in side for row in runs] for side in zip(*known, strict=True))
            changed, base = ([mean_run(rows, seed) for seed in sorted({r["seed"] for r in rows})] for rows in sides)
            lines.append([name, *(difference_of(changed, base, measure) for measure in ("accuracy", "reward"))])
    return markdown(FACTORS_HEADS, lines)


def mean_run(runs: Sequence[Row], seed: int) -> dict[str, Any]:
    """The runs of a seed as one."""
    own = [row for row in runs if row["seed"] == seed]
    rewards = [statistics.mean(row["reward"]) for row in own]
    return {"seed": seed, "accuracy": statistics.mean(row["accuracy"] for row in own), "reward": rewards}


def averaged(runs: Sequence[Row], seed: int, name: str) -> dict[str, Any]:
    """The runs of a seed as one, whose accuracy is the mean of their column `name`."""
    return {"seed": seed, "accuracy": statistics.mean(row[name] for row in runs if row["seed"] == seed)}


def draw(results: Sequence[Row]) -> None:
    results = [row for row in results if row["model"] == "quickstart"]
    tables: Mapping[str, str] = {
        "accuracy": table(results, "accuracy"),
        "policy": policy_table(results),
        "sampler": sampler_table(results),
        "factors": factors_table(results),
    }
    for name, text in tables.items():
        write_between(PAGE, f"quantised-{name}", text)
    curves = {str(arm): [row["reward"] for row in of(results, arm)] for arm in EVERY}
    CURVES.write_text(panels({name: each for name, each in curves.items() if each}, mean=True), encoding="utf-8")
    for arm in (arm for arm in ORDER if arm.correction != "none"):
        uncorrected = of(results, replace(arm, correction="none"))
        over = (
            f"{measure} {difference_of(of(results, arm), uncorrected, measure)}" for measure in ("accuracy", "reward")
        )
        print(f"{arm} over none: {', '.join(over)}")
    print(core_hours(results))


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, ARMS, RESULTS)
    parser.add_argument("--real", type=Path, nargs="+", help="folders of `python -m perl real`")
    parser.add_argument("--stop", type=Path, help="no other run begins once this file is there")
    return parser


@report_errors()
def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.draw:
        draw(rows_to_draw(args.output))
        return
    arms, starts = chosen(parser, args, ARMS), starts_of(args)
    if variables := device.start_environment(device.detect().kind):  # as a training has them
        command = [sys.executable, "-m", "benchmarks.quantised_training", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | variables)
    torch.set_num_threads(1)
    learn_all(starts, arms, args.steps, args.output, further=score_sampler, stop=args.stop, runs=args.runs)


if __name__ == "__main__":
    main()
