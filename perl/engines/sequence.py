"""A sequence: one completion to make, and what was drawn of it."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from perl.records import Completion

if TYPE_CHECKING:
    from perl.models.pixels import MakeImages


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion: what is asked for, then what was drawn."""

    prompt_ids: tuple[int, ...]
    seed: int
    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)
    """Drawn tokens; the last one is the end-of-sequence token when `stopped`."""
    logprobs: list[float] = field(default_factory=list)
    """The log-probability of each token when it was drawn, as `sampling.sample` defines it."""
    stopped: bool = False
    """Ended by an end-of-sequence token, and not cut off at max_new_tokens."""
    index: int = -1
    """Place among the sequences that the decoder read."""
    images: MakeImages | None = None
    """Of its prompt's images."""
    launched: int = 0
    """Tokens drawn, those included that are still to be read from the device."""

    @property
    def max_len(self) -> int:
        """Tokens that it may come to."""
        return len(self.prompt_ids) + self.max_new_tokens

    @property
    def length(self) -> int:
        """Tokens of prompt and completion now, those included that are still to be read."""
        return len(self.prompt_ids) + self.launched

    @property
    def finished(self) -> bool:
        return self.stopped or len(self.token_ids) == self.max_new_tokens

    @property
    def goes_on(self) -> bool:
        """Whether a further token is to be drawn."""
        return not self.finished and self.launched < self.max_new_tokens

    def completion(self) -> Completion:
        """What an engine gives back for it, once it is finished."""
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason="stop" if self.stopped else "length",
        )


def left_pad(sequences: List[List[int]], pad_token_id: int, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, int64 [rows, longest], padded on the left."""
    width = max(map(len, sequences))
    ids = [[pad_token_id] * (width - len(sequence)) + list(sequence) for sequence in sequences]
    mask = [[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences]
    return torch.tensor(ids, device=where), torch.tensor(mask, device=where)


def mark_seen(sequences: List[List[int]], vocabulary: int, where: torch.device) -> torch.Tensor:
    """bool [rows, vocabulary]: which tokens each sequence holds. Padding does not count."""
    seen = torch.zeros(len(sequences), vocabulary, dtype=torch.bool, device=where)
    for row, sequence in enumerate(sequences):
        seen[row, torch.tensor(sequence, device=where)] = True
    return seen
