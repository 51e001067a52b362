"""Attention where transformers' sdpa does more than it must: for one new token a row, and for packed micro-batches.

With grouped heads (four to eight query heads share a key head) and a mask, transformers' sdpa copies keys and values
once for each query head before it calls the kernel: at every decoded token, the whole cache times the heads of a
group. The query heads of a group look at the same keys through the same mask, so they are as well the queries of one
head, and nothing needs to be copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "sdpa_without_copies"
"""The name that `attention` has in a model's configuration."""

EXTRAS = ("softcap", "s_aux", "position_bias", "sliding_window")
"""What some models add to softmax(q k) v, and the functions here do not."""


class Uses:
    """How often attention has used a Packing. An object of its own: FSDP2 hands on copies of dataclasses."""

    def __init__(self) -> None:
        self.count = 0


@dataclass(frozen=True)
class Packing:
    """Which tokens of one sequence of L tokens attend to which: prompts to themselves, rows to their prompt and
    themselves. All int64 on the model's device unless said otherwise."""

    prefixes: torch.Tensor
    """[prompts, longest prefix]: place in the sequence of each prompt's tokens but the last, padded with 0."""
    rows: torch.Tensor
    """[rows, 1 + longest completion]: place of the last prompt token and the completion, padded with 0."""
    prompt_of: torch.Tensor
    """[rows]: index into `prefixes`."""
    visible: torch.Tensor
    """bool [rows, 1, 1 + longest completion, longest prefix + 1 + longest completion]: keys that a token sees."""
    back: torch.Tensor
    """[L]: for each token, its place among all results: those of `prefixes` first, then those of `rows`."""
    uses: Uses = field(default_factory=Uses)
    """A model that drops the argument on its way would compute nonsense."""


def adopt(model: Any) -> str | None:
    """Have `model` (a transformers model or a PeftModel) use `attention` from now on, where its attention is sdpa.

    Returns:
        None, or why it keeps its own.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    present = base.config._attn_implementation
    if present == ATTENTION:
        return None
    if present != "sdpa":
        return f"attention is {present}, not sdpa"
    if not base._supports_attention_backend:
        return "its attention function can't be chosen"
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    base.set_attn_implementation(ATTENTION)
    return None


@contextlib.contextmanager
def stock_attention(model: Any) -> Iterator[None]:
    """`model` (a transformers model or a PeftModel) with transformers' own sdpa again: continuous batching pages that,
    and refuses names that it does not know."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    adopted = base.config._attn_implementation == ATTENTION
    if adopted:
        base.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if adopted:
            base.set_attn_implementation(ATTENTION)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [rows, heads, tokens, head_dim], key and value [rows, key heads,
    columns, head_dim] to [rows, tokens, heads, head_dim].

    With `packing`, rows is 1 and `attention_mask` is not read. Without it the numbers are those of transformers' sdpa,
    which serves what neither case here is.
    """
    if packing is not None:
        extras = sorted(name for name in EXTRAS if kwargs.get(name) is not None)
        if extras:
            raise RuntimeError(f"packed micro-batches can't serve attention with {', '.join(extras)}")
        packing.uses.count += 1
        return _packed(query, key, value, packing, dropout, scaling), None
    grouped = query.shape[1] != key.shape[1]
    one_mask = attention_mask is None or attention_mask.shape[1] == 1
    if query.shape[2] == 1 and grouped and one_mask and kwargs.get("position_bias") is None:
        return _without_copies(query, key, value, attention_mask, dropout, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def _without_copies(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """As `attention`, `mask` being [rows, 1, tokens, columns] or None where all is seen."""
    rows, heads, tokens, head_dim = query.shape
    key_heads = key.shape[1]
    group = heads // key_heads
    if mask is not None:
        mask = mask[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
    queries = query.reshape(rows, key_heads, group * tokens, head_dim)
    found = F.scaled_dot_product_attention(queries, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return found.reshape(rows, heads, tokens, -1).transpose(1, 2)


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """As `attention` with rows 1 and L tokens."""
    parts = []
    if packing.prefixes.shape[1]:
        # Padded on the right, where causality hides the padding from every real token.
        q, k, v = (_take(states[0], packing.prefixes) for states in (query, key, value))
        k, v = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, scale=scaling)
        parts.append(found.transpose(1, 2))
    seen = torch.cat([packing.prefixes[packing.prompt_of], packing.rows], dim=1)
    k, v = (_take(states[0], seen) for states in (key, value))
    parts.append(_without_copies(_take(query[0], packing.rows), k, v, packing.visible, dropout, scaling))
    return torch.cat([part.flatten(0, 1) for part in parts])[packing.back][None]


def _take(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[heads, L, head_dim] at places [batch, tokens]: [batch, heads, tokens, head_dim]."""
    taken = states.index_select(1, places.flatten())
    return taken.unflatten(1, tuple(places.shape)).transpose(0, 1)
