"""Attention of one new token a row without copying the cache.

With grouped heads (four to eight query heads share a key head) and a mask, transformers' sdpa copies keys and values
once for each query head before it calls the kernel: at every decoded token, the whole cache times the heads of a
group. The query heads of a group look at the same keys through the same mask, so they are as well the queries of one
head, and nothing needs to be copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "sdpa_grouped"
"""Name of the attention function: transformers' sdpa, but for one token a row with grouped heads."""


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [rows, heads, tokens, head_dim], key and value [rows, key heads,
    columns, head_dim] to [rows, tokens, heads, head_dim]."""
    rows, heads, tokens, head_dim = query.shape
    key_heads = key.shape[1]
    one_mask = attention_mask is None or attention_mask.shape[1] == 1
    if tokens != 1 or heads == key_heads or not one_mask or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    group = heads // key_heads
    if attention_mask is not None:
        attention_mask = attention_mask.expand(-1, -1, group, -1)
    queries = query.reshape(rows, key_heads, group, head_dim)
    found = F.scaled_dot_product_attention(
        queries, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return found.reshape(rows, 1, heads, found.shape[-1]), None


@contextlib.contextmanager
def without_copies(model: Any) -> Iterator[None]:
    """Inside, a transformers model whose attention is sdpa uses `grouped_attention`."""
    config = model.config
    if config._attn_implementation != "sdpa":
        yield
        return
    AttentionInterface.register(ATTENTION, grouped_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
