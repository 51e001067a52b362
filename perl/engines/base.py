"""What every engine is, and the check that every engine makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from perl.errors import UserError
from perl.records import Completion, Prompt, Sampling


class Engine(Protocol):
    """A loaded model that completes prompts. What a prompt gets depends on its tokens, its seed and `sampling`
    alone: not on its neighbours, their order, or the number of devices (up to floating-point ties)."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Yield (index into `prompts`, completion) as each finishes, in any order.

        Each Prompt is completed once: `sampling.n` and `sampling.seed` are the caller's, who has already made n
        prompts of each problem and given each its own seed. Raises a UserError, before anything is generated, when
        a prompt leaves no room for a completion in the model's context.
        """
        ...

    def close(self) -> None:
        """Free the model and its memory. The engine can't be used afterwards; a second call does nothing."""
        ...


def require_room(prompts: Sequence[Prompt], max_model_len: int) -> None:
    """Raise a UserError that names the first prompt without room for one new token within `max_model_len` tokens."""
    for index, prompt in enumerate(prompts):
        if not prompt.token_ids:
            raise UserError(f"prompt {index} is empty; give it at least one token")
        if len(prompt.token_ids) >= max_model_len:
            raise UserError(
                f"prompt {index} has {len(prompt.token_ids)} tokens, and the context holds {max_model_len} with the"
                " completion; shorten the prompt, leave it out, or raise --max_model_len if the model allows more"
            )
