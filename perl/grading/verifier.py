"""math-verify in a process of its own, with a deadline for each row.

One worker serves every batch, so nothing is started per completion. Rows are sent in chunks and answered one by one:
the row whose answer is late is the one being judged, so it alone is a timeout. The worker is killed and replaced, and
the rows behind it are sent again.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

logger = logging.getLogger(__name__)

CHUNK = 64
"""Rows in one message: enough to hide its cost, few enough to send again after a timeout."""
LATE_ROWS = 4
"""Rows of a batch that may take their whole deadline; what is left of the batch then counts as a timeout, unasked."""
REMEMBERED = 4096
"""Questions that took their deadline and are not asked again."""
START_DEADLINE_S = 120.0
"""Importing sympy takes a second, and much longer on a machine that is busy loading a model."""


class Question(NamedTuple):
    text: str
    gold: str
    parts: bool
    """Whether `text` is an answer that is compared part by part (stated.equal), not a text to find one in."""


class Verdict(NamedTuple):
    score: float
    extracted: str | None
    reason: Literal["correct", "wrong", "unextracted", "timeout", "error"]


_TIMEOUT = Verdict(0.0, None, "timeout")


class MathVerifier:
    """Judges rows with math-verify. The worker starts with the first row and may be shared by threads.

    Args:
        deadline_s: wall-clock seconds that one row may take, extraction and comparison together.
    """

    def __init__(self, deadline_s: float):
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = os.getpid()
        self._early = ThreadPoolExecutor(1, thread_name_prefix="math-verify")
        self._started: dict[Question, Future[list[Verdict]]] = {}
        self._timeouts: dict[Question, None] = {}
        self._late = 0  # rows since the last batch ended

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
        if self._late > LATE_ROWS:
            logger.warning(
                "%d answers took math-verify's deadline of %g s; others of their batch count as timeouts, unasked",
                LATE_ROWS,
                self._deadline_s,
            )
        self._late = 0
        return [verdicts[row] for row in rows]

    def _ask(self, rows: Sequence[Question]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        died_at = -1
        with self._lock:
            while len(verdicts) < len(rows):
                row = rows[len(verdicts)]
                if row in self._timeouts:
                    verdicts.append(_TIMEOUT)
                    continue
                if self._late >= LATE_ROWS:
                    self._late += 1
                    verdicts.append(_TIMEOUT)
                    continue
                connection = self._connect()
                try:
                    chunk = rows[len(verdicts) : len(verdicts) + CHUNK]
                    known = next((at for at, other in enumerate(chunk) if other in self._timeouts), len(chunk))
                    connection.send(chunk[:known])
                    for row in chunk[:known]:
                        if not connection.poll(self._deadline_s):
                            self._kill()
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

    def _remember(self, row: Question) -> None:
        self._late += 1
        self._timeouts[row] = None
        if len(self._timeouts) > REMEMBERED:
            del self._timeouts[next(iter(self._timeouts))]

    def close(self) -> None:
        self._early.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._kill()

    def _connect(self) -> Connection:
        """The connection to a worker that is ready."""
        if self._owner != os.getpid():  # a fork: the worker is the parent's, and so are its answers
            self._connection, self._worker, self._owner = None, None, os.getpid()
        if self._connection is not None:
            return self._connection
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # Not multiprocessing's spawn: that would import the trainer's main module, torch included, into the worker.
        with theirs:
            self._worker = subprocess.Popen(
                [sys.executable, "-P", "-m", "perl.grading.worker", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path},
            )
        self._connection = Connection(ours.detach())
        try:
            if self._connection.poll(START_DEADLINE_S) and self._connection.recv() == "ready":
                return self._connection
        except (EOFError, OSError):
            pass
        self._kill()
        raise RuntimeError("the math-verify worker did not start; its own message stands above on stderr")

    def _kill(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()
        self._connection, self._worker = None, None
