"""Attention of a decode step over a paged KV cache on CUDA, in Triton, which every CUDA build of torch brings.

A row's keys are cut into splits of SPLIT tokens, whatever the batch, and each split of a key head is a program of its
own (Flash-Decoding, pytorch.org/blog/flash-decoding); a second kernel merges a row's splits by their log-sum-exps. So
one long row keeps the device busy too, and the bits of a row depend neither on its neighbours nor on the cache's size.
"""

# Triton's compiler types a kernel's body, not Python.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

SPLIT = 256
"""Tokens of a program. A block of the cache holds a multiple of TILE."""
TILE = 64
"""Tokens that a program reads at once; half of them where they would not fit into 99 KiB of shared memory."""
LOG2_E = 1.4426950408889634


@triton.jit
def _attend_split(
    query_ptr, key_ptr, value_ptr, table_ptr, lengths_ptr, out_ptr, lse_ptr,
    scale, splits,
    query_row, query_head, cache_block, cache_token, cache_head, table_row,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    row, key_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    first = split * SPLIT
    if first >= length:
        return
    heads = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, PADDED_DIM)
    here = (heads < GROUP)[:, None] & (dims < DIM)[None, :]
    query_offsets = row * query_row + (key_head * GROUP + heads)[:, None] * query_head + dims[None, :]
    query = tl.load(query_ptr + query_offsets, mask=here, other=0.0)
    largest = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    out = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
    for start in range(first, tl.minimum(first + SPLIT, length), TILE):
        block = tl.load(table_ptr + row * table_row + start // BLOCK).to(tl.int64)
        tokens = tl.arange(0, TILE)
        offsets = block * cache_block + (start % BLOCK + tokens)[:, None] * cache_token + key_head * cache_head
        seen = (start + tokens < length)[:, None] & (dims < DIM)[None, :]
        keys = tl.load(key_ptr + offsets + dims[None, :], mask=seen, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee" if EXACT else None) * scale
        scores = tl.where((start + tokens < length)[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        values = tl.load(value_ptr + offsets + dims[None, :], mask=seen, other=0.0)
        part = tl.dot(weights.to(values.dtype), values, input_precision="ieee" if EXACT else None)
        out = out * shrink[:, None] + part
        total = total * shrink + tl.sum(weights, 1)
        largest = new_largest
    query_heads = tl.num_programs(1) * GROUP
    places = (row * query_heads + key_head * GROUP + heads) * splits + split
    tl.store(out_ptr + places[:, None] * DIM + dims[None, :], out / total[:, None], mask=here)
    tl.store(lse_ptr + places, largest + tl.log2(total), mask=heads < GROUP)


@triton.jit
def _merge_splits(
    out_ptr, lse_ptr, lengths_ptr, result_ptr, splits,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + head
    dims = tl.arange(0, PADDED_DIM)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    result = tl.zeros([PADDED_DIM], tl.float32)
    for split in range(tl.cdiv(tl.load(lengths_ptr + row), SPLIT)):
        lse = tl.load(lse_ptr + place * splits + split)
        part = tl.load(out_ptr + (place * splits + split) * DIM + dims, mask=dims < DIM, other=0.0)
        new_largest = tl.maximum(largest, lse)
        shrink, weight = tl.exp2(largest - new_largest), tl.exp2(lse - new_largest)
        result = result * shrink + part * weight
        total = total * shrink + weight
        largest = new_largest
    result = (result / total).to(result_ptr.dtype.element_ty)
    tl.store(result_ptr + place * DIM + dims, result, mask=dims < DIM)


def _tile(exact: bool, dim: int) -> int:
    return TILE // 2 if exact and dim > 128 else TILE


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """See perl.device.kernels.PAGED for shapes and dtypes. Sums are float32; float32 products are not rounded."""
    rows, heads, dim = query.shape
    block, key_heads = key_cache.shape[1:3]
    splits = -(-block_table.shape[1] * block // SPLIT)
    out = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(rows, heads, splits, dtype=torch.float32, device=query.device)
    result = torch.empty_like(query, memory_format=torch.contiguous_format)
    padded_dim = max(16, triton.next_power_of_2(dim))
    group = heads // key_heads
    exact = query.dtype == torch.float32
    _attend_split[(rows, key_heads, splits)](
        query, key_cache, value_cache, block_table, lengths, out, lse,
        scaling * LOG2_E, splits,
        query.stride(0), query.stride(1), *key_cache.stride()[:3], block_table.stride(0),
        GROUP=group, PADDED_GROUP=max(16, triton.next_power_of_2(group)), DIM=dim, PADDED_DIM=padded_dim,
        BLOCK=block, SPLIT=SPLIT, TILE=_tile(exact, dim), EXACT=exact,
    )  # fmt: skip
    _merge_splits[(rows, heads)](out, lse, lengths, result, splits, DIM=dim, PADDED_DIM=padded_dim, SPLIT=SPLIT)
    return result
