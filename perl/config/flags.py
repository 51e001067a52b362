"""docs/flags.md: every flag of ours, its default and what it does, from the dataclasses that the parsers are made of.

python -m perl.config.flags > docs/flags.md
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docstring_parser import parse as parse_docstring

from perl.config.parser import WORDS, descriptions

HEAD = """# Flags

All flags of perl's own, as `python -m perl.config.flags` prints them from the code. `python -m perl.train --help all`
lists them together with TRL's (`--config.training.…`, the fields of GRPOConfig; of perl.sft: SFTConfig).

A flag `--config.GROUP.FIELD VALUE` is `GROUP: {FIELD: VALUE}` in a recipe. A flag overrides the recipe, the recipe
the default. A list is written as `'["a", "b"]'`.
"""


def default_of(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return _shown(field.default_factory())
    return "required" if field.default is dataclasses.MISSING else _shown(field.default)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def values_of(hint: Any) -> str:
    """The values that a field of this type takes, in words."""
    if get_origin(hint) is Literal:
        return ", ".join(str(value) for value in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return ", ".join(values_of(one) for one in get_args(hint))
    kind = get_origin(hint) or hint
    return WORDS[kind.__name__]


def table(prefix: str, kind: type, names: Iterable[str] | None = None) -> str:
    """Markdown table of a dataclass's fields.

    Args:
        prefix: of each flag, as "--config.peft.".
        names: the fields; None is all of them.
    """
    texts, hints, chosen = descriptions(kind), get_type_hints(kind), None if names is None else set(names)
    rows = [("flag", "values", "default", "what it does"), ("---",) * 4]
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):  # a group of the training's
            rows.append((f"`{prefix}{field.name}.FIELD`", "as above", "as above", texts[field.name]))
        elif chosen is None or field.name in chosen:
            cells = (values_of(hints[field.name]), default_of(field), texts[field.name])
            rows.append((f"`{prefix}{field.name}`", *cells))
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def page() -> str:
    """docs/flags.md."""
    from trl import GRPOConfig

    from perl.config.evaluation import EvalConfig
    from perl.config.schema import GROUPS, SFTDatasetConfig
    from perl.config.training import TrainingConfig

    sections = [(name, _summary(kind), table(f"--config.{name}.", kind)) for name, kind in GROUPS.items()]
    trls = {field.name: default_of(field) for field in dataclasses.fields(GRPOConfig)}
    ours = [field.name for field in dataclasses.fields(TrainingConfig) if trls.get(field.name) != default_of(field)]
    beside = "What GRPOConfig has not, and those of its fields that have another default here."
    sections += [
        ("training", beside, table("--config.training.", TrainingConfig, ours)),
        ("dataset (perl.sft)", _summary(SFTDatasetConfig), table("--config.dataset.", SFTDatasetConfig)),
        ("perl/eval.py", _summary(EvalConfig), table("--", EvalConfig)),
    ]
    return HEAD + "".join(f"\n## {title}\n\n{text}\n\n{rows}" for title, text, rows in sections)


def _summary(kind: type) -> str:
    """The first sentence of a dataclass's docstring."""
    return parse_docstring(kind.__doc__ or "").short_description or ""


if __name__ == "__main__":
    print(page(), end="")
