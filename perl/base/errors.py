"""Errors that a user can act on: one line, no traceback.

Every entry point runs its body under `report_errors()`: a UserError is printed as one line on stderr and the
process ends with exit code 2. Anything else is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import faulthandler
import functools
import importlib.util
import logging
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from perl.base.redact import hide, hide_secrets_in_tracebacks

log = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_USER_ERROR = 2
EXIT_NOT_ALL_GENERATED = 3
"""Of perl/eval.py: scored, but some rows have an error in the place of a completion and count as wrong."""
EXIT_WHILE_RUNNING = 1
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE, as any program that writes into `| head`."""
HELD_BY_LAUNCHER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
ONE_SIGNAL_S = 1.0
"""Signals within this time are one: a scheduler or a launcher passes on what the terminal has already sent to all."""
RANK_0_SPEAKS_S = 30.0
RANKS_APART_S = 1.0
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "Broken pipe",
    "Socket closed",
    "remote process exit",
    "Getting socket times out",
    "The wait execution of the Notify register times out",
    "An error CQE occurred during operator execution",
    "EI0002",
    "EI0006",
    "EI0013",
    "hccl fftsplus task timeout",
)
"""Parts of what gloo, torch's store, NCCL and HCCL raise in the others when a process has ended. HCCL's first three
are the texts of the codes below them, which differ between versions of CANN. (ERR02200 says that any call of HCCL has
failed, the first one too, as where a port is taken.)"""
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Escape sequences begin with one; others turn the direction of what follows, and no encoding has the last ones."""


def one_line(text: str) -> str:
    """A text from elsewhere as a line for a terminal: control characters as escapes."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], " ".join(text.split()))


class UserError(Exception):
    """What is wrong, where, and what to write instead, in one line."""

    exit_code = EXIT_USER_ERROR

    def __str__(self) -> str:
        return one_line(super().__str__())


class RankError(UserError):
    """What one process meets on its own, such as a full device, and therefore has to say itself; exit code 1."""

    exit_code = 1


class RunError(UserError):
    """What ends a training that is under way, on every process alike; exit code 1."""

    exit_code = 1


class Stopped(BaseException):
    """A signal ends the run in good order; exit code 128 and the signal's number, as a shell has it (SIGTERM: 143).
    Like KeyboardInterrupt it passes through those that catch any Exception."""

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.exit_code = 128 + signum


@functools.cache
def say_once(message: str, level: int = logging.WARNING) -> None:
    """Log it once a process. For fallbacks: a rollout is made many times a run."""
    log.log(level, "%s", message)


def lost_a_peer(error: Exception) -> bool:
    """Whether a collective of one of several processes has failed because another process has ended."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and isinstance(error, RuntimeError) and any(part in str(error) for part in LOST_PEER)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The entry of `known` most similar to `name`, or None when nothing is similar (difflib ratio below 0.6).
    Upper and lower case are the same."""
    entries = list(known)
    lower = [entry.lower() for entry in entries]
    matches = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return entries[lower.index(matches[0])] if matches else None


def lookup(table: Mapping[str, T], name: str, kind: str, flag: str = "") -> T:
    """Return `table[name]`, or raise a UserError that lists what exists and names the nearest entry.

    Args:
        table: a registry, such as TASKS.
        name: what the user wrote.
        kind: what an entry is, in the singular ("task", "reward").
        flag: where the user wrote it ("--config.reward.functions"), named in the message when given.
    """
    if name in table:
        return table[name]
    guess = nearest(name, table)
    where = f"{flag}: " if flag else ""
    meant = f"did you mean {guess!r}? " if guess else ""
    raise UserError(f"{where}unknown {kind} {name!r}; {meant}known: {', '.join(sorted(table))}")


