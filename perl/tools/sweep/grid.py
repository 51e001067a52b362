"""Every run of a sweep, from --vary and --seeds, each with its flags; all are checked before the first one starts."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from perl import device
from perl.base.errors import UserError, nearest
from perl.base.redact import drop_secrets
from perl.config.load import OF_ONE_RUN, Config, Program, build_parser, parse_for, read_recipe
from perl.config.parser import Parser
from perl.config.sft import SFTRunConfig
from perl.reports.methods import Run
from perl.tools.launch import local_workers, requested_processes

T = TypeVar("T")
SEEDS = ("common.seed", "training.seed")
ONE_RUN = tuple(f"training.{name}" for name in OF_ONE_RUN)
LONGEST = 40
"""Characters of a value in the name of a folder."""
LONGEST_NAME = 255
"""Bytes of a folder's name, on the file systems of Linux."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    program: Program
    recipe: str
    flags: Sequence[str]
    """Of all runs."""
    vary: Mapping[str, Sequence[str]]
    """Values by field."""
    settings: Mapping[str, Any]
    """Of recipe and flags, by field, without secrets and seeds: what all runs have in common."""
    runs: Sequence[Run]
    """All seeds of the first values first."""

    def argv(self, run: Run) -> list[str]:
        """Flags of one run's training, without those that say where it is written."""
        varied = [word for name, value in run.values.items() for word in (f"--config.{name}", value)]
        return ["--recipe", self.recipe, *self.flags, *varied, "--config.common.seed", str(run.seed)]


def make_grid(
    program: Program, recipe: str, flags: Sequence[str], vary: Sequence[str], seeds: int, output: Path
) -> Grid:
    """The product of what varies, with `seeds` seeds each: that of the recipe (or of the flags), and those after it.

    Raises:
        UserError: what --vary names is no field, or is settled otherwise; the recipe is missing.
    """
    parser = build_parser(program)
    known = [flag.removeprefix("--config.") for flag in parser.known_flags() if flag.count(".") == 2]
    fields = read_vary(vary, known)
    for name in ONE_RUN:
        if f"--config.{name}" in flags:
            raise UserError(f"--config.{name}: each run has a folder of its own below --output; leave it out")
    for name in fields:
        if f"--config.{name}" in flags:
            raise UserError(f"--config.{name}: --vary {name} has its values; leave the flag out")
    settings = read_settings(parser, program, recipe, flags)
    seed = int(settings.get("common.seed", program.groups["common"]().seed))
    seed_flags = [f"--config.{name}" for name in SEEDS]
    pairs = zip(flags[::2], flags[1::2], strict=True)
    common = [word for pair in pairs if pair[0] not in seed_flags for word in pair]
    runs = []
    for values in itertools.product(*fields.values()):
        chosen = dict(zip(fields, values, strict=True))
        for number in range(seed, seed + seeds):
            folder = output / "runs" / folder_of(chosen) / f"seed_{number}"
            runs.append(Run(values=chosen, seed=number, model="", folder=folder))
    kept = drop_secrets({name: settings[name] for name in sorted(settings) if name not in (*SEEDS, *ONE_RUN)})
    return Grid(program=program, recipe=recipe, flags=common, vary=fields, settings=kept, runs=runs)


def read_vary(vary: Sequence[str], known: Sequence[str]) -> dict[str, list[str]]:
    """`peft.type=lora,dora` -> {"peft.type": ["lora", "dora"]}."""
    fields: dict[str, list[str]] = {}
    for text in vary:
        name, equals, values = text.partition("=")
        name = name.removeprefix("--").removeprefix("config.")
        if not equals:
            raise UserError(f"--vary {text}: no values; write --vary {name or 'peft.type'}=VALUE,VALUE")
        if name in SEEDS:
            raise UserError(f"--vary {name}: seeds have a flag of their own; write --seeds N")
        if name in ONE_RUN:
            raise UserError(f"--vary {name}: each run has a folder of its own below --output; leave it out")
        if name not in known:
            guess = nearest(name, known) or next((field for field in known if field.endswith(f".{name}")), None)
            hint = f"did you mean {guess}?" if guess else "write group.field, such as peft.type"
            raise UserError(f"--vary {name}: unknown field; {hint}")
        if name in fields:
            raise UserError(f"--vary {name}: given twice; write all its values in one --vary")
        fields[name] = split_values(values)
        if not all(fields[name]):
            raise UserError(f"--vary {text}: an empty value; write --vary {name}=VALUE,VALUE")
        if twice := next((value for value in fields[name] if fields[name].count(value) > 1), None):
            raise UserError(f"--vary {text}: {twice} is given twice; write each value once")
    return fields


