"""The Python tool: what code gives, what it can't reach, and that nothing of it is left."""

import ctypes
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from perl.base.errors import RankError, UserError
from perl.environments import sandbox
from perl.environments.python_tool import LOST, NOT_BEGUN, READABLE, PythonTool
from perl.environments.sandbox import Limits
from perl.environments.tools import ToolUse
from tests.environments.scripted import Scripted, byte_tokenizer, rows_of, talking, text_completion

ROOT = Path(__file__).parents[2]
LIMITS = Limits(timeout_s=3, memory_mb=256, scratch_mb=4, max_output=1000)
SECRET = "gold-4711"
ESCAPED = "ESCAPED"


def has_namespaces() -> bool:
    ask = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x10000000 | 0x20000))"
    return subprocess.run([sys.executable, "-c", ask]).returncode == 0


pytestmark = pytest.mark.skipif(not has_namespaces(), reason="this kernel or container allows no user namespaces")


class Outside:
    """What a test has that code is not to reach: a file, a variable, sockets, a descriptor, this process."""

    def __init__(self, folder: Path):
        self.file = folder / "gold.jsonl"
        self.file.write_text(SECRET)
        self.descriptor = os.open(self.file, os.O_RDWR)
        os.set_inheritable(self.descriptor, True)
        os.environ["GOLD_TOKEN"] = SECRET
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.abstract.bind(f"\0perl-{os.getpid()}")
        self.abstract.setblocking(False)

    def fill_in(self, code: str) -> str:
        names = {"FILE": repr(str(self.file)), "PID": str(os.getpid()), "SECRET": repr(SECRET[:4]) + f"+{SECRET[4:]!r}"}
        names |= {"PORT": str(self.listener.getsockname()[1]), "DESCRIPTOR": str(self.descriptor)}
        for name, value in names.items():
            code = code.replace(f"${name}", value)
        return code

    def check(self) -> None:
        assert self.file.read_text() == SECRET
        with pytest.raises(BlockingIOError):
            self.abstract.recv(1)


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    outside = Outside(tmp_path_factory.mktemp("outside"))
    yield outside
    del os.environ["GOLD_TOKEN"]
    outside.listener.close()
    outside.abstract.close()
    os.close(outside.descriptor)


@pytest.fixture(scope="module")
def python(outside):
    with PythonTool(LIMITS) as python:
        yield python


def processes(session: int) -> list[int]:
    """Of a server, by generation: it, and all that it has started, have its session."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            parents[int(stat.parent.name)] = int(fields[1])

    def generation(pid: int) -> int:
        return 1 + generation(parents[pid]) if pid in parents else 0

    return sorted(parents, key=generation)


def wait_until(true, seconds=10.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def text_or_error(python, code: str) -> str:
    try:
        return python(code)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(1 + 1)", "2"),
        ("1 + 1", "2"),
        ("x = 3\nx ** 2", "9"),
        ("x = 3", ""),
        ("None", ""),
        ("print('a')\n'b'", "a\n'b'"),
        ("", ""),
        ("1 / 0", "ZeroDivisionError: division by zero (line 1)"),
        ("print('before')\n\ndef f():\n    return {}['k']\nf()", "before\nKeyError: 'k' (line 4)"),
        ("def f(:", "SyntaxError: invalid syntax (line 1)"),
        ("x = '\0'", "SyntaxError: source code string cannot contain null bytes"),
        ("x = '\ud800'\nlen(x)", "UnicodeEncodeError"),
        ("raise ValueError('a\\nb')", "ValueError: a\nb (line 1)"),
        ("import sys; sys.exit(3)", ""),
        ("import sys; sys.exit('bye')", "bye"),
        ("input()", "EOFError: EOF when reading a line (line 1)"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded (line 1)"),
        ("from sympy import *\nx = Symbol('x')\nfactor(x**2 - 1)", "(x - 1)*(x + 1)"),
        ("import math, fractions, itertools\nfractions.Fraction(1, 3) + math.comb(4, 2)", "Fraction(19, 3)"),
        ("print('ü', '\\ud800')", "ü \\ud800"),
        ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nA(1)", "A(x=1)"),
        ("open('a.py', 'w').write('b = 7')\nimport a\na.b", "7"),
        ("import asyncio\nasync def f(): return 5\nasyncio.run(f())", "5"),
        ("import threading\nt = threading.Thread(target=print, args=('in',))\nt.start()\nt.join()", "in"),
        ("def f(x: int): pass\nf.__annotations__", "{'x': <class 'int'>}"),
        (
            "import io, sys\nsys.stdout = io.StringIO()\nprint('kept')\n1 / 0",
            "ZeroDivisionError: division by zero (line 4)",
        ),
        ("import sys\nsys.stdout.close()\n1 / 0", "ZeroDivisionError: division by zero (line 3)"),
        ("import io, sys\nsys.stdout = io.StringIO()\nsys.exit('bye')", "bye"),
        ("import sys\nprint(1)\nprint(2, file=sys.stderr)\nprint(3)", "1\n2\n3"),
        ("import sqlite3\nsqlite3.connect(':memory:').execute('select 1 + 1').fetchone()", "(2,)"),
    ],
)
def test_what_code_gives(python, code, text):
    assert python(code).startswith(text) if text == "UnicodeEncodeError" else python(code) == text


def test_the_same_code_gives_the_same_text(python):
    code = "import random\nprint(random.random(), {'a', 'b', 'c', 'd', 'e'})"
    text = python(code)
    with PythonTool(LIMITS) as other:
        assert [other(code), python(code)] == [text, text]


def test_output_is_cut(python):
    assert python("print('x' * 1001)") == "x" * 1000 + "\n[output cut at 1000 characters]"
    assert python("print('ü' * 1000)") == "ü" * 1000


def test_other_modules_can_be_had(python):
    assert python("import numpy") == "ModuleNotFoundError: No module named 'numpy' (line 1)"
    with PythonTool(LIMITS, modules=("numpy",)) as other:
        assert other("import numpy\nprint(numpy.arange(3) @ numpy.arange(3))") == "5"


CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(number, *arguments) != -1:
        print("ESCAPED", number)
    else:
        print(os.strerror(ctypes.get_errno()))
"""
DENIED = "PermissionError: [Errno 1] Operation not permitted"
DENIED_ERROR = re.escape(DENIED)
DENIED_CALL = "Operation not permitted"
NONE = "FileNotFoundError"
X86 = platform.machine() == "x86_64"


