"""What every engine is, and the check that every engine makes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

from perl.base.errors import UserError
from perl.records import Completion, Prompt

logger = logging.getLogger(__name__)

Feed = Iterable[Prompt | None]
"""What `Engine.stream` reads: prompts as they come, each with its own sampling; None for "nothing at the moment"."""


class Engine(Protocol):
    """A loaded model that completes prompts. What a prompt gets depends on its tokens, its seed and `sampling`
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

    def replace_weights(self, model_path: str) -> str | None:
        """Put the weights of another model of the same shape, stored in `model_path`, in the place of those held: bit
        for bit what an engine holds that is built on that folder. Called while nothing is being generated.

        Returns:
            None when it is done, else why it can't be (the engine is then of no further use).
        """
        ...

    def close(self) -> None:
        """Free the model and its memory. The engine can't be used afterwards; a second call does nothing."""
        ...


def room_of(prompt: Prompt, max_model_len: int) -> int:
    """Most new tokens after `prompt` within `max_model_len` tokens. A UserError where it leaves no room for one."""
    if not prompt.token_ids:
        raise UserError("a prompt is empty; give it at least one token")
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
