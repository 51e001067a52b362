"""The order in which a run takes its prompts: epoch after epoch, each prompt once an epoch, as TRL's sampler has it.

A prompt's place in the stream names it: positions count on through the epochs. All processes hold the same stream, and
say the same of what was taken of it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from perl.base.errors import UserError


class PromptStream:
    """
    Args:
        rows: of the data set.
        batch: prompts of a generation batch. An epoch has as many whole batches as there are, so that up to batch - 1
            prompts, others in each epoch, are left out of it, as TRL leaves them out.
        seed: of the order.
        epochs: after so many it ends; None: never.
        shuffle: False: every epoch in the data set's order.

    Attributes:
        next: the first position that was not taken.
        equal_share: of the groups that earlier rollouts drew, how many had equal rewards (perl.training.collect), the
            latest ones counting most; 0 before the first.
    """

    def __init__(self, rows: int, batch: int, seed: int, epochs: float | None = None, shuffle: bool = True):
        self.rows, self.batch, self.seed, self.shuffle = rows, batch, seed, shuffle
        self.per_epoch = rows - rows % batch
        self.end = None if epochs is None else math.ceil(self.per_epoch * epochs)
        self.next = 0
        self.equal_share = 0.0

    @property
    def left(self) -> float:
        """Prompts that are ahead."""
        return math.inf if self.end is None else self.end - self.next

    @property
    def epoch(self) -> float:
        """Prompts taken, in epochs."""
        return self.next / self.per_epoch

    def row(self, position: int) -> int:
        """Which row of the data set stands at a position."""
        epoch, place = divmod(position, self.per_epoch)
        return _order(self.rows, self.seed, epoch)[place] if self.shuffle else place

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the same on every process, whatever their number."""
        return {"rows": self.rows, "next": self.next, "equal_share": self.equal_share}

    def restore(self, state: dict[str, Any]) -> None:
        if state["rows"] != self.rows:
            raise UserError(
                f"--config.training.resume_from_checkpoint: the run drew its prompts from {state['rows']} rows, now"
                f" there are {self.rows}; give it the same --config.dataset"
            )
        self.next, self.equal_share = state["next"], state["equal_share"]


@functools.lru_cache(maxsize=2)
def _order(rows: int, seed: int, epoch: int) -> list[int]:
    """The permutation of range(rows) that one generator, which TRL's RepeatSampler keeps for all epochs, draws for this
    one."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epoch):
        torch.randperm(rows, generator=generator)
    return torch.randperm(rows, generator=generator).tolist()
