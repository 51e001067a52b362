"""A key-value cache with one slot per row, each with its own length.

transformers' DynamicCache aligns rows at their right edge and is copied whole at every step; StaticCache has one
write position for all rows. Here row i owns slot i, its tokens stand from column 0 on, and a step writes one column
per row in place. A row that ends gives its slot to the last one; a new row is written behind the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class Step:
    """Where the decode step in progress writes, and what it sees; shared by all layers."""

    slots: torch.Tensor
    """int64 [rows], 0 to rows - 1."""
    columns: torch.Tensor
    """int64 [rows], where each row's new token goes."""
    width: int
    """Columns that some row uses, the new one included."""


class SlotLayer(CacheLayerMixin):
    """One layer: keys and values [slots, heads, columns, head_dim], zero where nothing was written yet (a masked
    place still meets a product with 0, which must not be NaN)."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: int, columns: int):
        """`keys`, `values`: any tensor of the layer, for its heads, head_dim, dtype and device."""
        super().__init__()
        self.keys: torch.Tensor = _blank(keys, slots, columns)  # pyright: ignore[reportIncompatibleVariableOverride]
        self.values: torch.Tensor = _blank(values, slots, columns)  # pyright: ignore[reportIncompatibleVariableOverride]
        self.is_initialized = True
        self.step: Step | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("a SlotLayer is made initialised")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token per row ([rows, heads, 1, head_dim]); return what the rows have so far."""
        step = self._current()
        rows = key_states.shape[0]
        self.keys[step.slots, :, step.columns] = key_states[:, :, 0]
        self.values[step.slots, :, step.columns] = value_states[:, :, 0]
        return self.keys[:rows, :, : step.width], self.values[:rows, :, : step.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._current().width, 0

    def get_seq_length(self) -> int:
        return self._current().width - 1

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # what transformers before 5.17 calls get_max_length
        return -1

    def _current(self) -> Step:
        assert self.step is not None, "SlotCache.begin comes before each decode step"
        return self.step


class SlotCache(Cache):
    """The layers of one model."""

    def __init__(self, like: Sequence[tuple[torch.Tensor, torch.Tensor]], slots: int, columns: int):
        """`like`: keys and values of each layer, of any batch size and length."""
        self.slot_layers = [SlotLayer(keys, values, slots, columns) for keys, values in like]
        super().__init__(layers=list(self.slot_layers))
        self.slots = slots
        self.columns = columns

    def begin(self, lengths: torch.Tensor, width: int) -> None:
        """Point the next forward at column lengths[i] of slot i, of which `width` columns are read."""
        step = Step(torch.arange(len(lengths), device=lengths.device), lengths, width)
        for layer in self.slot_layers:
            layer.step = step

    def insert(self, first: int, count: int, prompt: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write one prompt's keys and values (each layer's [heads, length, head_dim]) to `count` slots from
        `first` on."""
        for layer, (keys, values) in zip(self.slot_layers, prompt, strict=True):
            layer.keys[first : first + count, :, : keys.shape[1]] = keys
            layer.values[first : first + count, :, : values.shape[1]] = values

    def move(self, source: list[int], target: list[int], width: int) -> None:
        """Copy the first `width` columns of each source slot to its target slot."""
        for layer in self.slot_layers:
            layer.keys[target, :, :width] = layer.keys[source, :, :width]
            layer.values[target, :, :width] = layer.values[source, :, :width]

    def resize(self, slots: int, columns: int, rows: int, width: int) -> None:
        """Make room for another shape, layer by layer, keeping `width` columns of the first `rows` slots."""
        for layer in self.slot_layers:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = _blank(old, slots, columns)
                new[:rows, :, :width] = old[:rows, :, :width]
                setattr(layer, name, new)
                del old, new
        self.slots, self.columns = slots, columns


def _blank(like: torch.Tensor, slots: int, columns: int) -> torch.Tensor:
    return like.new_zeros(slots, like.shape[-3], columns, like.shape[-1])
