"""Conversations that the workers of a training have: the run is the same bit for bit without workers, with one or two,
however long the tools take, with a worker that is killed, and when it is resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from perl.config.schema import EnvironmentConfig, NoiseConfig
from perl.models.folders import load_model
from perl.training.batch import Batch
from perl.workers.conversations import opened
from tests.environments.calling import calling_tokenizer, save_calling
from tests.trainers import SUMS, kept_batches, make_trainer, reward_tokens

SLOW_TOOLS = '''
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
'''
NOISE = NoiseConfig(enabled=True, seed=3, sigma_start=0.1, sigma_end=0.01, num_stages=2)
PIECE = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    save_calling(folder / "model")
    (folder / "tools.py").write_text(SLOW_TOOLS)
    return folder


def train(
    place: Path, folder: Path, checkpoint: str | None = None, kill: bool = False, **settings: Any
) -> tuple[dict[str, torch.Tensor], list[Batch], list[dict[str, Any]]]:
    """The trained adapter, the batches, and what was logged.

    Args:
        kill: a worker ends by SIGKILL when the second batch is scored.
    """
    named = settings.pop("environment", {"tools": [f"{place}/tools.py:add"]})
    rollout = {"piece_size": PIECE} | settings.pop("rollout", {})
    tokenizer, calls = calling_tokenizer(), []

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        calls.append(None)
        if kill and len(calls) == 2:
            os.kill(trainer.step.engine._background.pool.workers[0].link._process.pid, signal.SIGKILL)
        return reward_tokens(completion_ids)

    model = load_model(place / "model")
    model.name_or_path = str(place / "model")
    fixed: dict[str, Any] = {"max_completion_length": 64, "max_steps": 3, "prompts": SUMS, "noise": NOISE}
    fixed |= {"per_device_train_batch_size": 8, "engine": "fast", "rewards": [reward]}
    with opened(EnvironmentConfig(max_turns=3, **named), tokenizer) as conversations:
        trainer = make_trainer(
            folder, model=model, tokenizer=tokenizer, conversations=conversations, rollout=rollout, **fixed | settings
        )
        batches = kept_batches(trainer)
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
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


def require_same(one: Any, other: Any) -> None:
    assert conversations_of(one[1]) == conversations_of(other[1])
    assert all(torch.equal(weight, other[0][name]) for name, weight in one[0].items())


def test_the_run_is_the_same_without_workers_and_with_two(place, tmp_path):
    alone = train(place, tmp_path / "alone")
    two = train(place, tmp_path / "two", rollout={"workers": 2})
    require_same(alone, two)
    for name in ("tools/call_frequency", "tools/failure_frequency", "turns/mean", "environment/failure_frequency"):
        assert [row[name] for row in two[2]] == [row[name] for row in alone[2]]
    assert two[2][0]["turns/mean"] > 1
    assert two[2][0]["tools/failure_frequency"] > 0
    assert all(row["rollout/engine_mismatch"] < 1e-4 for row in two[2])


@pytest.mark.slow
def test_the_run_is_the_same_with_a_lag_a_worker_that_is_killed_and_a_resumed_one(place, tmp_path):
    lag = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3}
    one = train(place, tmp_path / "one", rollout={"workers": 1, "lag": 2}, **lag)
    killed = train(place, tmp_path / "killed", kill=True, rollout={"workers": 2, "lag": 2}, **lag)
    require_same(one, killed)
    assert [row["pool/staleness"] for row in one[2]] == [0.0, 1.0, 2.0, 2.0, 2.0]
    resumed = train(
        place, tmp_path / "one", str(tmp_path / "one/checkpoint-3"), rollout={"workers": 2, "lag": 2}, **lag
    )
    assert conversations_of(resumed[1]) == conversations_of(one[1])[-len(conversations_of(resumed[1])) :]
    assert all(torch.equal(weight, resumed[0][name]) for name, weight in one[0].items())


@pytest.mark.slow
def test_the_newest_policy_converses_as_answers_come(place, tmp_path):
    """Nothing is held back, so that the run does not repeat; its rows are what was drawn."""
    rollout = {"workers": 2, "max_staleness": 2, "piece_size": None}
    _, batches, logged = train(place, tmp_path, rollout=rollout, max_steps=5)
    assert all(row["rollout/engine_mismatch"] < 1e-4 for row in logged)
    assert all(row["pool/staleness_max"] <= 2 for row in logged)
    assert max(row.turns for batch in batches for row in batch.rows) > 1


def test_an_environment_of_a_worker_rewards_and_says_what_it_adds(place, tmp_path):
    seen = []

    def reward(environment_rewards: list[float], completion_lengths: list[int], **others: Any) -> list[float]:
        assert "environments" not in others
        seen.extend(zip(environment_rewards, completion_lengths, strict=True))
        return environment_rewards

    settings = {"environment": {"factory": f"{place}/tools.py:Sums"}, "rewards": [reward], "max_steps": 1}
    _, (batch,), _ = train(place, tmp_path, rollout={"workers": 1}, **settings)
    assert [row.environment_reward for row in batch.rows] == [row.outcomes.count(False) / 10 for row in batch.rows]
    assert sorted(seen) == sorted((row.environment_reward, len(row.token_ids)) for row in batch.rows)
    assert all(row.row["prompt"][-1]["content"].endswith(" ?") for row in batch.rows)
