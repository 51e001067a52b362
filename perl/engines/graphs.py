"""Decode steps as captured graphs, on an accelerator.

A step of a small model is some hundred kernels of a few microseconds, and launching one from Python takes longer than
running it. A captured graph launches all of them at once, but always with the same shapes at the same addresses. So
rows are rounded up to a power of two and the columns that attention reads to a multiple of WIDTH, and each step's
numbers are copied to where the graph reads them. What is computed beyond the rows in flight is thrown away.

The weights may change between two steps, in place. The first step of a shape runs as it is, which warms up what must
not happen while capturing (workspaces, kernels compiled on first use); the second one is captured. A graph's first
replays are held against the step as it is, with the numbers that it was captured with and with others: one that
computes something else is never used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from perl import device
from perl.engines.base import warn_once

WIDTH = 128
"""Columns are rounded up to a multiple of this: a graph for each, and up to this many columns read for nothing."""

CHECKED_REPLAYS = 2
"""Of each graph: the first reads the numbers that it was captured with, the second others."""
ROUNDING = 0.1
"""Of the logits' standard deviation, how far two computations of them may be apart on average: bfloat16 leaves some
hundredths, a graph that reads another step's numbers as much as there is."""

Compute = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Last tokens int64 [rows], lengths int64 [rows] with them, columns to read -> logits [rows, vocabulary]. The same
operations each time, and nothing read back to the host."""


@dataclass(slots=True)
class Captured:
    """The step of one shape."""

    graph: Any
    logits: torch.Tensor
    """What the graph writes, float32 [rows, vocabulary]."""
    replays: int = 0


class StepGraphs:
    """Calls `compute`, by a captured graph where there is one.

    Args:
        compute: writes to slots of a cache in place.
        slots: of the cache; a free slot may be written to.
        columns: of the cache.
        filler: token of the rows beyond those in flight.
        where: the accelerator.
    """

    def __init__(self, compute: Compute, slots: int, columns: int, filler: int, where: torch.device):
        self.compute = compute
        self.slots, self.columns, self.filler = slots, columns, filler
        self.tokens = torch.full((slots,), filler, device=where)
        self.lengths = torch.ones(slots, dtype=torch.long, device=where)
        self.pool = device.graph_pool()
        self.shapes: dict[tuple[int, int], Captured | None] = {}
        """None until it is captured."""
        self.failed = False

    def __call__(self, tokens: torch.Tensor, lengths: torch.Tensor, width: int) -> torch.Tensor:
        """As `compute`; the result holds until the next call."""
        rows = len(tokens)
        shape = self.shape(rows, width)
        self.tokens[:rows].copy_(tokens)
        self.tokens[rows:].fill_(self.filler)
        self.lengths[:rows].copy_(lengths)
        self.lengths[rows:].fill_(1)
        if shape in self.shapes and self.shapes[shape] is None and not self.failed:
            self._capture(shape)
        if self.failed or (captured := self.shapes.setdefault(shape, None)) is None:
            return self._compute(shape)[:rows]
        captured.graph.replay()
        captured.replays += 1
        if captured.replays <= CHECKED_REPLAYS:
            return self._checked(captured, shape, rows)
        return captured.logits[:rows]

    def shape(self, rows: int, width: int) -> tuple[int, int]:
        """Rows and columns that are computed for so many."""
        return min(self.slots, 1 << (rows - 1).bit_length()), min(self.columns, -(-width // WIDTH) * WIDTH)

    def _compute(self, shape: tuple[int, int]) -> torch.Tensor:
        rows, width = shape
        return self.compute(self.tokens[:rows], self.lengths[:rows], width)

    def _capture(self, shape: tuple[int, int]) -> None:
        try:
            self.shapes[shape] = Captured(*device.capture(lambda: self._compute(shape), self.pool))
        except RuntimeError as error:
            self._fail((str(error).strip() or repr(error)).splitlines()[0])

    def _checked(self, captured: Captured, shape: tuple[int, int], rows: int) -> torch.Tensor:
        """The step's logits, computed as they are, after a replay that should have made the same."""
        computed = self._compute(shape)[:rows]
        apart = float((captured.logits[:rows] - computed).abs().mean())
        spread = float(computed.std(correction=0))
        if not apart <= ROUNDING * spread:
            self._fail(f"one's logits are {apart:.2g} from those of the step itself, whose spread is {spread:.2g}")
        return computed

    def _fail(self, reason: str) -> None:
        self.failed = True
        warn_once(f"decoding without captured graphs: {reason}")


def unsupported_reason(attention_kept: str | None, lockstep: bool) -> str | None:
    """Why steps can't be captured, or None.

    Args:
        attention_kept: why the model keeps its own attention (perl.engines.attention.adopt), or None.
        lockstep: whether forwards gather parameters from other ranks.
    """
    if device.detect().kind == "cpu":
        return "there are none on a cpu"
    if lockstep:
        return "each step gathers weights from other processes"
    return attention_kept