def number(x86: int, arm: int) -> int:
    return x86 if X86 else arm


ESCAPES = {
    # files
    "read the data": ("print('ESCAPED', open($FILE).read())", NONE),
    "read the accounts": ("print('ESCAPED', open('/etc/passwd').read())", NONE),
    "read the sources of the training": ("import perl\nprint('ESCAPED', open(perl.__file__).read())", NONE),
    "walk the file system": (
        "import os\nfor _, _, files in os.walk('/'):\n    if 'gold.jsonl' in files: print('ESCAPED')\nprint('none')",
        "none",
    ),
    "climb out": ("import os\nos.chdir('../' * 50)\nprint(sorted(os.listdir('.'))[:0], os.getcwd())", r"\[\] /$"),
    "a symbolic link": ("import os\nos.symlink($FILE, 'l')\nprint('ESCAPED', open('l').read())", NONE),
    "a hard link": ("import os, sympy\nos.link(sympy.__file__, 'l')\nprint('ESCAPED')", "OSError|PermissionError"),
    "write where Python's files are": (
        "import sympy\nopen(sympy.__file__, 'a')\nprint('ESCAPED')",
        "OSError|Permission",
    ),
    "rename Python's files": ("import os\nos.rename(os.__file__, os.__file__ + '2')\nprint('ESCAPED')", "Error"),
    "write at the root": ("open('/x', 'w')\nprint('ESCAPED')", "OSError|PermissionError"),
    "an inherited descriptor": (
        "import os\nfor i in range(3, 300):\n    try: print('ESCAPED', i, os.fstat(i))\n    except OSError: pass\n"
        "print('none')",
        "^none$",
    ),
    "descriptor 0": (
        "import os\nprint(os.read(0, 9))\nfor change in (lambda: os.write(0, b'x'), lambda: os.fchmod(0, 0o777)):\n"
        "    try: print('ESCAPED', change())\n    except OSError as error: print(error)",
        r"^b''\n\[Errno 9\] Bad file descriptor\n\[Errno 30\] Read-only file system$",
    ),
    "the file of the call before": (
        "import os\nprint('ESCAPED' if os.path.exists('left') else 'none')\nopen('left', 'w').write('x')",
        "^none",
    ),
    "devices": ("import os\nprint(os.listdir('/dev'))", r"^\['null'\]$"),
    "make a device": (
        "import os\nos.mknod('d', 0o60600, os.makedev(8, 0))\nprint('ESCAPED')",
        DENIED_ERROR,
    ),
    "change root": ("import os\nos.mkdir('d')\nos.chroot('d')\nprint('ESCAPED')", DENIED_ERROR),
    "mount": (CALL + f"call({number(165, 40)}, b't', b'/sandbox', b'tmpfs', 0, 0)", DENIED_CALL),
    "unmount": (CALL + f"call({number(166, 39)}, b'/sandbox', 2)", DENIED_CALL),
    "the new calls for mounts": (CALL + "call(428, -100, b'/', 1)\ncall(430, b'tmpfs', 0)", "Function not implemented"),
    "open by handle": (CALL + f"call({number(304, 265)}, 0, 0, 0)", DENIED_CALL),
    # data and secrets in memory
    "the environment": ("import os\nprint('ESCAPED' if $SECRET in str(os.environ) else dict(os.environ))", r"^\{\}$"),
    "the environment in C": (
        "import ctypes\nvalue = ctypes.CDLL(None).getenv(b'GOLD_TOKEN')\nprint('ESCAPED' if value else 'none')",
        "^none$",
    ),
    "the environment that the server was started with": (  # lies behind the arguments, whatever becomes of os.environ
        "import ctypes\nname = ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'program_invocation_name')\n"
        "address, text = name.value, b'x'\n"
        "while text:\n    text = ctypes.string_at(address)\n    address += len(text) + 1\n"
        "    if ($SECRET).encode() in text: print('ESCAPED')\nprint('end')",
        "^end$",
    ),
    "proc": ("print('ESCAPED', open('/proc/self/environ', 'rb').read())", NONE),
    "the training's memory by proc": ("print('ESCAPED', open('/proc/$PID/mem', 'rb'))", NONE),
    "the training's memory by a call": (CALL + f"call({number(310, 270)}, $PID, 0, 0, 0, 0, 0)", DENIED_CALL),
    "ptrace": (CALL + f"call({number(101, 117)}, 16, $PID, 0, 0)", DENIED_CALL),
    "keys": (CALL + f"call({number(250, 219)}, 0, -3, 1)", DENIED_CALL),
    # network and other processes
    "the network": (
        "import socket\nsocket.create_connection(('127.0.0.1', $PORT), 1)\nprint('ESCAPED')",
        DENIED_ERROR,
    ),
    "a raw socket": (CALL + f"call({number(41, 198)}, 17, 3, 0)\ncall({number(41, 198)}, 16, 3, 0)", DENIED_CALL),
    "an abstract socket": (
        "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "print('ESCAPED', a.sendto(b'x', '\\0perl-$PID'))",
        DENIED_ERROR,
    ),
    "an abstract socket from a stream": (
        "import socket\na, b = socket.socketpair()\na.sendto(b'x', '\\0perl-$PID')\n"
        "print('ESCAPED' if not b.recv(1) else 1)",
        "OSError|^1$",
    ),
    "bytes out of band": (
        "import socket\na, b = socket.socketpair()\n"
        "for do in (a.send, lambda _, flags: b.recv(1, flags)):\n"
        "    try: print('ESCAPED', do(b'x', socket.MSG_OOB))\n    except OSError as error: print(error)",
        r"^(\[Errno 1\] Operation not permitted\n?){2}$",
    ),
    "kill the training": ("import os\nos.kill($PID, 9)\nprint('ESCAPED')", DENIED_ERROR),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)\nprint('ESCAPED')", DENIED_ERROR),
    "kill all": ("import os\nos.kill(-1, 9)\nprint('ESCAPED')", DENIED_ERROR),
    "kill the group": ("import os\nos.killpg(0, 9)\nprint('ESCAPED')", DENIED_ERROR),
    "a signal by a descriptor": (
        "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, $PID)\nprint('ESCAPED')",
        DENIED_ERROR,
    ),
    "other processes' numbers": ("import os\nprint(os.getpid(), os.getppid())", "^1 0$"),
    "limits of the training": (
        "import resource\nresource.prlimit($PID, resource.RLIMIT_CPU)\nprint('ESCAPED')",
        "Error",
    ),
    "System V memory": (CALL + f"call({number(29, 194)}, 0, 4096, 0o1600)", DENIED_CALL),
    "POSIX shared memory": (
        "from multiprocessing import shared_memory\nshared_memory.SharedMemory('x', True, 4096)\nprint('ESCAPED')",
        "Error",
    ),
    "a message queue": (CALL + f"call({number(240, 180)}, b'q', 0o102, 0o600, 0)", DENIED_CALL),
    # rights
    "become root": (
        "import os\nprint('ESCAPED' if os.getuid() == 0 else 'no')\nos.setuid(0)",
        DENIED_ERROR,
    ),
    "a program with the setuid bit": (
        "import os\nopen('p', 'w').write('#!/bin/sh')\nos.chmod('p', 0o4755)\nos.execv('./p', ['p'])",
        DENIED_ERROR,
    ),
    "a shell": ("import os, subprocess\nprint('ESCAPED', subprocess.run(['/bin/sh', '-c', 'echo']))", DENIED_ERROR),
    "another Python": (
        "import os, sys\nos.execv(sys.executable, ['python', '-c', 'print(\"ESCAPED\")'])",
        DENIED_ERROR,
    ),
    "a namespace of users": (CALL + f"call({number(272, 97)}, 0x10000000)", DENIED_CALL),
    "a namespace by clone": (CALL + f"call({number(56, 220)}, 0x10000011, 0, 0, 0, 0)", DENIED_CALL),
    "clone3": (CALL + "call(435, ctypes.create_string_buffer(88), 88)", "Function not implemented"),
    "join a namespace": (CALL + f"call({number(308, 268)}, 0, 0)", DENIED_CALL),
    "lift a limit": (
        "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (-1, -1))\nprint('ESCAPED')",
        "ValueError|PermissionError",
    ),
    "rights back": (
        CALL + "libc.prctl(38, 0, 0, 0, 0) == 0 and print('ESCAPED')\nprint(os.strerror(ctypes.get_errno()))",
        DENIED_CALL,
    ),
    "a weaker filter": (CALL + f"call({number(317, 277)}, 1, 0, 0)", DENIED_CALL),
    "bpf": (CALL + f"call({number(321, 280)}, 0, 0, 0)", DENIED_CALL),
    "perf events": (CALL + f"call({number(298, 241)}, 0, 0, -1, -1, 0)", DENIED_CALL),
    "userfaultfd": (CALL + f"call({number(323, 282)}, 1)", DENIED_CALL),
    "io_uring": (CALL + "call(425, 8, ctypes.create_string_buffer(120))", "Function not implemented"),
    "the host's name": (f"import os\nprint('ESCAPED' if os.uname().nodename == {platform.node()!r} else 'no')", "^no$"),
    "priority": ("import os\nos.setpriority(0, 0, -5)\nprint('ESCAPED')", DENIED_ERROR),
    # too much of something
    "a bomb of forks": ("import os\nwhile True: os.fork()", DENIED_ERROR),
    "a bomb of threads": (
        "import threading, time\nthreading.stack_size(32768)\ntry:\n"
        "    for n in range(5000): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "except RuntimeError: pass\nprint('ESCAPED' if n > 64 else 'few')",
        "^few$",
    ),
    "memory at once": ("x = bytearray(1 << 31)\nprint('ESCAPED')", "^MemoryError"),
    "memory by and by": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "^MemoryError"),
    "shared memory": ("import mmap\nx = mmap.mmap(-1, 1 << 30)\nprint('ESCAPED')", "Cannot allocate memory"),
    "a file of memory": ("import os\nos.memfd_create('x')\nprint('ESCAPED')", DENIED_ERROR),
    "a large file": ("f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20))", "OSError"),
    "many files": (
        "n = 0\ntry:\n    while True:\n        open(str(n), 'wb').write(bytes(1 << 20))\n        n += 1\n"
        "except OSError: pass\nprint('ESCAPED' if n > 4 else 'few')",
        "^few$",
    ),
    "many names": ("for n in range(5000): open(str(n), 'w').close()\nprint('ESCAPED')", "No space left"),
    "many descriptors": ("import os\nx = [os.pipe() for _ in range(1000)]\nprint('ESCAPED')", "Too many open files"),
    "descriptors of a thread's own": (  # with as many sockets each, whose memory is nobody's
        CALL + f"call(436, 3, 0xFFFFFFFF, 2)\ncall({number(56, 220)}, 0x10900, 0, 0, 0, 0)",
        rf"^{DENIED_CALL}\n{DENIED_CALL}$",
    ),
    "a lock on Python's files": (
        "import fcntl, os\nfcntl.flock(open(os.__file__), fcntl.LOCK_EX)\nprint('ESCAPED')",
        DENIED_ERROR,
    ),
    "many locks": ("import fcntl\nfcntl.lockf(open('x', 'w'), fcntl.LOCK_EX, 1, 5)\nprint('ESCAPED')", DENIED_ERROR),
    "a flood": ("while True: print('x' * 999)", r"\[output cut at 1000 characters\]$"),
    "a flood of errors": ("import sys\nwhile True: sys.stderr.write('x' * 999)", r"\[output cut at 1000 characters\]$"),
    "a long line": ("import os\nwhile True: os.write(1, b'x' * (1 << 20))", r"\[output cut at 1000 characters\]$"),
    "another family of sockets": (
        "import socket\nfor family in (2, 16, 17, 30):\n"
        "    try: print('ESCAPED', family, socket.socketpair(family, socket.SOCK_STREAM))\n"
        "    except OSError as error: print(error)",
        r"^(\[Errno 1\] Operation not permitted\n?){4}$",
    ),
    "bytes": ("import os\nos.write(1, bytes(range(256)))", "\ufffd"),
    "a long error": ("raise ValueError('x' * 10**7)", r"^ValueError: x{900}"),
    "an error that hangs": (
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
        "TimeoutError: the code ran for more than 3 s$",
    ),
    # to go on or to end otherwise
    "sleep": ("print('a')\nimport time\ntime.sleep(99)", r"^a\nTimeoutError: the code ran for more than 3 s$"),
    "one long operation": ("9 ** 9 ** 9", "TimeoutError|MemoryError"),
    "ignored signals": (
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\n"
        "while True: pass",
        "TimeoutError",
    ),
    "an error caught": (
        "while True:\n    try:\n        1 / 0\n    except BaseException: pass",
        "TimeoutError",
    ),
    "closed output": ("import os\nos.close(1)\nos.close(2)\nwhile True: pass", "ended: Killed$"),
    "a thread that stays": (
        "import threading\ndef f():\n    while True: pass\nthreading.Thread(target=f).start()\nprint('end')",
        "^end$",
    ),
    "a core": ("import os\nos.abort()", "ended: "),
    "an address": ("import ctypes\nctypes.string_at(0)", "ended: Segmentation fault$"),
    "recursion in C": (
        "import sys\nsys.setrecursionlimit(10**9)\nx = ()\nfor _ in range(9**6): x = x,\nhash(x)",
        "ended: Segm",
    ),
    "an end without clean-up": ("import os\nprint('x', flush=True)\nos._exit(0)", "^x$"),
    "other code for the next call": (
        "import builtins, sympy, sys\nsympy.Integer.__add__ = sympy.Integer.__repr__ = lambda *_: 'ESCAPED'\n"
        "builtins.len = max\nsys.setrecursionlimit(50)\n'done'",
        "^'done'$",
    ),
}
if X86:
    ESCAPES["calls of 32 bits"] = (
        "import ctypes, mmap\ncode = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))  # mov eax, getpid; int 0x80; ret\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(code))\n"
        "print('ESCAPED', ctypes.CFUNCTYPE(ctypes.c_int)(address)())",
        "ended: (Bad system call|Segmentation fault)$",
    )


