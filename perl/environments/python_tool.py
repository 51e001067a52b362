"""Python for a policy: `python(code)` gives what the code printed, from a process that holds it.

    with PythonTool() as python:
        python("print(1 + 1)")  # "2"

Written here on the kernel's own means, as nothing that is kept does it: bubblewrap is a program that not every machine
has, and sandlock (Landlock, seccomp; its page asks for Linux 6.7, where Ascend's hosts run 4.19 and 5.10) confines a
command too, so that each call starts an interpreter, 0.4 s with sympy; pydantic-monty interprets a part of Python,
without sympy.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Literal

from perl.base.errors import RankError, UserError
from perl.environments.python_server import BEGUN, EXIT_CODE, LENGTH
from perl.environments.sandbox import Limits

logger = logging.getLogger(__name__)

Level = Literal["limits", "namespaces"]
ISOLATION: dict[Level, str] = {
    "limits": "limits and a filter of system calls: no network, no processes, no writing",
    "namespaces": "namespaces of processes, files and network; limits; a filter of system calls",
}
"""From the weakest to the strongest."""
DEFAULT = Limits()
START_DEADLINE_S = 120.0
"""Importing sympy takes half a second, and much longer on a machine that is busy loading a model."""
GRACE_S = 10.0
"""For the server, on top of a call's own limit."""
MOST_AT_ONCE = 32
"""Each may take its memory."""
UTF8 = 4
"""Bytes that a character may take."""
LOST = "the code was not run to its end"
NOT_BEGUN = "the code was not run"
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from perl.environments import python_server
python_server.main(sys.argv[1:])
"""
READABLE = "files can be read"
NOTHING = "nothing is found"
_PROBE = """
import os, socket
found = []
try:
    found.append(open({file!r}) and {readable!r})
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
print("; ".join(found) or {nothing!r})
"""


def slots() -> int:
    """Calls that run at once: more would have each other's seconds counted."""
    return min(MOST_AT_ONCE, len(os.sched_getaffinity(0)))


