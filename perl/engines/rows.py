"""What the decode loops take and give back: a Row is one completion to make, Finished is that completion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from perl.records import Sampling

DEFAULT_BATCH_TOKENS = 65_536
"""Most tokens of key-value cache at once: 3.7 GB at Qwen2.5-7B's 57 kB a token in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One completion to make."""

    prompt_ids: tuple[int, ...]
    seed: int
    max_new_tokens: int

    @property
    def reach(self) -> int:
        """Tokens that it may come to."""
        return len(self.prompt_ids) + self.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One completion made."""

    index: int
    """Index of its Row, Nones not counted."""
    token_ids: list[int]
    """Drawn tokens; the last one is the end-of-sequence token when `stopped`."""
    logprobs: list[float]
    """The log-probability of each token when it was drawn, as `sampling.choose` defines it."""
    stopped: bool
    """True: ended by an end-of-sequence token. False: cut off at the row's max_new_tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Rows, and all that a decode loop must know to complete them."""

    rows: Iterable[Row | None]
    """Read while others are decoded: None when there is nothing at the moment (perl.engines.base.Feed)."""
    sampling: Sampling
    """Its n, seed and max_new_tokens are not read here: each Row has its own."""
    eos_token_ids: frozenset[int]
    pad_token_id: int
    max_batch_tokens: int = DEFAULT_BATCH_TOKENS
    """Bound on rows in flight times the longest (prompt + max_new_tokens) among them. A row that is longer than this
    alone is decoded alone."""
    capture: bool = False
    """Decode steps run as captured graphs where the accelerator and the model allow it (perl.engines.graphs)."""


def arrived(source: Iterator[Row | None], first: int) -> list[tuple[int, Row]]:
    """The rows that there are now, up to the next None or the end, numbered from `first` on."""
    return list(enumerate(iter(lambda: next(source, None), None), first))


def left_pad(
    sequences: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, int64 [rows, longest], padded on the left."""
    width = max(map(len, sequences))
    ids = [[pad_token_id] * (width - len(sequence)) + list(sequence) for sequence in sequences]
    mask = [[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def mark_seen(sequences: Sequence[Sequence[int]], vocabulary: int, device: torch.device) -> torch.Tensor:
    """bool [rows, vocabulary]: which tokens each sequence holds. Padding does not count."""
    seen = torch.zeros(len(sequences), vocabulary, dtype=torch.bool, device=device)
    for row, sequence in enumerate(sequences):
        seen[row, torch.tensor(sequence, device=device)] = True
    return seen
