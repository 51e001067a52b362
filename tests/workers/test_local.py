"""A worker that is a process of this machine."""

import os
import signal
import time
from pathlib import Path

from perl.workers.local import ProcessLink
from perl.workers.worker import Batch, Ready, WorkerSpec


class Reader:
    """A job that reads what it is sent, and says nothing of it."""

    unit = "rows"

    def paths(self, weights):
        return []

    def serve(self, weights, inbox):
        yield Ready(1, 0.0)
        while inbox.next_weights(wait=True) is not None:
            inbox.take()


def test_a_worker_that_reads_nothing_holds_nobody_up(tmp_path: Path):
    """More than a pipe holds is sent to a process that was stopped."""
    events = []
    spec = WorkerSpec(index=0, device="cpu", job=Reader(), weights=None, environment={}, log=tmp_path / "log")
    link = ProcessLink(spec, events.append)
    deadline = time.monotonic() + 120
    while not events and time.monotonic() < deadline:
        time.sleep(0.05)
    assert isinstance(events[0], Ready)
    os.kill(link._process.pid, signal.SIGSTOP)
    for number in range(3):
        link.send(Batch(number, [number], payload=bytes(8_000_000)))
    link.kill()
    assert not link._process.is_alive()
    assert events[1:] == [None]
