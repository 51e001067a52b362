"""A reward function that does not return ends its process, and with it the run, in one line.

    with RewardDeadline(seconds, advice) as deadline:
        rewards = deadline.over(names, rewards)

What never returns may hold the interpreter's lock (a regular expression that backtracks for ever), may ignore signals,
or may have taken the one alarm that a process has (math-verify's own timeout does). So the clock is faulthandler's,
a thread of C: at the deadline it writes the stack into a pipe and ends the process with exit code 1. A second process,
this file run as a script, reads the pipe and says in one line which function it was, and at which line of its file. It
is in the process group of the first, so that the launcher, which ends the others, ends theirs too: one line is said.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RANKS_APART_S = 1.0
"""A function that hangs on all processes hangs for all at the same time: the first has its process's launcher end the
others."""
STACK_S = 2.0
"""The stack is written at once, or not at all."""


class RewardDeadline:
    """A context manager; its process ends with it.

    Args:
        seconds: that one call of a reward function may take.
        advice: what to do about it, the end of the line.
    """

    def __init__(self, seconds: float, advice: str):
        self.seconds, self.advice = seconds, advice
        self._late = seconds + int(os.environ.get("LOCAL_RANK", "0")) * RANKS_APART_S
        self._running: list[str] = []

    def __enter__(self) -> RewardDeadline:
        words = [sys.executable, "-I", "-S", __file__]
        self._reader = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._reader.stdin is not None
        self._pipe = self._reader.stdin
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._pipe.close()
        self._reader.terminate()  # a child of this process may hold the pipe open
        self._reader.wait()

    def over(self, names: Sequence[str], functions: Sequence[Callable[..., Any]]) -> list[Callable[..., Any]]:
        """The functions, each under the deadline.

        Args:
            names: of each, as the user wrote it in reward.functions.
        """
        return [self._watched(name, function) for name, function in zip(names, functions, strict=True)]

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def asynchronous(*args: Any, **kwargs: Any) -> Any:
                self._begin(name)
                try:
                    return await function(*args, **kwargs)
                finally:
                    self._end(name)

            return asynchronous

        @functools.wraps(function)
        def synchronous(*args: Any, **kwargs: Any) -> Any:
            self._begin(name)
            try:
                return function(*args, **kwargs)
            finally:
                self._end(name)

        return synchronous

    def _begin(self, name: str) -> None:
        """Async functions run at the same time, and began together: the first one's clock is that of all."""
        self._running.append(name)
        self._tell()
        if len(self._running) == 1:
            faulthandler.dump_traceback_later(self._late, exit=True, file=self._pipe)

    def _end(self, name: str) -> None:
        self._running.remove(name)
        if not self._running:
            faulthandler.cancel_dump_traceback_later()
        self._tell()

    def _tell(self) -> None:
        """A line for the reader: what runs. It may be gone; the stack is then lost, the deadline is not."""
        said = json.dumps({"running": self._running, "seconds": self.seconds, "advice": self.advice})
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe.fileno(), said.encode() + b"\n")


# The reader


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that is watched
    with open(0, "rb", buffering=0) as pipe:
        running: dict[str, Any] = {}
        while line := pipe.readline():
            if line.startswith(b"{"):
                running = json.loads(line)
            elif line.startswith(b"Timeout ("):
                sys.stderr.write(f"error: {sentence(running, stack())}\n")
                return


def stack() -> str:
    """What is left in the pipe. A child of the process may hold it open for longer."""
    found, until = b"", time.monotonic() + STACK_S
    while select.select([0], [], [], max(0.0, until - time.monotonic()))[0] and (piece := os.read(0, 65536)):
        found += piece
    return found.decode(errors="replace")


def sentence(running: dict[str, Any], frames: str) -> str:
    names = running["running"]
    where = [place for name in names if (place := line_of(name, frames))]
    what = ", ".join(names)
    at = f" (it is at {', '.join(where)})" if where else ""
    return f"--config.reward.functions: {what} has not returned for {running['seconds']:g} s{at}; {running['advice']}"


def line_of(name: str, frames: str) -> str | None:
    """`file.py:12`: the innermost line of the function's own file in faulthandler's stack, the innermost first."""
    file = Path(name.rpartition(":")[0]).name
    found = re.search(rf'File "(?:[^"]*/)?{re.escape(file)}", line (\d+)', frames) if file else None
    return found and f"{file}:{found[1]}"


if __name__ == "__main__":
    main()
