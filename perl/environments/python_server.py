"""The processes behind the Python tool, started by python_tool.PythonTool as a fresh interpreter without environment.

    the training ─ watch ─ serve ─┬─ supervise ─ run      one pair a call
                                  └─ supervise ─ run

`watch` imports the modules, enters the namespaces (perl/environments/sandbox.py) and ends `serve` with the training.
`serve` forks for each socket that it is sent. `supervise` reads the code from that socket, forks `run`, reads what it
prints, ends it at a limit and answers. `run` confines itself and then executes the code. Each dies with the one to its
left; in namespaces the kernel ends all that are below a pid namespace's first process, which `serve` and `run` are.
"""

from __future__ import annotations

import ast
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
    """Args: descriptor of the control socket, process id of the training, level, modules with commas."""
    control = socket.socket(fileno=int(arguments[0]))
    parent, namespaces, modules = int(arguments[1]), arguments[2] == "namespaces", arguments[3].split(",")
    os.environ.clear()
    try:
        folders = load(modules)
        used = resource.getpagesize() * int(open("/proc/self/statm").read().split()[0])
        if namespaces:
            sandbox.enter(["/dev/null", *folders], _site_folders())
        signal.signal(signal.SIGCHLD, lambda *_: os._exit(1))
        server = os.fork()
    except Exception as error:  # noqa: BLE001  # the training says it
        control.sendall(f"{type(error).__name__}: {error}".encode()[:4096])
        return
    if server == 0:
        try:
            serve(control, namespaces, used)
        finally:
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


def serve(control: socket.socket, namespaces: bool, used: int) -> None:
    sandbox.die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors need no one to wait for them
    gc.collect()
    gc.freeze()
    control.sendall(b"ready")
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        try:
            supervisor = os.fork()
        except OSError:  # no more processes: this call's socket closes without an answer
            supervisor = None
        if supervisor == 0:
            control.close()
            supervise(Connection(descriptors[0]), namespaces, used)
        os.close(descriptors[0])


def supervise(connection: Connection, namespaces: bool, used: int) -> NoReturn:
    """One call: the code, what it printed, how it ended."""
    try:
        sandbox.die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        request = json.loads(connection.recv_bytes())
        limits = sandbox.Limits(**request["limits"])
        if namespaces:
            sandbox.new_processes()
        output, far_end = os.pipe()
        child = os.fork()
        if child == 0:
            run(request["code"], far_end, limits, namespaces, used)
        os.close(far_end)
        printed, ending = _read(output, connection, limits)
        os.kill(child, signal.SIGKILL)  # where it ends by itself its own exit code stays
        _, status = os.waitpid(child, 0)
        text = printed.decode(errors="replace")
        if len(text) > limits.max_output:
            text = text[: limits.max_output]
            ending = f"[output cut at {limits.max_output} characters]"
        elif not ending and os.WIFSIGNALED(status):
            ending = f"the process was ended by {signal.Signals(os.WTERMSIG(status)).name}"
        connection.send_bytes("\n".join(filter(None, [text.rstrip("\n"), ending])).encode())
    except (EOFError, OSError):
        pass  # the training is gone, or sees the socket close
    finally:
        os._exit(0)


def _read(output: int, connection: Connection, limits: sandbox.Limits) -> tuple[bytes, str]:
    """Until the code's end, the deadline, or more than may be printed. Returns it and why it ended, where that is not
    the code's doing."""
    printed, deadline = b"", time.monotonic() + limits.timeout_s
    poll = select.poll()
    poll.register(output, select.POLLIN)
    poll.register(connection, select.POLLRDHUP)
    while len(printed) <= 4 * limits.max_output:  # of UTF-8's longest
        ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if not ready:
            return printed, f"TimeoutError: the code ran for more than {limits.timeout_s:g} s"
        if connection.fileno() in ready:
            break
        part = os.read(output, 1 << 16)
        if not part:
            break
        printed += part
    return printed, ""


def run(code: str, output: int, limits: sandbox.Limits, namespaces: bool, used: int) -> NoReturn:
    """Execute `code` as a notebook's cell does: the value of a last expression is printed, an error is its last line."""
    status = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, sandbox.FILES * 4)
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
