"""verl's keys: what each becomes here, as keys.yaml says. A further key is one line there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from perl.tools.from_verl import handlers, values
from perl.tools.from_verl.outcomes import (
    Condition,
    Handler,
    NoEffect,
    Outcome,
    Refused,
    Translated,
    choice,
    off,
    refused,
    same_as,
    to,
    when,
)

TABLE = yaml.safe_load((Path(__file__).parent / "keys.yaml").read_text(encoding="utf-8"))


def _handler(row: dict[str, Any]) -> Handler:
    """What decides about a key, from its row in keys.yaml."""
    if "to" in row:
        handler = to(row["to"], getattr(values, row.get("is", "anything")), row.get("of", ""))
    elif "as" in row:
        handler = same_as(row["as"])
    elif "same" in row:
        handler = choice(dict.fromkeys(row["same"], NoEffect(row["why"])), row["otherwise"])
    elif "choice" in row:
        handler = choice({value: _outcome(cell) for value, cell in row["choice"].items()}, row["otherwise"])
    else:
        name, *arguments = row["by"] if isinstance(row["by"], list) else [row["by"]]
        handler = getattr(handlers, name)(*arguments) if arguments else getattr(handlers, name)
    for name in row:
        if name == "empty":
            handler = off(row["empty"], handler, *row.get("at", ()))
        elif name == "when":
            for condition in row["when"].split():
                handler = when(*_condition(condition))(handler)
    return handler


def _condition(name: str) -> tuple[Condition, str]:
    """A condition of keys.yaml, and why a key has no effect without it."""
    holds, why = TABLE["conditions"][name]
    return (holds if "." in holds else getattr(handlers, holds)), why


def _outcome(cell: Any) -> Outcome:
    return Translated(cell) if isinstance(cell, dict) else NoEffect(cell) if isinstance(cell, str) else Refused(*cell)


def _without_counterpart() -> Iterator[tuple[str, Handler | NoEffect]]:
    for kind, handler in (("refused", refused), ("no_effect", NoEffect)):
        for why, keys in TABLE[kind].items():
            yield from ((key, handler(why)) for key in keys)


KEYS: dict[str, Handler | NoEffect] = {
    **{key: _handler(row) for key, row in TABLE["keys"].items()},
    **{key: handler for key, handler in _without_counterpart() if "\\" not in key},
}
"""Key of verl -> what becomes of its value."""
FAMILIES: tuple[tuple[str, Handler | NoEffect], ...] = (
    *((pattern, _handler(row)) for pattern, row in TABLE["families"].items()),
    *((pattern, handler) for pattern, handler in _without_counterpart() if "\\" in pattern),
)
"""(pattern of whole keys, what becomes of them), for keys that are not in KEYS; the first that fits."""

VALIDATION = re.compile("|".join(TABLE["validation"]))
"""Whole keys of validation alone."""
ALWAYS: list[str] = TABLE["always"]
NAMES: list[str] = TABLE["names"]
ENVIRONMENT: list[str] = TABLE["same_variables"]
NO_VARIABLE: dict[str, str] = TABLE["other_variables"]


def handler_of(key: str) -> Handler | NoEffect | None:
    """What decides about a key; None for one that verl does not have, or that nobody has looked at."""
    if key in KEYS:
        return KEYS[key]
    return next((handler for pattern, handler in FAMILIES if re.fullmatch(pattern, key)), None)
