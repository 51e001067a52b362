"""The folder of one training run, and what describes the run in it: config.yaml and environment.json."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

from perl import device
from perl.config.load import SECRET_FIELDS, Parsed
from perl.errors import UserError
from perl.provenance import git_commit, versions

VARIABLE_PREFIXES = ("ASCEND_", "HCCL_", "NCCL_", "CUDA_VISIBLE", "OMP_", "PYTORCH_", "VLLM_", "ACCELERATE_", "PERL_")
SECRET = re.compile(r"token|key|secret|password|credential", re.IGNORECASE)


def model_slug(model: str) -> str:
    """`Qwen/Qwen2.5-7B` and ModelScope's folder `…/Qwen2___5-7B` are both qwen2_5_7b."""
    return re.sub(r"[^a-z0-9]+", "_", Path(model.rstrip("/")).name.lower()).strip("_")


def default_run_dir(model: str, kind: str, root: Path = Path("outputs")) -> Path:
    """outputs/grpo_lora_<model>_<device>_<date>, the name that the guides' `tail -f` looks for."""
    return root / f"grpo_lora_{model_slug(model)}_{kind}_{time.strftime('%Y%m%d_%H%M%S')}"


def prepare(run_dir: Path, parsed: Parsed, world_size: int, resuming: bool) -> None:
    """Make the folder and write config.yaml and environment.json (main process only).

    Raises UserError when the folder already holds another run, whose metrics would be mixed with this one's.
    """
    if (run_dir / "metrics.jsonl").exists() and not resuming:
        raise UserError(
            f"--config.training.output_dir {run_dir} already holds a run; give another folder,"
            " or go on with --config.training.resume_from_checkpoint true"
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--config.training.output_dir {run_dir}: {error.strerror}") from error
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
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLE_PREFIXES) and not SECRET.search(name)
        },
    }


def redact(argv: list[str]) -> list[str]:
    """The command line with the values of secret fields replaced."""
    shown, hide = [], False
    for word in argv:
        flag, equals, _ = word.partition("=")
        is_secret = flag.startswith("--") and flag.rsplit(".", 1)[-1] in SECRET_FIELDS
        shown.append("<secret>" if hide else f"{flag}=<secret>" if is_secret and equals else word)
        hide = is_secret and not equals
    return shown
