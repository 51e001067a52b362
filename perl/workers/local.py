"""Workers that are processes of this machine."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import process, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from perl import device
from perl.base.errors import UserError
from perl.workers.worker import FOR_THE_PARENT, Deliver, Failed, RequestBatch, WorkerSpec, run_worker, said_by

logger = logging.getLogger(__name__)

FROM_OUTSIDE = (None, 0, -signal.SIGKILL)
"""Exit codes of what was ended, or was let go; None: of what is not over."""
NO_MORE = object()
"""Ends the sender, and is never sent."""
KILL_S = 30.0
"""A process that has closed its pipe, or that SIGKILL has not ended by then, waits in the kernel, for its device or a
file system."""
ENDS: weakref.WeakSet[Connection] = weakref.WeakSet()
"""This process's ends of the pipes: a worker ends with this process, not with the last child that it has forked."""


def _close_ends() -> None:
    for end in list(ENDS):
        end.close()


os.register_at_fork(after_in_child=_close_ends)


@contextlib.contextmanager
def held_back(*signals: int) -> Iterator[None]:
    """Processes that are started inside get these when they unblock them (run_worker)."""
    resource_tracker.ensure_running()  # whose own start unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ProcessLink:
    """A worker that is a process of this machine, at the other end of a pipe."""

    def __init__(self, spec: WorkerSpec, deliver: Deliver):
        context = multiprocessing.get_context("spawn")
        self._connection, far_end = context.Pipe()
        ENDS.update((self._connection, far_end))
        self._process = context.Process(target=run_worker, args=(spec, far_end), name=f"worker-{spec.index}")
        with held_back(*FOR_THE_PARENT):
            self._process.start()
        far_end.close()
        self._deliver = deliver
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._sender = threading.Thread(target=self._send, daemon=True)
        try:
            self._listener.start()
            self._sender.start()
        except RuntimeError:  # there is no thread to be had
            self._process.kill()
            raise

    def send(self, batch: RequestBatch | None) -> None:
        self._outbox.put(batch)

    def _send(self) -> None:
        """In a thread of its own: a worker that reads nothing lets its sender wait for ever once the pipe is full."""
        try:
            while (batch := self._outbox.get()) is not NO_MORE:
                self._connection.send(batch)
        except OSError:
            logger.debug("%s is gone", self._process.name)
        except Exception as error:  # noqa: BLE001  # it would wait for what it is never sent
            self._deliver(Failed(f"what it is sent cannot be packed: {said_by(error)}"))
            self._deliver(None)

    def join(self, timeout: float) -> None:
        self._process.join(timeout)

    def kill(self) -> int | None:
        """End the worker's whole process group: the engine may have processes of its own."""
        if self._connection.closed:
            return None
        assert self._process.pid is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:  # no group of its own yet, or gone already, and its id may be another's
            self._process.kill()
        self._outbox.put(NO_MORE)
        with socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)  # ends the waits of both threads
        self._listener.join()
        self._sender.join()
        self._process.join(KILL_S)
        self._connection.close()  # not before: the next pipe may have the same descriptor
        if self._process.exitcode is not None:
            return None
        vars(process)["_children"].discard(self._process)  # this interpreter would wait for it at its end
        return self._process.pid

    def exit_reason(self) -> str:
        code = self._process.exitcode
        return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"

    def _listen(self) -> None:
        try:
            while True:
                self._deliver(self._connection.recv())
        except (EOFError, OSError):
            self._process.join(KILL_S)  # a process closes its pipes before it has an exit code
            if self._process.exitcode not in FROM_OUTSIDE:
                self._deliver(Failed(self.exit_reason()))
        except Exception as error:  # noqa: BLE001  # whatever it is, what comes next is of no use
            self._deliver(Failed(f"what it sent cannot be read: {' '.join(str(error).split())}"))
        self._deliver(None)


def require_room(workers: int, taken: int) -> None:
    """Raise a UserError where this machine has fewer devices than a training of `taken` processes and its workers."""
    kind, ids = device.detect().kind, device.ids_beside(taken)
    if kind != "cpu" and workers > len(ids):
        raise UserError(
            f"--config.rollout.workers {workers}: the training's {taken} processes leave {len(ids)} {kind} devices of"
            f" this machine; start fewer of them (NUM_PROCESSES), or write --config.rollout.workers {len(ids)}"
        )


class LocalExecutor:
    """Workers are processes of this machine, on a CPU each on its own share of the cores."""

    def __init__(self, dp_size: int, tp_size: int, taken: int | None = None):
        self.devices = device.detect()
        self.workers, self._tp_size = dp_size, tp_size
        self._training = taken is not None
        if taken is not None:
            require_room(dp_size, taken)
            self._ids = device.ids_beside(taken)
        if taken is None and dp_size * tp_size > self.devices.count:
            what = "cores" if self.devices.kind == "cpu" else f"{self.devices.kind} devices"
            product = f"--dp_size {dp_size}" + (f" × --tp_size {tp_size}" if tp_size > 1 else "")
            possible = self.devices.count // tp_size or 1
            raise UserError(f"{product}: there are {self.devices.count} {what}; write --dp_size {possible}")

    def environment(self, index: int) -> dict[str, str]:
        if self._training and (variable := device.VISIBILITY_VARIABLE[self.devices.kind]):
            return {variable: self._ids[index]}
        environment = device.worker_environment(index, self._tp_size)
        if self.devices.kind == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, self.devices.count // self.workers))
        return environment

    def start(self, spec: WorkerSpec, deliver: Deliver) -> ProcessLink:
        return ProcessLink(replace(spec, cores=(spec.index, self.workers)), deliver)

    def shared(self, payload: Any) -> Any:
        return payload

    def close(self) -> None:
        pass
