"""A reward function that does not return ends its process, and with it the run.

    rewards = RewardDeadline(seconds, advice).over(names, rewards)

A thread says in one line which function it was, and at which line of its file. What holds the interpreter's lock holds
that thread too: then perl.base.lock writes the stack and ends the process. Neither needs a signal, which the function
may ignore, or the one alarm that a process has, which math-verify's own timeout takes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from perl.base.lock import end_in, spare

RANKS_APART_S = 1.0
"""A function that hangs on all processes hangs for all at the same time: the first has its process's launcher end the
others."""
LOCK_S = 2.0
"""How much later than the deadline perl.base.lock ends a process whose lock is held: on a busy machine the thread
that says the line may wake late."""


class RewardDeadline:
    """
    Args:
        seconds: that one call of a reward function may take.
        advice: what to do about it, the end of the line.
    """

    def __init__(self, seconds: float, advice: str):
        self.seconds, self.advice = seconds, advice
        self._late = seconds + int(os.environ.get("LOCAL_RANK", "0")) * RANKS_APART_S
        self._running: list[str] = []

    def over(self, names: Sequence[str], functions: Sequence[Callable[..., Any]]) -> list[Callable[..., Any]]:
        """The functions, each under the deadline.

        Args:
            names: of each, as the user wrote it in reward.functions.
        """
        return [self._watched(name, function) for name, function in zip(names, functions, strict=True)]

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            with self._watch(name):
                return await function(*args, **kwargs)

        @functools.wraps(function)
        def synchronous(*args: Any, **kwargs: Any) -> Any:
            with self._watch(name):
                return function(*args, **kwargs)

        return asynchronous if inspect.iscoroutinefunction(function) else synchronous

    @contextlib.contextmanager
    def _watch(self, name: str) -> Iterator[None]:
        """Async functions run at the same time, and began together: the first one's clock is that of all."""
        self._running.append(name)
        if len(self._running) == 1:
            self._timer = threading.Timer(self._late, self._end)
            self._timer.daemon = True
            self._timer.start()
            end_in(self, self._late + LOCK_S)
        try:
            yield
        finally:
            self._running.remove(name)
            if not self._running:
                self._timer.cancel()
                spare(self)

    def _end(self) -> None:
        if names := list(self._running):
            where = ", ".join(place for name in names if (place := line_of(name)))
            what = (
                f"{', '.join(names)} has not returned for {self.seconds:g} s{f' (it is at {where})' if where else ''}"
            )
            os.write(2, f"error: --config.reward.functions: {what}; {self.advice}\n".encode())
            os._exit(1)


def line_of(name: str) -> str | None:
    """`file.py:12`: the innermost line of the function's own file that a thread of this process is at."""
    file = Path(name.rpartition(":")[0]).name
    for innermost in sys._current_frames().values():
        for frame, line in traceback.walk_stack(innermost):
            if Path(frame.f_code.co_filename).name == file:
                return f"{file}:{line}"
    return None
