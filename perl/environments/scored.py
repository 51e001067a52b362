"""Conversations that are scored, by an evaluation or a validation: a sample's row, its turns' seeds, and what it gives.

Asked -> Trajectory -> Conversations.run -> Talked
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from perl.engines.base import Engine
from perl.environments.conversation import Conversations
from perl.records import Prompt, Sample, Talked, Trajectory, row_seed
from perl.rewards.files import ROW, row_of, text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A conversation to have."""

    prompt: Prompt
    """Its sampling's max_new_tokens are of all turns together, and of what is observed between them."""
    key: str
    """The problem's, and `sample`, which of its conversations: by them and the turn each completion has its seed."""
    sample: int
    row: dict[str, Any]
    """What the environment's reset gets."""


def asked_of(sample: Sample) -> Asked:
    return Asked(prompt=sample.prompt, key=sample.key, sample=sample.index, row=row_of_sample(sample))


def row_of_sample(sample: Sample) -> dict[str, Any]:
    """The columns that a training's row of this problem has (perl.runs.setup.build_dataset)."""
    problem = sample.problem
    prompt = [dict(message) for message in sample.messages]
    return {"prompt": prompt, "gold": problem.gold or None, "task": problem.task, ROW: row_of(problem)}


def converse(
    conversations: Conversations, engine: Engine, feed: Iterable[Asked | None], context: int | None
) -> Iterator[tuple[int, Talked]]:
    """What became of each, as `Engine.stream` has it. Its environment is free then.

    Args:
        context: most tokens of a prompt and all that follows it; None: any number.
    """
    under_way: dict[int, Asked] = {}

    def rows() -> Iterator[Trajectory | None]:
        place = 0
        for asked in feed:
            if asked is None:
                yield None
                continue
            under_way[place] = asked
            ids = asked.prompt.token_ids
            yield Trajectory(row=asked.row, position=place, sample=asked.sample, prompt_ids=ids)
            place += 1

    def prompt(row: Trajectory) -> Prompt:
        return _next_turn(under_way[row.position], row, context)

    for row in conversations.run(rows(), engine, prompt, frees=True):
        del under_way[row.position]
        yield row.position, _talked(row, conversations.template.text(row.row["prompt"]))


def _next_turn(asked: Asked, row: Trajectory, context: int | None) -> Prompt:
    """Of no token where none has room. What `reset` adds to a prompt takes of max_new_tokens: an engine may hold no
    more than the prompts as they were, and these."""
    sampling, ids = asked.prompt.sampling, row.prompt_ids + tuple(row.token_ids)
    longest = len(asked.prompt.token_ids) + sampling.max_new_tokens
    if context is not None:
        longest = min(longest, context)
    left = min(sampling.max_new_tokens - len(row.token_ids), longest - len(ids))
    seed = row_seed(sampling.seed, asked.key, asked.sample, row.turns)
    return replace(asked.prompt, token_ids=ids, seed=seed, sampling=replace(sampling, max_new_tokens=left))


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
