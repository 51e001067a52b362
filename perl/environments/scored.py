"""Conversations that are scored, by an evaluation or a validation: a sample's row, and what it gives.

Sample -> Trajectory -> Conversations.run -> Talked
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from perl.engines.base import Engine
from perl.environments.conversation import Conversations
from perl.records import Asked, Prompt, Sample, Talked, Trajectory
from perl.rewards.files import ROW, row_of, text_of


def row_of_sample(sample: Sample) -> dict[str, Any]:
    """The columns that a training's row of this problem has (perl.runs.setup.build_dataset)."""
    problem = sample.problem
    prompt = [dict(message) for message in sample.messages]
    return {"prompt": prompt, "gold": problem.gold or None, "task": problem.task, ROW: row_of(problem)}


def trajectory_of(prompt: Prompt, key: str, sample: int, row: dict[str, Any], context: int | None) -> Trajectory:
    """A conversation to have.

    Args:
        key: the problem's, and `sample`, which of its conversations.
        row: what the environment's reset gets.
        context: most tokens of a prompt, with what `reset` adds to it, and all that follows it. None: the model names
            none; the engine holds the prompt as it was and max_new_tokens, of which `reset` takes then.
    """
    longest = len(prompt.token_ids) + prompt.sampling.max_new_tokens if context is None else context
    asked = Asked(sampling=prompt.sampling, key=key, longest=longest, adapter=prompt.adapter)
    return Trajectory(row=row, position=0, sample=sample, prompt_ids=prompt.token_ids, asked=asked)


def converse(
    conversations: Conversations, engine: Engine, feed: Iterable[Trajectory | None]
) -> Iterator[tuple[int, Talked]]:
    """What became of each, as `Engine.stream` has it. Its environment is free then."""
    places = itertools.count()

    def rows() -> Iterator[Trajectory | None]:
        for row in feed:
            if row is not None:
                row.position = next(places)
            yield row

    for row in conversations.run(rows(), engine, frees=True):
        yield row.position, _talked(row, conversations.template.text(row.row["prompt"]))


def _talked(row: Trajectory, prompt_text: str) -> Talked:
    reward = row.environment_reward
    if reward is not None and not math.isfinite(reward):
        row.failure = "get_reward gave a number that is not finite"
    return Talked(
        token_ids=tuple(row.sampled_ids),
        finish_reason=row.finish,
        error=row.failure,
        messages=tuple(row.completion),
        text="" if row.failure else text_of(row.completion),
        turns=row.turns,
        observed=len(row.token_ids) - sum(row.sampled),
        reward=None if row.failure else reward,
        prompt_text=prompt_text,
        prompt_tokens=len(row.prompt_ids),
    )
