"""Unmerged LoRA, with fewer products and sums than PEFT makes.

The layers that read one hidden state (query, key and value; gate and up) share the product with A: of all of them it is
one matrix. The product with B adds to what the base has computed. The update keeps what merging it into bfloat16
weights would round away.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from perl.adapters.layers import AdaptedLayer

SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read one hidden state, in the order in which models call them."""


class BatchedUpdates:
    """The shared updates of a model's layers, made once for each dtype: a captured graph finds their weights where they
    were, whatever was computed in another dtype since."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Any, ...], SharedUpdate] = {}

    @contextlib.contextmanager
    def applied(self, layers: Sequence[AdaptedLayer], dtype: torch.dtype | None = None) -> Iterator[None]:
        """Inside, plain LoRA layers on linear ones compute their updates together: the same numbers up to the order of
        sums. Other methods and layers stay as they are. The adapter must not change meanwhile, and nothing can be
        differentiated.

        Args:
            dtype: what the trainer computes the updates of weights of that dtype in, by autocast; None is the
                adapter's own.
        """
        groups = []
        for members in _groups(layers):
            group = self._groups.setdefault((dtype, *members), SharedUpdate(members))
            group.read_weights(dtype)
            groups.append(group)
        try:
            for group in groups:
                for layer, forward in zip(group.layers, group.forwards, strict=True):
                    layer.forward = forward
            yield
        finally:
            for group in groups:
                for layer in group.layers:
                    vars(layer).pop("forward", None)


class SharedUpdate:
    """The updates of LoRA layers that read the same hidden state."""

    def __init__(self, layers: Sequence[Any]):
        self.layers = layers
        self.forwards = [functools.partial(self.forward, index) for index in range(len(layers))]
        """What each layer computes."""
        self.a = torch.empty(0)
        """[sum of ranks, in]."""
        self.b = [torch.empty(0) for _ in layers]
        """Of each layer [out, rank], scaled."""
        self._read: torch.Tensor | None = None
        self._hidden: tuple[torch.Tensor, ...] = ()
        """A times the hidden state `_read`, [..., rank] for each layer, until the last one has taken its own."""

    def read_weights(self, dtype: torch.dtype | None) -> None:
        """Copy the layers' adapters, to where they were copied before if they still fit."""
        parts = [(layer, layer.active_adapters[0]) for layer in self.layers]
        a = torch.cat([layer.lora_A[name].weight.detach() for layer, name in parts])
        if all(layer.get_base_layer().weight.dtype == dtype for layer in self.layers):
            a = a.to(dtype)
        self.a = _kept(self.a, a)
        for i, (layer, name) in enumerate(parts):
            self.b[i] = _kept(self.b[i], (layer.lora_B[name].weight.detach() * layer.scaling[name]).to(a.dtype))

    def forward(self, index: int, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What layer `index` makes of hidden states [..., in]."""
        layer = self.layers[index]
        if layer.disable_adapters:
            return type(layer).forward(layer, x, *args, **kwargs)
        result = layer.get_base_layer()(x, *args, **kwargs).contiguous()
        if x is not self._read:
            ranks = [b.shape[1] for b in self.b]
            self._read, self._hidden = x, F.linear(x.to(self.a.dtype), self.a).split(ranks, -1)
        hidden, b = self._hidden[index], self.b[index]
        if index == len(self.layers) - 1:
            self._read, self._hidden = None, ()
        if result.dtype != b.dtype:
            return result.add_(F.linear(hidden, b))  # rounded once, as a sum of the larger dtype would be
        result.view(-1, result.shape[-1]).addmm_(hidden.flatten(0, -2), b.T)
        return result


def _kept(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new`, at the place of `old` where that has its shape, dtype and device."""
    if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        return new
    return old.copy_(new)


def _groups(layers: Sequence[AdaptedLayer]) -> list[list[Any]]:
    """Plain LoRA layers by the hidden state that they read, as far as names tell, else alone. Where a name deceives,
    `forward` sees another hidden state and computes again."""
    by_input: dict[tuple[Any, ...], list[Any]] = {}
    for adapted in layers:
        if not _plain(adapted.layer):
            continue
        parent, _, name = adapted.name.rpartition(".")
        shared = next((names for names in SHARED_INPUT if name in names), name)
        layer: Any = adapted.layer
        a = layer.lora_A[layer.active_adapters[0]].weight
        by_input.setdefault((parent, shared, a.shape[1], a.dtype, a.device), []).append(layer)
    return list(by_input.values())


def _plain(layer: Any) -> bool:
    """Whether `layer` adds scale * B A x of one adapter, all of it on this device."""
    from peft.tuners.lora import Linear

    if type(layer) is not Linear or layer.merged or layer.disable_adapters or len(layer.active_adapters) != 1:
        return False
    (adapter,) = layer.active_adapters
    if adapter not in layer.lora_A or adapter in layer.lora_variant or layer.lora_bias[adapter]:
        return False
    parts: list[Any] = [layer.lora_A[adapter].weight, layer.lora_B[adapter].weight]
    return all(part.numel() > 0 and not hasattr(part, "placements") for part in parts)
