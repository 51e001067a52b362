"""What a method is asked to do, checked before a model is loaded; what it has done to the model, checked after."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from perl.adapters import ADAPTERS, Adapter
from perl.adapters.none import has_adapter
from perl.config.peft_fields import OF_ALL, TARGETS, reads_of
from perl.config.schema import PeftConfig
from perl.errors import UserError, lookup

if TYPE_CHECKING:
    from transformers import TrainingArguments

log = logging.getLogger(__name__)

STRATEGIES = {"zero3": "ZeRO-3", "fsdp2": "FSDP2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What is trained of a model; peft.json in the run's folder."""

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

    def line(self) -> str:
        share = self.trained / max(self.parameters, 1)
        modules = ", ".join(f"{count} {name}" for name, count in self.modules.items())
        what = f"{self.trained:,} of {self.parameters:,} parameters are trained ({share:.3%})"
        return f"{self.type}: {what}" + (f": {', '.join(self.tensors)} of {modules}" if self.modules else "")


def check_method(config: PeftConfig, training: TrainingArguments) -> Adapter:
    """The line of ADAPTERS that `config` names.

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
    strategy = strategy_of(training)
    if strategy in adapter.refused:
        raise UserError(
            f"--config.peft.type {config.type}: can't be trained with {STRATEGIES[strategy]}:"
            f" {adapter.refused[strategy]}; start with DDP or ZeRO-2 (scripts/accelerate), or write"
            " --config.peft.type lora"
        )
    return adapter


def _check_pattern(name: str, value: str | list[str] | None) -> None:
    """PEFT takes a text for a regular expression, and compiles it when the model is loaded."""
    try:
        re.compile(value if isinstance(value, str) else "")
    except re.error as error:
        raise UserError(
            f"--config.peft.{name} {value}: no regular expression: {error}; write one, or a list of names"
        ) from error


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
    own = [p for name, p in model.named_parameters() if prefix not in name and "ranknum" not in name]
    return Applied(
        type=config.type,
        method=str(getattr(method, "value", method)),
        trained=int(sum(_count(p) for p in trainable.values()) * adapter.trained_share),
        parameters=sum(_count(p) for p in own),
        tensors=dict(kinds),
        modules=dict(Counter(layer.rpartition(".")[2] for layer in layers)),
    )


def _parts(name: str, adapter: Adapter) -> tuple[str, str]:
    """Layer and kind of a trainable parameter; a RuntimeError for one that the method does not train."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        kind = part.replace("lora_embedding_", "lora_")
        if kind in adapter.trains:
            return ".".join(parts[:place]), kind
    raise RuntimeError(f"{name} is trainable, and the method trains {', '.join(adapter.trains)} alone")


def _count(parameter: Any) -> int:
    return getattr(parameter, "ds_numel", None) or parameter.numel()
