"""math-verify in a process of its own, with a deadline for each row.

One worker serves every batch, so nothing is started per completion. Rows are sent in chunks and answered one by one:
the row whose answer is late is the one being judged, so it alone is a timeout. The worker is killed and replaced, by a
fork of a process that has imported math-verify already (milliseconds, not seconds), and the rows behind it are sent
again.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, Literal, NamedTuple

logger = logging.getLogger(__name__)

CHUNK = 64
"""Rows in one message: enough to hide its cost, few enough to send again after a timeout."""
BUDGET = 2
"""Deadlines that the late rows of a batch share: each may take half of what is left, and at least LEAST_S."""
LEAST_S = 0.2
"""Seconds that any row may take: an honest one takes milliseconds, so it is graded behind any number of late ones."""
LONGEST_S = 86_400.0
"""A wait of much more is a number that the operating system does not take."""
REMEMBERED = 4096
"""Questions that took their deadline and are not asked again."""
START_DEADLINE_S = 120.0
"""Importing sympy takes a second, and much longer on a machine that is busy loading a model."""


class Question(NamedTuple):
    text: str
    gold: str
    how: Literal["text", "parts", "entry", "call"]
    """text: an answer is looked for in `text`. parts: it is an answer, compared part by part (stated.equal). entry: it
    is one to the entry that `gold` is (entries.judge_entry). call: `text` is a call of math-verify's (threads)."""


class Verdict(NamedTuple):
    score: float
    extracted: str | None
    reason: Literal["correct", "wrong", "unextracted", "timeout", "error"]


_TIMEOUT = Verdict(0.0, None, "timeout")


class MathVerifier:
    """Judges rows with math-verify. The worker starts with the first row and may be shared by threads.

    Args:
        deadline_s: wall-clock seconds that one row may take, extraction and comparison together. Rows behind late ones
            of their batch get less (BUDGET, LEAST_S).
    """

    def __init__(self, deadline_s: float):
        self._deadline_s = deadline_s = min(deadline_s, LONGEST_S)
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._connection: Connection | None = None
        self._judge = 0  # process id of the worker's fork behind `_connection`
        self._owner = os.getpid()
        self._early = ThreadPoolExecutor(1, thread_name_prefix="math-verify")
        self._started: dict[Question, Future[list[Verdict]]] = {}
        self._timeouts: dict[Question, None] = {}
        self._entries = False  # whether the worker has imported reasoning-gym, which takes seconds
        self._left_s = BUDGET * deadline_s  # of this batch's budget

    def start(self, row: Question) -> Future[Any]:
        """Begin to judge a row that `verify` will be asked for, while this process does something else; done when
        `verify` need not wait for it."""
        if row not in self._started:
            self._started[row] = self._early.submit(self._ask, [row])
        return self._started[row]

    def verify(self, rows: Sequence[Question]) -> list[Verdict]:
        """One Verdict per row, in order. A row that kills the worker twice (it may have been killed for another
        reason the first time) is an "error"."""
        early = {row: self._started.pop(row) for row in set(rows) & self._started.keys()}
        distinct = list(dict.fromkeys(row for row in rows if row not in early))
        verdicts = dict(zip(distinct, self._ask(distinct), strict=True))
        verdicts |= {row: future.result()[0] for row, future in early.items()}
        if self._left_s < (BUDGET - 1) * self._deadline_s:
            logger.warning(
                "an answer took math-verify's deadline of %g s; others of its batch got less, the last %.2g s",
                self._deadline_s,
                self._allowed_s(),
            )
        self._left_s = BUDGET * self._deadline_s
        return [verdicts[row] for row in rows]

    def _ask(self, rows: Sequence[Question]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        died_at = -1
        with self._lock:
            if not self._entries and any(row.how == "entry" for row in rows):
                self._kill()
                self._entries = True
            while len(verdicts) < len(rows):
                row = rows[len(verdicts)]
                if row in self._timeouts:
                    verdicts.append(_TIMEOUT)
                    continue
                try:
                    connection = self._connect()
                    chunk = rows[len(verdicts) : len(verdicts) + CHUNK]
                    known = next((at for at, other in enumerate(chunk) if other in self._timeouts), len(chunk))
                    connection.send(chunk[:known])
                    for row in chunk[:known]:
                        allowed_s = self._allowed_s()
                        if not connection.poll(allowed_s):
                            self._kill_judge()
                            self._left_s = max(self._left_s - allowed_s, 0.0)
                            self._remember(row)
                            verdicts.append(_TIMEOUT)
                            break
                        verdicts.append(Verdict(*connection.recv()))
                except (EOFError, OSError):  # the worker is gone: crashed, out of memory, or killed from outside
                    self._kill()
                    if died_at == len(verdicts):
                        verdicts.append(Verdict(0.0, None, "error"))
                    died_at = len(verdicts)
        return verdicts

    def _allowed_s(self) -> float:
        return min(self._deadline_s, max(self._left_s / 2, LEAST_S))

    def _remember(self, row: Question) -> None:
        self._timeouts[row] = None
        if len(self._timeouts) > REMEMBERED:
            del self._timeouts[next(iter(self._timeouts))]

    def close(self) -> None:
        self._early.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._kill()

    def _connect(self) -> Connection:
        """The connection to a fork of the worker that is ready."""
        if self._owner != os.getpid():  # a fork: the worker is the parent's, and so are its answers
            self._connection, self._control, self._worker, self._owner = None, None, None, os.getpid()
        if self._connection is not None:
            return self._connection
        control = self._control or self._start_worker()
        ours, theirs = socket.socketpair()
        with theirs:
            send_handle(control, theirs.fileno(), 0)
            self._judge = control.recv()
        self._connection = Connection(ours.detach())
        return self._connection

    def _start_worker(self) -> Connection:
        """The connection to a new worker, which forks when it is sent a socket and answers the fork's process id."""
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # Not multiprocessing's spawn: that would import the trainer's main module, torch included, into the worker.
        with theirs:
            self._worker = subprocess.Popen(
                [sys.executable, "-P", "-m", "perl.grading.worker", str(theirs.fileno()), str(os.getpid())]
                + ["entries"] * self._entries,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path},
            )
        self._control = Connection(ours.detach())
        try:
            if self._control.poll(START_DEADLINE_S) and self._control.recv() == "ready":
                return self._control
        except (EOFError, OSError):
            pass
        self._kill()
        raise RuntimeError("the math-verify worker did not start; its own message stands above on stderr")

    def _kill_judge(self) -> None:
        """End the fork and keep the worker, which has not waited for it yet: the process id is still its own."""
        if self._connection is not None:
            self._connection.close()
            os.kill(self._judge, signal.SIGKILL)
        self._connection = None

    def _kill(self) -> None:
        for connection in filter(None, (self._connection, self._control)):
            connection.close()
        if self._worker is not None:
            self._worker.kill()  # its fork dies with it
            self._worker.wait()
        self._connection, self._control, self._worker = None, None, None
