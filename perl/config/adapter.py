"""An adapter that a training starts from: what its own configuration settles in the group `peft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from perl.base.errors import UserError
from perl.base.paths import user_path
from perl.models.adapter_files import of_changed_base
from perl.models.folders import require_adapter

FLAG = "--config.peft.adapter"
OWN = {
    "r": int,
    "lora_alpha": int | float,
    "lora_dropout": int | float,
    "target_modules": str | list,
    "exclude_modules": str | list | None,
}
"""Fields of the group that an adapter which is trained further brings with it, as its type; their types."""
FURTHER = ("modules_to_save", "bias", "trainable_token_indices")
"""Fields of a LoRA adapter that name what it trains besides its matrices."""
HINT = f"it is trained further as it is; leave the flag out, or write {FLAG}_mode merge for a new adapter on top of it"


def take_adapter(values: Namespace, flags: Namespace, recipe: Namespace) -> list[str]:
    """Check the adapter that `values.peft.adapter` names, and give OWN the values that it was made with, so that the
    run's records say what is trained. One line for what the recipe says otherwise.

    Raises:
        UserError: no adapter lies there, none of LoRA's matrices alone that could be trained further, a flag says
            otherwise, or no adapter is trained at all.
    """
    peft = values.peft
    if peft.adapter is None:
        return []
    if peft.type == "none" and peft.adapter_mode == "continue":
        raise UserError(
            f"{FLAG}: --config.peft.type none trains all weights, and no adapter further; write {FLAG}_mode merge to"
            " start from the base with the adapter in its weights"
        )
    peft.adapter = str(user_path(peft.adapter))
    adapter = require_adapter(Path(peft.adapter), FLAG)
    if peft.adapter_mode == "merge":
        return []
    if adapter.get("peft_type") != "LORA":
        raise UserError(
            f"{FLAG} {peft.adapter}: is of method {adapter.get('peft_type')}, which is not trained further; write"
            f" {FLAG}_mode merge for a new adapter on top of it, or the folder of a LoRA one"
        )
    if further := [f"{name} {adapter[name]}" for name in FURTHER if adapter.get(name) not in (None, "none", [], {})]:
        raise UserError(
            f"{FLAG} {peft.adapter}: trains more than LoRA's matrices ({', '.join(further)}), and is not trained"
            f" further; write {FLAG}_mode merge for a new adapter on top of it"
        )
    if changed := of_changed_base(adapter):
        raise UserError(
            f"{FLAG} {peft.adapter}: with {changed} PEFT changes the base's weights as it loads it, and it is not"
            f" trained further; write {FLAG}_mode merge for a new adapter on top of it"
        )
    trained = {name: adapter.get(name) for name in OWN}
    if wrong := [f"{name} {value!r}" for name, value in trained.items() if not isinstance(value, OWN[name])]:
        raise UserError(f"{FLAG} {peft.adapter}: adapter_config.json holds {', '.join(wrong)}; copy the adapter again")
    trained["type"] = _type(adapter, peft.type)
    for name, value in trained.items():
        if f"peft.{name}" in flags and not _same(flags[f"peft.{name}"], value):
            flag = f"--config.peft.{name} {flags[f'peft.{name}']}"
            raise UserError(f"{flag}: the adapter in {peft.adapter} has {name} {value}, and {HINT}")
    other = [name for name, value in trained.items() if f"peft.{name}" in recipe and not _same(peft[name], value)]
    for name, value in trained.items():
        peft[name] = value
    if not other:
        return []
    taken = ", ".join(f"{name} {trained[name]}" for name in other)
    return [f"{FLAG}: the adapter's own {taken} override the recipe's"]


def _type(adapter: dict[str, Any], wanted: str) -> str:
    """The adapter's method by its name in ADAPTERS; lora, lora_plus and lora_fa differ in how they learn alone."""
    if adapter.get("use_dora"):
        return "dora"
    if adapter.get("use_rslora"):
        return "rslora"
    return wanted if wanted in ("lora_plus", "lora_fa") else "lora"


def _same(one: Any, other: Any) -> bool:
    return sorted(one) == sorted(other) if isinstance(one, list) and isinstance(other, list) else one == other
