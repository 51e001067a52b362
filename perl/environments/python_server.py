"""The processes behind the Python tool, started by python_tool.PythonTool as a fresh interpreter without environment.

    the training ─ watch ─ serve ─┬─ run      one each call
                                  └─ run

`watch` imports the modules, enters the namespaces (perl/environments/sandbox.py) and ends `serve` with the training.
`serve` forks `run` for each socket that it is sent, reads what that prints, ends it at a limit and answers over the
socket. `run` reads the code from the socket, confines itself, and executes it. Each dies with the one to its left; in
namespaces the kernel ends all that are below a pid namespace's first process, which `serve` and each `run` are.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import gc
import importlib
import io
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import sysconfig
import time
import traceback
import types
from multiprocessing.connection import Connection
from typing import NoReturn

from perl.environments import sandbox

FILE = "<python>"
STANDARD = (
    ("ctypes", "decimal", "hashlib", "ssl", "sqlite3", "bz2", "lzma", "zlib", "uuid", "json", "fractions", "itertools")
    + ("statistics", "collections", "functools", "heapq", "bisect", "string", "re", "datetime", "time", "cmath", "copy")
    + ("dataclasses", "typing", "operator", "threading", "asyncio", "tempfile", "pickle", "array", "struct", "math")
)
"""What code imports most; and what needs libraries of the system, which a call does not see."""
MESSAGE_CHARACTERS = 1000
"""Of an error's text."""


def main(arguments: list[str]) -> None:
    """Args: descriptor of the control socket, process id of the training, level, Limits as JSON, modules with commas."""
    control = socket.socket(fileno=int(arguments[0]))
    parent, namespaces = int(arguments[1]), arguments[2] == "namespaces"
    limits, modules = sandbox.Limits(**json.loads(arguments[3])), arguments[4].split(",")
    os.environ.clear()
    try:
        folders = load(modules)
        with open("/proc/self/statm") as sizes:
            used = resource.getpagesize() * int(sizes.read().split()[0])
        if namespaces:
            sandbox.new_namespaces()
        signal.signal(signal.SIGCHLD, lambda *_: os._exit(1))
        server = os.fork()
        if server == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sandbox.die_with_parent()
            own = None
            if namespaces:
                own = os.open("/proc/self/ns/pid", os.O_RDONLY)
                sandbox.new_root(["/dev/null", *folders], _site_folders())
            Server(control, limits, own, used).serve()
            os._exit(0)
    except Exception as error:  # noqa: BLE001  # the training says it
        control.sendall(f"{type(error).__name__}: {error}".encode()[:4096])
        os._exit(1)
    watch(control, parent, server)


def load(modules: list[str]) -> list[str]:
    """Import what calls are to find imported. Returns the folders that they may read."""
    for name in STANDARD:
        importlib.import_module(name)
    before = set(sys.modules)
    for name in modules:
        importlib.import_module(name)
    exec("from sympy import *\nintegrate(Symbol('x') ** 2)\nsolve(Symbol('x') ** 2 - 1)", {}) if "sympy" in modules else None
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    for name in {name.partition(".")[0] for name in set(sys.modules) - before}:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            folders.add(os.path.dirname(file) if os.path.basename(file).startswith("__init__.") else file)
    return sorted(folder for folder in folders if os.path.exists(folder))


def _site_folders() -> list[str]:
    """Below the standard library, where others put their packages."""
    standard = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    return [os.path.join(folder, name) for folder in set(standard) for name in ("site-packages", "dist-packages")]


def watch(control: socket.socket, parent: int, server: int) -> None:
    """Until the training has closed its end or is gone. Not PR_SET_PDEATHSIG: that goes with the thread that started
    this process."""
    poll = select.poll()
    poll.register(control, select.POLLRDHUP)
    while os.getppid() == parent and not poll.poll(500):
        pass
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)


@dataclasses.dataclass
class Call:
    child: int
    connection: Connection
    output: int
    """The end of a pipe to which the child prints."""
    deadline: float
    printed: bytes = b""


