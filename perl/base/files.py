"""Files that are read and written whole, the form of what they hold, and locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import msgspec
import yaml

from perl.base.errors import UserError

log = logging.getLogger(__name__)

T = TypeVar("T")
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""How flock fails on a file system that has none: Lustre mounted without them, NFS without its lock daemon."""
UMASK = os.umask(0o077)
"""Of this process; the system gives it for another alone."""
os.umask(UMASK)
LOCK, SAVING = "_lock", "_saving"
"""What a process holds by flock that works in a folder, and where a training writes what it then puts in place. Names
of ours that are no result begin with _: transformers' pushes of a folder leave out what is so called."""
STALE_S = 3600
"""Since the last change of a file that is being written: its writer has died."""


def is_of_process(name: str) -> bool:
    """Whether what is so called in a folder is no result, but of a process that works there or was killed there."""
    return name.startswith(".") or name in (LOCK, SAVING) or (name.startswith("_") and name.endswith(".partial"))


def typed(content: Any, kind: type[T]) -> T:
    """What was read, as `kind` (a TypedDict, a dataclass, dict[str, int], …) describes it: fields that it does not name
    are left out, whole numbers become floats where it says so. Raises a ValueError that names the field at fault."""
    return msgspec.convert(content, kind)


def read_json(file: Path, flag: str = "", hint: str = "", kind: type[T] = dict[str, Any]) -> T:
    """What `file` holds, of the form `kind`. Raises a UserError, with the flag that named the file and with what to do
    about it, when it is not readable or of another form."""
    try:
        return typed(json.loads(file.read_text(encoding="utf-8")), kind)
    except (OSError, ValueError, RecursionError) as error:
        where, advice = f"{flag}: " if flag else "", f"; {hint}" if hint else ""
        raise UserError(f"{where}{file} is not readable ({error}){advice}") from error


class _KeysOnce(yaml.SafeLoader):
    """Of a key that stands twice in a mapping PyYAML takes the second, without a word."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node: Any = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if first := lines.get(key.value):
                raise ValueError(f"{key.value} stands in line {first} and again in line {line}; write it once")
            lines[key.value] = line
        return node


def read_yaml(text: str) -> Any:
    """What a user's YAML holds. Raises a YAMLError, or a ValueError for a key that stands twice or a date that there is
    not."""
    return yaml.load(text, Loader=_KeysOnce)


def write_json(file: Path, content: Any) -> None:
    with atomic_write(file, errors="backslashreplace") as handle:  # of a lone surrogate that is JSON's own escape
        handle.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def json_line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def add_row(file: Path, row: Mapping[str, Any]) -> None:
    """Append a line of JSON. A last line that a kill has cut off is removed first; several processes may add to one
    file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        opened.seek(0)
        opened.truncate(opened.read().rfind(b"\n") + 1)
        opened.write(json.dumps(row).encode() + b"\n")


def read_rows(file: Path, kind: type[T] = dict[str, Any]) -> list[T]:
    """The lines of JSON in `file`, each of the form `kind`, none where it is not there; without a last line that was
    cut off. Raises a UserError for a line that is not readable or of another form."""
    rows = []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1] if file.is_file() else [], start=1):
        try:
            rows.append(typed(json.loads(line), kind))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}:{number} is not readable ({error}); delete this line") from error
    return rows


@contextlib.contextmanager
def atomic_write(file: Path, mode: Literal["w", "wb"] = "w", errors: str = "strict") -> Iterator[IO[Any]]:
    """Open a file that takes the place of `file` when the block ends: whoever reads, finds the old content or the new
    one, whole, with the old one's mode. An exception leaves the old one; what a killed writer of `file` left is removed
    after STALE_S. A link in the place of `file` is replaced, unless `target` has followed it. Text is UTF-8, `errors`
    as for `open`. Raises OSError."""
    text: dict[str, Any] = {} if mode == "wb" else {"encoding": "utf-8", "errors": errors}
    if file.exists() and not file.is_file():  # /dev/null or a pipe, which no file may take the place of
        with file.open(mode, **text) as handle:
            yield handle
        return
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f"_{file.name}.", suffix=".partial", dir=file.parent)
    except OSError as error:  # which names the temporary file
        raise OSError(error.errno, error.strerror, str(file)) from error
    try:
        with os.fdopen(descriptor, mode, **text) as handle:
            yield handle
            handle.flush()
            os.fchmod(descriptor, _mode(file))
            os.fsync(descriptor)
        os.replace(temporary, file)
        _remove_stale(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _mode(file: Path) -> int:
    """Of the permissions those that `file` has, or that a new one gets."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(mode := os.lstat(file).st_mode):
            return mode & 0o777
    return 0o666 & ~UMASK


def target(named: Path) -> Path:
    """Where a file goes that the user has named on the command line: what a link there leads to."""
    # As with the shell's >. A name that we give ourselves is not followed: in a folder of results, which may come from
    # others, a link of that name could lead to any file of the user's.
    # One that leads to a pipe (/dev/stdout) has no path of its own.
    leads_to_file = named.is_symlink() and (named.is_file() or not named.exists())
    return Path(os.path.realpath(named)) if leads_to_file else named


def _open_lock(path: str, _: int) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def _remove_stale(file: Path) -> None:
    named = re.compile(rf"_{re.escape(file.name)}\.[a-z0-9_]{{8}}\.partial")  # by mkstemp
    with contextlib.suppress(OSError):  # a folder that cannot be listed, a file that another has removed
        for entry in os.scandir(file.parent):
            if named.fullmatch(entry.name) and time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE_S:
                os.unlink(entry)


def open_lock(file: Path) -> IO[bytes]:
    """Open a file to be locked by flock, making it if need be; what it holds stays. Raises OSError, for a link too:
    it may lead to any file of the user's."""
    try:
        return open(file, "rb+", buffering=0, opener=_open_lock)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, f"{file.name} is a link; delete it", str(file)) from error
        raise


