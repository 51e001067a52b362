"""The launch script's last step: run accelerate, keep its output in output.log, show what matters, pass signals on.

    python -m perl.tools.supervise RUN_DIR --config_file FILE --num_processes N -m perl.train FLAGS…

SIGTERM, SIGINT and SIGHUP go to the training processes themselves, which save a checkpoint and end (StopOnSignal); the
launcher would have them killed after 30 seconds. A second signal kills all. The exit code is the training processes'.

Nothing large is imported here: this process lives as long as the training.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil

from perl.base.errors import EXIT_USER_ERROR, UserError, report_errors
from perl.base.paths import how_to_go_on
from perl.base.redact import hide
from perl.records import PROGRESS

SHOWN_STARTS = ("error: ", "stopped: ", "stopping: ")
SHOWN_PARTS = (" WARNING ", "Error: ", "fall back to run on the CPU")
LAUNCHERS_OWN = ("ChildFailedError", "SignalException")
"""A failed training process is reported by its own line; the launcher's about it is no news."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_CHILD_SUBREAPER = 36
ONE_SIGNAL_S = 1.0
"""Signals within this time are one."""


class Screen:
    """Shows progress and what went wrong; on a terminal the progress line stays in place. A reader that goes away
    (`| head`) ends the showing, not the training."""

    def __init__(self) -> None:
        self.terminal, self.open, self.pending = sys.stdout.isatty(), True, False

    def show(self, line: str) -> None:
        if line.startswith(PROGRESS):
            text = line.removeprefix(PROGRESS)
            width = shutil.get_terminal_size().columns
            self.write(f"\r\033[K{text[: width - 1]}" if self.terminal else f"{text}\n")
            self.pending = self.terminal
            return
        matters = line.startswith(SHOWN_STARTS) or any(part in line for part in SHOWN_PARTS)
        if matters and not any(error in line for error in LAUNCHERS_OWN):
            self.end_progress()
            self.write(f"{line}\n")

    def end_progress(self) -> None:
        if self.pending:
            self.write("\n")
        self.pending = False

    def write(self, text: str) -> None:
        if self.open:
            try:
                print(text, end="", flush=True)
            except OSError:  # EIO of a terminal that is gone
                self.open = False
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Log:
    """output.log, without secrets. A disk that takes no more of it ends the log, with one line, not the training."""

    def __init__(self, path: Path, screen: Screen):
        self.path, self.screen = path, screen
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("ab")
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}; give another folder after --config.training.output_dir"
            ) from error

    def write(self, text: str) -> None:
        if self.file.closed:
            return
        try:
            self.file.write(text.encode(errors="surrogateescape"))
            self.file.flush()
        except OSError as error:
            self.screen.show(f"error: {self.path}: {error.strerror}; the training goes on, and its log ends here")
            with contextlib.suppress(OSError):
                self.file.close()


class Launcher:
    """accelerate in a session of its own, so that the terminal's Ctrl-C reaches this process alone. The processes of a
    launcher that is killed become this one's children."""

    def __init__(self, argv: list[str]):
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.received, self._at = 0, 0.0
        heard = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]  # nohup
        for number in heard:
            signal.signal(number, signal.SIG_DFL)  # what is started may have it ignored else
        # A thread waits for them: a handler would run when the next line has come, where the signal arrives just before
        # the main thread begins to wait for that line.
        signal.pthread_sigmask(signal.SIG_BLOCK, heard)
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "perl.tools.accelerate_launch", *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, heard),
        )
        threading.Thread(target=self._hear, args=(heard,), daemon=True).start()
        threading.Thread(target=self._end_with_launcher, daemon=True).start()

    def _hear(self, signals: list[int]) -> None:
        """Pass a signal on; the second one kills."""
        while True:
            number = signal.sigwait(signals)
            now = time.monotonic()
            if not self.received:
                self.received, self._at = number, now
                ranks = children(self.process.pid)
                for pid in ranks:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                if not ranks:  # it has not started them yet
                    self.process.send_signal(signal.SIGTERM)
            elif now - self._at > ONE_SIGNAL_S:
                self.kill()

    def kill(self) -> None:
        """End every process of the run, at once."""
        for pid in [*children(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # torch's agent gives each rank a session of its own; else they are in the launcher's.
                (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)

    def _end_with_launcher(self) -> None:
        """The ranks hold the pipe that `lines` reads, and would train on."""
        if self.process.wait() < 0:
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()

    def lines(self) -> Iterator[bytes]:
        assert self.process.stdout is not None
        yield from self.process.stdout

    def killed_by(self) -> str | None:
        """The signal that has ended the launcher itself."""
        code = self.process.returncode
        return signal.Signals(-code).name if code is not None and code < 0 else None

    def wait(self) -> int:
        """The exit code as a shell has it, once nothing of the run is left."""
        code = self.process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it may have left behind
        if self.received and code:
            return 128 + self.received
        return 128 - code if code < 0 else code


def children(pid: int) -> list[int]:
    """Direct children of a process; none where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def main(run_dir: Path, argv: list[str]) -> int:
    screen = Screen()
    log = Log(run_dir / "output.log", screen)
    with tempfile.TemporaryDirectory(prefix="perl_ranks_") as ranks:  # torch leaves its own behind
        launcher = Launcher(["--log_dir", ranks, *argv])
        try:
            for line in launcher.lines():
                text = hide(line.decode(errors="surrogateescape"))
                log.write(text)
                screen.show(text.encode(errors="replace").decode(errors="replace").rstrip("\n"))
        except BaseException:
            launcher.kill()
            raise
        code = launcher.wait()
    screen.end_progress()
    if code == 0:
        name = "model" if (run_dir / "model").is_dir() else "adapter"
        screen.write(f"{name}: {run_dir}/{name}\n")
    elif not launcher.received:
        if (killed_by := launcher.killed_by()) is not None:
            print(f"error: the launcher was ended by {killed_by}", file=sys.stderr)
        print(f"training ended with exit code {code}; the whole log is in {log.path}", file=sys.stderr)
        if code != EXIT_USER_ERROR and any(run_dir.glob("checkpoint-*")):
            flag = "--config.training.resume_from_checkpoint"
            resumes = f"{flag}=auto" in argv or (flag, "auto") in pairwise(argv)
            print(f"run again to go on from its last checkpoint: {how_to_go_on(run_dir, resumes)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
