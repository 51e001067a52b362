"""Streams and events. Every operator has finished when it returns, so they keep only identities, times and, for the
order in which graphs are replayed and updated (graphs.py), which replays they stand behind."""

import contextlib
import time

import torch

from ._index import device_index

replays = 0
"""Graphs replayed so far in this process."""


def next_replay():
    """The number of a replay, from 1."""
    global replays
    replays += 1
    return replays


class Stream(torch.Stream):
    behind = 0
    """The last replay that what comes next on this stream waits for."""

    def __new__(cls, device=None, priority=0, **raw):
        if raw:  # stream_id, device_index, device_type: a stream that exists already
            return super().__new__(cls, priority=priority, **raw)
        return super().__new__(cls, torch.device("npu", device_index(device)), priority=priority)

    @property
    def npu_stream(self):
        return self.stream_id

    def wait_stream(self, stream):
        self.behind = replays
        super().wait_stream(stream)

    def wait_event(self, event):
        self.behind = max(self.behind, getattr(event, "behind", 0))
        super().wait_event(event)


class Event(torch.Event):
    behind = 0
    """The last replay before it was recorded."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, "npu", enable_timing=True)

    # torch.Event.elapsed_time insists on the exact type torch.Event, so the time is kept here.
    def record(self, stream=None):
        self._seconds = time.perf_counter()
        self.behind = replays
        super().record(*([] if stream is None else [stream]))

    def synchronize(self):
        global finished
        super().synchronize()
        finished = max(finished, self.behind)

    def elapsed_time(self, other):
        """Milliseconds from this event to `other`."""
        return (other._seconds - self._seconds) * 1e3


finished = 0
"""The last replay that the host has waited for by an event."""


def has_finished(replay, waits):
    """Whether the host knows that a replay is done, which was launched when it had waited `waits` times."""
    return finished >= replay or host_waits() > waits


def host_waits():
    """How often the host has waited for everything that a device was given."""
    counters = torch.ops.npuemu.waits()
    return sum(number for kind, number in counters.items() if kind in ("item", "nonzero", "copy", "synchronize"))


def current_stream(device=None):
    return torch.accelerator.current_stream(torch.device("npu", device_index(device)))


def default_stream(device=None):
    private_use_1 = 20  # c10::DeviceType::PrivateUse1
    return torch.Stream(stream_id=0, device_index=device_index(device), device_type=private_use_1)


def set_stream(stream):
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream):
    """Context in which `stream` is the current one; None changes nothing."""
    if stream is None:
        yield
        return
    previous = current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(previous)
