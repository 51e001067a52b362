"""Workers that draw while the trainer trains, beside the same run without them.

    python -m benchmarks.pool [--steps 8] [--rows 64] [--completion 192] [--sides "ddp;lag 1"]

Five runs of perl.train, one after another, of the same rows a step: a model of 12 million random weights with the
quickstart's tokenizer, whose completions end at random (geometric lengths, 480 tokens in the mean, cut at --completion:
192 leaves hardly a tail, `--rows 32 --completion 768` a long one). One thread a process:

    alone      one process, beside a second one of the same, so that both cores are at work: the rollout and the update
               that a step is made of
    threads    one process with two threads
    ddp        two processes, each drawing and training its half
    lag 0      a trainer and a worker, in turn
    lag 1      a trainer and a worker, at once

The last line is JSON: seconds a step of each (the median but for the first three), "bound" the longer of rollout and
update of "alone", "lag1_over_bound", "lag1_over_ddp".
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "assets" / "quickstart-base"
SKIPPED = 3
"""Steps at the start that are not counted: engines load, and nothing is drawn ahead yet."""


REWARD = """def irregular(completion_ids, **columns):
    return [sum((7 * i + 3) * token for i, token in enumerate(ids)) % 101 / 101 for ids in completion_ids]
"""
"""So that every group has a gradient."""


def make_model(folder: Path) -> None:
    """The quickstart's architecture and tokenizer, larger, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(QUICKSTART)
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6}
    config.update(sizes | {"num_key_value_heads": 6, "head_dim": 64, "layer_types": ["full_attention"] * 8})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(QUICKSTART).save_pretrained(folder)
    (folder / "reward.py").write_text(REWARD)


def command(model: Path, run: Path, options: argparse.Namespace, processes: int, **flags: Any) -> list[str]:
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "scripts/accelerate/cpu.yaml")]
    start = [*launch, "--num_processes", str(processes), "-m"] if processes > 1 else ["-m"]
    values = {
        "common.seed": 1,
        "model.model_name_or_path": model,
        "dataset.dataset_name_or_path": ROOT / "assets/quickstart-data/train.jsonl",
        "peft.r": 16,
        "training.output_dir": run,
        "training.max_steps": options.steps,
        "training.max_completion_length": options.completion,
        "training.per_device_train_batch_size": 8,
        "training.gradient_accumulation_steps": options.rows // 8 // processes,
        "training.num_generations": 8,
        "training.logging_steps": 1,
        "training.save_strategy": "no",
        "training.report_to": "none",
        "training.disable_tqdm": "true",
        "rollout.piece_size": 32,
        "reward.functions": json.dumps([f"{model / 'reward.py'}:irregular"]),
        **{name.replace("__", "."): value for name, value in flags.items()},
    }
    given = [part for name, value in values.items() for part in (f"--config.{name}", str(value))]
    return [sys.executable, *start, "perl.train", *given]


def started(argv: list[str], log: Path, threads: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as file:
        return subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


def seconds(run: Path) -> dict[str, float]:
    """Medians over the steps that count."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "timing/step" in row][SKIPPED:]
    names = "timing/step", "timing/rollout", "timing/update", "completions/mean_length", "completions/max_length"
    found = {name: statistics.median(row[name] for row in steps) for name in names}
    pool = [name for name in ("pool/trainer_waited", "pool/workers_idle") if name in steps[0]]
    return found | {name: statistics.median(row[name] for row in steps) for name in pool}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--completion", type=int, default=192)
    parser.add_argument("--sides", help="only these, separated by semicolons")
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        settings: dict[str, tuple[int, int, dict[str, Any]]] = {
            "alone": (1, 1, {}),
            "threads": (1, 2, {}),
            "ddp": (2, 1, {"rollout__piece_size": "null"}),
            "lag 0": (1, 1, {"rollout__workers": 1}),
            "lag 1": (1, 1, {"rollout__workers": 1, "rollout__lag": 1}),
        }
        for side in options.sides.split(";") if options.sides else settings:
            processes, threads, flags = settings[side]
            run = folder / side.replace(" ", "")
            made = [
                started(
                    command(folder / "model", run, options, processes, **flags), folder / f"{run.name}.log", threads
                )
            ]
            if side == "alone":
                beside = command(folder / "model", folder / "beside", options, processes)
                made.append(started(beside, folder / "beside.log", threads))
            try:
                failed = any(process.wait() for process in made)
            finally:
                for process in made:
                    process.kill()
            if failed:
                sys.exit(f"{side}: {(folder / f'{run.name}.log').read_text()[-2000:]}")
            figures[side] = seconds(run)
            print(side, {name: round(value, 3) for name, value in figures[side].items()}, flush=True)
    steps = {side: each["timing/step"] for side, each in figures.items()}
    if "alone" in figures:
        steps["bound"] = max(figures["alone"]["timing/rollout"], figures["alone"]["timing/update"])
    ratios = {
        f"lag1_over_{side}": round(steps["lag 1"] / steps[side], 3)
        for side in ("bound", "ddp")
        if {"lag 1", side} <= steps.keys()
    }
    print(json.dumps({f"{side.replace(' ', '')}_s": round(value, 3) for side, value in steps.items()} | ratios))


if __name__ == "__main__":
    main()
