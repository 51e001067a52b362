"""Which fields of the group `peft` a method reads, and what becomes of those that a recipe sets for another method;
above which methods the base may be quantised."""

from __future__ import annotations

import re
from dataclasses import fields

from jsonargparse import Namespace

from perl.config.schema import PeftConfig

OF_ALL = ("type", "adapter", "adapter_mode")
"""Which method, and from where."""
TARGETS = ("target_modules", "exclude_modules")
LORA_FIELDS = ("r", "lora_alpha", "lora_dropout", *TARGETS)
READS: dict[str, tuple[str, ...]] = {
    "lora_plus": (*LORA_FIELDS, "lora_plus_lr_ratio"),
    "pissa": ("r", "lora_alpha", *TARGETS),
    "milora": ("r", "lora_alpha", *TARGETS),
    "adalora": (*LORA_FIELDS, "adalora_target_r", "adalora_tinit", "adalora_tfinal"),
    "vera": ("r", "lora_dropout", "target_modules"),
    "miss": ("r", "lora_dropout", *TARGETS),
    "ia3": TARGETS,
    "ln_tuning": TARGETS,
    "hra": ("r", *TARGETS),
    "oft": ("oft_block_size", *TARGETS),
    "none": (),
}
"""Besides OF_ALL; other methods read LORA_FIELDS."""
UNMERGED = ("lora", "rslora", "lora_plus", "lora_fa", "pissa", "milora", "milora_plus")
"""Methods whose layers add scale * B A x to the base's product, which may be a quantised one."""


def reads_of(method: str) -> tuple[str, ...]:
    return READS.get(method, LORA_FIELDS)


def list_names(values: Namespace) -> None:
    """A text that is the name of a layer is a list of one: PEFT would match it, as an expression, with whole paths."""
    for name in TARGETS:
        if isinstance(text := values.peft[name], str) and re.fullmatch(r"[\w.]+", text):
            values.peft[name] = [text]


def leave_out_other_methods(values: Namespace, flags: Namespace, recipe: Namespace) -> list[str]:
    """Where a flag names another method than the recipe's, give what the recipe sets for its own, and the flag's does
    not read, the default back: recipes are compared under several methods. One line for each."""
    method = flags.get("peft.type")
    if method is None or method == recipe.get("peft.type", PeftConfig.type):
        return []
    lines = []
    for field in fields(PeftConfig):
        name = f"peft.{field.name}"
        read = field.name in (*OF_ALL, *reads_of(method))
        if read or name in flags or recipe.get(name, field.default) == field.default:
            continue
        lines.append(f"the recipe's {name} {values[name]} is left out: --config.peft.type {method} does not read it")
        values[name] = field.default
    return lines
