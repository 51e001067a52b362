"""The KV cache of a decoder: keys and values of the sequences in flight, row i of a decode step being sequence i.

transformers' DynamicCache aligns sequences at their right edge and is copied whole at every step; StaticCache has one
write position for all. Here each row has its own length, and a step writes one token a row in place. Two layouts:

- BlockCache (on accelerators; PagedAttention, arXiv 2309.06180): a row owns a list of blocks, and rows of one prompt
  share the blocks that it fills. Memory is what the sequences are, not what they may become, and no tensor moves.
- RowCache (on a CPU): row i owns `max_seq_len` places of its own. What attention reads is a view, where blocks would
  have to be copied together in each layer; memory that no token was written to is never touched.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from perl import device

KeysAndValues = list[tuple[torch.Tensor, torch.Tensor]]
"""Of each layer: [heads, tokens, head_dim] both."""

BLOCK_SIZE = 128
"""Tokens of a block, as attention kernels take it; half of it is lost at the end of each sequence on average."""
GROWTH = 16
"""Tokens by which each sequence can grow when another one is let in."""
SCRATCH = 0
"""The block that rows without a sequence write to."""


@dataclass(slots=True)
class Prefix:
    """The keys and values of a prompt, kept for the sequences that begin with it."""

    length: int
    states: KeysAndValues
    """Of its tokens that are not in `blocks`."""
    blocks: list[int]
    """That it fills, and that the sequences share; none in a RowCache."""
    copied: bool = False
    """`states` are not a part of the batch that the prompt was computed in."""

    def keep_own_copy(self) -> None:
        """Let go of that batch."""
        if not self.copied:
            self.states = [(keys.clone(), values.clone()) for keys, values in self.states]
            self.copied = True


@dataclass(slots=True)
class StepPlaces:
    """Where the decode step in progress writes and what it reads; shared by all layers."""

    first: torch.Tensor
    """int64 [rows]: the row, or the block, that each row's new token goes to."""
    second: torch.Tensor
    """int64 [rows]: its place in there."""
    width: int
    """Places that are read of each row."""
    blocks: torch.Tensor | None
    """int32 [rows, blocks to read]; None in a RowCache."""


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows or blocks, tokens, heads, head_dim], zero where nothing was written yet: a
    masked place still meets a product with 0, which must not be NaN."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.keys: torch.Tensor = keys  # pyright: ignore[reportIncompatibleVariableOverride]
        self.values: torch.Tensor = values  # pyright: ignore[reportIncompatibleVariableOverride]
        self.is_initialized = True
        self.step: StepPlaces | None = None
        self.whole = False
        """Attention gets all blocks and finds its own (Layout of the step)."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("a KVLayer is made initialised")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token a row ([rows, heads, 1, head_dim]); return what the rows have so far, [rows, heads, width,
        head_dim]."""
        step = self._current()
        self.keys[step.first, step.second] = key_states[:, :, 0]
        self.values[step.first, step.second] = value_states[:, :, 0]
        if self.whole:
            return self.keys, self.values
        return self._read(self.keys, step), self._read(self.values, step)

    def _read(self, states: torch.Tensor, step: StepPlaces) -> torch.Tensor:
        if step.blocks is None:
            return states[: len(step.first), : step.width].transpose(1, 2)
        rows, blocks = step.blocks.shape
        gathered = states.index_select(0, step.blocks.flatten())
        return gathered.view(rows, blocks * states.shape[1], *states.shape[2:]).transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._current().width, 0

    def get_seq_length(self) -> int:
        return self._current().width - 1

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # what transformers before 5.17 calls get_max_length
        return -1

    def _current(self) -> StepPlaces:
        assert self.step is not None, "KVCache.begin comes before each decode step"
        return self.step


