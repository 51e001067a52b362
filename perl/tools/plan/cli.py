"""The command: read, count, search, print."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from perl import device
from perl.config.load import GRPO, Program, build_parser, parse_for
from perl.config.sft import SFT
from perl.errors import UserError, lookup
from perl.tools.plan.devices import DEVICES
from perl.tools.plan.inputs import critic_of, job_of, parallel_of, read_config, rough, shape_of, vllm_room
from perl.tools.plan.memory import Device, Parallel
from perl.tools.plan.page import Plan, as_json, as_text

MODES = get_args(Parallel)


def _flags_of(program: Program) -> tuple[str, ...]:
    return tuple(flag for flag in build_parser(program).known_flags() if flag.count(".") == 2)


@functools.cache
def _training_flags() -> tuple[str, ...]:
    return tuple(dict.fromkeys(flag for program in PROGRAMS.values() for flag in _flags_of(program)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", help="YAML file, as perl.train or perl.sft takes it; every --config.… flag goes before it"
    )
    parser.add_argument("--device", default=None, help=f"{', '.join(DEVICES)}; default: this machine's")
    parser.add_argument("--count", type=int, default=None, help="devices, one process each; default: this machine's")
    parser.add_argument(
        "--parallel",
        default=None,
        help=f"{', '.join(MODES)}; default: the launch script's choice, or the file ACCELERATE_CONFIG",
    )
    text = "grpo or sft: whose recipe it is, perl.train's or perl.sft's; default: what its settings say"
    parser.add_argument("--method", default=None, help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")
    for flag in _training_flags():  # as texts: perl.train's own parser reads them
        parser.add_argument(flag, type=str, default=None, help=argparse.SUPPRESS)


def run(args: Any) -> int:
    """Print what the run takes; 0 whether it fits or not."""
    where, count = _device(args.device, args.count)
    parallel = parallel_of(where, count) if args.parallel is None else _mode(args.parallel, count)
    flags = [word for flag, value in _given(args) for word in (flag, value)]
    program, why = program_of(args.recipe, flags[::2], args.method)
    parsed = parse_for(program, ["--recipe", args.recipe, *flags])
    config = parsed.build(count)
    shape = shape_of(read_config(config.model.model_name_or_path), config.peft, critic_of(config))
    job = job_of(config, parsed, where, count, parallel)
    if parsed.program is GRPO and config.training.attention_kernels is True and not where.cpu:
        where = dataclasses.replace(where, attention="kernel")
    notes = [*why, *parsed.warnings, *rough(config), *vllm_room(shape, job, where)]
    plan = Plan(config.model.model_name_or_path, shape, job, where, notes)
    print(as_json(plan) if args.json else as_text(plan))
    return 0


PROGRAMS: dict[str, Program] = {"grpo": GRPO, "sft": SFT}
"""--method -> what trains by such a recipe."""


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
    """group.field of each setting; a recipe that cannot be read is the parser's to complain about."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        content = yaml.safe_load(Path(recipe).read_text(encoding="utf-8"))
        for group, fields in content.items() if isinstance(content, dict) else ():
            yield from (f"{group}.{name}" for name in fields or ()) if isinstance(fields, dict) else ()


def _device(name: str | None, count: int | None) -> tuple[Device, int]:
    here = device.detect()
    if name is None:
        kinds = [known for known, other in DEVICES.items() if other.kind == here.kind]
        if len(kinds) != 1:
            raise UserError(f"--device: this machine has {device.name()}; write one of {', '.join(kinds)}")
        name = kinds[0]
    found = lookup(DEVICES, name, "device", "--device")
    if count is None:
        count = here.count if found.kind == here.kind and not found.cpu else 1
    if count < 1:
        raise UserError(f"--count {count}: write a number of devices from 1")
    if found.cpu:
        found = dataclasses.replace(found, memory=found.memory // count)
    return found, count


def _mode(name: str, count: int) -> Parallel:
    mode: Any = lookup(dict.fromkeys(MODES), name, "way to share the work", "--parallel") or name
    if mode == "single" and count > 1:
        raise UserError(f"--parallel single: a single process, but --count is {count}; write ddp, zero2 or --count 1")
    return mode


def _given(args: Any) -> Iterator[tuple[str, str]]:
    for flag in _training_flags():
        if (value := args.get(flag.removeprefix("--"))) is not None:
            yield flag, value
