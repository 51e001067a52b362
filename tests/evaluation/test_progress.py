"""What a log file gets while an evaluation runs."""

from __future__ import annotations

import io
import re
from typing import Any, cast

from rich.console import Console

from perl.evaluation import progress
from perl.evaluation.progress import Progress
from perl.scoring.results import SampleRecord


def test_a_file_gets_a_line_with_counts_rate_and_accuracy(monkeypatch):
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.0)
    file = io.StringIO()
    with Progress(10, 4, Console(file=file)) as line:
        line.refresh()
        for score in (1.0, 0.0, 0.0):
            line.add(cast(SampleRecord, cast(Any, {"score": score})))
        line.refresh()
    first, last = file.getvalue().splitlines()
    assert first == "4/10 rows, starting engines …"
    assert re.fullmatch(r"7/10 rows, [\d.]+/s, 0:00:0\d left, accuracy so far 33\.3", last)


def test_a_terminal_gets_a_bar():
    file = io.StringIO()
    with Progress(10, 4, Console(file=file, force_terminal=True, width=80)) as bar:
        bar.refresh()
    assert "4/10" in file.getvalue()
    assert "━" in file.getvalue()
