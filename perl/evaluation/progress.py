"""A line on the screen while rows come in: done, rate, remaining time, running accuracy."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from perl.results import SampleRecord

LOG_EVERY_S = 30.0


class Progress:
    """On a terminal the line is redrawn in place; into a file it is written anew every half minute."""

    def __init__(self, total: int, done: int, console: Console):
        self.total = total
        self.done = done
        self.began_with = done
        self.score = 0.0
        self.graded = 0
        self.started: float | None = None
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._next_log = time.monotonic() + LOG_EVERY_S

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, record: SampleRecord) -> None:
        """Count one graded record (called from the recorder's thread)."""
        self.started = self.started or time.monotonic() - record["time"]
        self.done += 1
        self.graded += 1
        self.score += record["score"]

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(Text(self.line()))
        elif time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + LOG_EVERY_S
            self._console.print(self.line(), highlight=False)

    def line(self) -> str:
        if self.started is None:
            return f"{self.done}/{self.total} rows; starting engines …"
        elapsed = max(time.monotonic() - self.started, 1e-9)
        rate = (self.done - self.began_with) / elapsed
        remaining = (self.total - self.done) / rate if rate else 0.0
        accuracy = f", accuracy so far {100 * self.score / self.graded:.1f}" if self.graded else ""
        return f"{self.done}/{self.total} rows, {rate:.1f}/s, {_duration(remaining)} left{accuracy}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
