"""Where workers run. EXECUTORS names the ways to start one; what it says afterwards comes through one function.

An Executor starts workers; the Link that it returns is the parent's way to one of them:

    parent -> worker   Batch, as often as there is work; None: no more will come
    worker -> parent   Ready, Result for each sample, Restart, Failed; None when it is gone, whatever ended it
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Protocol

from perl.base.errors import UserError
from perl.config.evaluation import EvalConfig
from perl.device import Devices
from perl.workers.local import LocalExecutor
from perl.workers.worker import Batch, Deliver, WorkerSpec


class Link(Protocol):
    """One started worker."""

    def send(self, batch: Batch | None) -> None:
        """Send; that a worker is gone is delivered, not raised."""
        ...

    def join(self, timeout: float) -> None:
        """Wait until the worker has ended."""
        ...

    def kill(self) -> None:
        """End the worker and all its processes now. A second call does nothing."""
        ...

    def exit_reason(self) -> str:
        """How it ended, as far as is known."""
        ...


class Executor(Protocol):
    """A way to start workers."""

    devices: Devices
    """What there is for all workers together."""

    def environment(self, index: int) -> dict[str, str]:
        """Variables that worker `index` gets so that it sees its own devices only."""
        ...

    def start(self, spec: WorkerSpec, deliver: Deliver) -> Link: ...

    def close(self) -> None:
        """Give back what the executor itself holds; the workers have been killed before."""
        ...


def _local(config: EvalConfig) -> Executor:
    return LocalExecutor(config.dp_size, config.tp_size)


def _ray(config: EvalConfig) -> Executor:
    if importlib.util.find_spec("ray") is None:
        raise UserError('--executor ray: ray is not installed; pip install "ray>=2.50", or leave --executor out')
    from perl.workers.cluster import RayExecutor

    return RayExecutor(config.dp_size, config.tp_size, config.ray_address)


EXECUTORS: dict[str, Callable[[EvalConfig], Executor]] = {
    "local": _local,
    "ray": _ray,
}
"""Builders by name. Each raises a UserError where there are fewer devices than --dp_size × --tp_size."""
