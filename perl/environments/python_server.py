"""The processes behind the Python tool, started by python_tool.PythonTool as a fresh interpreter without environment.

    the training ─ watch ─ serve ─┬─ run      one each call
                                  └─ run

`watch` imports the modules, enters the namespaces (perl/environments/sandbox.py) and ends `serve` with the training.
`serve` forks `run` for each socket and pipe that it is sent, kills it when the training shuts the socket down, and says
how it ended. `run` reads the code from the socket, confines itself, and executes it; what it prints goes into the pipe,
past `serve`, so that no call finds anything of another one in its memory. Each dies with the one to its left; in
namespaces the kernel ends all that are below a pid namespace's first process, which `serve` and each `run` are.
"""

from __future__ import annotations

import ast
import contextlib
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
import struct
import sys
import sysconfig
import traceback
import types
from typing import NoReturn

from perl.environments import sandbox
from perl.environments.sandbox import Limits

LENGTH, EXIT_CODE = struct.Struct("!I"), struct.Struct("!i")
"""What goes over a call's socket: before the code, which is JSON; and when it has ended."""
BEGUN = b"b"
"""And from `run`, when it is confined, before it executes anything: code can't say so itself."""
WATCH_S = 0.5
FILE = "<python>"
# fmt: off
STANDARD = (
    "array", "asyncio", "bisect", "bz2", "cmath", "collections", "copy", "ctypes", "dataclasses", "datetime",
    "decimal", "fractions", "functools", "hashlib", "heapq", "itertools", "json", "lzma", "math", "operator",
    "pickle", "re", "sqlite3", "ssl", "statistics", "string", "struct", "tempfile", "threading", "time", "typing",
    "uuid", "zlib",
)
# fmt: on
"""What code imports most; and what needs libraries of the system, which a call does not see."""
PREPARED = {
    "sympy": """
from sympy import *
import sympy.core.random
sympy.core.random.seed(0)
integrate(Symbol('x') ** 2)
solve(Symbol('x') ** 2 - 1)
""",
}
"""Run after a module's import: what a call prints depends on its code alone; tables are made, and libraries that a
first use loads are loaded, before the calls."""
MESSAGE_CHARACTERS = 1000
"""Of an error's text."""


def main(arguments: list[str]) -> None:
    """Args: descriptor of the control socket, process id of the training, level, Limits and modules as JSON."""
    control = socket.socket(fileno=int(arguments[0]))
    parent, namespaces = int(arguments[1]), arguments[2] == "namespaces"
    limits, modules = Limits(**json.loads(arguments[3])), json.loads(arguments[4])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # which a scheduler sends to every process of a job
        signal.signal(number, signal.SIG_IGN)  # the training finishes its step, and ends this one
    os.environ.clear()
    with contextlib.suppress(OSError):
        sandbox.write("/proc/self/oom_score_adj", "1000")  # where memory ends, a call ends, and not the training
    try:
        folders = load(modules)
        with open("/proc/self/statm") as sizes:
            used = resource.getpagesize() * int(sizes.read().split()[0])
        if namespaces:
            sandbox.new_namespaces()
        server = os.fork()
        if server == 0:
            sandbox.die_with_parent()
            gc.collect()
            gc.freeze()
            sandbox.use_huge_pages()
            own, visible = None, ["/dev/null", *folders]
            if namespaces:
                own = os.open("/proc/self/ns/pid", os.O_RDONLY)
                sandbox.new_root(visible, _site_folders())
            else:
                sandbox.restrict_files(visible)
            serve(control, limits, own, used)
            os._exit(0)
    except Exception as error:  # noqa: BLE001  # the training says it
        control.sendall(f"{type(error).__name__}: {error}".encode()[:4096])
        os._exit(1)
    control.close()
    watch(parent, server)


def load(modules: list[str]) -> list[str]:
    """Import what calls are to find imported. Returns the folders that they may read."""
    for name in STANDARD:
        importlib.import_module(name)
    before = set(sys.modules)
    for name in modules:
        importlib.import_module(name)
        if name in PREPARED:
            exec(PREPARED[name], {})
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


