"""Logits in float32 of a model that is kept in its own dtype: one block at a time is raised to float32 and put back.

A 7B model stays at 14 GB; a block of it is 0.9 GB in float32, and 32 probe tokens take seconds on a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from perl.adapters.layers import in_float32, merged_in_float32

if TYPE_CHECKING:
    import torch

PROBE_LENGTH = 32


def probe_tokens(vocabulary: int) -> torch.Tensor:
    """Token ids, int64 [1, PROBE_LENGTH], spread over the vocabulary, the same ones each time."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (1, PROBE_LENGTH), generator=generator)


def float32_logits(model: Any, tokens: torch.Tensor, *, merged: bool = False) -> torch.Tensor:
    """Logits of the causal language model for `tokens`, computed in float32.

    Args:
        model: a transformers model, or a PeftModel around one; on the CPU, in any floating dtype.
        tokens: int64 [1, length].
        merged: compute with PEFT's adapter merged into each block's float32 weights instead of next to them.

    Returns:
        float32 [length, vocabulary].
    """
    import torch

    with torch.inference_mode(False), torch.no_grad(), contextlib.ExitStack() as stack:
        for block in blocks(model):
            stack.enter_context(_float32_while_called(block, merged))
        return model(input_ids=tokens, use_cache=False).logits[0].float()


def blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules that together hold every parameter: the decoder's layers, and what is not in their list."""
    import torch

    if isinstance(module, torch.nn.ModuleList):
        yield from module.children()
    elif any(isinstance(inner, torch.nn.ModuleList) for inner in module.modules()):
        for child in module.children():
            yield from blocks(child)
    elif next(module.parameters(), None) is not None:
        yield module


@contextlib.contextmanager
def _float32_while_called(block: torch.nn.Module, merged: bool) -> Iterator[None]:
    raised, call = merged_in_float32 if merged else in_float32, contextlib.ExitStack()
    handles = [
        block.register_forward_pre_hook(lambda *_: call.enter_context(raised(block))),
        block.register_forward_hook(lambda *_: call.close(), always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
