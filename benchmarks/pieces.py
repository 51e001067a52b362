"""Is a completion the same whichever worker draws it, after whatever that worker drew before?

    python -m benchmarks.pieces [--engine fast|vllm] [--tokens 1000000] [--piece_size 16] [--length 250]

A model of random weights with an adapter and noise. One worker draws the pieces in their order; then two new ones draw
them from the last to the first, after pieces of another policy, so that none meets the same engine state. Compared are
each row's tokens and log-probabilities, to the last bit. The last line is JSON: tokens, rows, and the rows that differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import perl
from benchmarks._workload import wake_adapter
from benchmarks.delivery import make_base, open_trainer
from perl.config.schema import RolloutConfig
from perl.records import Completion, Prompt, Sampling, Weights


def make_prompts(rows: int, length: int) -> list[Prompt]:
    """Of 5 to 40 tokens, each with a seed of its own."""
    numbers = random.Random(0)
    sampling = Sampling(max_new_tokens=length)
    texts = [tuple(numbers.randrange(1050, 1900) for _ in range(numbers.randrange(5, 41))) for _ in range(rows)]
    return [Prompt(token_ids=text, seed=numbers.getrandbits(63), sampling=sampling) for text in texts]


def drawn(
    base: str, folder: Path, options: argparse.Namespace, workers: int, prompts: Sequence[Prompt], before: int
) -> list[Completion]:
    """The prompts' completions by new workers, which have drawn `before` of the prompts by another policy."""
    rollout = RolloutConfig(engine=options.engine, workers=workers, piece_size=options.piece_size, lag=1)
    vllm = {"use_vllm": True, "vllm_max_model_length": options.length + 64} if options.engine == "vllm" else {}
    trainer = open_trainer(base, folder, rollout, max_completion_length=options.length, max_steps=2, **vllm)
    engine: Any = trainer.step.engine
    try:
        for version, asked in ((1, prompts[:before]), (2, prompts)):
            wake_adapter(trainer.policy.bare, 0.05, version)
            engine.publish(Weights(version=version, sigma=0.05, draw=1))
            found = dict(engine.stream(asked))
    finally:
        engine.close()
    return [found[place] for place in range(len(prompts))]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["fast", "vllm"], default="fast")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="at most, drawn by each of the two sides")
    parser.add_argument("--piece_size", type=int, default=16)
    parser.add_argument("--length", type=int, default=250, help="most tokens of a completion")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    size = options.piece_size
    pieces = options.tokens // (options.length * size)
    prompts = make_prompts(pieces * size, options.length)
    order = [piece * size + place for piece in reversed(range(pieces)) for place in range(size)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pieces-") as name, contextlib.redirect_stdout(None):
        base = make_base(Path(name) / "base", 0)
        one = drawn(base, Path(name) / "one", options, 1, prompts, 0)
        two = drawn(base, Path(name) / "two", options, 2, [prompts[place] for place in order], 4 * size)
    again = dict(zip(order, two, strict=True))
    differ = [
        place
        for place, completion in enumerate(one)
        if (completion.token_ids, completion.logprobs) != (again[place].token_ids, again[place].logprobs)
    ]
    print(json.dumps({
        "benchmark": "pieces", "perl": perl.__version__, "torch": torch.__version__, "engine": options.engine,
        "tokens": sum(len(completion.token_ids) for completion in one), "rows": len(one), "pieces": pieces,
        "rows_that_differ": differ, "seconds": round(time.monotonic() - began),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
