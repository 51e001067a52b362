"""Code of C that holds the interpreter's lock (a regular expression that backtracks for ever) holds every thread of
Python. faulthandler, a thread of C, writes the stack then and ends the process. A process has one timer of it, which is
here for all.

    end_in(owner, seconds); …; spare(owner)       the process ends, unless it is spared by then
    held = HeldLock(seconds)
    held.begin(); …; held.end()                   or where no thread had the lock for so long in between
"""

from __future__ import annotations

import atexit
import faulthandler
import threading
import time

BEAT_S = 0.5
"""So often a thread shows that it still gets the lock."""

_lock = threading.Lock()
_due: dict[int, float] = {}
"""By id of the owner, on the clock time.monotonic."""
_ended = threading.Event()


def end_in(owner: object, seconds: float) -> None:
    """In the place of what the owner has asked for before."""
    with _lock:
        if not _ended.is_set():
            now = time.monotonic()
            _due[id(owner)] = now + seconds
            _set(now)


def spare(owner: object) -> None:
    with _lock:
        _due.pop(id(owner), None)
        _set(time.monotonic())


@atexit.register
def _at_exit() -> None:
    """The interpreter ends, however long that takes: threads that still hold something end with it."""
    with _lock:
        _ended.set()
        faulthandler.cancel_dump_traceback_later()


def _set(now: float) -> None:
    if _due and not _ended.is_set():
        faulthandler.dump_traceback_later(max(0.001, min(_due.values()) - now), exit=True, file=2)
    else:
        faulthandler.cancel_dump_traceback_later()


class HeldLock:
    """
    Args:
        seconds: that the lock may be held, BEAT_S at least.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._begun, self._changing = 0, threading.Lock()
        self._over = threading.Event()

    def begin(self) -> None:
        """As often as `end`, from any thread. Raises RuntimeError where the system gives no further thread."""
        with self._changing:
            if not self._begun:
                over = threading.Event()
                threading.Thread(target=self._beat, args=(over,), name="held lock", daemon=True).start()
                end_in(over, self.seconds)  # whatever begins behind this may hold the lock at once
                self._over = over
            self._begun += 1

    def end(self) -> None:
        with self._changing:
            self._begun -= 1
            if not self._begun:
                self._over.set()

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(BEAT_S):
            end_in(over, self.seconds)
        spare(over)
