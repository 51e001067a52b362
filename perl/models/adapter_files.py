"""What an adapter's folder, which may come from anywhere, is not let do: lead PEFT out of it, or keep it busy for ever.

PEFT reads more fields of adapter_config.json than a LoRA that is to be merged needs: some name a Python module, a
tokenizer or other files, and several are regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]
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
MOST_REPEATS = 5
"""Unbounded repeats in a row: of a name of 60 characters, five try five million ways at most."""
OWNERS = ("adapter_config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")
"""Files by which a folder is a model's or an adapter's."""


def require_contained(config: Mapping[str, Any], where: str) -> None:
    """Raise a UserError for a field of `config`, an adapter's, that is in LEADS_OUT or that no match would end of."""
    for path, value in _fields(config):
        what = LEADS_OUT.get(path.rpartition(".")[2])
        if what and value:
            raise UserError(f"{where}: {path} names {what} outside of the adapter, which is not read; take it out")
    for name in PATTERNS:
        for pattern in _texts(config.get(name)):
            try:
                endless = _repeats(_parser.parse(pattern)) > MOST_REPEATS
            except (re.error, RecursionError, OverflowError) as error:
                raise UserError(f"{where}: {name} {pattern!r:.80} is no regular expression ({error})") from error
            if endless:
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


def _repeats(parsed: Any, inside: bool = False) -> float:
    """Unbounded repeats of a parsed expression in a row; infinite where one is inside of another, or holds a choice, so
    that a match may try exponentially many ways."""
    count: float = 0
    for kind, content in parsed:
        if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            least, most, repeated = content
            unbounded = most > MOST_REPEATS
            if inside and least != most:
                return float("inf")
            count += unbounded + _repeats(repeated, inside or unbounded)
        elif kind is _constants.BRANCH:
            if inside:
                return float("inf")
            count += max(_repeats(branch) for branch in content[1])
        elif kind is _constants.GROUPREF_EXISTS:
            count += sum(_repeats(part, inside) for part in content[1:] if part is not None)
        elif isinstance(content, _parser.SubPattern):
            count += _repeats(content, inside)
        elif isinstance(content, tuple) and content and isinstance(content[-1], _parser.SubPattern):
            count += _repeats(content[-1], inside)  # a group, or what must follow or precede
    return count
