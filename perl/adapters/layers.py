"""The weights that an adapter changes, and what it makes of each of them in float32.

Two ways to the same numbers: PEFT's own merge, whatever the method, and the formula written out for LoRA and DoRA,
which proves the first. Where FSDP2 has split the weights, both give this rank's shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from perl.sharding import is_split, local, whole

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A layer of the base model that has an adapter."""

    name: str
    """In the base model: "model.layers.0.self_attn.q_proj"."""
    layer: BaseTunerLayer

    def weights(self) -> dict[str, torch.Tensor]:
        """The base layer's own weights by name, the storage itself: to write to one changes the model."""
        return {
            f"{self.name}.{own}": local(parameter) for own, parameter in self._base().named_parameters(recurse=False)
        }

    def merged(self) -> dict[str, torch.Tensor]:
        """Each of `weights` with the active adapter in it, float32, by PEFT's own merge. The layer stays as it is."""
        with _in_float32(self.layer) as base:
            self.layer.merge()
            self.layer.merged_adapters.clear()
            return {f"{self.name}.{own}": parameter.data for own, parameter in base.named_parameters(recurse=False)}

    def cannot_merge(self) -> str | None:
        """Why the adapter can't be folded into this layer's weights, or None where it can."""
        for parameter in self._base().parameters():
            if not parameter.is_floating_point():
                return f"{self.name} is quantized"
            if parameter.numel() == 0:
                return (
                    f"{self.name} is not gathered while completions are sampled"
                    " (--config.training.ds3_gather_for_generation)"
                )
            if is_split(parameter) and (why := self._cannot_merge_a_shard()):
                return f"{self.name} is split over the devices, {why}"
        return None

    def _cannot_merge_a_shard(self) -> str | None:
        """A shard of rows of base + scale * BA needs the same rows of B, and all of A."""
        from peft.tuners.lora import Linear
        from torch.distributed.tensor import Replicate, Shard

        if not isinstance(self.layer, Linear) or self.layer.fan_in_fan_out:
            return f"and {type(self.layer).__name__} is not merged row by row"
        placements = {p for parameter in self.layer.parameters() for p in getattr(parameter, "placements", ())}
        return None if placements <= {Shard(0), Replicate()} else "and not by rows"

    def _base(self) -> nn.Module:
        return self.layer.get_base_layer()


def adapted_layers(model: nn.Module) -> list[AdaptedLayer]:
    """The layers of `model` (a PeftModel) that have an adapter, in the model's order."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [
        AdaptedLayer(name.removeprefix("base_model.model."), module)
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    ]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a folded weight must be."""

    weight: torch.Tensor
    """float32."""
    slack: torch.Tensor
    """float32, how far another order of the same sums may be off, before rounding to the weight's own dtype."""


def expected(adapted: AdaptedLayer, name: str, base: torch.Tensor) -> Expected | None:
    """The weight `name` of the layer with the adapter in it, from the papers' formulas: base + scale * BA for LoRA
    (arXiv 2106.09685; rank-stabilised or not), magnitude * V / ||V|| with that sum for V and norms over rows for DoRA
    (arXiv 2402.09353). None for any other method, and for several adapters at once.

    Args:
        name: one of `adapted.weights()`.
        base: that weight without the adapter, any dtype.
    """
    from peft.tuners.lora import Linear
    from peft.tuners.lora.variants import DoraLinearVariant

    layer: Any = adapted.layer
    if not isinstance(adapted.layer, Linear) or len(layer.active_adapters) != 1:
        return None
    (adapter,) = layer.active_adapters
    if name.endswith(".bias") and not layer.lora_bias[adapter]:
        return Expected(base.float(), torch.zeros_like(base, dtype=torch.float32))
    variant = layer.lora_variant.get(adapter)
    if variant not in (None, DoraLinearVariant) and not isinstance(variant, DoraLinearVariant):
        return None
    a, b = whole(layer.lora_A[adapter].weight).float(), local(layer.lora_B[adapter].weight).float()
    scaled = b * layer.scaling[adapter]
    total, size = torch.einsum("or,ri->oi", scaled, a), torch.einsum("or,ri->oi", scaled.abs(), a.abs())
    if layer.fan_in_fan_out:
        total, size = total.T, size.T
    total = total + base.float()
    # One unit in the last place for each of the sum's r terms and the final addition, or TF32's ten bits of mantissa.
    exact = torch.get_float32_matmul_precision() == "highest"
    slack = size * (a.shape[0] * 2.0**-23 if exact else 2.0**-9) + total.abs() * 2.0**-23
    if variant is None:
        return Expected(total, slack)
    dim = 0 if layer.fan_in_fan_out else 1
    magnitude = local(layer.lora_magnitude_vector[adapter].weight).float().unsqueeze(dim)
    factor = magnitude / torch.linalg.vector_norm(total, dim=dim, keepdim=True)
    # A norm over n squares is off by less than n / 2 units, in practice by its root.
    return Expected(factor * total, factor.abs() * (slack + total.abs() * total.shape[dim] ** 0.5 * 2.0**-22))


@contextlib.contextmanager
def _in_float32(layer: Any) -> Iterator[nn.Module]:
    """`layer` holds float32 copies of its parameters, of this rank's rows where they are split; gives the base layer.
    Modules' parameters are exchanged and not their data: no tensor of the model moves."""
    own = [
        (module, name, parameter, path.startswith("lora_A"))
        for path, module in layer.named_modules()
        for name, parameter in list(module._parameters.items())
        if parameter is not None
    ]
    try:
        for module, name, parameter, needed_whole in own:
            tensor = whole(parameter) if needed_whole else local(parameter)
            module._parameters[name] = nn.Parameter(tensor.to(torch.float32, copy=True), requires_grad=False)
        yield layer.get_base_layer()
    finally:
        for module, name, parameter, _ in own:
            module._parameters[name] = parameter
