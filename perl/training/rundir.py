"""The folder of one training run, and what describes the run in it: config.yaml and environment.json."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from perl import device
from perl.config.load import Parsed
from perl.errors import UserError
from perl.provenance import git_commit, versions
from perl.redact import hide, redact
from perl.results import METRICS

log = logging.getLogger(__name__)

TRAINER_STATE, ROLLOUT_STATE = "trainer_state.json", "rollout_state_0.pt"
"""What transformers writes last into a checkpoint, and what GRPO writes after it."""
CRITIC = Path("critic") / "critic.safetensors"
"""Where the critic lies in a checkpoint and in a run's folder, if there is one."""

VARIABLE_PREFIXES = ("ASCEND_", "HCCL_", "NCCL_", "CUDA_VISIBLE", "OMP_", "PYTORCH_", "VLLM_", "ACCELERATE_", "PERL_")
SECRET = re.compile(r"token|key|secret|password|credential", re.IGNORECASE)


def model_slug(model: str) -> str:
    """`Qwen/Qwen2.5-7B` and ModelScope's folder `…/Qwen2___5-7B` are both qwen2_5_7b."""
    return re.sub(r"[^a-z0-9]+", "_", Path(model.rstrip("/")).name.lower()).strip("_")


def method_of(config: Any) -> str:
    """grpo_lora, ppo_lora, grpo_full, sft_lora, …: how a configuration, or its parsed values, trains, and what."""
    algorithm = getattr(config, "algorithm", None)  # perl.sft has none
    return f"{algorithm.name if algorithm else 'sft'}_{'full' if config.peft.type == 'none' else 'lora'}"


def default_run_dir(config: Any, kind: str, root: Path = Path("outputs")) -> Path:
    """outputs/grpo_lora_<model>_<device>_<date>, the name that the guides' `tail -f` looks for.

    Args:
        config: a Config, an SFTRunConfig, or the parsed values of one.
        kind: of the device.
    """
    name = f"{method_of(config)}_{model_slug(config.model.model_name_or_path)}_{kind}"
    return root / f"{name}_{time.strftime('%Y%m%d_%H%M%S')}"


def check_folder(run_dir: Path, resuming: bool) -> None:
    """Raise a UserError for a folder that can't be made or written to, or that already holds another run, whose
    metrics would be mixed with this one's."""
    if (run_dir / METRICS).exists() and not resuming:
        raise UserError(
            f"--config.training.output_dir {run_dir} already holds a run; give another folder,"
            " or go on with --config.training.resume_from_checkpoint true"
        )
    there = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "can't be written to" if there.is_dir() else "is no folder"
        raise UserError(f"--config.training.output_dir {run_dir}: {there} {why}; give another folder")


def find_checkpoint(wanted: str | None, run_dir: Path, last_file: str = ROLLOUT_STATE) -> str | None:
    """The checkpoint to go on from: `true` is the last one in the run's folder, else a path. A UserError where it is
    not there.

    Args:
        last_file: what the trainer writes last into a checkpoint.
    """
    if wanted is None or str(wanted).lower() in ("false", "none", "null", ""):
        return None
    flag = "--config.training.resume_from_checkpoint"
    if str(wanted).lower() == "true":
        last = last_whole_checkpoint(run_dir, last_file)
        if last is None:
            raise UserError(
                f"{flag} true: no checkpoint in {run_dir}; name the run's folder with --config.training.output_dir,"
                " or a checkpoint's path"
            )
        return str(last)
    if not (Path(wanted) / TRAINER_STATE).is_file():
        raise UserError(f"{flag}: {wanted} is no checkpoint (it has no trainer_state.json)")
    return str(wanted)


def check_critic(checkpoint: str | None, algorithm: str, has_critic: bool) -> None:
    """Raise a UserError for a checkpoint of an algorithm with a critic where this one has none, and the other way
    round."""
    if checkpoint is not None and (Path(checkpoint) / CRITIC).is_file() != has_critic:
        raise UserError(
            f"--config.training.resume_from_checkpoint {checkpoint}: it holds {'no' if has_critic else 'a'} critic, and"
            f" --config.algorithm.name {algorithm} has {'one' if has_critic else 'none'}; go on with the algorithm of"
            " the run's config.yaml"
        )


def last_whole_checkpoint(run_dir: Path, last_file: str = ROLLOUT_STATE) -> Path | None:
    """The checkpoint of the highest step that was written to its end; one that a crash left half-written is passed
    over with a line."""
    folders = [f for f in run_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if f.name.rpartition("-")[2].isdigit()]
    for folder in sorted(folders, key=lambda f: int(f.name.rpartition("-")[2]), reverse=True):
        if (folder / TRAINER_STATE).is_file() and (folder / last_file).is_file():
            return folder
        log.warning("%s is incomplete: not resumed from", folder)
    return None


def prepare(run_dir: Path, parsed: Parsed, world_size: int) -> None:
    """Make the folder and write config.yaml and environment.json (main process only)."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--config.training.output_dir {run_dir}: {error.strerror}; give another folder") from error
    (run_dir / "config.yaml").write_text(parsed.dump(), encoding="utf-8")
    environment = json.dumps(describe_environment(world_size), indent=2, ensure_ascii=False)
    (run_dir / "environment.json").write_text(environment + "\n", encoding="utf-8")


def describe_environment(world_size: int) -> dict[str, Any]:
    """Versions, devices, variables and command of this run, without anything secret."""
    devices = device.detect()
    return {
        "command": redact(sys.argv),
        "folder": str(Path.cwd()),
        "git_commit": git_commit(),
        "machine": platform.machine(),
        "device": devices.kind,
        "devices_visible": devices.count,
        "num_processes": world_size,
        "packages": versions(),
        "variables": {
            name: hide(value)
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLE_PREFIXES) and not SECRET.search(name)
        },
    }
