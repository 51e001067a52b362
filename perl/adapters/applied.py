"""What a method is asked to do, checked before a model is loaded; what it has done to the model, checked after."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from perl.adapters import ADAPTERS, Adapter
from perl.adapters.none import has_adapter
from perl.base.errors import UserError, lookup
from perl.base.files import read_json
from perl.config.peft_fields import OF_ALL, TARGETS, reads_of
from perl.config.schema import PeftConfig
from perl.models import folders
from perl.models.few_bits import described, fields_of

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from perl.config.load import Config
    from perl.config.sft import SFTRunConfig

log = logging.getLogger(__name__)

APPLIED = "peft.json"
"""Applied, in the run's folder."""
SHOWN = 10
"""Names of layers in a message."""
STRATEGIES = {"zero3": "ZeRO-3", "fsdp2": "FSDP2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What is trained of a model; APPLIED in the run's folder."""

    type: str
    """Key of ADAPTERS."""
    method: str
    """PEFT's name of it; "" where all weights are trained."""
    trained: int
    """Numbers that the optimizer moves."""
    parameters: int
    """Of the model, without the adapter."""
    tensors: dict[str, int]
    """PEFT's name of what is trained in a layer ("lora_A") -> how many tensors."""
    modules: dict[str, int]
    """Kind of adapted layer ("q_proj") -> how many."""
    quantised: str = ""
    """How the base is held that it is trained above, "4 bits (bitsandbytes, nf4)"; "" where it is not quantised."""

    def line(self) -> str:
        share = self.trained / max(self.parameters, 1)
        modules = ", ".join(f"{count} {name}" for name, count in self.modules.items())
        what = f"{self.trained:,} of {self.parameters:,} parameters are trained ({share:.3%})"
        above = f"; above a base in {self.quantised}" if self.quantised else ""
        return f"{self.type}: {what}" + (f": {', '.join(self.tensors)} of {modules}" if self.modules else "") + above


def check_method(config: PeftConfig, training: TrainingArguments, strategy: str | None = None) -> Adapter:
    """The line of ADAPTERS that `config` names.

    Args:
        strategy: as `strategy_of` has it; None: that of `training`.

    Raises:
        UserError: no such method, a field that it does not read, a value that it can't have, or a way to spread the
            weights over devices that it can't be trained with.
    """
    adapter = lookup(ADAPTERS, config.type, "adapter type", "--config.peft.type")
    names = reads_of(config.type)
    for field in fields(PeftConfig):
        value = getattr(config, field.name)
        if field.name in (*OF_ALL, *names) or value == field.default:
            continue
        reads = f"it reads {', '.join(names)}" if names else "it reads no other field of the group"
        raise UserError(
            f"--config.peft.{field.name} {value}: peft.type {config.type} does not read it; {reads}; leave it out"
            f" (its default is {field.default})"
        )
    for name in TARGETS:
        _check_pattern(name, getattr(config, name))
    if adapter.check is not None:
        adapter.check(config, training)
    strategy = strategy_of(training) if strategy is None else strategy
    if strategy in adapter.refused:
        raise UserError(
            f"--config.peft.type {config.type}: can't be trained with {STRATEGIES[strategy]}:"
            f" {adapter.refused[strategy]}; start with DDP or ZeRO-2 (scripts/accelerate), or write"
            " --config.peft.type lora"
        )
    return adapter


def check_base(config: Config | SFTRunConfig, strategy: str | None = None) -> None:
    """What a base can't be had with that is quantised as it loads (model.quantization).

    Args:
        strategy: as in `check_method`.

    Raises:
        UserError: a method, or a way to spread the weights, that needs them whole; another flag that asks for it.
    """
    if "quantization_config" in (config.training.model_init_kwargs or {}):
        raise UserError(
            "--config.training.model_init_kwargs: quantization_config has no place there; write"
            " --config.model.quantization nf4"
        )
    if config.model.quantization == "none":
        return
    flag = f"--config.model.quantization {config.model.quantization}"
    if why := ADAPTERS[config.peft.type].refused.get(config.model.quantization):
        raise UserError(f"{flag}: --config.peft.type {config.peft.type}: {why}; write lora, or none for quantization")
    if strategy := strategy_of(config.training) if strategy is None else strategy:
        raise UserError(
            f"{flag}: {STRATEGIES[strategy]} would split the packed weights; start with DDP or ZeRO-2"
            " (scripts/accelerate), or write none"
        )


def check_stored(config: Config | SFTRunConfig, model: Any, strategy: str | None = None) -> None:
    """What a base can't be had with whose files, as `model` says, its PretrainedConfig, are quantised.

    Args:
        strategy: as in `check_method`.

    Raises:
        UserError: model.quantization asks for it too, or the weights would be spread.
    """
    if not (stored := fields_of(model)):
        return
    path = config.model.model_name_or_path
    if config.model.quantization != "none":
        raise UserError(
            f"--config.model.quantization {config.model.quantization}: {path} is quantised already; leave the flag out"
        )
    if strategy := strategy_of(config.training) if strategy is None else strategy:
        raise UserError(
            f"{path} is stored in {described(stored)}, and {STRATEGIES[strategy]} would split the packed weights;"
            " start with DDP or ZeRO-2 (scripts/accelerate)"
        )


def _check_pattern(name: str, value: str | list[str] | None) -> None:
    """PEFT takes a text for a regular expression, and compiles it when the model is loaded."""
    try:
        re.compile(value if isinstance(value, str) else "")
    except re.error as error:
        raise UserError(
            f"--config.peft.{name} {value}: no regular expression: {error}; write one, or a list of names"
        ) from error


def check_layers(config: PeftConfig, folder: Path) -> None:
    """Of the shapes of the model in `folder` alone, no weight is read: whether the method finds layers, which can have
    the values of `config`. What else there is to say of this model is said when it is loaded.

    Raises:
        UserError: target_modules names no layer, or one of them can't have a value.
    """
    adapter = ADAPTERS[config.type]
    peft_config = adapter.build(config)
    if peft_config is None or (config.adapter is not None and config.adapter_mode == "continue"):
        return
    wrapped = _without_weights(folder, peft_config)
    if wrapped is not None and adapter.fits is not None:
        adapter.fits(wrapped, config)


def _without_weights(folder: Path, peft_config: Any) -> Any:
    """The model in `folder`, wrapped, on the meta device; None where the shapes alone do not do for that."""
    import torch
    from peft import get_peft_model

    config, linear = folders.load_config(folder), {}
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come again with the weights
            model = folders.kind_of(config).from_config(config)
            layers = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
            linear = dict.fromkeys(name.rpartition(".")[2] for name in layers)
            return get_peft_model(model, peft_config, low_cpu_mem_usage=True)
    except Exception as error:
        if "not found in the base model" in str(error):
            shown = ", ".join([*list(linear)[:SHOWN], *(["…"] if len(linear) > SHOWN else [])])
            named = peft_config.target_modules
            raise UserError(
                f"--config.peft.target_modules {named if isinstance(named, str) else sorted(named)}: the model has no"
                f" such layer; its linear layers are {shown}"
            ) from error
        log.debug("the model's shapes alone do not do for PEFT", exc_info=error)
        return None


def strategy_of(training: TrainingArguments) -> str:
    """ "zero3", "fsdp2", or "" where each device has all weights."""
    deepspeed = training.deepspeed_plugin and training.deepspeed_plugin.deepspeed_config["zero_optimization"]
    if deepspeed and deepspeed["stage"] == 3:
        return "zero3"
    return "fsdp2" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else ""


def applied(model: Any, adapter: Adapter, config: PeftConfig) -> Applied:
    """What is trainable in `model`, as it was wrapped.

    Raises:
        UserError: the method has found no layer.
        RuntimeError: something else is trainable than the method trains, or less.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not has_adapter(model):
        count = sum(_count(p) for p in trainable.values())
        return Applied(type=config.type, method="", trained=count, parameters=count, tensors={}, modules={})
    kinds: Counter[str] = Counter()
    layers: dict[str, None] = {}
    for name in trainable:
        layer, kind = _parts(name, adapter)
        kinds[kind] += 1
        layers[layer] = None
    if kinds.keys() != set(adapter.trains):
        raise RuntimeError(
            f"peft.type {config.type} should train {', '.join(adapter.trains)}, but {', '.join(kinds) or 'nothing'} is"
            " trainable"
        )
    prefix = model.base_model.prefix
    method = model.peft_config["default"].peft_type
    of_base = [p for name, p in model.named_parameters() if prefix not in name and "ranknum" not in name]
    return Applied(
        type=config.type,
        method=str(getattr(method, "value", method)),
        trained=int(sum(_count(p) for p in trainable.values()) * adapter.trained_share),
        parameters=sum(_count(p) for p in of_base),
        tensors=dict(kinds),
        modules=dict(Counter(layer.rpartition(".")[2] for layer in layers)),
        quantised=described(fields_of(model.get_base_model().config)),
    )


class Above(TypedDict):
    """What is read of APPLIED, which an older run wrote without it."""

    quantised: NotRequired[str]


def trained_above(adapter: Path) -> str:
    """Applied.quantised of the run whose folder `adapter` lies in; "" where no run is known."""
    file = adapter.resolve().parent / APPLIED
    return read_json(file, kind=Above).get("quantised", "") if file.is_file() else ""


def _parts(name: str, adapter: Adapter) -> tuple[str, str]:
    """Layer and kind of a trainable parameter; a RuntimeError for one that the method does not train."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        kind = part.replace("lora_embedding_", "lora_")
        if kind in adapter.trains:
            return ".".join(parts[:place]), kind
    raise RuntimeError(f"{name} is trainable, and the method trains {', '.join(adapter.trains)} alone")


def _count(parameter: Any) -> int:
    state = getattr(parameter, "quant_state", None)  # of 4 bits, two of which are one number of the tensor
    return state.shape.numel() if state else getattr(parameter, "ds_numel", None) or parameter.numel()
