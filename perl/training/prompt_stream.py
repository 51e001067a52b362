"""The order in which dynamic sampling takes prompts: epoch after epoch, each prompt once an epoch.

Positions count on through the epochs; every process knows all of it, as what each has drawn is exchanged after a
rollout. In a rollout process k of n takes the k-th, (k+n)-th, … of the positions that are ahead, as many as it needs.
Those that lie before the last one drawn and were not drawn come first in the next rollout.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from perl.base.errors import UserError
from perl.prompts import row_seed


class PromptStream:
    """
    Args:
        rows: of the data set.
        seed: of the order.
        epochs: after so many it ends; None: never.
        shuffle: False: every epoch in the data set's order.
    """

    def __init__(self, rows: int, seed: int, epochs: float | None = None, shuffle: bool = True):
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.end = None if epochs is None else math.ceil(rows * epochs)
        self.next = 0
        """The first position behind all that were drawn."""
        self.skipped: list[int] = []
        """Positions before it that were not drawn."""

    @property
    def left(self) -> float:
        """Prompts that are ahead."""
        return math.inf if self.end is None else len(self.skipped) + self.end - self.next

    @property
    def epoch(self) -> float:
        """Prompts drawn, in epochs."""
        return (self.next - len(self.skipped)) / self.rows

    def ahead(self) -> Iterator[int]:
        """The positions to come, in their order."""
        rest = itertools.count(self.next) if self.end is None else range(self.next, self.end)
        return itertools.chain(tuple(self.skipped), rest)

    def share(self, process: int, processes: int) -> Iterator[int]:
        """Those of one process."""
        return itertools.islice(self.ahead(), process, None, processes)

    def drawn(self, counts: Sequence[int]) -> None:
        """Go on behind what a rollout has drawn: so many of its share by each process. Every process must say the
        same."""
        taken = {
            position
            for process, count in enumerate(counts)
            for position in itertools.islice(self.share(process, len(counts)), count)
        }
        behind = max(taken, default=-1) + 1
        candidates = [*self.skipped, *range(self.next, behind)]
        self.skipped = [position for position in candidates if position not in taken]
        self.next = max(self.next, behind)

    def row(self, position: int) -> int:
        """Which row of the data set stands at a position."""
        epoch, place = divmod(position, self.rows)
        return _order(self.rows, row_seed(self.seed, "epoch", epoch))[place] if self.shuffle else place

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the same on every process, whatever their number."""
        return {"rows": self.rows, "next": self.next, "skipped": list(self.skipped)}

    def restore(self, state: dict[str, Any]) -> None:
        if state["rows"] != self.rows:
            raise UserError(
                f"--config.training.resume_from_checkpoint: the run drew its prompts from {state['rows']} rows, now"
                f" there are {self.rows}; give it the same --config.dataset"
            )
        self.next, self.skipped = state["next"], list(state["skipped"])


@functools.lru_cache(maxsize=2)
def _order(rows: int, seed: int) -> list[int]:
    """A permutation of range(rows)."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
