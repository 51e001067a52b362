"""Validation during training side by side with the evaluator: the same rows, seeds and weights, interleaved pairs.

    python -m benchmarks.validation [--pairs 5] [--rows 200] [--n 1] [--temperature 0.0] [--max_new_tokens 128]

The quickstart's base and problems. "validation" is `Validation.run` as the trainer calls it (merge, rollout engine,
grading, metrics, files), "evaluator" what perl/eval.py does once its engine is loaded: HFEngine and Recorder, with
grading, summary and files. Each side is a process of its own, its first round is not counted, and both must leave the
same completions and verdicts. The last line is JSON: "ratio" is the median over pairs of the validation's seconds over
the evaluator's (1.1 is a tenth more), "cpu_ratio" that of processor time, which other programs on the machine disturb
less.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._side import Side, ratio, serve, take_turns
from perl.base.files import write_json
from perl.config.load import parse
from perl.grading import Grader
from perl.prompts import ChatTemplate
from perl.scoring.results import SUMMARY, read_samples
from perl.scoring.summary import summarize
from perl.training.grpo import import_trainer

ASSETS = Path(__file__).parents[1] / "assets"
MODEL, PROBLEMS = ASSETS / "quickstart-base", ASSETS / "quickstart-data" / "test.jsonl"


def digest(records: dict[Any, Any]) -> str:
    """What both sides must agree on."""
    rows = [(row, record["completion"], record["score"]) for row, record in sorted(records.items())]
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()


def timed(work: Callable[[], dict[Any, Any]]) -> dict[str, Any]:
    began, processor = time.perf_counter(), time.process_time()
    records = work()
    wall, used = time.perf_counter() - began, time.process_time() - processor
    return {
        "wall_s": wall,
        "cpu_s": used,
        "digest": digest(records),
        "tokens": sum(r["tokens"] for r in records.values()),
    }


def validation_round(options: argparse.Namespace, folder: Path) -> Callable[[], dict[str, Any]]:
    from perl.runs.setup import load_model
    from perl.training.preflight import check_run
    from perl.training.validation import Validation

    settings = {
        "model.model_name_or_path": MODEL,
        "dataset.dataset_name_or_path": ASSETS / "quickstart-data" / "train.jsonl",
        "training.output_dir": folder / "run",
        "validation.datasets": json.dumps([str(PROBLEMS)]),
        "validation.max_samples": options.rows,
        "validation.n": options.n,
        "validation.temperature": options.temperature,
        "validation.max_new_tokens": options.max_new_tokens,
    }
    config = parse([word for name, value in settings.items() for word in (f"--config.{name}", str(value))]).build()
    checked = check_run(config, folder / "run")
    assert checked.validation is not None
    validation = Validation(checked.validation, Grader(), folder / "run", 0, 1)
    trainer = import_trainer()(
        config,
        model=load_model(config),
        train_dataset=checked.dataset,
        processing_class=checked.tokenizer,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        validation=validation,
    )

    def validate() -> dict[Any, Any]:
        validation.run(1, trainer.step.engine, lambda folder: None)
        return read_samples(folder / "run" / "validation" / "step-1" / PROBLEMS.stem / "samples.jsonl")

    return lambda: timed(validate)


def evaluator_round(options: argparse.Namespace, folder: Path) -> Callable[[], dict[str, Any]]:
    from perl.config.evaluation import EvalConfig
    from perl.engines.hf import HFEngine
    from perl.evaluation.datasets import load_problem_sets
    from perl.evaluation.recorder import Recorder
    from perl.evaluation.store import Store

    engine = HFEngine(str(MODEL))
    config = EvalConfig(
        model=str(MODEL),
        dataset=str(PROBLEMS),
        max_samples=options.rows,
        n=options.n,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
    )
    (problem_set,) = load_problem_sets(config, ChatTemplate(engine.tokenizer))
    rounds = 0

    def evaluate() -> dict[Any, Any]:
        nonlocal rounds
        rounds += 1
        store = Store(folder / f"round-{rounds}", {})
        with Recorder({problem_set.dataset: store}, engine.tokenizer, "hf") as recorder:
            for place, completion in engine.stream(problem_set.samples):
                recorder.add(problem_set.samples[place], completion)
        records = [store.records[sample.key, sample.index] for sample in problem_set.samples]
        write_json(store.path.with_name(SUMMARY), summarize(records, options.n))
        return read_samples(store.path)

    return lambda: timed(evaluate)


ROUNDS = {"validation": validation_round, "evaluator": evaluator_round}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--n", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", choices=ROUNDS, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = make_parser().parse_args()
    if options.side:
        with tempfile.TemporaryDirectory() as folder:
            serve(ROUNDS[options.side](options, Path(folder)))
        return
    sides = [Side("benchmarks.validation", name, options.threads) for name in ROUNDS]
    mine, theirs = sides
    for side in sides:
        side.round()
    first = [side.answers.pop() for side in sides]
    if first[0]["digest"] != first[1]["digest"]:
        raise SystemExit("error: the two sides left different rows")
    take_turns(sides, options.pairs, lambda found: ", ".join(f"{answer['wall_s']:.2f} s" for answer in found))
    for side in sides:
        side.close()
    result = {
        "benchmark": "validation",
        "rows": options.rows * options.n,
        "tokens": first[0]["tokens"],
        "validation_s": mine.median("wall_s"),
        "evaluator_s": theirs.median("wall_s"),
        "ratio": ratio(mine, theirs),
        "cpu_ratio": ratio(mine, theirs, "cpu_s"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
