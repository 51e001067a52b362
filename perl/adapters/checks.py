"""What a method is asked to do, checked before a model is loaded (perl/adapters/applied.py has what it has done)."""

from __future__ import annotations

import logging
import os
import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import get_peft_model

from perl.adapters import ADAPTERS, Adapter
from perl.base.errors import UserError, lookup
from perl.config.peft_fields import OF_ALL, TARGETS, reads_of
from perl.config.schema import PeftConfig
from perl.models import folders
from perl.models.few_bits import described, fields_of

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from perl.config.load import Config
    from perl.config.sft import SFTRunConfig

log = logging.getLogger(__name__)

SHOWN = 10
"""Names of layers in a message."""
STRATEGIES = {"zero3": "ZeRO-3", "fsdp2": "FSDP2"}


def strategy_of(training: TrainingArguments) -> str:
    """ "zero3", "fsdp2", or "" where each device has all weights."""
    deepspeed = training.deepspeed_plugin and training.deepspeed_plugin.deepspeed_config["zero_optimization"]
    if deepspeed and deepspeed["stage"] == 3:
        return "zero3"
    return "fsdp2" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else ""


def check_method(config: PeftConfig, training: TrainingArguments, strategy: str) -> Adapter:
    """The line of ADAPTERS that `config` names.

    Args:
        strategy: as `strategy_of` has it.

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
    if strategy in adapter.refused:
        raise UserError(
            f"--config.peft.type {config.type}: can't be trained with {STRATEGIES[strategy]}:"
            f" {adapter.refused[strategy]}; start with DDP or ZeRO-2 (scripts/accelerate), or write"
            " --config.peft.type lora"
        )
    return adapter


def check_base(config: Config | SFTRunConfig, strategy: str) -> None:
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
    if strategy:
        raise UserError(
            f"{flag}: {STRATEGIES[strategy]} would split the packed weights; start with DDP or ZeRO-2"
            " (scripts/accelerate), or write none"
        )


def check_stored(config: Config | SFTRunConfig, model: Any, strategy: str) -> None:
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
    if strategy:
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
    """Of the shapes of the model in `folder` alone, no weight is read: whether the method finds the layers that are
    named, which can have the values of `config`.

    Raises:
        UserError: target_modules or exclude_modules names no layer, or one of them can't have a value.
    """
    adapter = ADAPTERS[config.type]
    peft_config = adapter.build(config)
    if peft_config is None or (config.adapter is not None and config.adapter_mode == "continue"):
        return
    if (model := _without_weights(folder)) is None:
        return
    for name in TARGETS:
        _require_found(model, name, getattr(config, name))
    if (wrapped := _wrapped(model, peft_config, config)) is None:
        return
    if adapter.fits is not None:
        adapter.fits(wrapped, config)
    if hasattr(wrapped.get_output_embeddings(), "base_layer"):
        raise UserError(
            f"--config.peft.target_modules {_shown(config.target_modules)}: log-probabilities are computed from the"
            " output head's own weights, so that an adapter on it would train nothing; leave it out"
        )


def _without_weights(folder: Path) -> Any:
    """The model in `folder` on the meta device; None where its code does not do for that."""
    config = folders.load_config(folder)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come again with the weights
            return folders.kind_of(config).from_config(config)
    except Exception as error:
        log.debug("the model's shapes alone do not do", exc_info=error)
        return None


def _require_found(model: Any, name: str, value: str | list[str] | None) -> None:
    """Raise a UserError for a name of a list, or an expression of what is excluded, that is of no module: PEFT takes
    what it finds of a list, and trains the others."""
    modules = [module for module, _ in model.named_modules()]
    if isinstance(value, list):
        strange = [one for one in value if not any(f".{module}".endswith(f".{one}") for module in modules)]
    elif value and name == "exclude_modules":
        strange = [] if any(re.fullmatch(value, module) for module in modules) else [value]
    else:  # PEFT finds a layer, or says so
        strange = []
    if strange:
        raise UserError(f"--config.peft.{name} {_shown(value)}: the model has no layer {strange[0]}; {_linear(model)}")


def _wrapped(model: Any, peft_config: Any, config: PeftConfig) -> Any:
    """`model` as PEFT wraps it; None where its shapes alone do not do for that."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return get_peft_model(model, peft_config, low_cpu_mem_usage=True)
    except (ValueError, TypeError) as error:
        flag = f"--config.peft.target_modules {_shown(config.target_modules)}"
        if "not found in the base model" in str(error):
            raise UserError(f"{flag}: the model has no such layer; {_linear(model)}") from error
        said = " ".join(str(error).split())
        raise UserError(f"{flag}: peft.type {config.type} can't have these layers or values: {said}") from error
    except Exception as error:
        log.debug("the model's shapes alone do not do for PEFT", exc_info=error)
        return None


def _shown(value: str | list[str] | None) -> str:
    return str(sorted(value) if isinstance(value, list) else value)


def _linear(model: Any) -> str:
    layers = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    names = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    return f"its linear layers are {', '.join([*names[:SHOWN], *(['…'] if len(names) > SHOWN else [])])}"
