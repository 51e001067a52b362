"""What an adapter's folder, which may come from anywhere, is not let do: lead PEFT out of it, or keep it busy for ever.

PEFT reads more fields of adapter_config.json than a LoRA that is to be merged needs: some name a Python module, a
tokenizer or other files, and several are regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perl.base.errors import UserError

LEADS_OUT = {
    "adapters": "other adapters",
    "cache_file": "a file",
    "covariance_file": "a file",
    "layer_replication": "copies of the base's layers",
    "megatron_config": "a Python module to import",
    "prompt_tuning_init_state_dict_path": "a file",
    "tokenizer_kwargs": "a tokenizer's arguments",
    "tokenizer_name_or_path": "a tokenizer",
}
"""Field -> what it names besides the base and the adapter's own weights. Empty, as PEFT writes it, it does no harm."""
PATTERNS = ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "rank_pattern", "alpha_pattern")
"""Fields whose texts, and keys, PEFT takes for regular expressions over the names of modules."""
LONGEST_PATTERN = 1000
MOST_REPEATS = 5
"""Repeats in an expression: of a name of 60 characters, five try five million ways at most."""
MOST_OPTIONS = 10
"""Parts that may be there or not: two ways each."""
MOST_CHOICES = 1_000_000
"""Of one alternative in each group; Unsloth's expressions have 130,000."""
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?|(?:[*+?]|\{(?:\d+,?|\d*,)\d*\})[?+]?|.", re.DOTALL)
"""An escape, a set of characters, the head of a group with an extension, a repeat, or one character."""
COMMENTS = re.compile(r"\(\?(?:#|[aiLmsu]*x)")
"""A comment, or the flag that makes them of other texts: TOKEN would read them."""
OWNERS = ("adapter_config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")
"""Files by which a folder is a model's or an adapter's."""


TAKEN_OUT = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""How the texts of init_lora_weights begin with which PEFT changes the base's weights as it builds the layers."""


def of_changed_base(config: Mapping[str, Any]) -> str | None:
    """ "init_lora_weights pissa" or "kasa_config" of an adapter that belongs to a base which PEFT changes at its every
    start; None of one that belongs to the base as it is."""
    if config.get("kasa_config"):
        return "kasa_config"
    start = config.get("init_lora_weights")
    return f"init_lora_weights {start}" if isinstance(start, str) and start.lower().startswith(TAKEN_OUT) else None


def require_contained(config: Mapping[str, Any], where: str) -> None:
    """Raise a UserError for a field of `config`, an adapter's, that is in LEADS_OUT or that no match would end of."""
    for path, value in _fields(config):
        what = LEADS_OUT.get(path.rpartition(".")[2])
        if what and value:
            raise UserError(f"{where}: {path} names {what} outside of the adapter, which is not read; take it out")
    for name in PATTERNS:
        for pattern in _texts(config.get(name)):
            if len(pattern) > LONGEST_PATTERN:
                raise UserError(f"{where}: {name} has {len(pattern)} characters; write the names of the modules")
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise UserError(f"{where}: {name} {pattern!r:.80} is no regular expression ({error})") from error
            if may_take_for_ever(pattern):
                raise UserError(
                    f"{where}: {name} {pattern!r:.80} may take for ever to match; write the names of the modules"
                )


def leads_out(path: Path, folder: Path) -> bool:
    """Whether `path`, in a model's or adapter's `folder`, is a link to what is in no such folder, nor in the blobs of
    the hub's cache that `folder` is in."""
    if not path.is_symlink():
        return False
    here, target = folder.resolve(), path.resolve()
    in_cache = here.parent.name == "snapshots" and target.parent == here.parents[1] / "blobs"
    owned = any((target.parent / name).is_file() for name in OWNERS)
    return not (here in target.parents or in_cache or owned)


def _fields(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every field, to any depth of mappings."""
    for name, value in config.items():
        yield f"{before}{name}", value
        if isinstance(value, Mapping):
            yield from _fields(value, f"{before}{name}.")


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [item for item in value if isinstance(item, str)] if isinstance(value, Mapping | Sequence) else []


def may_take_for_ever(pattern: str) -> bool:
    """Whether a match of this valid expression may try more ways than can be waited for: a group that repeats holds a
    repeat or a choice, or there are too many repeats or choices. Some that would end are among them."""
    if COMMENTS.search(pattern):
        return True
    varies = [False]  # of each open group: whether it holds a repeat or a choice
    alternatives, choices = [1], 1
    repeats = options = 0
    closed = False  # whether the token before ended a group that varies
    for token in TOKEN.findall(pattern):
        if token in ("(", "(?"):
            varies.append(False)
            alternatives.append(1)
        elif token == ")":
            choices *= alternatives.pop()
        elif token == "|":
            varies[-1] = True
            alternatives[-1] += 1
        elif token[0] in "*+?" or (token[0] == "{" and len(token) > 1):
            optional = token[0] == "?"
            if closed and not optional:
                return True
            repeats, options = repeats + (not optional), options + optional
            varies[-1] = True
        closed = token == ")" and varies.pop()
        varies[-1] = varies[-1] or closed
    return repeats > MOST_REPEATS or options > MOST_OPTIONS or choices > MOST_CHOICES
