"""Paths that a user has written."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(path: str | Path) -> Path:
    """The path, with ~ for the home folder. A ~name of no user stays as it is, as in a shell: `Path.expanduser` raises
    a RuntimeError for it."""
    return Path(os.path.expanduser(path))
