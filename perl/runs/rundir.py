"""The folder of one training run, and what describes the run in it: config.yaml and environment.json."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from perl import device
from perl.adapters.applied import APPLIED, Applied
from perl.base.errors import UserError
from perl.base.files import LOCK, holder_of, lock_now, open_lock
from perl.base.paths import checkpoints_in
from perl.base.provenance import git_commit, versions
from perl.base.redact import hide, is_secret_name, redact
from perl.config.load import Parsed
from perl.scoring.results import METRICS

log = logging.getLogger(__name__)

LAST_ATTEMPT_S = 30.0
"""How long a run that goes on waits for its last attempt to end: processes that outlive a killed launcher, or save a
checkpoint after a signal."""
POLL_S = 0.2
VARIABLE_PREFIXES = ("ASCEND_", "HCCL_", "NCCL_", "CUDA_VISIBLE", "OMP_", "MALLOC_", "PYTORCH_", "VLLM_", "ACCELERATE_",
                     "PERL_")  # fmt: skip


def model_slug(model: str) -> str:
    """`Qwen/Qwen2.5-7B` and ModelScope's folder `…/Qwen2___5-7B` are both qwen2_5_7b."""
    return re.sub(r"[^a-z0-9]+", "_", Path(model.rstrip("/")).name.lower()).strip("_")


def method_of(config: Any) -> str:
    """grpo_lora, ppo_dora, grpo_full, sft_lora, …: how a configuration, or its parsed values, trains, and what."""
    algorithm = getattr(config, "algorithm", None)  # perl.sft has none
    return f"{algorithm.name if algorithm else 'sft'}_{'full' if config.peft.type == 'none' else config.peft.type}"


def default_run_dir(config: Any, kind: str) -> Path:
    """outputs/grpo_lora_<model>_<device>_<date>, the name that the guides' `tail -f` looks for.

    Args:
        config: a Config, an SFTRunConfig, or the parsed values of one.
        kind: of the device.
    """
    name = f"{method_of(config)}_{model_slug(config.model.model_name_or_path)}_{kind}"
    return Path("outputs", f"{name}_{time.strftime('%Y%m%d_%H%M%S')}")


def check_place(run_dir: Path) -> None:
    """Raise a UserError for a folder that can't be made or written to."""
    there = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "can't be written to" if there.is_dir() else "is no folder"
        raise UserError(f"--config.training.output_dir {run_dir}: {there} {why}; give another folder")


def check_folder(run_dir: Path, resuming: bool) -> None:
    """Raise a UserError for a folder as for `check_place`, and for one that already holds another run, whose metrics
    and checkpoints would be mixed with this one's."""
    check_place(run_dir)
    if not resuming and ((run_dir / METRICS).exists() or checkpoints_in(run_dir)):
        raise UserError(
            f"--config.training.output_dir {run_dir} already holds a run; give another folder,"
            " or go on with --config.training.resume_from_checkpoint auto"
        )


def require_free(run_dir: Path, resuming: bool) -> None:
    """Raise a UserError for a folder in which a training works; one that goes on waits for its last attempt."""
    if (run_dir / LOCK).is_file():
        with _locked(run_dir, resuming):
            pass


@contextlib.contextmanager
def held(run_dir: Path, resuming: bool) -> Iterator[None]:
    """Make the folder, and keep every other training out of it inside (main process only). The lock ends with this
    process, however it ends: a child that it has forked does not hold on to it. A folder that holds nothing else in
    the end, as where a check has failed, is taken away again. Raises a UserError as `require_free`."""
    made = [folder for folder in (run_dir, *run_dir.absolute().parents) if not folder.exists()]
    with _locked(run_dir, resuming) as lock:
        os.register_at_fork(after_in_child=lock.close)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if os.listdir(run_dir) == [LOCK]:
                    (run_dir / LOCK).unlink()
                    for folder in made:
                        folder.rmdir()


def _locked(run_dir: Path, resuming: bool) -> IO[bytes]:
    """The lock, taken. A start that is refused takes its new folder away, with a lock that another may have opened."""
    while True:
        with writable(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            try:
                lock = open_lock(run_dir / LOCK)
            except FileNotFoundError:
                continue
        try:
            _take(lock, run_dir, LAST_ATTEMPT_S if resuming else 0.0)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name)):
                    return lock
        except BaseException:
            lock.close()
            raise
        lock.close()


def _take(lock: IO[bytes], run_dir: Path, patience_s: float) -> None:
    """flock, or a UserError where another process has it for so long."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return lock_now(lock)
        except BlockingIOError as error:
            if (left := deadline - time.monotonic()) <= 0:
                raise UserError(
                    f"--config.training.output_dir {run_dir}: another training works in it ({holder_of(lock)}); wait"
                    " until it has ended, or give another folder"
                ) from error
            if left > patience_s - POLL_S:
                log.warning("%s: waiting for its last attempt to end (%s)", run_dir, holder_of(lock))
            time.sleep(POLL_S)


def prepare(run_dir: Path, parsed: Parsed, world_size: int) -> None:
    """Write config.yaml and environment.json (main process only)."""
    environment = json.dumps(describe_environment(world_size), indent=2, ensure_ascii=False)
    with writable(run_dir):
        (run_dir / "config.yaml").write_text(parsed.dump(), encoding="utf-8")
        (run_dir / "environment.json").write_text(environment + "\n", encoding="utf-8")


@contextlib.contextmanager
def writable(run_dir: Path) -> Iterator[None]:
    """A file of the run's folder that can't be written inside, before anything is trained, is a UserError."""
    try:
        yield
    except OSError as error:
        what = "" if error.filename in (None, str(run_dir)) else f"{Path(error.filename).name}: "
        raise UserError(
            f"--config.training.output_dir {run_dir}: {what}{error.strerror or error}; give another folder"
        ) from error


def write_applied(run_dir: Path, applied: Applied) -> None:
    """Say in the log and in the run's folder what is trained (main process only)."""
    log.info("%s", applied.line())
    with writable(run_dir):
        (run_dir / APPLIED).write_text(json.dumps(asdict(applied), indent=2) + "\n", encoding="utf-8")


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
            if name.startswith(VARIABLE_PREFIXES) and not is_secret_name(name)
        },
    }
