"""What the kernel does to hold code that nobody has read. By ctypes, without root.

Two steps. The server of perl/environments/python_server.py takes the first once (`new_namespaces`, `new_root`): users,
network and host name of its own, and a root folder that has Python's files and nothing else. Each call takes the second
in a process of its own (`new_processes`, `confine`): a process table, a folder in memory that vanishes with it, a user
without rights, limits, and a filter of system calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import resource
import signal
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NOBODY = 65534
SCRATCH = "/sandbox"
"""A call's folder, in its own root; Python's files may lie below any other one."""
_MOUNT_POINT = "/tmp"
"""Any folder that each machine has: the new root lies here until it is the root."""
FILES = 64
"""Descriptors that a call may have open."""
THREADS = 64
ERROR_ROOM = 16 << 20
"""Bytes that a call which has run out of memory may take on top, to say so."""

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_CLONE_NEWCGROUP, _CLONE_THREAD, _CLONE_FILES = 0x2000000, 0x10000, 0x400
_CLOSE_RANGE_CLOEXEC = 4
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_MS_REC, _MS_PRIVATE, _MNT_DETACH = 1 << 14, 1 << 18, 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_ALL, _LANDLOCK_READ_FILE, _LANDLOCK_READ_DIR = (1 << 13) - 1, 1 << 2, 1 << 3
"""Of its first version."""
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """What one call may use. `timeout_s`: seconds by the clock; `memory_mb`: on top of what Python and the modules
    take; `scratch_mb`: files in its folder; `max_output`: characters of what it prints."""

    timeout_s: float = 5.0
    memory_mb: int = 512
    scratch_mb: int = 16
    max_output: int = 4000


_COMPUTE = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, close 3 57, close_range 436 436,
lseek 8 62, dup 32 23, dup2 33 -, dup3 292 24, fstat 5 80, newfstatat 262 79, statx 332 291, stat 4 -, lstat 6 -,
access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79
17, chdir 80 49, fchdir 81 50, statfs 137 43, fstatfs 138 44, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73,
select 23 -, pselect6 270 72, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2
290 19, mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, madvise 28 233, brk 12 214, msync 26 227,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133,
sigaltstack 131 132, futex 202 98, sched_yield 24 124, sched_getaffinity 204 123, getpid 39 172, getppid 110 173,
gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158, getpgid 121
155, getpgrp 111 -, getsid 124 156, getrandom 318 278, gettimeofday 96 169, clock_gettime 228 113, clock_getres 229
114, clock_nanosleep 230 115, nanosleep 35 101, time 201 -, times 100 153, getrusage 98 165, getrlimit 97 163,
sysinfo 99 179, uname 63 160, umask 95 166, alarm 37 -, getitimer 36 102, setitimer 38 103, pause 34 -, exit 60 93,
exit_group 231 94, wait4 61 260, waitid 247 95, set_robust_list 273 99, set_tid_address 218 96, rseq 334 293,
restart_syscall 219 128, fsync 74 82, fdatasync 75 83, sendto 44 206, recvfrom 45
207, shutdown 48 210, getsockopt 55 209, getpeername 52 205, getsockname 51 204, openat 257 56, fcntl 72 25, ioctl
16 29, prlimit64 302 261, clone 56 220, socketpair 53 199
"""
"""What CPython needs to compute: name, number on x86-64, number on AArch64 (- where it has none). What stands in
neither list is refused, so that a system call of tomorrow's kernel is too."""
_WRITE = """
mkdir 83 -, mkdirat 258 34, unlink 87 -, unlinkat 263 35, rmdir 84 -, rename 82 -, renameat 264 38, renameat2 316
276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, chmod 90 -, fchmod 91 52, fchmodat 268 53, truncate
76 45, ftruncate 77 46, utimensat 280 88, sendfile 40 71
"""
"""Of a call that has a folder of its own."""
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> AUDIT_ARCH of linux/audit.h, column of the lists."""
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_UNIFIED = 424
"""From here on the numbers are the same everywhere, and glibc does without a call where the kernel has none."""
_EPERM, _ENOSYS = 0x50001, 0x50026
_ALLOW, _KILL = 0x7FFF0000, 0x80000000

Rule = tuple[int, int, tuple[int, ...]]
"""(argument, mask, values): the argument's masked lower half has to be one of the values."""