def split_values(text: str) -> list[str]:
    """At commas, but not at those within brackets: '["accuracy"],["accuracy","format"]' are two lists."""
    values, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def read_settings(parser: Parser, program: Program, recipe: str, flags: Sequence[str]) -> dict[str, Any]:
    """Those of the flags, and else of the recipe, by field: as plain values."""
    given = parser.parse_args(list(flags), defaults=False).get("config")
    written = read_recipe(recipe, parser, program)[0].get("config")
    settings = {name: value for source in (written, given) if source for name, value in source.items()}
    if seeds := [source[name] for source in (given, written) if source for name in SEEDS if name in source]:
        settings["common.seed"] = seeds[0]
    return json.loads(json.dumps(settings, default=str))


def folder_of(values: Mapping[str, str]) -> str:
    """peft.type=lora,training.learning_rate=1e-4; a value that no name of a folder can be is shortened, with a hash,
    and so are all of them together."""
    name = ",".join(f"{name}={slug(value)}" for name, value in values.items()) or "recipe"
    if len(name.encode()) <= LONGEST_NAME:
        return name
    end = "-" + hashed(json.dumps([*values.items()]), 6)
    return name.encode()[: LONGEST_NAME - len(end)].decode(errors="ignore") + end


def slug(value: str) -> str:
    plain = re.sub(r"[^\w.+\-]+", "_", value)[:LONGEST]
    return plain if plain == value else f"{plain}-{hashed(value, 3)}"


def hashed(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    runs: Sequence[Run]
    """Those of the grid, each with its base."""
    configs: Sequence[Config | SFTRunConfig]
    """Of each set of values, with the first seed."""
    warnings: Sequence[str]
    """Of all of them, each once."""
    processes: int
    """Of each training."""


def check(grid: Grid, devices: device.Devices) -> Checked:
    """Check each set of values as its own program would, for as many processes as the most workers leave devices.

    Raises:
        UserError: for the first mistake, which names the values; two sets of values that are one training.
    """
    first = [run for run in grid.runs if run.seed == grid.runs[0].seed]
    parsed = [named(run, lambda run=run: parse_for(grid.program, grid.argv(run))) for run in first]
    processes = requested_processes(devices, max(local_workers(one.values) for one in parsed))
    configs = [named(run, lambda one=one: one.build(processes)) for run, one in zip(first, parsed, strict=True)]
    seen: dict[str, Run] = {}
    for run, one in zip(first, parsed, strict=True):
        if (other := seen.setdefault(one.dump(), run)) is not run:
            raise UserError(f"{flags_of(run)}: is the same training as {flags_of(other)}; leave one of them out")
    for run, config in zip(first, configs, strict=True):
        if not run.train.exists():
            named(run, lambda run=run, config=config: check_files(config, run.train))
    warnings = dict.fromkeys(line for one in parsed for line in one.warnings)
    models = {tuple(r.values.values()): c.model.model_name_or_path for r, c in zip(first, configs, strict=True)}
    runs = [replace(run, model=models[tuple(run.values.values())]) for run in grid.runs]
    return Checked(runs=runs, configs=configs, warnings=list(warnings), processes=processes)


def named(run: Run, what: Callable[[], T]) -> T:
    """Do `what`; a UserError then tells for which values."""
    try:
        return what()
    except UserError as error:
        raise UserError(f"{flags_of(run)}: {error}" if run.values else str(error)) from error


def flags_of(run: Run) -> str:
    return " ".join(f"--vary {name}={value}" for name, value in run.values.items())


def check_files(config: Config | SFTRunConfig, folder: Path) -> None:
    """The checks that read a tokenizer and the data."""
    if isinstance(config, SFTRunConfig):
        from perl.finetuning.rows import check_rows

        check_rows(config, folder)
    else:
        from perl.training.preflight import check_run

        check_run(config, folder)
