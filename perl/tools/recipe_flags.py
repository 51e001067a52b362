"""A recipe and --config.… flags on the command line of a tool: whose recipe it is, and the flags as texts, which that
program's own parser reads."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from perl.base.errors import lookup
from perl.base.files import read_yaml
from perl.base.paths import user_path
from perl.config.load import GRPO, Program, build_parser
from perl.config.sft import SFT

PROGRAMS: dict[str, Program] = {"grpo": GRPO, "sft": SFT}
"""--method -> what trains by such a recipe."""


def add_recipe_flags(parser: argparse.ArgumentParser, use: str) -> None:
    """The recipe, --method, and every --config.… flag of any program.

    Args:
        use: what the flags do here, for the recipe's help.
    """
    parser.add_argument("recipe", help=f"YAML file, as perl.train or perl.sft takes it; {use}")
    text = "grpo or sft: whose recipe it is, perl.train's or perl.sft's; default: what its settings say"
    parser.add_argument("--method", default=None, help=text)
    for flag in _training_flags():
        parser.add_argument(flag, type=str, default=None, help=argparse.SUPPRESS)


def given_flags(args: Any) -> list[str]:
    """The --config.… flags that the user wrote, each followed by its value."""
    given = ((flag, args.get(flag.removeprefix("--"))) for flag in _training_flags())
    return [word for flag, value in given if value is not None for word in (flag, value)]


def program_of(recipe: str, flags: Sequence[str], method: str | None) -> tuple[Program, list[str]]:
    """Whose recipe it is, by the settings that only one of the programs has, and a line where nothing tells."""
    if method is not None:
        return lookup(PROGRAMS, method, "method", "--method"), []
    written = {*flags, *(f"--config.{name}" for name in settings_of(recipe))}
    known = {name: set(_flags_of(program)) for name, program in PROGRAMS.items()}
    both = known["grpo"] & known["sft"]
    only = [name for name in PROGRAMS if written & (known[name] - both)]
    if only:
        return PROGRAMS[only[0]], []  # with settings of both the parser names the one that does not fit
    return GRPO, [f"nothing in {recipe} says what trains by it: taken as perl.train's; --method sft for perl.sft's"]


def settings_of(recipe: str) -> Iterator[str]:
    """group.field of each setting, its base's too; a recipe that cannot be read is the parser's to complain about."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        content = read_yaml(Path(recipe).read_text(encoding="utf-8"))
        if isinstance(content, dict) and isinstance(base := content.pop("base", None), str):
            yield from settings_of(str(Path(recipe).resolve().parent / user_path(base)))
        for group, fields in content.items() if isinstance(content, dict) else ():
            yield from (f"{group}.{name}" for name in fields or ()) if isinstance(fields, dict) else ()


def _flags_of(program: Program) -> tuple[str, ...]:
    return tuple(flag for flag in build_parser(program).known_flags() if flag.count(".") == 2)


@functools.cache
def _training_flags() -> tuple[str, ...]:
    return tuple(dict.fromkeys(flag for program in PROGRAMS.values() for flag in _flags_of(program)))
