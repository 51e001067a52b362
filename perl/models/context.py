"""How many tokens a model can be given at all. Beyond max_position_embeddings plain RoPE still computes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

from perl.models.folders import kind_of

log = logging.getLogger(__name__)

OFFSET = 8
"""Rows that a table of positions may have besides one for each (OPT: 2)."""


def most_tokens(config: Any) -> tuple[int, str] | None:
    """Tokens of prompt and completion together beyond which the model's policy is not one: (number, why); None: there
    is no such number.

    Args:
        config: transformers', of the text part.
    """
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        kind = str(rope.get("rope_type", "default"))
        if kind == "longrope" or "dynamic" in kind:  # of all rows of a forward, by the longest of them
            original = rope.get("original_max_position_embeddings") if kind == "longrope" else None
            return original or config.max_position_embeddings, f"its positions (rope_type {kind}) change beyond them"
    context = getattr(config, "max_position_embeddings", None)
    return (context, "it has a table of so many positions") if context and has_table(config, context) else None


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """RoPE's parameters, of each type of layer where these differ."""
    if isinstance(parameters, dict):
        if "rope_type" in parameters:
            yield parameters
        else:
            for each in parameters.values():
                yield from _ropes(each)


def has_table(config: Any, context: int) -> bool:
    """Whether the model looks its positions up. It is made on the meta device, without weights."""
    import torch

    if getattr(config, "rope_parameters", None) is not None:
        return False
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = kind_of(config).from_config(config)
    except Exception as error:  # own code of a model may do anything; what is wrong loading it says
        log.debug("no model of %s without weights", type(config).__name__, exc_info=error)
        return False
    words = model.get_input_embeddings()
    tables = [each.weight for each in model.modules() if isinstance(each, torch.nn.Embedding) and each is not words]
    tables += [buffer for buffer in model.buffers() if buffer.ndim == 2]  # of sines, as GPT-J's
    return any(0 <= len(table) - context <= OFFSET for table in tables)
