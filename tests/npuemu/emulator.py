"""Build the emulated NPU, and make the environment in which a command finds it.

    python tests/npuemu/emulator.py COMMAND...      what tests/npuemu/run calls

Only the standard library is imported, so that this starts fast and under any Python.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-DUSE_DISTRIBUTED", "-DUSE_C10D"]
INHERITED_PREFIXES = ("NPUEMU_", "ASCEND_", "HCCL_")
"""Variables by which a caller's own NPU settings would leak into a test."""


class NoCompilerError(RuntimeError):
    """There is no C++ compiler, so the emulated device cannot be built."""


class BuildFailedError(RuntimeError):
    """The compiler refused the sources; the message holds its own."""


def build(python: str = sys.executable) -> Path:
    """The shared library for the torch that `python` imports, compiled at the first call (about half a minute).

    It is kept in $NPUEMU_CACHE, or $XDG_CACHE_HOME/npuemu, or ~/.cache/npuemu, under a name that holds the hash of
    the sources, the flags, the compiler and torch's version; a file lock keeps parallel callers from compiling twice.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoCompilerError(f"no C++ compiler ({os.environ.get('CXX', 'g++')}); install g++ or set CXX")
    torch_dir, torch_version = _torch_of(python)
    sources = sorted((HERE / "csrc").iterdir())
    key = hashlib.sha256(repr((torch_version, FLAGS, compiler)).encode())
    for source in sources:
        key.update(source.name.encode() + source.read_bytes())
    library = _cache_dir() / f"libnpuemu-torch{torch_version}-{key.hexdigest()[:16]}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, [s for s in sources if s.suffix == ".cpp"], torch_dir, library)
    return library


def environment(
    devices: int = 2, *, python: str = sys.executable, base: Mapping[str, str] | None = None, **variables: str | int
) -> dict[str, str]:
    """Environment for a process that sees `devices` emulated NPUs.

    Args:
        devices: physical devices of the emulated machine; 0 means that torch_npu is installed but finds none.
        python: the interpreter whose torch the device is built for.
        base: environment to extend; by default this process's, without its own NPU settings.
        variables: further variables, such as NPUEMU_MEMORY_BYTES=2**20 or ASCEND_RT_VISIBLE_DEVICES="1".
    """
    if base is None:
        base = {k: v for k, v in os.environ.items() if not k.startswith(INHERITED_PREFIXES)}
    defaults = {
        "ASCEND_HOME_PATH": str(HERE / "cann"),  # DeepSpeed reads it without a default
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "NPUEMU_DEVICES": str(devices),
    }
    search_path = [str(HERE / "site"), *filter(None, [base.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(search_path), "NPUEMU_LIBRARY": str(build(python))}
    return {**defaults, **base, **ours, **{name: str(value) for name, value in variables.items()}}


def _cache_dir() -> Path:
    if "NPUEMU_CACHE" in os.environ:
        return Path(os.environ["NPUEMU_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npuemu"


@functools.cache
def _torch_of(python: str) -> tuple[Path, str]:
    """Folder and version of the torch that `python` would import, without importing it."""
    code = (
        "import importlib.metadata as m, importlib.util as u;"
        "print(u.find_spec('torch').submodule_search_locations[0]); print(m.version('torch'))"
    )
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise BuildFailedError(f"{python} has no torch:\n{answer.stderr}")
    folder, version = answer.stdout.split("\n")[:2]
    return Path(folder), version


def _compile(compiler: str, sources: list[Path], torch_dir: Path, library: Path) -> None:
    # No rpath: whoever loads the library has imported torch, whose libraries are then found by name.
    include = torch_dir / "include"
    flags = [*FLAGS, f"-I{include}", f"-I{include}/torch/csrc/api/include"]
    objects = [library.with_name(f"{source.stem}.{os.getpid()}.o") for source in sources]
    unfinished = library.with_suffix(f".{os.getpid()}")
    try:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [[compiler, *flags, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects, strict=True)]
            list(pool.map(_checked, commands))
        libraries = [f"-L{torch_dir / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
        _checked([compiler, "-shared", *map(str, objects), "-o", str(unfinished), *libraries])
        unfinished.rename(library)
    finally:
        for leftover in [*objects, unfinished]:
            leftover.unlink(missing_ok=True)


def _checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailedError(f"{' '.join(command)}\n{done.stderr}")


def main() -> None:
    command = sys.argv[1:]
    devices = int(os.environ.get("NPUEMU_DEVICES", "2"))
    try:
        env = environment(devices, base=os.environ)
        os.execvpe(command[0], command, env)
    except (NoCompilerError, BuildFailedError, FileNotFoundError) as error:
        sys.exit(f"npuemu: {error}")


if __name__ == "__main__":
    main()
