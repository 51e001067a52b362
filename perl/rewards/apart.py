"""A reward function called before the run that it is for: in a process of its own, for a bounded time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable


def call_apart(call: Callable[[], str | None], seconds: float) -> str | None:
    """What `call` returns in a fork of this process; None where it raises, ends its process, or takes longer than
    `seconds`, after which it is killed with what it has started.

    The user's code may hang, use up memory, print, or count its calls: the fork's working directory is a scratch
    folder, its output goes nowhere, and nothing that it changes in memory is seen here.
    """
    with tempfile.TemporaryDirectory(prefix="perl-audit-", ignore_cleanup_errors=True) as scratch:
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            _serve(call, scratch, send)
        os.close(send)
        try:
            return _read(receive, time.monotonic() + seconds)
        finally:
            os.close(receive)
            for kill in (os.killpg, os.kill):  # the group, which the child may not have founded yet
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _serve(call: Callable[[], str | None], scratch: str, send: int) -> None:
    try:
        os.setpgid(0, 0)
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, signal.SIG_DFL)
        sys.stdout = sys.stderr = nowhere = open(os.devnull, "w")  # noqa: SIM115
        for output in (1, 2):  # of what it starts, too
            os.dup2(nowhere.fileno(), output)
        os.chdir(scratch)
        os.write(send, (call() or "").encode())
    finally:
        os._exit(0)  # nothing of the parent's is to be flushed or closed twice


def _read(receive: int, until: float) -> str | None:
    parts = []
    while select.select([receive], [], [], max(0.0, until - time.monotonic()))[0]:
        if not (part := os.read(receive, 1 << 16)):
            return b"".join(parts).decode() or None
        parts.append(part)
    return None
