"""Paths that a user has written, and the checkpoints of a run."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path


def user_path(path: str | Path) -> Path:
    """The path, with ~ for the home folder. A ~name of no user stays as it is, as in a shell: `Path.expanduser` raises
    a RuntimeError for it."""
    return Path(os.path.expanduser(path))


def step_of_checkpoint(folder: Path) -> int:
    """N of checkpoint-N; -1 of a folder of another name, such as checkpoint-best."""
    match = re.fullmatch(r"checkpoint-([0-9]{1,15})", folder.name)
    return int(match[1]) if match else -1


def checkpoints_in(run_dir: Path) -> list[Path]:
    """Of the lowest step first."""
    return sorted((f for f in run_dir.glob("checkpoint-*") if step_of_checkpoint(f) >= 0), key=step_of_checkpoint)


def how_to_go_on(run_dir: Path, resumes: bool) -> str:
    """For a user whose command had resume_from_checkpoint auto (`resumes`), or had not."""
    if resumes:
        return "the same command"
    folder = shlex.quote(str(run_dir))
    return f"the same flags and --config.training.output_dir {folder} --config.training.resume_from_checkpoint auto"
