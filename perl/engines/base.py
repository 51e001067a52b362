"""What every engine is, and the check that every engine makes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from perl.base.errors import UserError
from perl.records import Completion, Prompt, Sampling, Weights

logger = logging.getLogger(__name__)

Feed = Iterable[Prompt | None]
"""What `Engine.stream` reads: prompts as they come, each with its own sampling; None for "nothing at the moment"."""


class Engine(Protocol):
    """Completes prompts with a model. What a prompt gets depends on its tokens, its seed and `sampling`
    alone: not on its neighbours, their order, or the number of devices (up to floating-point ties)."""

    max_num_seqs: int
    """Rows worked on at once, as far as is known now; a caller keeps the engine full by having more under way."""

    def stream(self, feed: Feed) -> Iterator[tuple[int, Completion]]:
        """Complete prompts as `feed` brings them: (position in the feed, completion) as each finishes.

        More are taken while others are under way, so that a short row never waits for a long one. The feed gives None
        when it has nothing now though rows are under way; when all that it has given is finished it waits itself, and
        its end is the end. A position counts the Nones out. Raises a UserError for a prompt that leaves no room for a
        completion in the model's context.
        """
        ...

    def close(self) -> None:
        """Free its memory. The engine can't be used afterwards; a second call does nothing."""
        ...


class LoadedEngine(Engine, Protocol):
    """An engine on a model that it has loaded itself."""

    def replace_weights(self, model_path: str) -> str | None:
        """Put the weights of another model of the same shape, stored in `model_path`, in the place of those held: bit
        for bit what an engine holds that is built on that folder. Called while nothing is being generated.

        Returns:
            None when it is done, else why it can't be (the engine is then of no further use).
        """
        ...


class PolicyEngine(Engine, Protocol):
    """A training's engine: completes prompts with the policy that was published last. Every process calls `publish`,
    and iterates over `stream` to its end."""

    itemsize: int
    """Bytes of a number that it computes in, at most."""
    context: int | None
    """Most tokens of prompt and completion together; None: no limit of its own."""

    def publish(self, weights: Weights) -> None:
        """From now on `stream` draws with the policy as it is now, with this noise."""
        ...

    def evaluating(self, eos_token_ids: frozenset[int], context: int | None) -> Engine:
        """The same policy under the evaluator's rules, with the noise as published: prompts are completed by their
        sampling and seeds, these tokens and this context alone. Nothing of TRL's generation config or of the run's
        generation_kwargs is heeded, and what the engine keeps for rollouts stays as it is. Close it afterwards."""
        ...

    def not_comparable(self, sampling: Sampling) -> str | None:
        """What its log-probabilities are, where they are not log_softmax(logits / temperature) of all tokens."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What was measured since the last call, by the name that is logged."""
        ...

    def state(self) -> dict[str, Any]:
        """What a resumed run must take up besides the weights, in plain values, the same on every process."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` was."""
        ...


def room_of(prompt: Prompt, max_model_len: int | None) -> int:
    """Most new tokens after `prompt` within `max_model_len` tokens; None: of any number. A UserError where it leaves no
    room for one."""
    if not prompt.token_ids:
        raise UserError("a prompt is empty; give it at least one token")
    if max_model_len is None:
        return prompt.sampling.max_new_tokens
    if len(prompt.token_ids) >= max_model_len:
        raise UserError(
            f"a prompt has {len(prompt.token_ids)} tokens, and the context holds {max_model_len} with the completion;"
            " shorten the prompt, leave it out, or raise --max_model_len if the model allows more"
        )
    return min(prompt.sampling.max_new_tokens, max_model_len - len(prompt.token_ids))


@functools.cache
def warn_once(message: str) -> None:
    """For fallbacks: a rollout is made many times a run."""
    logger.warning(message)