def _rules(writing: bool, threads: bool) -> dict[str, list[Rule]]:
    namespaces = (
        _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWCGROUP
    )
    thread = _CLONE_THREAD | _CLONE_FILES
    no_mask = 0xFFFFFFFF
    opens_for_writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
    stream = [1 | flags for flags in (0, 0o4000, 0o2000000, 0o2004000)]  # SOCK_STREAM: a datagram can be sent anywhere
    return {
        "prlimit64": [(0, no_mask, (0,))],  # its own
        # Threads of this process; no new one, so nothing outlives it. With its descriptors: a table of its own for each
        # thread would be FILES more, and what their sockets hold no limit of memory counts.
        "clone": [(0, thread | namespaces, (thread,) if threads else ())],
        "close_range": [(2, no_mask, (0, _CLOSE_RANGE_CLOEXEC))],
        "openat": [(2, 0 if writing else opens_for_writing, (0,))],
        # Duplicates, flags, a pipe's size; not whom a descriptor sends signals to, nor locks, which nothing counts.
        "fcntl": [(1, no_mask, (0, 1, 2, 3, 4, 1030, 1032))],
        # TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
        "ioctl": [(1, no_mask, (0x5401, 0x541B, 0x5421, 0x5450, 0x5451))],
        "socketpair": [(0, no_mask, (socket.AF_UNIX,)), (1, no_mask, tuple(stream))],
        # Kernels of 2024 could be taken over by it.
        "sendto": [(3, socket.MSG_OOB, (0,))],
        "recvfrom": [(3, socket.MSG_OOB, (0,))],
    }


