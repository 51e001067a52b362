"""Which shared objects the loader will not find for torch_npu and vllm_ascend, all of them and by name.

An import stops at the first missing one. `ldd` names them all, given what Python would have loaded before: torch's
own libraries. Where there is no ldd, the loader is asked object by object, and names the first alone.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from perl.tools.doctor.local import run

EXTENSIONS = {"torch-npu": "torch_npu", "vllm-ascend": "vllm_ascend"}
OPTIONAL = ("libop_plugin_atb.so",)
"""torch_npu loads it when an ATB operator is first called."""


def missing(packages: dict[str, str], until: float) -> dict[str, list[str]]:
    """By package: the names of shared objects that are not found. Packages that are not installed are absent."""
    found: dict[str, list[str]] = {}
    for distribution, module in EXTENSIONS.items():
        folder = _folder(module) if distribution in packages else None
        if folder is None:
            continue
        names: set[str] = set()
        for path in _objects(folder):
            names |= _not_found(path, until)
        # What the package brings itself is loaded by its own import, not by the loader's search.
        found[module] = sorted(names - {p.name for p in folder.rglob("*.so*")})
    return found


def _objects(folder: Path) -> list[Path]:
    """The extension modules that `import` loads, and the libraries alongside them."""
    paths = [*folder.glob("*.so"), *folder.glob("lib/*.so")]
    return [path for path in paths if path.name not in OPTIONAL]


def _folder(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)  # of a top-level package: nothing is imported
    return Path(spec.origin).parent if spec and spec.origin else None


def _not_found(path: Path, until: float) -> set[str]:
    torch = _folder("torch")
    env = dict(os.environ)
    if torch:
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, [env.get("LD_LIBRARY_PATH", ""), str(torch / "lib")]))
    ldd = shutil.which("ldd")
    if ldd:
        command, pattern = [ldd, str(path)], r"^\s*(\S+) => not found"
    else:
        command = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(path)!r})"]
        pattern = r"OSError: ([^:\s]+): cannot open shared object"
    names = set(re.findall(pattern, run(command, until, env).output, re.MULTILINE))
    # Without torch installed its libraries are missing too; that is the check versions' to say.
    return {name for name in names if torch or not re.match(r"lib(torch|c10)", name)}