@pytest.mark.parametrize("name", ESCAPES)
def test_escape(python, outside, name):
    code, expected = ESCAPES[name]
    server = python._server.pid
    begin = time.monotonic()
    text = python(outside.fill_in(code))
    assert ESCAPED not in text
    assert SECRET not in text
    assert re.search(expected, text), text
    assert len(text) <= LIMITS.max_output + 100
    assert time.monotonic() - begin < LIMITS.timeout_s + 5
    outside.check()
    assert python("import sympy\nprint(sympy.Integer(2) + 2)") == "4"  # the next call is as if this one had not been
    assert python._server.pid == server
    assert len(processes(server)) == 2


def test_there_are_forty():
    assert len(ESCAPES) >= 40


def test_threads_share_it():
    answers = {}
    with PythonTool(LIMITS) as python:

        def ask(n):
            answers[n] = python("while True: pass" if n == 3 else f"print({n} * 2)")

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    late = "TimeoutError: the code ran for more than 3 s"
    assert answers == {n: late if n == 3 else str(2 * n) for n in range(12)}


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 14),
    reason="this kernel counts the threads of a user, whatever his namespace",
)
def test_each_call_has_its_own_number_of_threads(python):
    code = (
        "import threading, time\nthreading.stack_size(32768)\nbegun, n = time.monotonic(), 0\ntry:\n"
        "    while True:\n        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n        n += 1\n"
        "except RuntimeError: pass\nprint(n, flush=True)\ntime.sleep(max(0, begun + 1.5 - time.monotonic()))"
    )
    answers = []
    calls = [threading.Thread(target=lambda: answers.append(python(code))) for _ in range(2)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert answers == ["63", "63"]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_killed_process_costs_one_call(which, caplog):
    """Of the processes behind a call, in the order in which they were started: watch, serve, run."""
    with PythonTool(LIMITS) as python:
        server, answer = python._server.pid, []
        code = "print('begun')\nimport time\ntime.sleep(2)"
        call = threading.Thread(target=lambda: answer.append(text_or_error(python, code)))
        call.start()
        wait_until(lambda: len(processes(server)) == 3)
        os.kill(processes(server)[which], signal.SIGKILL)
        call.join()
        (said,) = answer  # the kill may come before the print, or before the code
        killed = "the code was ended: Killed", f"{NOT_BEGUN}: its process was ended"
        assert said.removeprefix("begun\n") in (killed if which == 2 else (LOST,))
        assert python("print(1 + 1)") == "2"
        assert ("it is started again" in caplog.text) == (which < 2)
        wait_until(lambda: which == 2 or processes(server) == [])


@pytest.mark.parametrize(("code", "seconds"), [("print(1)", 4.0), ("#" * (1 << 22), 2.0)])
def test_a_server_that_hangs_costs_one_call(monkeypatch, code, seconds):
    """Code that its socket does not hold waits for the server before the call's own time begins."""
    monkeypatch.setattr("perl.environments.python_tool.GRACE_S", 2.0)
    with PythonTool(Limits(timeout_s=2)) as python:
        server = python._server.pid
        os.kill(processes(server)[1], signal.SIGSTOP)
        begin = time.monotonic()
        assert text_or_error(python, code) == LOST
        assert time.monotonic() - begin > seconds  # the times are over: it hung, and had not ended
        assert python("print(1 + 1)") == "2"
        wait_until(lambda: processes(server) == [])


def test_the_thread_that_started_the_server_may_end():
    """The kernel's signal for a parent's death goes by threads."""
    made = []
    thread = threading.Thread(target=lambda: made.append(PythonTool(LIMITS)))
    thread.start()
    thread.join()
    with made[0] as python:
        time.sleep(1)
        assert python("print(1 + 1)") == "2"


def test_nothing_is_left_of_a_training_that_is_killed():
    """With a child of it that has its end of every pipe."""
    script = (
        "import os, threading, time\nfrom perl.environments.python_tool import PythonTool\n"
        "python = PythonTool()\n"
        "if os.fork() == 0: time.sleep(10); os._exit(0)\n"
        "threading.Thread(target=python, args=('while True: pass',)).start()\n"
        "time.sleep(0.5); print(python._server.pid, flush=True); time.sleep(60)"
    )
    training = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    server = int(training.stdout.readline())
    assert len(processes(server)) == 3
    training.kill()
    training.wait()
    wait_until(lambda: processes(server) == [])
    training.stdout.close()


def test_a_signal_to_all_processes_of_a_job_ends_no_call():
    """The training makes its step to the end, with what the call gives."""
    with PythonTool(LIMITS) as python:
        server, answer = python._server.pid, []
        code = "import time; time.sleep(2); print(6 * 7)"
        call = threading.Thread(target=lambda: answer.append(text_or_error(python, code)))
        call.start()
        wait_until(lambda: len(processes(server)) == 3)
        for process in processes(server):
            os.kill(process, signal.SIGTERM)
        call.join()
        assert answer == ["42"]


def test_close_ends_calls():
    python = PythonTool(LIMITS)
    server, answer = python._server.pid, []
    call = threading.Thread(target=lambda: answer.append(text_or_error(python, "while True: pass")))
    call.start()
    wait_until(lambda: len(processes(server)) == 3)
    python.close()
    call.join()
    assert (answer, processes(server)) == ([LOST], [])
    with pytest.raises(RankError, match="closed"):
        python("print(1)")


def test_a_fork_has_its_own_server():
    with PythonTool(LIMITS, modules=()) as python:
        child = os.fork()
        if child == 0:
            os._exit(0 if python("print(1 + 1)") == "2" else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert python("print(1 + 1)") == "2"


LANDLOCK = 444
"""landlock_create_ruleset"""
WITHOUT_NAMESPACES = f"""
import struct, sys
from perl.environments import sandbox
from perl.environments.python_tool import PythonTool
from perl.base.errors import report_errors
refuse, allow = (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)
flags, landlock = (int(text, 0) & 0xFFFFFFFF for text in sys.argv[2:])
instructions = [(0x20, 0, 0, 0), (0x15, 0, 1, landlock), refuse, (0x15, 1, 0, {number(272, 97)}), allow]
instructions += [(0x20, 0, 0, 16), (0x54, 0, 0, flags), (0x15, 0, 1, 0), allow, refuse]  # any of unshare's flags
sandbox.install_filter(b"".join(struct.pack("=HBBI", *i) for i in instructions))
import logging
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
with report_errors(), PythonTool(required=sys.argv[1], modules=()) as python:
    for code in sys.stdin.read().split("---"):
        print(repr(python(code)))
"""


def without_namespaces(required: str, *codes: str, flags=0xFFFFFFFF, landlock=True) -> subprocess.CompletedProcess[str]:
    """With a filter, as containers have it: unshare with one of the flags is refused, and perhaps Landlock."""
    command = [sys.executable, "-c", WITHOUT_NAMESPACES, required, hex(flags), str(-1 if landlock else LANDLOCK)]
    return subprocess.run(command, input="---".join(codes), cwd=ROOT, capture_output=True, text=True)


def test_without_namespaces_it_is_refused():
    run = without_namespaces("namespaces")
    assert run.returncode == 2
    assert run.stderr == (
        "error: the Python tool can't be isolated by namespaces here: PermissionError: [Errno 1] Operation not"
        " permitted: 'unshare'; allow them (in a container: --security-opt seccomp=unconfined, or --cap-add SYS_ADMIN),"
        " or require 'limits', where on older kernels code can read the training's files\n"
    )


@pytest.mark.parametrize("landlock", [True, False])
def test_what_holds_without_namespaces(tmp_path, landlock):
    if landlock and ctypes.CDLL(None).syscall(LANDLOCK, None, 0, 1) < 1:
        pytest.skip("this kernel has no Landlock")
    file = tmp_path / "file"
    file.write_text("read")
    run = without_namespaces(
        "limits",
        f"print(open({str(file)!r}).read())",
        "print(b'gold' in open(f'/proc/{__import__(\"os\").getppid()}/environ', 'rb').read())",
        f"open({str(file)!r}, 'w')",
        f"import os; os.remove({str(file)!r})",
        "import os; os.mkdir('/tmp/perl-escape')",
        "import os; os.fork()",
        "import socket; socket.socket()",
        "import os; os.kill(os.getppid(), 9)",
        "x = bytearray(1 << 32)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "import fractions, colorsys; print(1 + 1)",
        landlock=landlock,
    )
    refused = "PermissionError: [Errno 13] Permission denied"
    assert run.stderr == ""
    said, read, environment, *others = run.stdout.splitlines()
    assert said == (
        "Python tool: limits and a filter of system calls: no network, no processes, no writing, "
        + ("no files but Python's" if landlock else "but files can be read")
        + " (no namespaces: PermissionError: [Errno 1] Operation not permitted: 'unshare')"
    )
    assert read == (repr(f"{refused}: {str(file)!r} (line 1)") if landlock else "'read'")
    # A process that has more rights than the call, as root's has, is not to be looked into.
    assert refused in environment if landlock or os.geteuid() == 0 else environment == "'False'"
    assert others == [
        repr(f"{DENIED}: {str(file)!r} (line 1)"),
        repr(f"{DENIED}: {str(file)!r} (line 1)"),
        repr(f"{DENIED}: '/tmp/perl-escape' (line 1)"),
        *[repr(f"{DENIED} (line 1)")] * 3,
        "'MemoryError (line 1)'",
        "'ValueError: not allowed to raise maximum limit (line 1)'",
        "'2'",
    ]
    assert file.read_text() == "read"


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone has namespaces without one of users")
def test_root_needs_no_namespace_of_users():
    code = "import os\nprint(os.getpid(), os.getuid(), os.listdir('/dev'))\nos.setuid(0)"
    run = without_namespaces("namespaces", code, flags=0x10000000)
    said, text = run.stdout.splitlines()
    assert said == "Python tool: namespaces of processes, files and network; limits; a filter of system calls"
    assert (run.stderr, text) == ("", repr(f"1 65534 ['null']\n{DENIED} (line 3)"))


@pytest.mark.parametrize("mapped", ["0", "1000"])
def test_a_user_without_rights_has_namespaces(mapped):
    """In a user namespace that maps one user: one called root, and another one."""
    script = (
        "import ctypes, os, sys\nuid, gid = os.getuid(), os.getgid()\n"
        "assert ctypes.CDLL(None).unshare(0x10000000) == 0\n"
        f"maps = dict(setgroups='deny', uid_map=f'{mapped} {{uid}} 1', gid_map=f'{mapped} {{gid}} 1')\n"
        "for name, text in maps.items(): open(f'/proc/self/{name}', 'w').write(text)\n"
        "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    )
    use = (
        "from perl.environments.python_tool import PythonTool\n"
        "with PythonTool(modules=()) as python:\n"
        "    print(python('import os\\nprint(os.getuid(), os.listdir(\"/dev\"))\\n1 / 0'))"
    )
    run = subprocess.run([sys.executable, "-c", script, use], cwd=ROOT, capture_output=True, text=True)
    assert (run.stderr, run.stdout) == ("", "65534 ['null']\nZeroDivisionError: division by zero (line 3)\n")


def test_python_may_lie_below_tmp(tmp_path):
    """Where the new root is put together, and where code looks for a folder of its own."""
    (tmp_path / "mine.py").write_text("import mine_too\nanswer = 42")
    (tmp_path / "mine_too.py").write_text("")
    (tmp_path / "other.py").write_text("")
    use = (
        "from perl.environments.python_tool import PythonTool\n"
        "with PythonTool(modules=('mine',)) as python:\n"
        "    print(python('import importlib, mine, mine_too, tempfile\\nimportlib.reload(mine)\\nmine.answer'))\n"
        "    print(python('import tempfile\\ntempfile.TemporaryFile()\\nimport other'))"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    run = subprocess.run([sys.executable, "-c", use], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert (run.stderr, run.stdout) == ("", "42\nModuleNotFoundError: No module named 'other' (line 3)\n")


def test_code_that_was_never_run_is_no_empty_result():
    """A memory of half a megabyte is shifted before anything runs: the probe says so."""
    limits = Limits(memory_mb=512.5)  # type: ignore[arg-type]
    reason = r"unsupported operand type\(s\) for <<: 'float' and 'int'"
    for required in ("limits", "namespaces"):
        with pytest.raises(UserError, match=f"{NOT_BEGUN}: TypeError: {reason}"):
            PythonTool(limits, required, modules=())


def test_a_call_that_is_not_run_has_failed():
    """Its folder in memory can't be made: the probe's could."""
    with PythonTool(LIMITS, modules=()) as python:
        tools = ToolUse({"python": python})
        tools.reset({"prompt": []})
        python.limits = replace(LIMITS, scratch_mb=-1)
        with python._lock:
            python._end()
        call = {"type": "function", "function": {"name": "python", "arguments": {"code": "print(1)"}}}
        shown = tools.step({"role": "assistant", "content": "", "tool_calls": [call]})
    assert shown is not None
    assert re.match(rf"{{'error': \"{NOT_BEGUN}: OSError: .*'mount tmpfs", shown[0]["content"])
    assert tools.outcomes == [True]


def test_a_sandbox_that_can_not_be_had_any_more_ends_the_run():
    """A model that is told of it has nothing to change, and no call would be run any more."""
    tokenizer = byte_tokenizer("qwen2_5")
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'
    engine = Scripted(lambda prompt: text_completion(tokenizer, call, "<|im_end|>"))
    with PythonTool(LIMITS, modules=()) as sandboxed:

        def python(code: str) -> str:
            """Run Python code.

            Args:
                code: The code.
            """
            return sandboxed(code)

        sandboxed._modules = ("gone",)
        with sandboxed._lock:
            sandboxed._end()
        conversations = talking(tokenizer, python)
        with pytest.raises(RankError, match=r"^the Python tool can't be started again: ModuleNotFoundError: .*'gone'$"):
            list(conversations.run(rows_of(conversations, 1), engine))


def test_python_may_find_its_library_by_the_environment(monkeypatch, tmp_path):
    """CANN's images have such a Python. A call is not shown where; without it nothing is said of namespaces."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$LD_LIBRARY_PATH" = /its/own ] || exit 127\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/its/own")
    with PythonTool(required="limits") as tool:
        shown = tool(
            "import ctypes, os\nprint(dict(os.environ), ctypes.CDLL(None).getenv(b'LD_LIBRARY_PATH'))\n"
            "try: print(open('/proc/self/environ').read())\nexcept OSError: print('no file')"
        )
        assert shown.splitlines()[0] == "{} 0"
        assert "/its/own" not in shown or READABLE in tool.isolation
    monkeypatch.delenv("LD_LIBRARY_PATH")
    with pytest.raises(UserError) as error:
        PythonTool()
    assert str(error.value) == f"the Python tool can't be started: {python} ended at once, with exit code 127"


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match=r"memory_mb is 0; write a number above 0"):
        PythonTool(Limits(memory_mb=0))
    with pytest.raises(UserError, match=r"is to import sumpy, which is not installed for"):
        PythonTool(modules=("sumpy",))


@pytest.mark.parametrize(
    ("column", "header"),
    [(1, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (2, "/usr/include/asm-generic/unistd.h")],
)
def test_the_numbers_of_system_calls_are_the_kernels(column, header):
    """AArch64 has the generic ones."""
    if not Path(header).exists():
        pytest.skip(f"no {header} here")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\n", Path(header).read_text())
    known = {"newfstatat" if name == "fstatat" else name: number for name, number in found}
    for entry in (sandbox._COMPUTE + "," + sandbox._WRITE).split(","):
        words = entry.split()
        assert words[column] == known.get(words[0], "-")
    assert str(list(sandbox._PIVOT_ROOT.values())[column - 1]) == known["pivot_root"]