@functools.cache
def seccomp_filter(writing: bool, threads: bool) -> bytes:
    """A program of classic BPF (struct sock_filter: code, jump if true, jump if false, constant): EPERM for what it
    does not allow, ENOSYS for what glibc has another way for.

    Raises:
        OSError: no numbers for this machine.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(f"no filter of system calls for {platform.machine()}")
    audit, column = _ARCHITECTURES[platform.machine()]
    load, and_, equal, at_least, return_ = 0x20, 0x54, 0x15, 0x35, 0x06
    program = [(load, 0, 0, 4), (equal, 1, 0, audit), (return_, 0, 0, _KILL), (load, 0, 0, 0)]
    rules = _rules(writing, threads)
    for entry in (_COMPUTE + ("," + _WRITE if writing else "")).split(","):
        name, *numbers = entry.split()
        if numbers[column] == "-":
            continue
        number = int(numbers[column])
        if name not in rules:
            program += [(equal, 0, 1, number), (return_, 0, 0, _ALLOW)]
            continue
        check = []
        for argument, mask, values in rules[name]:
            check += [(load, 0, 0, 16 + 8 * argument), (and_, 0, 0, mask)]
            check += [(equal, len(values) - at, 0, value) for at, value in enumerate(values)]
            check.append((return_, 0, 0, _EPERM))
        check.append((return_, 0, 0, _ALLOW))
        program += [(equal, 0, len(check), number), *check]
    program += [(at_least, 0, 1, _UNIFIED), (return_, 0, 0, _ENOSYS), (return_, 0, 0, _EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_filter(program: bytes) -> None:
    _checked("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    length = len(program) // 8
    _checked("prctl", _PR_SET_SECCOMP, 2, ctypes.byref(_Program(length, program)), 0, 0)


def _checked(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        shown = " ".join(a.decode(errors="replace") for a in arguments if isinstance(a, bytes))
        raise OSError(number, os.strerror(number), " ".join([name, *filter(None, [shown])]))


def die_with_parent() -> None:
    """SIGKILL from the kernel when the parent ends. To be asked for again after a change of user, which clears it."""
    _checked("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def use_huge_pages() -> None:
    """Put this process's memory into pages of 2 MiB, where the kernel has them: a fork then copies a table of dozens
    of entries and not one of ten thousands."""
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    for region in regions:
        if region[1] == "rw-p" and region[4] == "0" and region[5:] in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in region[0].split("-"))
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


def new_namespaces() -> None:
    """Move this process to namespaces of users, mounts, network, IPC and host name; its next child is the first
    process of a pid namespace. Root may go without one of users, which some hosts have switched off.

    Raises:
        OSError: this user may not do so here; the process is then to be ended, as half of it may be done.
    """
    uid, gid = os.geteuid(), os.getegid()
    new = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    if uid == 0:
        try:
            if _unshare_as_root(new | _CLONE_NEWUSER):
                return
        except OSError:
            _checked("unshare", new)
            return
    else:
        _checked("unshare", new | _CLONE_NEWUSER)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{uid} {uid} 1")
    write("/proc/self/gid_map", f"{gid} {gid} 1")


def _unshare_as_root(new: int) -> bool:
    """unshare, and whether NOBODY is then mapped beside root, whose processes the kernel does not count. The maps are
    written by a process that stays outside."""
    ready_out, ready_in = os.pipe()
    parent = os.getpid()
    helper = os.fork()
    if helper == 0:
        done = 1
        try:
            os.close(ready_in)
            if os.read(ready_out, 1):
                for ids in ("uid_map", "gid_map"):
                    write(f"/proc/{parent}/{ids}", f"0 0 1\n{NOBODY} {NOBODY} 1")
                done = 0
        finally:
            os._exit(done)
    os.close(ready_out)
    try:
        _checked("unshare", new)
        os.write(ready_in, b"1")
    finally:
        os.close(ready_in)
        _, status = os.waitpid(helper, 0)
    return status == 0


def write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    given = [None if text is None else text.encode() for text in (source, target, kind)]
    _checked("mount", *given, ctypes.c_ulong(flags), None if options is None else options.encode())


def new_root(visible: Iterable[str], hidden: Iterable[str]) -> None:
    """Give this mount namespace a root that has the files and folders `visible`, read-only, under their own names, and
    an empty folder SCRATCH.

    Args:
        visible: absolute.
        hidden: folders below visible ones that are empty in the new root, but for what is visible in them.
    """
    socket.sethostname("sandbox")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in visible}  # before anything lies on top of them
    top = _MOUNT_POINT
    _mount("tmpfs", top, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    mounted = [top]
    for path in sorted({*sources, *hidden}, key=lambda path: path.count("/")):
        target = top + path
        if path in sources:
            is_folder = os.path.isdir(f"/proc/self/fd/{sources[path]}")
            if not os.path.lexists(target):
                os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
                if not is_folder:
                    os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
            _mount(f"/proc/self/fd/{sources[path]}", target, None, _MS_BIND)
            os.close(sources[path])
        elif os.path.isdir(target):
            _mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
        else:
            continue
        mounted.append(target)
    os.makedirs(top + SCRATCH)
    for target in mounted:
        kept = os.statvfs(target).f_flag & (_MS_NODEV | _MS_NOEXEC)  # a user may not take them away
        _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | kept)
    os.chdir(top)
    _checked("syscall", _PIVOT_ROOT[platform.machine()], b".", b".")
    _checked("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def restrict_files(visible: Iterable[str]) -> None:
    """In the place of `new_root`, without namespaces: let this process and its children read what is `visible` and
    nothing else, by Landlock. Does nothing where the kernel is older than 5.13 or has it switched off."""
    if _libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1) < 1:  # its version
        return
    ruleset = _libc.syscall(_LANDLOCK_CREATE_RULESET, struct.pack("=Q", _LANDLOCK_ALL), 8, 0)
    for path in visible:
        descriptor = os.open(path, os.O_PATH)
        allowed = _LANDLOCK_READ_FILE | (_LANDLOCK_READ_DIR if os.path.isdir(path) else 0)
        _checked("syscall", _LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    _checked("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _checked("syscall", _LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def new_processes(own: int) -> None:
    """The next child is the first process of a pid namespace: its end is the end of all that it starts.

    Args:
        own: descriptor of this process's pid namespace. The kernel makes a second one only for a process whose
            children would be in its own.
    """
    _checked("setns", own, _CLONE_NEWPID)
    _checked("unshare", _CLONE_NEWPID)


def confine(limits: Limits, namespaces: bool, used: int) -> None:
    """The last step before unknown code runs in this process: what follows can't be undone.

    Args:
        used: bytes of address space that the process has already.

    Raises:
        OSError: something was refused; the code must not run.
    """
    threads = os.getuid() != 0  # of root no kernel counts them
    if namespaces:
        _checked("unshare", _CLONE_NEWNS)
        options = f"size={limits.scratch_mb}m,nr_inodes=1k"
        _mount("tmpfs", SCRATCH, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)
        os.chdir(SCRATCH)
        os.umask(0o077)
        if os.getuid() == 0:
            with contextlib.suppress(OSError):  # not mapped: a root without rights, and without threads
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
        threads = os.getuid() != 0
        # Threads are counted by user and namespace of users: without one of its own a call has those that others leave.
        # RLIMIT_NPROC is still the server's: what it is now holds for all namespaces of that user.
        with contextlib.suppress(OSError):  # none here, not even the server's
            _checked("unshare", _CLONE_NEWUSER)
    _drop_capabilities()
    die_with_parent()
    _checked("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    seconds = int(limits.timeout_s) + 1
    memory = used + (limits.memory_mb << 20)
    file_size = limits.scratch_mb << 20 if namespaces else 0
    bounds = {
        resource.RLIMIT_AS: (memory, memory + ERROR_ROOM),
        resource.RLIMIT_CPU: (seconds, seconds),
        resource.RLIMIT_FSIZE: (file_size, file_size),
        resource.RLIMIT_NOFILE: (FILES, FILES),
        resource.RLIMIT_NPROC: (THREADS, THREADS),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    for kind, (soft, hard) in bounds.items():
        _, given = resource.getrlimit(kind)
        if given != resource.RLIM_INFINITY:
            soft, hard = min(soft, given), min(hard, given)
        resource.setrlimit(kind, (soft, hard))
    install_filter(seccomp_filter(namespaces, threads))


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", 0x20080522, 0)  # version 3, this process
    _checked("capset", header, bytes(24))
