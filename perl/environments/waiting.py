"""What is asynchronous in the user's tools: one event loop of a process, in a thread of its own, so that a session or a
semaphore of one call serves the next.

    waiting = Waiting()
    futures = [waiting.begun(call) for call in calls]      in the thread of a turn; those that are async go on together
    waiting.cancel()                                       in another, when they are late
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from perl import device

TURN_S = 1.0
"""A loop that does not turn for so long is held by a call that does not await."""

THREADS = "environments"
"""Of this name: those that calls are made in, and their loops."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _running() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(_loop, device.current()), name=THREADS, daemon=True).start()
        return _loop


def _run(loop: asyncio.AbstractEventLoop, index: int | None) -> None:
    device.use(index)
    loop.run_forever()


def _leave_if_held(loop: asyncio.AbstractEventLoop) -> None:
    global _loop
    if loop is not _loop:  # left already
        return
    turned = threading.Event()
    loop.call_soon_threadsafe(turned.set)
    if not turned.wait(TURN_S):
        with _lock:
            _loop = None if _loop is loop else _loop


def _join_no_daemons() -> None:
    """At the end of Python, which joins the threads of all executors (asyncio.to_thread has one, a tool may), though
    those that a call begins are daemons as its own is: one that hangs would keep the process for ever."""
    threads: Any = concurrent.futures.thread._threads_queues
    for thread in list(threads):
        if thread.daemon:
            del threads[thread]


# What atexit calls comes behind the joins.
threading._register_atexit(_join_no_daemons)  # pyright: ignore[reportAttributeAccessIssue]


class Waiting:
    """For the calls of an environment."""

    def __init__(self) -> None:
        self._begun: list[tuple[Future[Any], asyncio.AbstractEventLoop]] = []

    def begun(self, call: Callable[[], Any]) -> Future[Any]:
        """Of what the call gives, or comes to, or raises: at an end already where it is not awaitable."""
        given: Future[Any] = Future()
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001  # raised where the result is asked for
            given.set_exception(error)
            return given
        if not inspect.isawaitable(value):
            given.set_result(value)
            return given

        async def wait() -> Any:
            try:
                return await value
            except (SystemExit, KeyboardInterrupt) as error:  # would end the loop
                raise RuntimeError(str(error)) from error

        loop = _running()
        given = asyncio.run_coroutine_threadsafe(wait(), loop)
        self._begun = [(future, at) for future, at in self._begun if not future.done()] + [(given, loop)]
        return given

    def result(self, call: Callable[[], Any]) -> Any:
        return self.begun(call).result()

    def cancel(self) -> None:
        late = [(future, at) for future, at in self._begun if not future.done()]
        for future, _ in late:
            future.cancel()
        for loop in {at for _, at in late}:
            _leave_if_held(loop)