def watch(parent: int, server: int) -> None:
    """Until the training is gone, or `serve`, which ends when the training has closed its socket. Not
    PR_SET_PDEATHSIG, which goes with the thread that started this process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while os.getppid() == parent and os.waitpid(server, os.WNOHANG) == (0, 0):
        signal.sigtimedwait([signal.SIGCHLD], WATCH_S)


def serve(control: socket.socket, limits: Limits, own: int | None, used: int) -> None:
    """Until the control socket's other end is closed.

    Args:
        own: descriptor of this process's pid namespace, or None where there are no namespaces.
        used: bytes of address space that this process takes.
    """
    for threads in (False, True):
        sandbox.seccomp_filter(own is not None, threads)  # remembered, and not made in each call
    calls: dict[int, tuple[socket.socket, int]] = {}
    """By the socket's descriptor: socket, process id."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    control.sendall(b"ready")
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in calls:
                poll.unregister(descriptor)
                _end(*calls.pop(descriptor))
                continue
            _, received, _, _ = socket.recv_fds(control, 1, 2)
            if not received:
                return
            connection, output = socket.socket(fileno=received[0]), received[1]
            try:
                if own is not None:
                    sandbox.new_processes(own)
                child = os.fork()
            except OSError:  # no more processes: the socket closes without an answer
                connection.close()
            else:
                if child == 0:
                    run(connection, output, limits, own is not None, used)
                calls[connection.fileno()] = connection, child
                poll.register(connection, select.POLLRDHUP)
            os.close(output)


def _end(connection: socket.socket, child: int) -> None:
    os.kill(child, signal.SIGKILL)  # where it has ended by itself its own exit code stays
    _, status = os.waitpid(child, 0)
    with connection, contextlib.suppress(OSError):  # the training may have gone
        connection.sendall(EXIT_CODE.pack(os.waitstatus_to_exitcode(status)))


def run(connection: socket.socket, output: int, limits: Limits, namespaces: bool, used: int) -> NoReturn:
    """Execute the code that comes over `connection` as a notebook's cell does: the value of a last expression is
    printed, and an error as its last line. Where it can't be, the reason is printed, and BEGUN not sent."""
    status = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            (length,) = LENGTH.unpack(connection.recv(LENGTH.size, socket.MSG_WAITALL))
            code = json.loads(connection.recv(length, socket.MSG_WAITALL))
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # of the new root, where nothing can be changed
            sys.stdout, sys.stderr = (
                io.TextIOWrapper(io.FileIO(descriptor, "w"), "utf-8", "backslashreplace", write_through=True)
                for descriptor in (1, 2)
            )
            sys.argv, sys.path[:] = [""], ["", *sys.path]
            random.seed(0)  # a fork has drawn a seed of its own
            descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            sandbox.confine(limits, namespaces, used)
            connection.sendall(BEGUN)
            os.closerange(3, descriptors)
        except BaseException as error:  # noqa: BLE001  # the policy is told, and the call has failed
            os.write(2, f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS].encode(errors="backslashreplace"))
        else:
            status = _execute(code)
            sys.stdout.flush()
    finally:
        os._exit(status)


def _execute(code: str) -> int:
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        tree = ast.parse(code, FILE)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, FILE, "exec", dont_inherit=True), main_module.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), FILE, "eval", dont_inherit=True), main_module.__dict__)
            if value is not None:
                print(repr(value))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        line = _line(error)
        traceback.clear_frames(error.__traceback__)
        main_module.__dict__.clear()
        parts = traceback.format_exception_only(type(error), error)
        text = (parts[-1] if isinstance(error, SyntaxError) else "".join(parts)).strip()
        sys.stderr.write(text[:MESSAGE_CHARACTERS] + (f" (line {line})" if line else "") + "\n")
        return 1
    return 0


def _line(error: BaseException) -> int | None:
    """Of the code, where the error came up last."""
    if isinstance(error, SyntaxError) and error.filename == FILE:
        return error.lineno
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == FILE]
    return lines[-1] if lines else None
