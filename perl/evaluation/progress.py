"""What the screen shows while completions come in: done, rate, remaining time, running accuracy."""

from __future__ import annotations

import time
from datetime import timedelta

from rich import progress
from rich.console import Console
from rich.text import Text

from perl.scoring.results import SampleRecord

LOG_EVERY_S = 30.0
STARTING = "starting engines …"


class RateColumn(progress.ProgressColumn):
    """Samples per second over the last half minute."""

    def render(self, task: progress.Task) -> Text:
        return Text(f"{task.speed or 0:.1f}/s")


class Progress:
    """On a terminal a bar; into a file a line every half minute."""

    def __init__(self, total: int, done: int, console: Console):
        self._console = console
        self._bar = progress.Progress(
            progress.MofNCompleteColumn(),
            progress.BarColumn(),
            RateColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}"),
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )
        self._bar.add_task(STARTING, total=total, completed=done)
        (self._task,) = self._bar.tasks
        self._graded, self._score = 0, 0.0
        self._next_log = time.monotonic() + LOG_EVERY_S

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, record: SampleRecord) -> None:
        """Count one graded sample (called from the recorder's thread)."""
        self._graded += 1
        self._score += record["score"]
        accuracy = f"accuracy so far {100 * self._score / self._graded:.1f}"
        self._bar.update(self._task.id, advance=1, description=accuracy)

    def refresh(self) -> None:
        """Write the line into a file when it is time."""
        if not self._console.is_terminal and time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + LOG_EVERY_S
            self._console.print(self.line(), highlight=False)

    def line(self) -> str:
        task = self._task
        counts = f"{task.completed:.0f}/{task.total:.0f} rows"
        if task.speed is None or task.time_remaining is None:
            return f"{counts}, {task.description}"
        remaining = timedelta(seconds=round(task.time_remaining))
        return f"{counts}, {task.speed:.1f}/s, {remaining} left, {task.description}"
