"""The base quantised while completions are drawn, the adapter unmerged above it in its own precision.

base = QuantisedBase(model, "int8")
with base.applied():
    model.generate(...)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from perl.adapters.batched import BatchedUpdates
from perl.adapters.layers import adapted_layers
from perl.adapters.none import has_adapter
from perl.base.errors import UserError
from perl.device import products as npu
from perl.device.sharding import is_split
from perl.engines.base import evaluation_mode
from perl.engines.quantised import SCHEMES, QuantisedLayers, lacking, require_products, wide_inputs

if TYPE_CHECKING:
    from perl.config.load import Config

log = logging.getLogger(__name__)
FLAG, BY_VLLM = "--config.rollout.quantization", "--config.rollout.engine vllm"


class QuantisedBase:
    """The linear layers of `model` as whole numbers, made at the first use, as the base is frozen.

    Args:
        model: in evaluation mode while it is used; without an adapter too.
        quantization: of SCHEMES.
        flag: what asks for it.
        by_vllm: what is to be written for vLLM.

    Raises:
        UserError: a layer cannot be quantised.
    """

    def __init__(self, model: nn.Module, quantization: str, flag: str = FLAG, by_vllm: str = BY_VLLM):
        self.model, self.quantization, self._said = model, quantization, (flag, by_vllm)
        self.layers: QuantisedLayers | None = None
        self._adapted = adapted_layers(model)
        self._batched = BatchedUpdates()
        layers = quantisable(model, quantization, flag, by_vllm)
        without = model.disable_adapter() if has_adapter(model) else contextlib.nullcontext()  # type: ignore[operator]
        with (
            evaluation_mode(model),
            without,
        ):  # before there is noise on norms, of which a resumed run would see another
            self._wide = wide_inputs(model, layers, SCHEMES[quantization])

    @property
    def nbytes(self) -> int:
        """Of the copy; 0 before it is made."""
        return 0 if self.layers is None else self.layers.nbytes

    @contextlib.contextmanager
    def applied(self, dtype: torch.dtype | None = None) -> Iterator[None]:
        """Inside, the base computes by `quantization`, in the dtype of the hidden states, and the adapter's updates in
        fewer products (perl.adapters.batched, which says what dtype is). The adapter must not change inside, and
        nothing can be differentiated."""
        if self.layers is None:
            self.layers = self._made()
        with self.layers.applied(), self._batched.applied(self._adapted, dtype):
            yield

    def _made(self) -> QuantisedLayers:
        layers = quantisable(self.model, self.quantization, *self._said)  # FSDP2 may have split it since
        made = QuantisedLayers(layers, head_of(self.model), SCHEMES[self.quantization], self._wide)
        held, whole = made.nbytes / 1e6, sum(layer.weight.nbytes for layer in made.layers) / 1e6
        count, name = len(made.layers), self.quantization
        log.info("%s: %d linear layers in %.1f MB, %.1f MB as they are", name, count, held, whole)
        return made


def check_drawn(config: Config, kind: str, strategy: str) -> None:
    """What rollout.quantization can't be had with.

    Args:
        kind: of the device that draws.
        strategy: "zero3", "fsdp2" or another.

    Raises:
        UserError: a kind of device without such products; FSDP2, where the trainer itself has to have all weights.
    """
    rollout, validation = config.rollout, config.validation
    if rollout.quantization == "none":
        return
    flag, by_vllm = f"{FLAG} {rollout.quantization}", config.training.use_vllm
    require_products(kind, rollout.quantization, flag, None if by_vllm else BY_VLLM)
    if strategy != "fsdp2" or by_vllm:
        return
    if not rollout.workers:
        raise UserError(
            f"{flag}: FSDP2 gathers each layer's own weights to draw; write --config.rollout.workers 1 or more, start"
            " with DDP or ZeRO (scripts/accelerate), or write none"
        )
    if validation.quantized and validation.datasets:
        raise UserError(
            f"{flag}: FSDP2 gathers each layer's own weights to validate; write --config.validation.quantized false"
        )


def quantisable(
    model: nn.Module,
    quantization: str,
    flag: str = FLAG,
    by_vllm: str = BY_VLLM,
) -> list[nn.Linear]:
    """The linear layers of `model`, of a PeftModel's base, those without an adapter too, such as the head. What is
    trained whole (modules_to_save) is not among them. A UserError where an adapter's layer would compute with other
    weights than these.

    Args as of QuantisedBase.
    """
    from peft.tuners import lora
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    flag = f"{flag} {quantization}"
    critic = getattr(model, "critic", None)  # it draws nothing
    own: set[nn.Module] = set() if critic is None else set(critic.modules())
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            own |= set(module.modules())
        if not isinstance(module, BaseTunerLayer) or type(module) is lora.Embedding:
            continue
        base: Any = module.get_base_layer()
        if type(module) is not lora.Linear or module.lora_variant or type(base) is not nn.Linear:
            raise UserError(
                f"{flag}: {name.removeprefix('base_model.model.')} is {type(module).__name__} on {type(base).__name__},"
                " and plain LoRA on linear layers alone is computed above a quantised product; write none"
            )
        own |= set(module.modules()) - {base}
    scheme = SCHEMES[quantization]
    layers = [module for module in model.modules() if type(module) is nn.Linear and module not in own]
    for kind in sorted({layer.weight.device.type for layer in layers}):
        require_products(kind, quantization, flag, by_vllm)
        if why := lacking(scheme, kind):
            raise UserError(f"{flag}: {why}; write none")
    if other := other_matrix(model, {*layers, *own}):
        raise UserError(f"{flag}: {other} is of no linear layer, and would stay as it is; write none")
    if not layers:
        raise UserError(f"{flag}: the model has no linear layer; write none")
    head = head_of(model)
    for layer in layers:
        weight = layer.weight
        if weight.numel() == 0 or is_split(weight):
            raise UserError(f"{flag}: the weights are split over the devices, and quantised whole alone; write none")
        if scheme.group and weight.shape[1] % scheme.group:
            raise UserError(
                f"{flag}: a layer has {weight.shape[1]} inputs, which are no whole groups of {scheme.group}; write int8"
            )
        if npu.multiply_on(weight.device.type) and layer is not head and (why := npu.refused(weight, scheme.bits)):
            raise UserError(f"{flag}: {why}; write none")
    return layers


def head_of(model: Any) -> nn.Module | None:
    """What gives logits, below an adapter of its own."""
    head = model.get_output_embeddings()
    return getattr(head, "base_layer", head)


def other_matrix(model: nn.Module, layers: Collection[nn.Module]) -> str | None:
    """Name of a weight with two dimensions or more that belongs to none of `layers`, nor to an embedding."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or module in layers:
            continue
        for part, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1:
                return f"{name}.{part}".removeprefix("base_model.model.")
    return None
