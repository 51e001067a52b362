"""Files and commands of this machine, read without an exception for what is not there."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from perl.tools.doctor.machine import Command


def read(path: str | Path) -> str:
    """Text of a file, or "" where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def run(command: Sequence[str], until: float, env: Mapping[str, str] | None = None) -> Command:
    """What a command printed; code 124 where it had not ended at `until` (time.monotonic()), 126 where it did not
    start."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(0.1, until - time.monotonic()),
            env=env,
        )
    except subprocess.TimeoutExpired as late:
        return Command(124, (late.stdout or b"").decode(errors="replace"))
    except OSError as error:
        return Command(126, str(error))
    return Command(done.returncode, done.stdout.decode(errors="replace"))
