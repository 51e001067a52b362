"""Trainings whose workers have conversations, in this process or as one rank:

python -m tests.environments.working PLACE FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from perl.config.schema import EnvironmentConfig, NoiseConfig
from perl.models.folders import load_model
from perl.prompts import ChatTemplate
from perl.training.batch import Batch
from perl.workers.conversations import Talks
from tests.environments.calling import calling_tokenizer, save_calling
from tests.ranks import leave
from tests.trainers import SUMS, kept_batches, make_trainer, reward_tokens

SLOW_TOOLS = '''
import os
import random
import time


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    time.sleep(random.SystemRandom().random() / 30)  # more or less than the conversations wait for each other
    return a + b


def end_worker(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    os._exit(7)


end_worker.__name__ = "add"


class Sums:
    def reset(self, gold: str = "", **row) -> str | None:
        self.seen = []
        return " ?"

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        self.seen.append(a + b)
        return a + b

    def get_reward(self) -> float:
        return len(self.seen) / 10


class OfFirstRank(Sums):
    def reset(self, **row) -> None:
        if os.environ.get("RANK") == "1":
            raise RuntimeError("no game here")
        super().reset()
'''
NOISE = NoiseConfig(enabled=True, seed=3, sigma_start=0.1, sigma_end=0.01, num_stages=2)
PIECE = 4


def make_place(folder: Path) -> Path:
    """A model that calls add, and tools.py."""
    save_calling(folder / "model")
    (folder / "tools.py").write_text(SLOW_TOOLS)
    return folder


def train(
    place: Path,
    folder: Path,
    checkpoint: str | None = None,
    kill: bool = False,
    saved: Path | None = None,
    **settings: Any,
) -> tuple[dict[str, torch.Tensor], list[Batch], list[dict[str, Any]]]:
    """The trained adapter, the batches, and what was logged.

    Args:
        kill: a worker ends by SIGKILL when the second batch is scored.
        saved: folder for the trained adapter, for trainings whose weights are spread over processes.
    """
    named = settings.pop("environment", {"tools": [f"{place}/tools.py:add"]})
    rollout = {"piece_size": PIECE} | settings.pop("rollout", {})
    tokenizer, calls = calling_tokenizer(), []

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        calls.append(None)
        if kill and len(calls) == 2:
            os.kill(trainer.step.engine._background.pool.workers[0].link._process.pid, signal.SIGKILL)
        return reward_tokens(completion_ids)

    model = load_model(place / "model", **settings.pop("load", {}))
    model.name_or_path = str(place / "model")
    fixed: dict[str, Any] = {"max_completion_length": 64, "max_steps": 3, "prompts": SUMS, "noise": NOISE}
    fixed |= {"per_device_train_batch_size": 8, "engine": "fast", "rewards": [reward]}
    talks = Talks.of(EnvironmentConfig(max_turns=3, **named), ChatTemplate(tokenizer))
    with talks.opened() as conversations:
        trainer = make_trainer(
            folder, model=model, tokenizer=tokenizer, conversations=conversations, rollout=rollout, **fixed | settings
        )
        batches = kept_batches(trainer)
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
            if saved is not None:
                trainer.save_model(str(saved))
        finally:
            trainer.step.engine.close()
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return weights, batches, [row for row in trainer.state.log_history if "loss" in row]


def conversations_of(batches: list[Batch]) -> list[list[Any]]:
    return [
        [row.position, row.sample, row.prompt_ids, row.token_ids, row.sampled, str(row.logprobs), str(row.completion),
         row.turns, row.finish, row.outcomes, row.environment_reward, row.row["prompt"]]
        for batch in batches for row in batch.rows
    ]  # fmt: skip


def main() -> None:
    place, out = Path(sys.argv[1]), Path(sys.argv[2])
    weights, batches, _ = train(place, out / "run", rollout={"workers": 2}, per_device_train_batch_size=4)
    said = {f"{each[0]}-{each[1]}": each for each in conversations_of(batches)}
    digests = {name: weight.double().sum().item() for name, weight in weights.items()}
    leave(out, int(os.environ["RANK"]), json.loads(json.dumps([said, digests])))


if __name__ == "__main__":
    main()