class Server:
    """Args: `own`: descriptor of the server's pid namespace, or None where there are no namespaces; `used`: bytes of
    address space that it takes."""

    def __init__(self, control: socket.socket, limits: sandbox.Limits, own: int | None, used: int):
        self._control, self._limits, self._own, self._used = control, limits, own, used
        self._calls: dict[int, Call] = {}
        """By either descriptor."""
        self._poll = select.poll()

    def serve(self) -> None:
        for threads in (False, True):
            sandbox.seccomp_filter(self._own is not None, threads)  # remembered, and not made in each call
        gc.collect()
        gc.freeze()
        self._poll.register(self._control, select.POLLIN)
        self._control.sendall(b"ready")
        while True:
            first = min((call.deadline for call in self._calls.values()), default=None)
            wait_ms = None if first is None else max(0.0, first - time.monotonic()) * 1000
            for descriptor, _ in self._poll.poll(wait_ms):
                if descriptor == self._control.fileno():
                    _, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
                    if not descriptors:
                        return
                    self._begin(Connection(descriptors[0]))
                elif (call := self._calls.get(descriptor)) is None:
                    continue  # ended by the event before this one
                elif descriptor == call.output:
                    self._read(call)
                else:
                    self._end(call)  # nobody waits for it any more
            for call in {id(call): call for call in self._calls.values() if call.deadline <= time.monotonic()}.values():
                self._end(call, f"TimeoutError: the code ran for more than {self._limits.timeout_s:g} s")

    def _begin(self, connection: Connection) -> None:
        output, far_end = os.pipe()
        try:
            if self._own is not None:
                sandbox.new_processes(self._own)
            child = os.fork()
        except OSError:  # no more processes: the socket closes without an answer
            os.close(output)
            connection.close()
        else:
            if child == 0:
                run(connection, far_end, self._limits, self._own is not None, self._used)
            call = Call(child, connection, output, time.monotonic() + self._limits.timeout_s)
            self._calls |= {output: call, connection.fileno(): call}
            self._poll.register(output, select.POLLIN)
            self._poll.register(connection, select.POLLRDHUP)
        os.close(far_end)

    def _read(self, call: Call) -> None:
        part = os.read(call.output, 1 << 16)
        call.printed += part
        if not part or len(call.printed) > 4 * self._limits.max_output:  # of UTF-8's longest
            self._end(call)

    def _end(self, call: Call, reason: str = "") -> None:
        """Kill what is left of a call, and answer."""
        os.kill(call.child, signal.SIGKILL)  # where it ends by itself its own exit code stays
        _, status = os.waitpid(call.child, 0)
        text = call.printed.decode(errors="replace")
        if len(text) > self._limits.max_output:
            text = text[: self._limits.max_output]
            reason = f"[output cut at {self._limits.max_output} characters]"
        elif not reason and os.WIFSIGNALED(status):
            reason = f"the process was ended by {signal.Signals(os.WTERMSIG(status)).name}"
        with contextlib.suppress(OSError):  # the training may have gone
            call.connection.send_bytes("\n".join(filter(None, [text.rstrip("\n"), reason])).encode())
        for descriptor in (call.output, call.connection.fileno()):
            self._poll.unregister(descriptor)
            del self._calls[descriptor]
        os.close(call.output)
        call.connection.close()


def run(connection: Connection, output: int, limits: sandbox.Limits, namespaces: bool, used: int) -> NoReturn:
    """Execute the code that comes over `connection` as a notebook's cell does: the value of a last expression is printed, an error is its last line."""
    status = 1
    try:
        code = json.loads(connection.recv_bytes())
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        sys.stdout = io.TextIOWrapper(open(1, "wb", 0), "utf-8", "backslashreplace", write_through=True)
        sys.stderr = sys.stdout
        sys.argv, sys.path[:] = [""], ["", *sys.path]
        random.seed(0)  # what a call prints depends on its code alone
        sandbox.confine(limits, namespaces, used)
        status = _execute(code)
        sys.stdout.flush()
    finally:
        os._exit(status)


def _execute(code: str) -> int:
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        tree = ast.parse(code, FILE)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, FILE, "exec"), main_module.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), FILE, "eval"), main_module.__dict__)
            if value is not None:
                print(repr(value))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code)
        return 1
    except BaseException as error:  # noqa: BLE001
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        line = _line(error)
        traceback.clear_frames(error.__traceback__)
        main_module.__dict__.clear()
        parts = traceback.format_exception_only(type(error), error)
        text = (parts[-1] if isinstance(error, SyntaxError) else "".join(parts)).strip()
        print(text[:MESSAGE_CHARACTERS] + (f" (line {line})" if line else ""))
        return 1
    return 0


def _line(error: BaseException) -> int | None:
    """Of the code, where the error came up last."""
    if isinstance(error, SyntaxError) and error.filename == FILE:
        return error.lineno
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == FILE]
    return lines[-1] if lines else None
