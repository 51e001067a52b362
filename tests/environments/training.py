"""A training of two steps with tools, in this process or as one rank: python -m tests.environments.training FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from perl.algorithms import ALGORITHMS
from perl.training.batch import Batch
from tests.environments.calling import calling_model, calling_tokenizer
from tests.environments.scripted import add, talking
from tests.ranks import leave
from tests.trainers import SUMS, kept_batches, make_trainer, reward_digits, reward_tokens
from tests.training.every_algorithm import reward_some


def toolful(folder: Path, **settings: Any) -> tuple[Any, list[Batch]]:
    """A trainer whose model calls `add`, and the batches that it will have trained on."""
    tokenizer = calling_tokenizer()
    fixed: dict[str, Any] = {"engine": "fast", "rewards": [reward_tokens], "max_completion_length": 64}
    fixed |= {"per_device_train_batch_size": 4 // int(os.environ.get("WORLD_SIZE", "1"))}  # of the same batches
    fixed |= {"model": calling_model(), "tokenizer": tokenizer, "prompts": SUMS[:4]}
    fixed |= {"conversations": talking(tokenizer, add, max_turns=3)}
    trainer = make_trainer(folder, **(fixed | settings))
    return trainer, kept_batches(trainer)


def fields_of(algorithm: str) -> dict[str, Any]:
    """Of make_trainer: what an algorithm sets, and rewards that it can learn from."""
    groups: dict[str, dict[str, Any]] = {"algorithm": {"name": algorithm}, "training": {}, "reward": {}}
    for flag, value in ALGORITHMS[algorithm].settings.items():
        group, _, field = flag.partition(".")
        groups[group][field] = value
    dynamic = "dynamic_sampling" in groups["algorithm"]
    rewards = [reward_tokens, reward_digits] if algorithm == "gdpo" else [reward_some if dynamic else reward_tokens]
    return {"rewards": rewards, "algorithm": groups["algorithm"]} | groups["training"]


def tokens(batches: list[Batch]) -> list[dict[str, list[Any]]]:
    """Each batch's conversations, by place and sample."""
    return [
        {f"{row.position}-{row.sample}": [row.prompt_ids, row.token_ids, row.sampled] for row in batch.rows}
        for batch in batches
    ]


def main() -> None:
    trainer, batches = toolful(Path(sys.argv[1]) / "run")
    trainer.train()
    leave(Path(sys.argv[1]), int(os.environ["RANK"]), tokens(batches))


if __name__ == "__main__":
    main()