class PythonTool:
    """A server that runs Python code, one process each call; threads may share it.

    Args:
        required: the isolation without which no code is run.
        modules: imported before the first call, so that none waits for them; of other packages a call sees nothing.

    Raises:
        UserError: less than `required` can be had here, or a module is missing.
    """

    def __init__(self, limits: Limits = DEFAULT, required: Level = "namespaces", modules: tuple[str, ...] = ("sympy",)):
        for name, value in asdict(limits).items():
            if value <= 0:
                raise UserError(f"the Python tool's {name} is {value:g}; write a number above 0")
        for module in modules:
            if importlib.util.find_spec(module) is None:
                raise UserError(f"the Python tool is to import {module}, which is not installed for {sys.executable}")
        self.limits, self._modules = limits, modules
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(slots())
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._owner, self._closed = os.getpid(), False
        self.level: Level = "namespaces"
        self.isolation = ""
        """What was reached, in words."""
        if (reason := self._try("namespaces")) and (missing := self._try("limits")):
            raise UserError(f"the Python tool can't be started: {missing}")  # whatever is allowed
        if reason and required == "namespaces":
            self.close()
            raise UserError(
                f"the Python tool can't be isolated by namespaces here: {reason}; allow them (in a container:"
                " --security-opt seccomp=unconfined, or --cap-add SYS_ADMIN), or require 'limits', where on older"
                " kernels code can read the training's files"
            )
        logger.info("Python tool: %s%s", self.isolation, f" (no namespaces: {reason})" if reason else "")

    def __call__(self, code: str) -> str:
        """What `code` printed, with the value of a last expression as in a notebook; behind it an error's last line,
        or why it was ended.

        Raises:
            RuntimeError: it was not run, or its server was lost.
            RankError: there is no server, and none can be had.
        """
        return self._run(code, self.limits.timeout_s)

    def _run(self, code: str, timeout_s: float) -> str:
        with self._slots:
            server, connection, output = self._begin()
            with connection, os.fdopen(output, "rb", 0) as pipe:
                try:
                    connection.settimeout(GRACE_S)
                    message = json.dumps(code).encode()
                    connection.sendall(LENGTH.pack(len(message)) + message)
                    printed, late = self._read(pipe, timeout_s)
                    connection.shutdown(socket.SHUT_WR)
                    with connection.makefile("rb") as answers:
                        begun = answers.read(len(BEGUN))
                        ended = answers.read(EXIT_CODE.size) if begun == BEGUN else b""
                except OSError as error:
                    if isinstance(error, TimeoutError):
                        server.kill()  # it hangs
                        server.wait()
                    raise RuntimeError(LOST) from error
            if begun and begun != BEGUN:
                reason = f"no process within {timeout_s:g} s" if late else printed.decode(errors="replace")
                raise RuntimeError(f"{NOT_BEGUN}: {reason or 'its process was ended'}")
            if not ended:
                raise RuntimeError(LOST)
            return self._text(printed, EXIT_CODE.unpack(ended)[0], late)

    def _read(self, pipe: io.FileIO, timeout_s: float) -> tuple[bytes, bool]:
        """What comes until the code has ended or has printed more than it may, and whether its time was over first."""
        printed, deadline = b"", time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while len(printed) <= UTF8 * self.limits.max_output:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return printed, True
            part = pipe.read(1 << 16)
            if not part:
                break
            printed += part
        return printed, False

    def _text(self, printed: bytes, exit_code: int, late: bool) -> str:
        text, most = printed.decode(errors="replace").rstrip("\n"), self.limits.max_output
        if len(text) > most:
            return f"{text[:most]}\n[output cut at {most} characters]"
        if exit_code >= 0:
            return text
        reason = f"the code was ended: {signal.strsignal(-exit_code)}"
        why = f"TimeoutError: the code ran for more than {self.limits.timeout_s:g} s" if late else reason
        return "\n".join(filter(None, [text, why]))

    def __enter__(self) -> PythonTool:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the server and every call; there are no further ones."""
        with self._lock:
            self._closed = True
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
        words = {"file": sys.executable, "parent": os.getpid(), "readable": READABLE, "nothing": NOTHING}
        try:
            found = self._run(_PROBE.format(**words, namespaces=namespaces), START_DEADLINE_S)
        except RuntimeError as error:
            found = str(error)
        self.isolation = ISOLATION[level]
        if not namespaces:
            self.isolation += f", but {READABLE}" if found == READABLE else ", no files but Python's"
        if found == NOTHING or (found == READABLE and not namespaces):
            return None
        with self._lock:
            self._end()
        return f"tried, and {found or 'the probe printed nothing'}"

    def _begin(self) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
        """Begin a call: the server, the socket for its code, the pipe that it prints to."""
        with self._lock:
            if self._owner != os.getpid():  # a fork: the server is the parent's
                self._server, self._control, self._owner = None, None, os.getpid()
            if self._closed:
                raise RankError("the Python tool is closed")
            for _ in range(2):
                if self._server is not None and self._control is not None and self._server.poll() is None:
                    ours, theirs = socket.socketpair()
                    output, far_end = os.pipe()
                    try:
                        socket.send_fds(self._control, [b"c"], [theirs.fileno(), far_end])
                        return self._server, ours, output
                    except OSError:
                        ours.close()
                        os.close(output)
                    finally:
                        theirs.close()
                        os.close(far_end)
                if self._server is not None:
                    self._end()
                    logger.warning("the Python tool's server has ended; it is started again")
                if reason := self._start():
                    raise RankError(f"the Python tool can't be started again: {reason}")
            raise RankError("the Python tool's server ends as soon as it is started")

    def _start(self) -> str | None:
        """Start the server at `level`; why not, where that fails. The lock is held."""
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        path = [root, *(os.path.abspath(entry) for entry in sys.path if entry)]
        interpreter = [sys.executable, "-P", "-s", "-B", "-c", _START]
        settings = [json.dumps(value) for value in (asdict(self.limits), self._modules, path)]
        with theirs:
            self._server = subprocess.Popen(
                [*interpreter, str(theirs.fileno()), str(os.getpid()), self.level, *settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
                # Sets print in the same order in each run; BLAS starts no threads; Python may find its library there.
                env={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
                | ({"LD_LIBRARY_PATH": libraries} if (libraries := os.environ.get("LD_LIBRARY_PATH")) else {}),
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
        server = self._server
        self._end()
        return answer or f"{sys.executable} ended at once, with exit code {server.returncode}"

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