class KVCache(Cache, ABC):
    """
    Args:
        like: keys and values of each layer, for heads, head_dim, dtype and device.
        max_num_seqs: rows.
        max_seq_len: most tokens of a sequence.
        max_tokens: most tokens held; a single sequence is held whatever its length.
    """

    def __init__(self, like: KeysAndValues, max_num_seqs: int, max_seq_len: int, max_tokens: int):
        self.max_num_seqs, self.max_seq_len, self.max_tokens = max_num_seqs, max_seq_len, max_tokens
        self.run = max_num_seqs, max_seq_len
        """Rows, and most tokens of each, that it was fitted to in this run of a decoder; 0 before the first time. Only
        so much counts as room, whatever runs before have left: what is computed together decides the last bits."""
        self.held: list[int] = []
        """Tokens of each row."""
        shape = self._shape()
        self.kv_layers = [KVLayer(_zeros(shape, keys), _zeros(shape, values)) for keys, values in like]
        super().__init__(layers=list(self.kv_layers))

    @abstractmethod
    def _shape(self) -> tuple[int, int]:
        """Rows or blocks, and the places of each."""

    def fit(self, max_num_seqs: int, max_seq_len: int) -> bool:
        """Have room for so many rows, so long; whether what is held has moved."""
        self.run = max(max_num_seqs, self.run[0]), max(max_seq_len, self.run[1])
        if max_num_seqs <= self.max_num_seqs and max_seq_len <= self.max_seq_len:
            return False
        self.extend(max_num_seqs, max_seq_len)
        return True

    def extend(self, max_num_seqs: int, max_seq_len: int) -> None:
        """Make room for more rows or longer ones, layer by layer, keeping what is held."""
        self.max_num_seqs = max(max_num_seqs, self.max_num_seqs)
        self.max_seq_len = max(max_seq_len, self.max_seq_len)
        shape = self._shape()
        for layer in self.kv_layers:
            if layer.keys.shape[:2] != shape:
                layer.keys = self._moved(layer.keys, shape)
                layer.values = self._moved(layer.values, shape)

    @abstractmethod
    def _moved(self, old: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """What is held of `old`, in a tensor of `shape`."""

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.kv_layers for tensor in (layer.keys, layer.values))

    # What a new sequence takes

    @property
    @abstractmethod
    def room(self) -> int:
        """Tokens, or blocks, that new sequences may take, so that each row can still grow by GROWTH tokens."""

    @abstractmethod
    def prompt_cost(self, length: int) -> int:
        """What a prompt of `length` tokens and a sequence that begins with it take of `room`."""

    @abstractmethod
    def cost(self, prefix: Prefix) -> int:
        """What one more sequence that begins with `prefix` takes of `room`."""

    @abstractmethod
    def keep(self, states: KeysAndValues, length: int) -> Prefix:
        """Keep a prompt: [heads, length, head_dim] of each layer."""

    @abstractmethod
    def keep_row(self, row: int, length: int) -> Prefix:
        """Keep the first `length` tokens of a row that leaves."""

    @abstractmethod
    def states_of(self, prefix: Prefix) -> KeysAndValues:
        """[heads, length, head_dim] of each layer."""

    def _tokens(self, index: int, length: int) -> KeysAndValues:
        """A copy of the first tokens of row or block `index`."""
        return [
            (layer.keys[index, :length].transpose(0, 1).clone(), layer.values[index, :length].transpose(0, 1).clone())
            for layer in self.kv_layers
        ]

    def drop(self, prefix: Prefix) -> None:
        """No further sequence begins with it."""
        prefix.states, prefix.blocks = [], []

    # Rows

    @abstractmethod
    def append(self, prefix: Prefix) -> None:
        """A new row after the last one, which holds the prompt."""

    @abstractmethod
    def grow(self) -> bool:
        """Make room for one more token of each row; False when there is none."""

    def remove(self, count: int, moves: List[tuple[int, int]]) -> None:
        """Keep the first `count` rows; first each of `moves` takes a row from where it is to the place of one that
        ended."""
        for source, target in moves:
            self.held[target] = self.held[source]
        del self.held[count:]

    def clear(self) -> None:
        """Forget all rows and prompts, as another run begins; the memory stays."""
        self.held.clear()
        self.run = 0, 0

    # A decode step

    def begin(self, positions: torch.Tensor, width: int, whole: bool = False) -> int:
        """Have the next forward write each row's token at `positions` (int64 [rows]) and read `width` places of each
        row, or the next larger number of them, which is returned; with `whole`, attention gets all blocks."""
        step = self._step(positions, width)
        for layer in self.kv_layers:
            layer.step, layer.whole = step, whole
        return step.width

    @abstractmethod
    def _step(self, positions: torch.Tensor, width: int) -> StepPlaces:
        """Where a step writes and what it reads, see `begin`."""

    def _write(self, index: int, states: KeysAndValues, start: int, length: int) -> None:
        """To the first `length` places of row or block `index`: tokens from `start` on."""
        for layer, (keys, values) in zip(self.kv_layers, states, strict=True):
            layer.keys[index, :length] = keys[:, start : start + length].transpose(0, 1)
            layer.values[index, :length] = values[:, start : start + length].transpose(0, 1)


