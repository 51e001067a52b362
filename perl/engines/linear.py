"""Products of few rows with large weights, on a CPU.

A decode step multiplies each weight with as many rows as are in flight. torch hands that to a BLAS that lays the weight
out again in each call; oneDNN does it once and multiplies two to three times as fast with 4 to 30 rows.

Where the policy is trained in bfloat16 on a CPU whose AMX units multiply it, products are of bfloat16 too, as in the
update. A weight w that holds the adapter is kept as two tensors, h = bfloat16(w) and l = bfloat16(w - h), and the
product is that of [x x] with [h l], so that nothing of the adapter is lost (h + l is w within 2^-16 of it). That takes
half the time of the float32 product.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from perl import device

logger = logging.getLogger(__name__)

ROWS = 16
"""Rows of a product for which oneDNN chooses its layout; others are computed with it as well."""
SHARE_OF_FREE_MEMORY = 0.25
"""Of the memory that this process can still take, how much the packed copies may have."""
SHARE_OF_MEMORY = 1 / 8
"""Of the machine's, where what is free must not decide: for these copies, and for the KV cache."""


@contextlib.contextmanager
def prepacked(model: nn.Module) -> Iterator[None]:
    """Inside, the linear layers of a float32 model on a CPU use copies of their weights in oneDNN's layout. The weights
    must not change meanwhile, and nothing can be differentiated. Other layers, dtypes and devices stay as they are."""
    layers = packable(model)
    try:
        for layer in layers:
            prepack(layer, layer.weight, layer.bias)
        yield
    finally:
        for layer in layers:
            unpack(layer)


def packable(model: nn.Module, fixed: bool = False) -> list[nn.Linear]:
    """The linear layers of `model` that can be packed: none where that is done already, nor, with a line in the log,
    where memory is short.

    Args:
        fixed: what the machine has decides, not what is free: packed layers have other last bits.
    """
    if any(isinstance(vars(module).get("forward"), _Product) for module in model.modules()):
        return []
    layers = [module for module in model.modules() if type(module) is nn.Linear and _takes(module)]
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    room = SHARE_OF_MEMORY * device.total_memory() if fixed else SHARE_OF_FREE_MEMORY * device.host_memory()
    if size > room:
        logger.info("weights are not prepacked: %.1f GB, %.1f GB allowed", size / 1e9, room / 1e9)
        return []
    return layers


def prepack(
    module: nn.Module,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype | None = torch.float32,
    *,
    merged: bool = False,
) -> None:
    """Have `module` compute the product with a copy of `weight` in oneDNN's layout, until `unpack`.

    Args:
        module: a linear layer, or PEFT's layer around one, then with the merged weight.
        weight: float32 [out, in] on the CPU; it may go, the copy stays.
        bias: float32 [out], or None.
        dtype: what is multiplied: bfloat16 where the CPU does that fast, for any other float32.
        merged: the weight holds an adapter, whose small part in it is kept.
    """
    copy, times = weight.detach(), 1
    if dtype == torch.bfloat16 and device.multiplies_bfloat16():
        copy, times = (torch.cat(split(copy), dim=1), 2) if merged else (copy.bfloat16(), 1)
    module.forward = _Product(module, copy, bias, times)  # pyright: ignore[reportAttributeAccessIssue]


def unpack(module: nn.Module) -> None:
    """Give `module` its own forward back."""
    vars(module).pop("forward", None)


def _takes(layer: nn.Linear) -> bool:
    weight = layer.weight
    plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and weight.numel() > 0 and "forward" not in vars(layer) and _available()


@functools.cache
def _available() -> bool:
    """These are the operators of torch's own compiler; torch has no public ones."""
    there = torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
    if not there:
        logger.info("this torch has no oneDNN: weights are not prepacked")
    return there


class _Product:
    """The forward of a packed layer."""

    def __init__(self, module: Any, weight: torch.Tensor, bias: torch.Tensor | None, times: int):
        self.module, self.bias = module, None if bias is None else bias.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.dtype, self.times = weight.dtype, times
        self.has_adapter = hasattr(module, "disable_adapters")

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        unadapted = self.has_adapter and self.module.disable_adapters  # the module's own forward leaves the adapter out
        if unadapted or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return type(self.module).forward(self.module, x, *args, **kwargs)
        if self.dtype == torch.float32:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        rounded = torch.cat([x.to(self.dtype)] * self.times, dim=-1)
        product = torch.ops.mkldnn._linear_pointwise(rounded, self.weight, None, "none", [], "").float()
        return product if self.bias is None else product.add_(self.bias)


def split(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two bfloat16 tensors whose sum is the float32 `weight`, within 2^-16 of each number."""
    high = weight.bfloat16()
    return high, (weight - high).bfloat16()