def lock_now(lock: IO[bytes]) -> None:
    """flock, without waiting; where the file system has no locks, a line in the log instead. Raises BlockingIOError
    where another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        why = f"its file system has no locks ({error.strerror})"
        log.warning("%s: nothing keeps another process out of it: %s", Path(lock.name).parent, why)


@contextlib.contextmanager
def shared_files(folder: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """Inside, files that this user's processes on this machine read at the same time: the first that comes has `make`
    write them into a folder in `folder`, the others wait for it, and the last that leaves removes them. What killed
    ones have left whole the next one takes. Raises OSError."""
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            if (there := folder.lstat()).st_uid != os.getuid() or not stat.S_ISDIR(there.st_mode):
                raise OSError(errno.EPERM, "belongs to somebody else", str(folder))
            lock = open_lock(folder / LOCK)
        except FileNotFoundError:  # the last one has left meanwhile
            continue
        with lock:
            files, made = folder / "files", folder / "made"
            fcntl.flock(lock, fcntl.LOCK_SH)
            if not _is_there(lock):
                continue
            if not made.exists():
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if _is_there(lock) and not made.exists():  # to change a lock is to let go of it
                        _make_shared(folder, make)
                except BlockingIOError:  # another one makes them
                    fcntl.flock(lock, fcntl.LOCK_UN)
                    time.sleep(0.1)
                continue
            try:
                yield files
            finally:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove_shared(folder)
            return


def _make_shared(folder: Path, make: Callable[[Path], None]) -> None:
    shutil.rmtree(folder / "files", ignore_errors=True)
    try:
        (folder / "files").mkdir()
        make(folder / "files")
        (folder / "made").touch()
    except BaseException:
        _remove_shared(folder)
        raise


def _remove_shared(folder: Path) -> None:
    """The lock last, but for the folder: another process may make a new one at once."""
    with contextlib.suppress(OSError):
        (folder / "made").unlink(missing_ok=True)
        shutil.rmtree(folder / "files", ignore_errors=True)
        (folder / LOCK).unlink()
        folder.rmdir()


def _is_there(lock: IO[bytes]) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def passing_folder(parent: Path, name: str) -> Iterator[Path]:
    """Inside, a folder of this process alone in `parent`, which is gone afterwards. Where a process was killed in it,
    the next one that asks for this `name` removes it. Raises OSError."""
    prefix = f"perl-{os.getuid()}-{name}-"
    for left in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another one is in it, or has removed it
            if left.lstat().st_uid == os.getuid():
                with open(left / LOCK, "rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"_{prefix}", dir=parent))
    with open_lock(folder / LOCK) as lock:
        lock_now(lock)
        folder = folder.rename(parent / folder.name[1:])  # once it is locked, or it would be one that is left
        try:
            (folder / "files").mkdir()
            yield folder / "files"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def holder_of(lock: IO[bytes]) -> str:
    """Who holds the flock on this file, as far as this machine's kernel knows."""
    process = process_that_holds(Path(lock.name))
    return f"process {process}" if process else "a process of another machine or container"


def process_that_holds(lock: Path) -> int | None:
    """The process of this machine that has the flock on this file, which is not touched; None: none is known."""
    with contextlib.suppress(OSError):
        file = lock.stat()
        for entry in map(str.split, Path("/proc/locks").read_text().splitlines()):
            held = entry[1] == "FLOCK" and entry[5].endswith(f":{file.st_ino}") and entry[4] != "0"
            if held and _may_have_open(entry[4], file):
                return int(entry[4])
    return None


def _may_have_open(process: str, file: os.stat_result) -> bool:
    """False where it surely has not: a file of another disk can have the same inode, and /proc/locks names disks by
    numbers that btrfs and overlayfs do not have in a stat. A process of another user, and one that has left its lock
    to a child, can't be asked."""
    try:
        opened = list(Path("/proc", process, "fd").iterdir())
    except OSError:
        return True
    for descriptor in opened:
        with contextlib.suppress(OSError):
            if os.path.samestat(descriptor.stat(), file):
                return True
    return False
