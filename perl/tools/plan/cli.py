"""The command: read, count, search, print."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Literal, get_args

from perl import device
from perl.adapters.checks import STRATEGIES, check_base, check_method
from perl.base.errors import UserError, lookup
from perl.config.derived import too_many_workers
from perl.config.files import look_for
from perl.config.load import GRPO, Config, parse_for
from perl.environments.tools import load_environment
from perl.tools.launch import local_workers, requested_processes
from perl.tools.plan.devices import DEVICES
from perl.tools.plan.inputs import (
    critic_of,
    job_of,
    parallel_of,
    quantised_fields,
    read_config,
    rough,
    shape_of,
    vllm_room,
    workers_room,
)
from perl.tools.plan.memory import Device, Job, Parallel
from perl.tools.plan.page import Plan, as_json, as_text
from perl.tools.recipe_flags import add_recipe_flags, given_flags, program_of

MODES = get_args(Parallel)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_flags(parser, "every --config.… flag overrides it")
    parser.add_argument("--device", default=None, help=f"{', '.join(DEVICES)}; default: this machine's")
    many = "NUM_PROCESSES, else the launch script's choice, 1 where this machine has other devices"
    parser.add_argument(
        "--count", type=int, default=None, help=f"devices that train, one process each; default: {many}"
    )
    parser.add_argument(
        "--parallel",
        default=None,
        help=f"{', '.join(MODES)}; default: the launch script's choice, or the file ACCELERATE_CONFIG",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")


def run(args: Any) -> int:
    """Print what the run takes; 0 whether it fits or not."""
    flags = given_flags(args)
    recipe, taken = look_for(args.recipe, "recipe")
    program, why = program_of(recipe, flags[::2], args.method)
    parsed = parse_for(program, ["--recipe", recipe, *flags])
    where, count = _device(args.device, args.count, local_workers(parsed.values))
    parallel = parallel_of(where, count) if args.parallel is None else _mode(args.parallel, count)
    config = parsed.build(count)
    strategy = parallel if parallel in STRATEGIES else ""
    check_method(config.peft, config.training, strategy)
    check_base(config, strategy)
    if isinstance(config, Config) and config.environment.used:
        load_environment(config.environment)  # a mistake in it is one line here too
    model = read_config(config.model.model_name_or_path)
    shape, quantised = shape_of(model, config.peft, critic_of(config)), quantised_fields(config, model, strategy)
    job = job_of(config, parsed, where, count, parallel, quantised)
    if parsed.program is GRPO and packed_by_kernel(config.training.attention_kernels, where, job):
        where = dataclasses.replace(where, by_row=False)
    rooms = [*vllm_room(shape, job, where), *workers_room(shape, job, where)]
    if isinstance(config, Config):
        rooms += filter(None, [too_many_workers(config)])
    notes = [*taken, *why, *parsed.warnings, *rough(config, quantised), *rooms]
    plan = Plan(config.model.model_name_or_path, shape, job, where, notes)
    print(as_json(plan) if args.json else as_text(plan))
    return 0


def packed_by_kernel(wanted: bool | Literal["auto"], where: Device, job: Job) -> bool:
    """Whether a packed micro-batch's attention is one kernel (perl.device.kernels.VARLEN)."""
    return where.packs and job.compute_bytes == 2 if wanted == "auto" else wanted


def _device(name: str | None, count: int | None, workers: int) -> tuple[Device, int]:
    here = device.detect()
    if name is None:
        kinds = [known for known, other in DEVICES.items() if other.kind == here.kind]
        if len(kinds) != 1:
            raise UserError(f"--device: this machine has {device.name()}; write one of {', '.join(kinds)}")
        name = kinds[0]
    chosen = lookup(DEVICES, name, "device", "--device")
    if count is None:  # of a machine with other devices nothing bounds NUM_PROCESSES, as on a CPU
        count = requested_processes(here if chosen.kind == here.kind else device.Devices("cpu", 1), workers)
    if count < 1:
        raise UserError(f"--count {count}: write a number of devices from 1")
    return chosen, count


def _mode(name: str, count: int) -> Parallel:
    mode: Any = lookup(dict.fromkeys(MODES), name, "way to share the work", "--parallel") or name
    if mode == "single" and count > 1:
        raise UserError(f"--parallel single: a single process, but --count is {count}; write ddp, zero2 or --count 1")
    return mode
