"""The weights that an adapter changes, and what it makes of each of them in float32: PEFT's own merge, whatever the
method. Where FSDP2 has split the weights, this rank's shard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perl import device
from perl.device.sharding import is_split, local, whole

if TYPE_CHECKING:
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer


ACCEPTED_ROUNDING_ERROR = 0.10
"""Relative rounding error up to which merged weights take the base's dtype, unless the user says otherwise."""


class CannotMerge(RuntimeError):
    """PEFT's merge has refused an adapter; says why in one line."""


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A layer of the base model that has an adapter."""

    name: str
    """In the base model: "model.layers.0.self_attn.q_proj"."""
    layer: BaseTunerLayer

    def weights(self) -> dict[str, torch.Tensor]:
        """The base layer's weights by their names in it ("weight"), the storage itself: to write to one changes the
        model."""
        return {name: local(parameter) for name, parameter in self._base().named_parameters()}

    def merged(self) -> dict[str, torch.Tensor]:
        """Each of `weights` with the active adapter in it, float32, by PEFT's own merge. The layer stays as it is."""
        import torch

        with torch.no_grad(), merged_in_float32(self.layer):  # type: ignore[arg-type]  # a mix-in of Modules
            return self.weights()

    def cannot_merge(self) -> str | None:
        """Why the adapter can't be merged into this layer's weights, or None where it can."""
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

    def _base(self) -> torch.nn.Module:
        return self.layer.get_base_layer()


def adapted_layers(model: torch.nn.Module) -> list[AdaptedLayer]:
    """The layers of `model` (a PeftModel) that have an adapter, in the model's order."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [
        AdaptedLayer(name.removeprefix("base_model.model."), module)
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    ]


@contextlib.contextmanager
def merged_in_float32(module: torch.nn.Module) -> Iterator[None]:
    """As `in_float32`, with PEFT's active adapters inside `module` merged into the float32 copies, by PEFT's own merge.
    The copies are thrown away: nothing is unmerged. Raises CannotMerge."""
    from peft.tuners.ln_tuning.layer import LNTuningLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    with in_float32(module):
        try:
            for layer in layers:
                _merge(layer)
            yield
        finally:
            for layer in layers:
                if isinstance(layer, LNTuningLayer) and layer.merged:
                    layer.unmerge()  # it exchanges modules
                layer.merged_adapters.clear()


def _merge(layer: BaseTunerLayer) -> None:
    try:
        layer.merge()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        if device.is_out_of_memory(error):
            raise
        raise CannotMerge(f"PEFT can't merge it: {' '.join(str(error).split())[:200]}") from error


@contextlib.contextmanager
def in_float32(module: torch.nn.Module) -> Iterator[None]:
    """`module` holds float32 copies of its floating parameters, of this rank's rows where they are split. Parameters
    are exchanged and not their data: no tensor of the model moves."""
    import torch

    parameters = [
        (inner, name, parameter, "lora_A" in path.split("."))
        for path, inner in module.named_modules()
        for name, parameter in list(inner._parameters.items())
        if parameter is not None and parameter.is_floating_point()
    ]
    try:
        for inner, name, parameter, needed_whole in parameters:
            # A shard of rows of base + scale * BA needs all of A.
            tensor = whole(parameter) if needed_whole else local(parameter)
            inner._parameters[name] = torch.nn.Parameter(tensor.to(torch.float32, copy=True), requires_grad=False)
        yield
    finally:
        for inner, name, parameter, _ in parameters:
            inner._parameters[name] = parameter


@dataclass
class RoundingError:
    """How much of an adapter's update is lost where merged weights are rounded."""

    lost: float = 0.0
    """Sum of (round(merged) - merged)^2 so far."""
    update: float = 0.0
    """Sum of (merged - base)^2 so far."""

    def add(self, base: torch.Tensor, merged: torch.Tensor, dtype: torch.dtype) -> None:
        """Count one weight, `merged` in float32, rounded to `dtype`."""
        self.lost += float((merged.to(dtype).float() - merged).square().sum())
        self.update += float((merged - base).square().sum())

    @property
    def relative(self) -> float:
        """||round(merged) - merged|| / ||merged - base||, Frobenius norms over all weights. 0: nothing of the update is
        lost (or there is none yet); 1: as if the adapter had not been there."""
        return (self.lost / self.update) ** 0.5 if self.update else 0.0
