"""Python for a policy: `python(code)` gives what the code printed, from a process that holds it.

    with PythonTool() as python:
        python("print(1 + 1)")  # "2"

Written here on the kernel's own means, as nothing that is kept does it: bubblewrap is a program that not every machine
has and starts an interpreter for each call (0.4 s with sympy); sandlock shares the network and the process table, and
needs Landlock, which the 4.19 and 5.10 kernels of Ascend hosts lack; pydantic-monty is an interpreter of a part of
Python, without sympy.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Literal

from perl.base.errors import UserError
from perl.environments.sandbox import Limits

logger = logging.getLogger(__name__)

Level = Literal["limits", "namespaces"]
ISOLATION: dict[Level, str] = {
    "limits": "limits and a filter of system calls: no network, no processes, no writing, but files can be read",
    "namespaces": "namespaces of users, processes, files and network; limits; a filter of system calls",
}
"""From the weakest to the strongest."""
START_DEADLINE_S = 120.0
"""Importing sympy takes half a second, and much longer on a machine that is busy loading a model."""
GRACE_S = 10.0
"""For the server, on top of a call's own limit."""
LOST = "RuntimeError: the code was not run to its end"
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from perl.environments import python_server
python_server.main(sys.argv[1:])
"""
_PROBE = """
import os, socket
found = []
try:
    found.append(open({file!r}) and "files can be read")
except OSError:
    pass
try:
    found.append(socket.socket() and "sockets can be opened")
except OSError:
    pass
try:
    found.append(os.kill({parent}, 0) or "the training can be sent signals")
except OSError:
    pass
if {namespaces} and os.getpid() != 1:
    found.append("processes are shared")
print("; ".join(found))
"""


class PythonTool:
    """A server that runs Python code, one process each call; threads may share it.

    Args:
        required: the isolation without which no code is run.
        modules: imported before the first call, so that none waits for them; of other packages a call sees nothing.

    Raises:
        UserError: less than `required` can be had here, or a module is missing.
    """

    def __init__(
        self, limits: Limits = Limits(), required: Level = "namespaces", modules: tuple[str, ...] = ("sympy",)
    ):
        self.limits, self._modules = limits, modules
        self._lock = threading.Lock()
        # More at once would have each other's seconds counted.
        self._slots = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._owner = os.getpid()
        self.level: Level = "namespaces"
        reason = self._try("namespaces")
        if reason and required == "limits":
            self.level = "limits"
            if missing := self._try("limits"):
                raise UserError(f"the Python tool can't be started: {missing}")
        elif reason:
            raise UserError(
                f"the Python tool can't be isolated by namespaces here: {reason}; allow them (in a container:"
                " --security-opt seccomp=unconfined, or --cap-add SYS_ADMIN), or require 'limits', where code can read"
                " every file that the training can"
            )
        logger.info("Python tool: %s%s", ISOLATION[self.level], f" (no namespaces: {reason})" if reason else "")

    def __call__(self, code: str) -> str:
        """What `code` printed, with the value of a last expression as in a notebook; behind it an error's last line,
        or why it was ended."""
        with self._slots:
            server, connection = self._connect()
            try:
                connection.send_bytes(json.dumps(code).encode())
                if connection.poll(self.limits.timeout_s + GRACE_S):
                    return connection.recv_bytes().decode()
            except (EOFError, OSError):
                return LOST
            finally:
                connection.close()
            server.kill()  # it hangs
            return LOST

    def __enter__(self) -> PythonTool:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the server and every call."""
        with self._lock:
            self._end()

    def _try(self, level: Level) -> str | None:
        """Why there is no server of this level."""
        if sys.platform != "linux":
            return "it needs Linux"
        self.level = level
        with self._lock:
            if reason := self._start():
                return reason
        namespaces = level == "namespaces"
        probe = _PROBE.format(file=str(Path(__file__).resolve()), parent=os.getpid(), namespaces=namespaces)
        found = self(probe)
        if found and (namespaces or found != "files can be read"):
            self.close()
            return f"tried, and {found}"
        return None

    def _connect(self) -> tuple[subprocess.Popen[bytes], Connection]:
        with self._lock:
            if self._owner != os.getpid():  # a fork: the server is the parent's
                self._server, self._control, self._owner = None, None, os.getpid()
            for _ in range(2):
                if self._server is not None and self._control is not None and self._server.poll() is None:
                    ours, theirs = socket.socketpair()
                    with theirs:
                        try:
                            socket.send_fds(self._control, [b"c"], [theirs.fileno()])
                            return self._server, Connection(ours.detach())
                        except OSError:
                            ours.close()
                if self._server is not None:
                    self._end()
                    logger.warning("the Python tool's server has ended; it is started again")
                if reason := self._start():
                    raise RuntimeError(f"the Python tool can't be started again: {reason}")
            raise RuntimeError("the Python tool's server ends as soon as it is started")

    def _start(self) -> str | None:
        """Start the server at `level`; why not, where that fails. The lock is held."""
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        path = [root, *(os.path.abspath(entry) for entry in sys.path if entry)]
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-s", "-B", "-c", _START, str(theirs.fileno()), str(os.getpid())]
                + [self.level, json.dumps(asdict(self.limits)), ",".join(self._modules), json.dumps(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
                # Sets print in the same order in each run; BLAS starts no threads.
                env={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._control = ours
        ours.settimeout(START_DEADLINE_S)
        try:
            answer = ours.recv(4096).decode(errors="replace")
        except OSError:
            answer = f"no answer in {START_DEADLINE_S:g} s"
        ours.settimeout(None)
        if answer == "ready":
            return None
        self._end()
        return answer or "the server ended at once"

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            try:
                self._server.wait(2.0)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        self._server, self._control = None, None
