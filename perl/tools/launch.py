"""What the launch script needs to know before it starts anything, as shell assignments, and what it exports.

    eval "$(python -m perl.tools.launch FLAGS…)"

The whole command line is checked here, in one process and before accelerate starts, so that a user's mistake is one
line and exit code 2 instead of a launcher's traceback.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.base.errors import UserError, report_errors

STDOUT = 1
if __name__ == "__main__":  # a shell evaluates what comes out: nothing that a library prints may be among it
    STDOUT = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

with report_errors():  # without the environment, one line
    import yaml

    from perl import device
    from perl.base.files import read_yaml
    from perl.config.files import look_for
    from perl.config.load import parse
    from perl.runs.rundir import default_run_dir, require_free

if TYPE_CHECKING:
    from jsonargparse import Namespace

CONFIG_FOLDER = Path(__file__).parents[2] / "scripts" / "accelerate"
CONFIGS = {"npu": "npu_4.yaml", "cuda": "cuda_zero2.yaml", "cpu": "cpu.yaml"}


def plan(argv: list[str]) -> dict[str, str]:
    """Device, number of processes, accelerate file and run folder for the training run that `argv` describes.

    Raises UserError for whatever perl.train would find before it loads the model.
    """
    from perl.runs.checkpoints import goes_on
    from perl.tools.audit.before_training import warn_of_rewards
    from perl.training.preflight import check_run

    parsed = parse(argv)
    parsed.require_files()
    values = parsed.values
    devices = device.detect()
    processes = requested_processes(devices, local_workers(values))
    config = parsed.build(processes)
    run_dir = values.training.output_dir or default_run_dir(values, devices.kind)
    require_free(Path(run_dir), goes_on(config.training.resume_from_checkpoint))
    warn_of_rewards(config, check_run(config, Path(run_dir)))
    return {
        "DEVICE": devices.kind,
        "NUM_PROCESSES": str(processes),
        "ACCELERATE_CONFIG": accelerate_config(devices.kind, processes),
        "RUN_DIR": str(Path(run_dir).absolute()),
    }


def visible_device(kind: device.Kind, processes: int) -> dict[str, str]:
    """What shows a single process a single device, and its workers the others; empty where nothing is to be hidden."""
    variable = device.VISIBILITY_VARIABLE[kind]
    if not variable or processes != 1:
        return {}
    first, *others = device.visible_ids()
    return {variable: first, device.HIDDEN_DEVICES: ",".join(others)}


def local_workers(values: Namespace) -> int:
    """That a configuration has draw on this machine's devices; perl.sft's has none."""
    rollout = values.get("rollout")
    return rollout.workers if rollout is not None and rollout.executor == "processes" else 0


def requested_processes(devices: device.Devices, workers: int = 0) -> int:
    """NUM_PROCESSES if set, else one for each accelerator that no worker of this machine takes, or one on a CPU."""
    device.require_all_visible()
    text = os.environ.get("NUM_PROCESSES", "")
    if not text:
        return 1 if devices.kind == "cpu" else max(1, devices.count - workers)
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"NUM_PROCESSES={text}: give a whole number from 1")
    if devices.kind != "cpu" and int(text) > devices.count:
        raise UserError(
            f"NUM_PROCESSES={text} but only {devices.count} {devices.kind} device(s) are visible;"
            f" give at most {devices.count}, or look at {device.VISIBILITY_VARIABLE[devices.kind]}"
        )
    return int(text)


def accelerate_file(kind: str, processes: int) -> tuple[Path, dict[str, Any]]:
    """ACCELERATE_CONFIG if set, else single.yaml for one process, else what is usual on the device; and its content. A
    line on stderr where it is taken from elsewhere than the working directory."""
    chosen = os.environ.get("ACCELERATE_CONFIG")
    default = "single.yaml" if processes == 1 else CONFIGS[kind]
    path, lines = CONFIG_FOLDER / default, []
    if chosen:
        place, lines = look_for(chosen, "ACCELERATE_CONFIG")
        path = Path(place)
    for line in lines:
        print(line, file=sys.stderr)
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"ACCELERATE_CONFIG={chosen}: not a readable YAML file ({error}); take one of {CONFIG_FOLDER}"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"ACCELERATE_CONFIG={chosen}: holds no settings; take one of {CONFIG_FOLDER}")
    return path, content


def accelerate_config(kind: str, processes: int) -> str:
    """The file that accelerate is started with; a UserError where what it needs is not installed."""
    path, content = accelerate_file(kind, processes)
    if content.get("distributed_type") == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        without = f"{kind}_ddp.yaml" if kind != "cpu" else "cpu.yaml"
        raise UserError(
            f"{path.name} needs DeepSpeed, which is not installed: pip install deepspeed, or do without it by"
            f" ACCELERATE_CONFIG={CONFIG_FOLDER / without}"
        )
    return str(path)


def main() -> None:
    with report_errors():
        planned = plan(sys.argv[1:])
        lines = [f"{name}={shlex.quote(value)}\n" for name, value in planned.items()]
        kind, processes = device.detect().kind, int(planned["NUM_PROCESSES"])
        started_with = device.start_environment(kind) | visible_device(kind, processes)
        lines += [f"export {name}={shlex.quote(value)}\n" for name, value in started_with.items()]
        with os.fdopen(STDOUT, "w", errors="surrogateescape", closefd=False) as stdout:
            stdout.writelines(lines)


if __name__ == "__main__":
    main()
