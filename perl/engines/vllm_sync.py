"""Gives vLLM the policy: the adapter alone, to a base that neither vLLM nor the trainer ever writes to.

TRL 1.16 merges the adapter into the trainer's own weights, sends all of them and subtracts it again, at every
synchronisation: gigabytes, and rounding leaves another base behind each time. Here

    sync = VLLMSync(peft_config)
    llm = start(sync.options(…, policy))    a vllm.LLM with LoRA enabled
    sync.load(llm, policy, gather)          hands the adapter over (a few MB), which requests name then (sync.adapter)

Where vLLM can't serve the adapter, one line in the log says why and `load` sends merged weights. They are computed in
copies, by PEFT's own merge in float32, so that nothing has to be restored.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from perl import device
from perl.adapters.layers import adapted_layers
from perl.adapters.none import NO_ADAPTER, has_adapter
from perl.base.errors import UserError
from perl.base.files import passing_folder
from perl.device.sharding import Gather, resharded, unwrapped, whole, whole_of
from perl.engines.vllm import cannot_serve, max_lora_rank

if TYPE_CHECKING:
    from peft import PeftConfig

    from perl.noise.injector import NoiseInjector, Target

log = logging.getLogger(__name__)


MEMORY = Path("/dev/shm")
"""Files here never reach a disk."""


class VLLMSync:
    """
    Args:
        config: PEFT's, of the adapter that is trained; None where all weights are.

    Attributes:
        reason: why vLLM is sent all weights, merged; None where it is given the adapter alone.
        adapter: the LoRARequest of the last `load`; None: vLLM draws with the weights of its base.
    """

    def __init__(self, config: PeftConfig | None):
        self.config = {} if config is None else config.to_dict()
        self.reason = NO_ADAPTER if config is None else cannot_serve(self.config)
        self.adapter: Any = None
        self._number = 0

    def options(self, options: Mapping[str, Any], model: Any) -> dict[str, Any]:
        """Those of a vllm.LLM, and those with which it serves the adapter of `model`, unless something stands against
        it. Where workers draw, the trainer has looked at its layers (odd_layer), and `model` is None."""
        self.reason = self.reason or _model_refuses(options) or (None if model is None else odd_layer(model))
        if self.reason is not None:
            what = "all weights" if self.reason == NO_ADAPTER else "merged weights, not the adapter alone"
            log.info("rollouts: vLLM is sent %s: %s", what, self.reason)
            return dict(options)
        return {**options, "enable_lora": True, "max_lora_rank": max_lora_rank(self.config)}

    def load(self, llm: Any, model: Any, gather: Gather) -> None:
        """Bring `llm` up to date with `model` (the policy, not wrapped by DDP or DeepSpeed). Every process must come
        here.

        Raises:
            UserError: vLLM refuses the adapter, or has no weights that others could replace.
        """
        if self.reason is None:
            self.serve(llm, lambda folder: save_adapter(model, gather, folder))
            return
        (replaceable,) = llm.apply_model(_holds_weights)
        if not replaceable:
            raise UserError(
                f"--config.rollout.engine vllm: vLLM has packed its weights for the CPU and can only be given the"
                f" adapter alone, but {self.reason}; use --config.rollout.engine fast"
            )
        for named in merged_weights(model, gather):
            llm.apply_model(lambda inner, named=named: inner.load_weights([named]))

    def serve(self, llm: Any, save: Callable[[Path], None], of: str = "") -> None:
        """Have `llm` load what `save` writes to a folder, under a name that holds `of` and that it has not had before,
        and forget what it served until now: no request may be under way."""
        from vllm.lora.request import LoRARequest

        previous, self._number = self.adapter, self._number + 1
        name = f"perl-{self._number}{of}"
        with passing_folder(MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir()), "adapter") as folder:
            save(folder)
            # The name is part of the prefix cache's keys: what another adapter computed is never found.
            request = LoRARequest(name, self._number, str(folder))
            try:
                if previous is not None:
                    llm.llm_engine.remove_lora(previous.lora_int_id)
                loaded = llm.llm_engine.add_lora(request)
            except (ValueError, RuntimeError) as error:
                if previous is not None or device.is_out_of_memory(error):  # it served the same layers before
                    raise
                raise UserError(
                    f"--config.rollout.engine vllm: vLLM refuses the adapter: {' '.join(str(error).split())[:300]}; use"
                    " --config.rollout.engine fast"
                ) from error
        if not loaded:
            raise RuntimeError(f"vLLM did not load the adapter of synchronisation {self._number}")
        self.adapter = request


def noise_of_engine(llm: Any, noise: NoiseInjector) -> NoiseInjector:
    """What puts the noise of `noise` on the norm weights of the engine in this process.

    Raises:
        UserError: the engine has not each of these layers as the trainer has it.
    """
    ((model, modules),) = llm.apply_model(lambda model: [model, dict(model.named_modules())])
    rename = getattr(model, "hf_to_vllm_mapper", None)
    return noise.on(model, [_layer_of_engine(modules, rename, target) for target in noise.targets])


def save_adapter(model: Any, gather: Gather, folder: Path) -> None:
    """The adapter in PEFT's files. All ranks gather."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    def named() -> dict[str, nn.Parameter]:
        return {unwrapped(name): p for name, p in model.named_parameters() if model.prefix in name}

    with resharded(model), gather(list(named().values())):
        tensors = {name: whole(p).cpu() for name, p in named().items()}
    folder.mkdir(parents=True, exist_ok=True)
    name = model.active_adapter
    state = get_peft_model_state_dict(model, state_dict=tensors, adapter_name=name, save_embedding_layers=False)
    save_file({key: t.contiguous() for key, t in state.items()}, folder / "adapter_model.safetensors")
    model.peft_config[name].save_pretrained(str(folder))


