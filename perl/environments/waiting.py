"""What is asynchronous in the user's tools: one event loop of a process, in a thread of its own, so that a session or a
semaphore of one call serves the next.

    waiting = Waiting()
    waiting.result(awaitable)       in the thread of a call
    waiting.cancel()                in another, when that is late
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from typing import Any

TURN_S = 1.0
"""A loop that does not turn for so long is held by a call that does not await."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _running() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="environments", daemon=True).start()
        return _loop


def _leave_if_held(loop: asyncio.AbstractEventLoop) -> None:
    global _loop
    turned = threading.Event()
    loop.call_soon_threadsafe(turned.set)
    if not turned.wait(TURN_S):
        with _lock:
            _loop = None if _loop is loop else _loop


class Waiting:
    """For one result at a time."""

    def __init__(self) -> None:
        self._future: concurrent.futures.Future[Any] | None = None
        self._at: asyncio.AbstractEventLoop | None = None

    def result(self, given: Any) -> Any:
        """What was given, or what it comes to, or raises, where it is awaitable."""
        if not inspect.isawaitable(given):
            return given

        async def wait() -> tuple[Any, BaseException | None]:
            try:
                return await given, None
            except BaseException as error:  # noqa: BLE001  # a SystemExit would end the loop
                return None, error

        self._at = _running()
        self._future = asyncio.run_coroutine_threadsafe(wait(), self._at)
        value, error = self._future.result()
        if error is not None:
            raise error
        return value

    def cancel(self) -> None:
        if self._future is not None and self._at is not None and not self._future.done():
            self._future.cancel()
            _leave_if_held(self._at)
