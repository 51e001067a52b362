"""Where workers run: on this machine or in a Ray cluster. What one says after its start comes through one function.

An Executor starts workers; the Link that it returns is the parent's way to one of them:

    parent -> worker   RequestBatch, as often as there is work; None: no more will come
    worker -> parent   Ready, Result for each request, Restart, Failed; None when it is gone, whatever ended it
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

from perl.base.errors import UserError
from perl.device import Devices
from perl.workers.local import LocalExecutor
from perl.workers.worker import Deliver, RequestBatch, WorkerSpec


class Link(Protocol):
    """One started worker."""

    def send(self, batch: RequestBatch | None) -> None:
        """Send; that a worker is gone is delivered, not raised."""
        ...

    def join(self, timeout: float) -> None:
        """Wait until the worker has ended."""
        ...

    def kill(self) -> int | None:
        """End the worker and all its processes now. A second call does nothing. Gives the process that does not end."""
        ...

    def exit_reason(self) -> str:
        """How it ended, as far as is known."""
        ...


class Executor(Protocol):
    """A way to start workers."""

    devices: Devices
    """What there is for all workers together."""
    workers: int
    """How many there are to be."""

    def environment(self, index: int) -> dict[str, str]:
        """Variables that worker `index` gets so that it sees its own devices only."""
        ...

    def start(self, spec: WorkerSpec, deliver: Deliver) -> Link: ...

    def shared(self, payload: Any) -> Any:
        """What several workers are sent in the place of `payload`, and get as that."""
        ...

    def close(self) -> None:
        """Give back what the executor itself holds; the workers have been killed before."""
        ...


def make_executor(
    name: str,
    workers: int,
    devices_each: int = 1,
    ray_address: str = "auto",
    taken: int | None = None,
    paths: Sequence[str] = (),
) -> Executor:
    """The executor `name` ("local" or "ray"). Raises a UserError where there are fewer than workers × devices_each
    devices.

    Args:
        taken: the first devices of this machine are a training's own, so many; None: it is no training.
        paths: what each node of a training's cluster has to have.
    """
    if name == "local":
        return LocalExecutor(workers, devices_each, taken)
    require_ray(ray_address, training=taken is not None)
    from perl.workers.cluster import RayExecutor

    return RayExecutor(workers, devices_each, ray_address, taken, paths)


def require_ray(address: str, training: bool) -> None:
    """Raise a UserError where ray is not installed, or nothing listens at a cluster's address."""
    if importlib.util.find_spec("ray") is None:
        flag = "--config.rollout.executor" if training else "--executor"
        raise UserError(f'{flag} ray: ray is not installed; pip install "ray>=2.50", or leave {flag} out')
    from perl.workers.cluster import EVALUATION, TRAINING, require_port

    require_port(address, TRAINING if training else EVALUATION)


@functools.cache  # a sweep asks for each of its runs
def require_cluster(workers: int, address: str, taken: int, paths: tuple[str, ...]) -> None:
    """Raise a UserError where a Ray cluster can't have the workers of a training, as `make_executor` has it."""
    make_executor("ray", workers, 1, address, taken, paths).close()
