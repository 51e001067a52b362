"""Streams and events. Every operator has finished when it returns, so they keep only identities and times."""

import contextlib
import time

import torch

from ._index import device_index


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **raw):
        if raw:  # stream_id, device_index, device_type: a stream that exists already
            return super().__new__(cls, priority=priority, **raw)
        return super().__new__(cls, torch.device("npu", device_index(device)), priority=priority)

    @property
    def npu_stream(self):
        return self.stream_id


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, "npu", enable_timing=True)

    # torch.Event.elapsed_time insists on the exact type torch.Event, so the time is kept here.
    def record(self, stream=None):
        self._seconds = time.perf_counter()
        super().record(*([] if stream is None else [stream]))

    def elapsed_time(self, other):
        """Milliseconds from this event to `other`."""
        return (other._seconds - self._seconds) * 1e3


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
