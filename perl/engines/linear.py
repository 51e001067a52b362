"""Products of few rows with large weights, on a CPU.

A decode step multiplies each weight with as many rows as are in flight. torch hands that to a BLAS that lays the weight
out anew in each call; oneDNN does it once and multiplies two to three times as fast with 4 to 30 rows.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

ROWS = 16
"""Rows of a product for which oneDNN chooses its layout; others are computed with it as well."""
SHARE_OF_FREE_MEMORY = 0.25
"""Of the machine's free memory, how much the copies may take."""


@contextlib.contextmanager
def laid_out(model: nn.Module) -> Iterator[None]:
    """Inside, the linear layers of a float32 model on a CPU use copies of their weights in oneDNN's layout. The weights
    must not change meanwhile, and nothing can be differentiated. Other layers, dtypes and devices stay as they are."""
    layers = [module for module in model.modules() if type(module) is nn.Linear and _takes(module)]
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    room = SHARE_OF_FREE_MEMORY * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if layers and size > room:
        logger.info("rollout: no room to lay the weights out: %.1f GB, %.1f GB allowed", size / 1e9, room / 1e9)
    if not layers or size > room:
        yield
        return
    try:
        for layer in layers:
            weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
            layer.forward = functools.partial(_product, weight, layer.bias)  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


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
        logger.info("this torch has no oneDNN: weights are laid out anew in each product")
    return there


def _product(weight: Any, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
