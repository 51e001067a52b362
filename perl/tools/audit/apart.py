"""A reward function called before the run that it is for: in a process of its own, for a bounded time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

Send = Callable[[Any], None]


def call_apart(call: Callable[[], str | None], seconds: float) -> str | None:
    """What `call` returns in a fork of this process, in a scratch folder; None where it raises, ends its process, or
    takes longer than `seconds`."""
    with tempfile.TemporaryDirectory(prefix="perl-audit-", ignore_cleanup_errors=True) as scratch:
        try:
            return next(told_apart(lambda send: send(call()), seconds, scratch), None)
        except TimeoutError:
            return None


def told_apart(call: Callable[[Send], None], seconds: float, folder: str | None = None) -> Iterator[Any]:
    """What `call` sends from a fork of this process, until it returns, raises or ends its process. The fork is killed
    then, with what it has started.

    The user's code may hang, use up memory, print, or count its calls: the fork's output goes nowhere, and nothing that
    it changes in memory is seen here.

    Args:
        call: is given what sends, which takes anything that can be pickled.
        seconds: that it may take until it sends something, or something more.
        folder: its working directory; default: this process's.

    Raises:
        TimeoutError: it took longer.
    """
    receive, send = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _serve(call, send, folder)
    send.close()
    try:
        while receive.poll(seconds):
            try:
                told = receive.recv()
            except (EOFError, OSError):  # also where it ended in the middle of a message
                return
            yield told
        raise TimeoutError
    finally:
        receive.close()
        for kill in (os.killpg, os.kill):  # the group, which the child may not have founded yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _serve(call: Callable[[Send], None], send: Any, folder: str | None) -> None:
    try:
        os.setpgid(0, 0)
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, signal.SIG_DFL)
        sys.stdout = sys.stderr = nowhere = open(os.devnull, "w")  # noqa: SIM115
        for output in (1, 2):  # of what it starts, too
            os.dup2(nowhere.fileno(), output)
        if folder is not None:
            os.chdir(folder)
        call(send.send)
    finally:
        os._exit(0)  # nothing of the parent's is to be flushed or closed twice
