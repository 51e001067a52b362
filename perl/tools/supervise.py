"""The launch script's last step: run accelerate, keep its output in output.log, show what matters, pass signals on.

    python -m perl.tools.supervise RUN_DIR --config_file FILE --num_processes N -m perl.train FLAGS…

SIGTERM, SIGINT and SIGHUP go to the training processes themselves, which save a checkpoint and end (StopOnSignal). The
launcher, which would have them killed after 30 seconds, hears none, as a scheduler may send them to every process of a
job. A second signal, and SIGQUIT, kill all. The exit code is the training processes', and theirs alone once they run.

Nothing large is imported here: this process lives as long as the training.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil

from perl.base.errors import EXIT_USER_ERROR, HELD_BY_LAUNCHER, ONE_SIGNAL_S, UserError, report_errors
from perl.base.paths import how_to_go_on
from perl.base.redact import hide
from perl.records import PROGRESS

SHOWN_STARTS = ("error: ", "stopped: ", "stopping: ")
SHOWN_PARTS = (" WARNING ", "Error: ", "fall back to run on the CPU")
ENDS = ("error: ", "stopped: ")
"""How a line begins that says why a training ended."""
LAUNCHER = "perl.tools.accelerate_launch"
LAUNCHERS_OWN = "ChildFailedError"
"""A failed training process is reported by its own line; the launcher's about it is no news."""
PR_SET_CHILD_SUBREAPER = 36
OF_OTHERS = re.compile(r"(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(PET|PMI)_\w+|(OMPI|MV2)_COMM_WORLD_\w+")
"""Variables by which a pod or MPI tells a process its place among others, for which torchrun would wait: the run is of
this machine alone."""
LOOK_S = 0.5
KILLED_S = 5.0
"""So long what was killed may take to end: a device's driver may hold it."""


class Screen:
    """Shows progress and what went wrong; on a terminal the progress line stays in place. A reader that goes away
    (`| head`) ends the showing, not the training.

    Attributes:
        told: whether a line has said why the training ended.
    """

    def __init__(self) -> None:
        self.terminal, self.open, self.pending, self.told = sys.stdout.isatty(), True, False, False
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # not every locale has what is logged

    def show(self, line: str) -> None:
        if line.startswith(PROGRESS):
            text = line.removeprefix(PROGRESS)
            width = shutil.get_terminal_size().columns
            self.write(f"\r\033[K{text[: width - 1]}" if self.terminal else f"{text}\n")
            self.pending = self.terminal
            return
        matters = line.startswith(SHOWN_STARTS) or any(part in line for part in SHOWN_PARTS)
        if matters and LAUNCHERS_OWN not in line:
            self.end_progress()
            self.write(f"{line}\n")
            self.told = self.told or line.startswith(ENDS)

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