EXTRAS = {
    "deepspeed": "deepspeed",
    "hydra": "verl",
    "omegaconf": "verl",
    "tree_sitter": "verl",
    "tree_sitter_bash": "verl",
    "wandb": "logging",
    "tensorboard": "logging",
    "ray": "ray",
    "reasoning_gym": "reasoning_gym",
}
"""Package -> the extra of pyproject.toml that brings it."""


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Turn a UserError or Stopped into one line on stderr and its exit code, and Ctrl-C into exit code 130.

    A package that is not installed for this Python is one line too.

    Of several launched processes only rank 0 prints. The others wait for the launcher to end them: the first to exit
    would have rank 0 killed before it has said what is wrong; one that nobody ends speaks after all. A RankError is
    printed by the process that meets it, and later by a higher rank, so that the launcher ends those that meet it at
    the same time. A process that has lost another one waits for the launcher too: the other's error is the one to see,
    and its exit code that of the run. Where the reader of stdout has gone (`| head`) the process ends quietly, as with
    SIGPIPE. What is not caught keeps its traceback, without secrets; where native code crashes, stderr has the Python
    stack of each thread.
    """
    for name in ("stdout", "stderr"):  # None where it is closed (`>&-`)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    hide_secrets_in_tracebacks()
    if not faulthandler.is_enabled():
        faulthandler.enable(2)
    try:
        try:
            yield
        except SystemExit as end:
            if isinstance(end.__context__, BrokenPipeError):  # rich's consoles make an exit with code 1 of it
                sys.exit(EXIT_BROKEN_PIPE)
            sys.stdout.flush()  # here, where a closed pipe can still be dealt with
            raise
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package == "perl" or importlib.util.find_spec(package) is not None:
            raise
        project = f"'.[{EXTRAS[package]}]'" if package in EXTRAS else "."
        print(
            f"error: {package} is not installed for {sys.executable}; run make quickstart once or"
            f" pip install -e {project}, and"
            " use that environment's Python (the launch script takes PYTHON=/path/to/python)",
            file=sys.stderr,
        )
        sys.exit(EXIT_USER_ERROR)
    except UserError as error:
        if isinstance(error, RankError):
            time.sleep(int(os.environ.get("LOCAL_RANK", "0")) * RANKS_APART_S)
        elif os.environ.get("RANK", "0") != "0":
            time.sleep(RANK_0_SPEAKS_S)
        # One write: unbuffered, print writes the newline apart, and the ranks share a terminal.
        sys.stderr.write(f"error: {hide(str(error))}\n")
        sys.stderr.flush()
        sys.exit(error.exit_code)
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"stopped: {hide(str(stopped))}\n")
            sys.stderr.flush()
        sys.exit(stopped.exit_code)
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        sys.exit(EXIT_BROKEN_PIPE)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            sys.stderr.write(f"error: {error.filename!s:.60}…: too long for the name of a file; write a shorter one\n")
            sys.exit(EXIT_USER_ERROR)
        if (missing := _missing_of_cann(error)) is not None:
            sys.stderr.write(f"error: {missing}\n")
            sys.exit(EXIT_USER_ERROR)
        if lost_a_peer(error):
            time.sleep(RANK_0_SPEAKS_S)
        if (refused := _disk_refuses(error)) is None:
            raise
        sys.stderr.write(f"error: {hide(refused)}\n")
        sys.stderr.flush()
        sys.exit(EXIT_WHILE_RUNNING)


@contextlib.contextmanager
def hear_signals() -> Iterator[None]:
    """Inside, signals come through that a training process of the launch script was started with, held back: its
    launcher has to outlive them (perl.tools.supervise). One that comes while the process ends changes nothing any
    more, whichever thread it is given to."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BY_LAUNCHER)
    try:
        yield
    finally:
        for number in before.intersection(HELD_BY_LAUNCHER):
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def stopped_by_signals(message: str) -> Iterator[None]:
    """SIGTERM, as a scheduler sends it, and Ctrl-C end the work inside with one line: what cleans up behind it does
    so."""

    until = 0.0

    def stopped(number: int) -> Stopped:
        return Stopped(f"{signal.Signals(number).name}; {message}", number)

    def stop(number: int, _frame: object) -> None:
        nonlocal until
        if time.monotonic() >= until:  # the same signal once more would end the cleaning up
            until = time.monotonic() + ONE_SIGNAL_S
            raise stopped(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise stopped(signal.SIGINT) from None
    finally:
        signal.signal(signal.SIGTERM, before)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_ERRORS = (*FULL, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)
"""What a disk that is full, broken or not to be written to makes of a write."""


DISK_WORDS = re.compile(
    r"No space left on device|File too large|Read-only file system|Disk quota exceeded"
    r"|PytorchStreamWriter failed|inline_container\.cc|iostream error"
)
"""In the errors of libraries that write tensors and tokenizers; the last three are torch.save's."""


def _missing_of_cann(error: BaseException | None) -> str | None:
    """One line where torch_npu, which torch loads by itself, finds a library of CANN's, NNAL's or the driver's nowhere;
    None for any other error."""
    while error is not None:
        found = re.search(r"lib[\w.+-]+?\.so\S*(?=: cannot open shared object file)", str(error))
        files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
        if found and isinstance(error, ImportError) and any("torch_npu" in file for file in files):
            return (
                f"{found[0]} is not found, which torch_npu needs: source /usr/local/Ascend/cann/set_env.sh (libatb.so:"
                " /usr/local/Ascend/nnal/atb/set_env.sh); bash scripts/check_npu_env.sh says what is missing"
            )
        error = error.__cause__
    return None


def _disk_refuses(error: Exception) -> str | None:
    """One line where a file could not be written because of the disk; None for any other error. The libraries that
    write tensors have errors of their own for it."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        said, full = f"{error.filename or 'a file'}: {error.strerror}", error.errno in FULL
    elif not isinstance(error, OSError) and (refusal := DISK_WORDS.search(text)):
        said, full = f"a file could not be written ({refusal[0]})", "Read-only" not in refusal[0]
    else:
        return None
    if not full:
        return f"{said}; give another place, or this user the right to it"
    return f"{said}; what was written before stays: make room, and go on (a training with resume_from_checkpoint auto)"


def _stdout_is_closed() -> bool:
    """Whether it is stdout whose reader has gone (`| head`), not some other pipe. If so, what is left goes nowhere, or
    the interpreter would complain at its end."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
