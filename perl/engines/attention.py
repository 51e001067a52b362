"""The attention function of a model that perl computes with: transformers' sdpa, but for two cases.

A forward may carry a `layout`, an object that computes attention in its own way (a packed micro-batch,
perl.training.packing).

With one new token a row transformers' sdpa does more than it must: with grouped heads (four to eight query heads share
a key head) and a mask it copies keys and values once for each query head before it calls the kernel, at every decoded
token the whole cache times the heads of a group. The query heads of a group look at the same keys through the same
mask, so they are as well the queries of one head, and nothing needs to be copied.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from perl import device
from perl.engines.norms import fuse_norms

ATTENTION = "sdpa_without_copies"
"""The name that `attention` has in a model's configuration."""

EXTRAS = ("softcap", "s_aux", "position_bias", "sliding_window")
"""What some models add to softmax(q k) v, and the functions here do not."""


class Layout(Protocol):
    """Which tokens of a forward attend to which, where a mask would be a poor way to say so. A forward is given one as
    its argument `layout`, and every attention layer calls it."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scaling: float | None
    ) -> torch.Tensor:
        """From query [rows, heads, tokens, head_dim], key and value [rows, key heads, columns, head_dim] to [rows,
        tokens, heads, head_dim]."""
        ...


def numbers_of(model: Any) -> tuple[torch.dtype, int]:
    """dtype and head_dim that the attention of `model` (a transformers model or a PeftModel) computes with."""
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return model.dtype, head_dim


class _Reached(Exception):
    """An attention layer was given the layout, and what it was to be given with it."""


class _Changed(Exception):
    """It was given other keys or values than the cache's."""


class _Probe:
    """A layout that ends the forward at the first attention layer that is given it."""

    def __init__(self, first: Any):
        self.first = first

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any) -> torch.Tensor:
        whole = self.first is None or (key is self.first.keys and value is self.first.values)
        raise _Reached if whole else _Changed


def layout_lost(model: Any, cache: Any = None) -> str | None:
    """Why the attention layers of `model` (a transformers model that has adopted `attention`) can't be given a layout,
    or None where they can.

    Asked of a copy without weights on the meta device, since some of the model's own may lie on other processes, which
    would have to take part in a forward.

    Args:
        cache: a KVCache on the meta device in which a decode step of one row has begun: attention must be given the
            keys and values that its layers hand out, as they are. Latent ones (DeepSeek's) are expanded first, say.
    """
    try:
        with torch.device("meta"):
            copy = type(model)(deepcopy(model.config)).base_model
            ids = torch.zeros(1, 2 if cache is None else 1, dtype=torch.long)
            mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
            cached = {"use_cache": cache is not None, "past_key_values": cache}
            probe = _Probe(cache and cache.kv_layers[0])
            copy(input_ids=ids, position_ids=ids, attention_mask=mask, layout=probe, **cached)
    except _Reached:
        return None
    except _Changed:
        return "its layers change keys and values on their way from the cache to attention"
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"its attention could not be tried with a layout: {reason}"
    return "its layers do not hand arguments on to attention"


def adopt(model: Any) -> str | None:
    """Have `model` (a transformers model or a PeftModel) use `attention` from now on, where its attention is sdpa, and
    fused norms where the device has them.

    Returns:
        None, or why it keeps its own.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if device.fuses_rms_norm(base.device):
        fuse_norms(base)
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


def adopted_from(config: Any) -> str:
    """The attention that a model of this configuration was loaded with."""
    present = config._attn_implementation
    return "sdpa" if present == ATTENTION else present


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [rows, heads, tokens, head_dim], key and value [rows, key heads,
    columns, head_dim] to [rows, tokens, heads, head_dim].

    With a `layout`, `attention_mask` is not read. Without it the numbers are those of transformers' sdpa, which serves
    what neither case here is.
    """
    if layout is not None:
        extras = sorted(name for name in EXTRAS if kwargs.get(name) is not None)
        if extras:
            raise RuntimeError(f"a layout can't serve attention with {', '.join(extras)}")
        return layout.attend(query, key, value, dropout, scaling), None
    grouped = query.shape[1] != key.shape[1]
    one_mask = attention_mask is None or attention_mask.shape[1] == 1
    if query.shape[2] == 1 and grouped and one_mask and kwargs.get("position_bias") is None:
        return sdpa_without_copies(query, key, value, attention_mask, dropout, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def sdpa_without_copies(
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
    output = F.scaled_dot_product_attention(queries, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return output.reshape(rows, heads, tokens, -1).transpose(1, 2)