def complain(text: str) -> None:
    """A line on stderr, which nobody may read any more."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


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
            self.screen.end_progress()
            self.screen.write(f"error: {self.path}: {error.strerror}; the training goes on, and its log ends here\n")
            with contextlib.suppress(OSError):
                self.file.close()


class Launcher:
    """accelerate in a session of its own, so that the terminal's Ctrl-C reaches this process alone. The processes of a
    launcher that has ended become this one's children.

    Args:
        argv: of accelerate launch; after -m the module that the training processes run.
    """

    def __init__(self, argv: list[str]):
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.received, self._at = 0, 0.0
        self._begun = self._killed = False
        self._module = argv[argv.index("-m") + 1]
        self._others = psutil.Process().children()  # as of a shell that this process has replaced: `> >(tee log)`
        self._folder = tempfile.TemporaryDirectory(prefix="perl_ranks_")  # torch leaves its own behind
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heard = [number for number in HELD_BY_LAUNCHER if number != signal.SIGHUP or not nohup]
        for number in heard:
            signal.signal(number, signal.SIG_DFL)  # what is started may have it ignored else
        # A thread waits for them: a handler would run when the next line has come, where the signal arrives just before
        # the main thread begins to wait for that line. The launcher inherits that they are held.
        signal.pthread_sigmask(signal.SIG_BLOCK, heard)
        command = ["-u", "-m", LAUNCHER, "--log_dir", self._folder.name, *argv]
        environment = {name: value for name, value in os.environ.items() if not OF_OTHERS.fullmatch(name)}
        environment["PET_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGQUIT"  # of torchrun, which hears SIGHUP under nohup
        environment["PYTHONIOENCODING"] = "utf-8:surrogateescape"  # as `lines` are read, whatever the screen is
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reaper = threading.Thread(target=self._reap, daemon=True)
        self._reaper.start()
        threading.Thread(target=self._look_for_ranks, daemon=True).start()
        threading.Thread(target=self._hear, args=(heard,), daemon=True).start()

    def _hear(self, signals: list[int]) -> None:
        """Pass a signal on; the second one kills."""
        while True:
            number = signal.sigwait(signals)
            now = time.monotonic()
            if not self.received and number != signal.SIGQUIT:
                self.received, self._at = number, now
                ranks = self.ranks()
                for rank in ranks:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        rank.send_signal(number)
                if not ranks and not self._begun:
                    self._killed = True
                    self.kill()
            elif number == signal.SIGQUIT or now - self._at > ONE_SIGNAL_S:
                self.received = self.received or number
                self._killed = True
                self.kill()
                threading.main_thread().join(KILLED_S)
                if threading.main_thread().is_alive():  # it waits for a screen that nobody reads
                    self._folder.cleanup()
                    os._exit(128 + self.received)

    def _look_for_ranks(self) -> None:
        """Where there are none, they have ended, or have not been started."""
        while self._reaper.is_alive() and not self._begun:
            self._begun = bool(self.ranks())
            time.sleep(LOOK_S)

    def ranks(self) -> list[psutil.Process]:
        """The training processes at work. accelerate starts others as well: nvidia-smi, which is the launcher's own
        image for a moment."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    words = child.cmdline()
                    found += [child] if self._module in words and LAUNCHER not in words else []
        return found

    def kill(self) -> None:
        """End every process of the run, at once."""
        left = [child for child in psutil.Process().children() if child not in self._others]
        for child in tuple(left):
            with contextlib.suppress(psutil.NoSuchProcess):
                left += child.children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs([process for process in left if process.pid != self.process.pid], timeout=KILLED_S)

    def _reap(self) -> None:
        """Wait for the launcher, and end what it has left behind, which may hold the pipe that `lines` reads."""
        if sys.platform == "linux":
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != self.process.pid:
                with contextlib.suppress(ChildProcessError):  # `kill` has waited for it
                    os.waitpid(ended.si_pid, 0)
        self.process.wait()
        self.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # where orphans have become another process's

    def lines(self) -> Iterator[bytes]:
        assert self.process.stdout is not None
        yield from self.process.stdout

    def killed_by(self) -> str | None:
        """The signal that has ended the launcher itself."""
        code = self.process.returncode
        return signal.Signals(-code).name if code is not None and code < 0 else None

    def wait(self) -> int:
        """The exit code as a shell has it, once nothing of the run is left."""
        self._reaper.join()
        self._folder.cleanup()
        code = self.process.returncode
        code = 128 - code if code < 0 else code
        stopped = self._killed or code in (128 + self.received, 128 + signal.SIGTERM)  # torch ends the others by it
        return 128 + self.received if code and self.received and stopped else code


def main(run_dir: Path, argv: list[str]) -> int:
    screen = Screen()
    log = Log(run_dir / "output.log", screen)
    launcher = Launcher(argv)
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
    stopped = launcher.received and code == 128 + launcher.received
    if code == 0:
        name = "model" if (run_dir / "model").is_dir() else "adapter"
        screen.write(f"{name}: {run_dir}/{name}\n")
    elif stopped and not screen.told:
        complain(f"stopped: {signal.Signals(launcher.received).name}; every process was ended at once")
    elif not stopped:
        if (killed_by := launcher.killed_by()) is not None:
            complain(f"error: the launcher was ended by {killed_by}")
        complain(f"training ended with exit code {code}; the whole log is in {log.path}")
    if code not in (0, EXIT_USER_ERROR) and not (stopped and screen.told) and any(run_dir.glob("checkpoint-*")):
        flag = "--config.training.resume_from_checkpoint"
        resumes = f"{flag}=auto" in argv or (flag, "auto") in pairwise(argv)
        complain(f"run again to go on from its last checkpoint: {how_to_go_on(run_dir, resumes)}")
    return code


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
