"""Decode steps as captured graphs, on an accelerator.

A step of a small model is some hundred kernels of a few microseconds, and launching one from Python takes longer than
running it. A captured graph launches all of them at once, but always with the same shapes at the same addresses. So
rows and the places that attention reads are rounded up to one of few sizes; what is computed beyond the rows in flight
is thrown away. Graphs live as long as the cache that they read, from one rollout to the next.

The weights may change between two steps, in place; where they lie elsewhere, or a layer computes otherwise
(`baked_in`), all graphs are made again. The first step of a shape runs as it is, which warms up what must not happen
while capturing (workspaces, kernels compiled on first use); the second one is captured. A graph's first replays are
held against the step as it is, with the numbers that it was captured with and with others: one that
computes something else is never used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from perl import device
from perl.base.errors import say_once
from perl.device.sharding import is_of_zero3, is_sharded

ROWS = 8
"""Rows are rounded up to a multiple of this, above 64 to a multiple of 64."""
WIDTH = 128
"""The fewest places that attention reads; more are rounded up to this times 1.5, 2, 3, 4, 6, 8, …"""

CHECKED_REPLAYS = 2
"""Of each graph: the first reads the numbers that it was captured with, the second others."""
ROUNDING = 0.1
"""Of the logits' standard deviation, how far two computations of them may be apart on average: bfloat16 leaves some
hundredths, a graph that reads another step's numbers as much as there is."""

Compute = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""Rows, places to read of each -> the step's result [2, rows] and its logits [rows, vocabulary]. It advances the state
of the rows in place, by the same operations each time, and reads nothing back to the host."""


@dataclass(slots=True)
class Captured:
    """The step of one shape."""

    graph: Any
    result: torch.Tensor
    logits: torch.Tensor
    replays: int = 0


def rounded(rows: int, width: int, max_rows: float = math.inf, max_width: float = math.inf) -> tuple[int, int]:
    """Rows and places of the captured step that computes so many, in a cache of `max_rows` and `max_width`."""
    multiple = ROWS if rows <= 64 else 64
    octave = WIDTH << max(0, (width - 1) // WIDTH).bit_length()
    places = next(size for size in (octave // 2, octave * 3 // 4, octave) if size >= width)
    return int(min(max_rows, -(-rows // multiple) * multiple)), int(min(max_width, max(WIDTH, places)))


class StepGraphs:
    """Decode steps by captured graphs, where there is one.

    Args:
        made_for: what is baked into them besides shapes and the addresses of `state` and cache.
        state: what a step advances.
        max_rows, max_width: of the cache.
        host_lengths: the step calls a kernel that reads the rows' lengths from the host (perl.device.kernels.Kernel).
    """

    def __init__(
        self, made_for: Any, state: list[torch.Tensor], max_rows: int, max_width: int, host_lengths: bool = False
    ):
        self.host_lengths = host_lengths
        self.made_for, self.state = made_for, state
        self.max_rows, self.max_width = max_rows, max_width
        self.pool = device.graph_pool()
        self.shapes: dict[tuple[int, int], Captured | None] = {}
        """None until it is captured."""
        self.failed = False

    def bind(self, compute: Compute, lengths: Callable[[int], list[int]]) -> Compute:
        """`compute`, by graphs. They hold no reference to it, and so none to the cache.

        Args:
            lengths: those of so many rows, the step's token included.
        """
        return partial(self._step, compute, lengths)

    def shape(self, rows: int, width: int) -> tuple[int, int]:
        """Rows and places that are computed for so many."""
        return rounded(rows, width, self.max_rows, self.max_width)

    def _step(
        self, compute: Compute, lengths: Callable[[int], list[int]], rows: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `compute`; what it returns holds until the next call."""
        shape = self.shape(rows, width)
        if shape in self.shapes and self.shapes[shape] is None and not self.failed:
            self._capture(compute, shape)
        if self.failed or (captured := self.shapes.setdefault(shape, None)) is None:
            result, logits = compute(*shape)
            return result[:, :rows], logits[:rows]
        captured.graph.update_lengths(lengths(shape[0]) if self.host_lengths else [])
        if captured.replays < CHECKED_REPLAYS:
            captured.replays += 1
            result, logits = self._checked(captured, compute, shape, rows)
        else:
            captured.graph.replay()
            result, logits = captured.result, captured.logits
        return result[:, :rows], logits[:rows]

    def _capture(self, compute: Compute, shape: tuple[int, int]) -> None:
        try:
            graph, (result, logits) = device.capture(lambda: compute(*shape), self.pool, self.host_lengths)
            self.shapes[shape] = Captured(graph, result, logits)
        except RuntimeError as error:
            self._fail((str(error).strip() or repr(error)).splitlines()[0])

    def _checked(
        self, captured: Captured, compute: Compute, shape: tuple[int, int], rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The step computed as it is, after a replay from the same state that should have made the same."""
        before = [tensor.clone() for tensor in self.state]
        captured.graph.replay()
        replayed = captured.logits[:rows].clone()
        for tensor, value in zip(self.state, before, strict=True):
            tensor.copy_(value)
        result, logits = compute(*shape)
        apart = float((replayed - logits[:rows]).abs().mean())
        spread = float(logits[:rows].std(correction=0))
        if not apart <= ROUNDING * spread:
            self._fail(f"one's logits are {apart:.2g} from those of the step itself, whose spread is {spread:.2g}")
        return result, logits

    def _fail(self, reason: str) -> None:
        self.failed = True
        self.shapes.clear()
        say_once(f"decoding without captured graphs: {reason}")


def unsupported_reason(model: Any, attention_kept: str | None) -> str | None:
    """Why steps of `model` can't be captured, or None.

    Args:
        attention_kept: why the model keeps its own attention (perl.engines.attention.adopt), or None.
    """
    if device.detect().kind == "cpu":
        return "there are none on a cpu"
    if is_sharded(model):
        return "each step gathers weights from other processes"
    if is_of_zero3(model):
        return "ZeRO-3 gathers the weights for each rollout, to another place in memory"
    return attention_kept


def baked_in(model: nn.Module) -> tuple[Any, ...]:
    """What a graph of `model` holds of it: where its tensors lie, and which modules compute otherwise than their class
    says (perl.adapters.batched) or with their adapter merged or off. Graphs serve as long as this stays equal."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    switches = tuple(
        (vars(module).get("forward"), getattr(module, "merged", None), getattr(module, "disable_adapters", None))
        for module in model.modules()
    )
    return tuple(tensor.data_ptr() for tensor in tensors), switches
