"""The processes that train together, as far as a step has to know of them."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object


class Processes:
    """What each process must say to the others. Every one of these methods is called by all of them together.

    Args:
        accelerator: accelerate's, of the trainer.
    """

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator

    @property
    def device(self) -> torch.device:
        """Of this process."""
        return self.accelerator.device

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def count(self) -> int:
        return self.accelerator.num_processes

    def gathered(self, things: list[Any]) -> list[Any]:
        """The lists of all processes, one after the other: things that pickle."""
        return gather_object(things) if self.count > 1 else list(things)

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """From [rows, …] of this process to [rows of all processes, …], as many of each."""
        return self.accelerator.gather(tensor)

    def numbers(self, numbers: list[Any]) -> torch.Tensor:
        """[processes, numbers]: as many numbers of every process."""
        return self.accelerator.gather(torch.tensor([numbers], device=self.device))

    def largest(self, numbers: list[int]) -> list[int]:
        """The largest of each among all processes."""
        return self.numbers(numbers).amax(dim=0).tolist() if self.count > 1 and numbers else list(numbers)

    def added_up(self, numbers: list[float]) -> list[float]:
        """The sums over the processes: float32 crosses, as HCCL takes no float64; added up in the same order by all."""
        return self.numbers(numbers).double().sum(dim=0).tolist()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the processes, the same bits on each of them."""
        return self.accelerator.reduce(tensor, reduction="sum")