class RowCache(KVCache):
    """Row i owns `max_seq_len` places, which attention reads as a view."""

    def _shape(self) -> tuple[int, int]:
        return self.max_num_seqs, self.max_seq_len

    def _moved(self, old: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        new = _zeros(shape, old.transpose(1, 2))
        for row, held in enumerate(self.held):
            new[row, :held] = old[row, :held]
        return new

    @property
    def room(self) -> int:
        return self.max_tokens - sum(self.held) - len(self.held) * GROWTH

    def prompt_cost(self, length: int) -> int:
        return length + GROWTH

    def cost(self, prefix: Prefix) -> int:
        return prefix.length + GROWTH

    def keep(self, states: KeysAndValues, length: int) -> Prefix:
        return Prefix(length, states, [])

    def keep_row(self, row: int, length: int) -> Prefix:
        return Prefix(length, self._tokens(row, length), [], True)

    def states_of(self, prefix: Prefix) -> KeysAndValues:
        return prefix.states

    def append(self, prefix: Prefix) -> None:
        self._write(len(self.held), prefix.states, 0, prefix.length)
        self.held.append(prefix.length)

    def grow(self) -> bool:
        if len(self.held) > 1 and sum(self.held) + len(self.held) > self.max_tokens:
            return False
        self.held = [held + 1 for held in self.held]
        return True

    def remove(self, count: int, moves: List[tuple[int, int]]) -> None:
        if moves:
            source, target = ([move[side] for move in moves] for side in (0, 1))
            width = max(self.held[row] for row in source)
            for layer in self.kv_layers:
                layer.keys[target, :width] = layer.keys[source, :width]
                layer.values[target, :width] = layer.values[source, :width]
        super().remove(count, moves)

    def _step(self, positions: torch.Tensor, width: int) -> StepPlaces:
        return StepPlaces(torch.arange(len(positions), device=positions.device), positions, width, None)


class BlockCache(KVCache):
    """A row owns a list of blocks, and shares those that its prompt fills with the other sequences of the prompt.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, like: KeysAndValues, max_num_seqs: int, max_seq_len: int, max_tokens: int, block_size: int):
        self.block_size = block_size
        super().__init__(like, max_num_seqs, max_seq_len, max_tokens)
        self.rows: list[list[int]] = []
        """Blocks of each row."""
        self.table = self._blank_table(like[0][0].device)
        """int32 [max_num_seqs, blocks of max_seq_len]: the same, on the device."""
        self.users = [0] * self._shape()[0]
        """Rows and prompts that hold each block."""
        self.free = list(range(len(self.users) - 1, SCRATCH, -1))

    @classmethod
    def without_weights(cls, model: Any, dtype: torch.dtype, head_dim: int, block_size: int) -> BlockCache:
        """One on the meta device for one row of a transformers model, which has begun a decode step."""
        config = model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        states = torch.empty(heads, 1, head_dim, dtype=dtype, device="meta")
        cache = cls([(states, states)] * config.num_hidden_layers, 1, block_size, block_size, block_size)
        cache.begin(torch.zeros(1, dtype=torch.long, device="meta"), 1, whole=True)
        return cache

    def _shape(self) -> tuple[int, int]:
        return 1 + self._blocks_for(self.max_num_seqs, self.max_seq_len), self.block_size

    def _blocks_for(self, rows: int, max_seq_len: int) -> int:
        a_row = self._blocks_of(max_seq_len)
        # Two rows at least: one that is decoded alone, and the prompt of another that waits.
        return max(2 * a_row, min(self.max_tokens // self.block_size, rows * a_row))

    def _blank_table(self, where: torch.device) -> torch.Tensor:
        size = self.max_num_seqs, self._blocks_of(self.max_seq_len)
        return torch.full(size, SCRATCH, dtype=torch.int32, device=where)

    def extend(self, max_num_seqs: int, max_seq_len: int) -> None:
        super().extend(max_num_seqs, max_seq_len)
        more = range(len(self.users), self._shape()[0])
        self.users += [0] * len(more)
        self.free = [*reversed(more), *self.free]
        old, self.table = self.table, self._blank_table(self.table.device)
        self.table[: old.shape[0], : old.shape[1]] = old

    def _moved(self, old: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        new = _zeros(shape, old.transpose(1, 2))
        new[: len(old)] = old
        return new

    @property
    def _left(self) -> int:
        """Free blocks, but for those that a cache made for this run had not."""
        return len(self.free) - (len(self.users) - 1 - self._blocks_for(*self.run))

    @property
    def room(self) -> int:
        return self._left - self._blocks_of(len(self.held) * GROWTH)

    def prompt_cost(self, length: int) -> int:
        return self._blocks_of(length + GROWTH)

    def cost(self, prefix: Prefix) -> int:
        return self._blocks_of(prefix.length + GROWTH) - len(prefix.blocks)

    def keep(self, states: KeysAndValues, length: int) -> Prefix:
        """Blocks that the prompt fills are written here, once."""
        full = length // self.block_size
        if full > self._left:  # the rows in flight leave no room for sharing: each sequence gets a copy of its own
            return Prefix(length, states, [])
        blocks = [self._take_block() for _ in range(full)]
        for place, block in enumerate(blocks):
            self._write(block, states, place * self.block_size, self.block_size)
        rest = [
            (keys[:, full * self.block_size :].clone(), values[:, full * self.block_size :].clone())
            for keys, values in states
        ]
        return Prefix(length, rest, blocks, True)

    def keep_row(self, row: int, length: int) -> Prefix:
        """Its full blocks are shared."""
        full, rest = divmod(length, self.block_size)
        blocks = self.rows[row][:full]
        for block in blocks:
            self.users[block] += 1
        return Prefix(length, self._tokens(self.rows[row][full] if rest else SCRATCH, rest), blocks, True)

    def states_of(self, prefix: Prefix) -> KeysAndValues:
        def whole(states: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
            blocks = states[prefix.blocks].flatten(0, 1).transpose(0, 1)
            return torch.cat([blocks, rest], dim=1)

        layers = zip(self.kv_layers, prefix.states, strict=True)
        return [(whole(layer.keys, keys), whole(layer.values, values)) for layer, (keys, values) in layers]

    def drop(self, prefix: Prefix) -> None:
        self._let_go(prefix.blocks)
        super().drop(prefix)

    def append(self, prefix: Prefix) -> None:
        row, shared = len(self.held), len(prefix.blocks)
        blocks = [*prefix.blocks, *(self._take_block() for _ in range(self._blocks_of(prefix.length) - shared))]
        for block in prefix.blocks:
            self.users[block] += 1
        rest = prefix.length - shared * self.block_size
        for place, block in enumerate(blocks[shared:]):
            start = place * self.block_size
            self._write(block, prefix.states, start, min(self.block_size, rest - start))
        self.rows.append(blocks)
        self.held.append(prefix.length)
        self.table[row, : len(blocks)] = device.to_device(torch.tensor(blocks, dtype=torch.int32), self.table.device)

    def grow(self) -> bool:
        short = [row for row, held in enumerate(self.held) if held == len(self.rows[row]) * self.block_size]
        if len(short) > self._left:
            return False
        for row in short:
            block = self._take_block()
            self.table[row, len(self.rows[row])] = block  # a fill: nothing is copied from the host
            self.rows[row].append(block)
        self.held = [held + 1 for held in self.held]
        return True

    def remove(self, count: int, moves: List[tuple[int, int]]) -> None:
        targets = {target for _, target in moves}
        sources = {source for source, _ in moves}
        for row, blocks in enumerate(self.rows):
            if row in targets or (row >= count and row not in sources):
                self._let_go(blocks)
        for source, target in moves:
            self.rows[target] = self.rows[source]
            self.table[target].copy_(self.table[source])
        if len(self.rows) > count:
            self.table[count : len(self.rows)].fill_(SCRATCH)
        del self.rows[count:]
        super().remove(count, moves)

    def clear(self) -> None:
        self.remove(0, [])
        super().clear()
        self.users = [0] * len(self.users)
        self.free = list(range(len(self.users) - 1, SCRATCH, -1))

    def _step(self, positions: torch.Tensor, width: int) -> StepPlaces:
        table, blocks = self.table[: len(positions)], self._blocks_of(width)
        block = table.gather(1, (positions // self.block_size)[:, None])[:, 0].long()
        return StepPlaces(block, positions % self.block_size, blocks * self.block_size, table[:, :blocks])

    def _blocks_of(self, tokens: int) -> int:
        return math.ceil(tokens / self.block_size)

    def _take_block(self) -> int:
        block = self.free.pop()
        self.users[block] = 1
        return block

    def _let_go(self, blocks: List[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)


def _zeros(shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """[*shape, heads, head_dim] of zeros. On a CPU numpy's, whose pages take no memory until they are written to."""
    size = (*shape, like.shape[-3], like.shape[-1])
    if like.device.type != "cpu":
        return like.new_zeros(size)
    return torch.from_numpy(np.zeros(math.prod(size) * like.element_size(), dtype=np.uint8)).view(like.dtype).view(size)