@torch.no_grad()
def merged_weights(model: Any, gather: Gather) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight of the base with the adapter in it, if there is one, in the base's dtype; the model itself is only
    read."""
    with resharded(model), gather(list(model.parameters())):
        layers = {unwrapped(layer.name): layer for layer in adapted_layers(model)}
        for layer in layers.values():
            if why := layer.cannot_merge():
                raise UserError(
                    f"--config.rollout.engine vllm: the adapter can't be merged: {why}; use --config.rollout.engine"
                    " fast"
                )
        merged: dict[str, torch.Tensor] = {}
        for full_name, parameter in model.named_parameters():
            if has_adapter(model) and (
                model.prefix in full_name
                or "original_module" in full_name
                or ".ranknum." in full_name  # AdaLoRA's scale
                or not unwrapped(full_name).startswith("base_model.")  # the critic's
            ):
                continue
            name = unwrapped(full_name).removeprefix("base_model.model.").replace(".base_layer", "")
            module, _, weight = name.replace("modules_to_save.default.", "").rpartition(".")
            if module in layers:
                if weight not in merged:
                    merged = layers[module].merged()
                tensor = whole_of(merged.pop(weight).to(parameter.dtype), parameter)
            else:
                tensor = whole(parameter)
            yield f"{module}.{weight}", tensor


def own_name(name: str) -> str:
    """A layer's name in the checkpoint."""
    return unwrapped(name).removeprefix("base_model.model.")


def odd_layer(model: Any) -> str | None:
    """A layer with an adapter that is not applied as vLLM applies LoRA; an embedding may be tied or padded there."""
    from peft.tuners.lora import Linear

    odd = [adapted.name for adapted in adapted_layers(model) if not isinstance(adapted.layer, Linear)]
    return f"vLLM serves LoRA on linear layers, not on {odd[0]}" if odd else None


def _model_refuses(options: Mapping[str, Any]) -> str | None:
    """Why vLLM can't serve LoRA on this model at all, or None where it can; nothing is loaded."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import get_model_architecture
    from vllm.model_executor.models.interfaces import supports_lora

    known = {name: options[name] for name in ("model", "model_impl") if name in options}
    architecture, _ = get_model_architecture(EngineArgs(**known).create_model_config())
    return None if supports_lora(architecture) else f"vLLM's {architecture.__name__} does not support LoRA"


def _holds_weights(model: nn.Module) -> bool:
    """Whether all weights are there. Runs in vLLM's worker."""
    return all(parameter.numel() for parameter in model.parameters())


def _layer_of_engine(modules: dict[str, nn.Module], rename: Any, target: Target) -> nn.Module:
    """The engine's layer for one of the trainer's, by its own name in the checkpoint or by vLLM's for it."""
    name = own_name(target.name)
    renamed = rename.map_name(f"{name}.weight") if rename is not None else None
    module = modules.get(name) or modules.get((renamed or "").removesuffix(".weight"))
    weight = getattr(module, "weight", None)
    shape = tuple(getattr(target.weight, "ds_shape", target.weight.shape))  # ZeRO-3's own is (0,) here
    if weight is not None and weight.is_floating_point() and tuple(weight.shape) == shape:
        assert module is not None
        return module
    dtype = str(getattr(weight, "dtype", "")).removeprefix("torch.")
    has = "no such layer" if weight is None else f"it as {dtype} {list(weight.shape)}"
    raise UserError(
        f"--config.noise_injection.enabled: {name} is {list(shape)} in the trainer, but vLLM has {has}, which can't be"
        " given the noise; use --config.rollout.engine fast"
    )
