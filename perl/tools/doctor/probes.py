"""Looks a machine over: every probe in a thread of its own, all within one deadline, none raising."""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from perl.base.redact import hide, is_secret_name
from perl.tools.doctor import libraries
from perl.tools.doctor.local import read, run
from perl.tools.doctor.machine import Command, Device, Machine, Process

DEADLINE_S = 8.0
GRACE_S = 3.0
"""What a probe that ends its command at the deadline may take for that, on a machine under load."""
COMMANDS = ("npu-smi info", "nvidia-smi -L", "ray status")
TEXT_FILES = (
    "/usr/local/Ascend/driver/version.info",
    "/usr/local/Ascend/firmware/version.info",
    "/usr/local/Ascend/nnal/atb/latest/version.info",
)
OTHER_FILES = (
    "/usr/local/Ascend/nnal/atb/set_env.sh",
    "/usr/local/sbin/npu-smi",
    "/usr/local/bin/npu-smi",
)
VARIABLES = re.compile(
    r"^(ASCEND|ATB_HOME|HCCL|GLOO_|TP_SOCKET|NCCL|NPU_|PYTORCH_|TORCH_|VLLM_|RAY_|HF_HOME$|CUDA_VISIBLE|OMP_NUM"
    r"|LD_LIBRARY_PATH$)",
    re.IGNORECASE,
)


def gather(root: Path = Path("/"), deadline_s: float = DEADLINE_S) -> Machine:
    """Every fact of this machine, in at most about `deadline_s` seconds.

    A probe that is not done by then is named in `Machine.unfinished` and left behind in its daemon thread: a hanging
    driver or name server cannot be interrupted. `root` is where /dev, /proc and /usr/local are looked for.
    """
    until = time.monotonic() + deadline_s
    facts: dict[str, Any] = dict(_basics(), env=environment(), packages=_packages())
    probes: dict[str, Callable[[], Any]] = {
        "files": lambda: _files(root),
        "devices": lambda: _devices(root),
        "pci_accelerators": lambda: _pci_accelerators(root),
        "processes": lambda: _processes(root),
        "listening": lambda: _listening(root),
        "interfaces": _interfaces,
        "free_gb": lambda: _free_gb(facts["env"]),
        "shm_gb": lambda: _shm_gb(root),
        "missing_libraries": lambda: libraries.missing(facts["packages"], until),
        "torch": lambda: _torch(facts["packages"], until),
        **{name: partial(_command, name, until) for name in COMMANDS},
    }
    results: dict[str, Any] = {}

    def work(name: str, probe: Callable[[], Any]) -> None:
        try:
            results[name] = probe()
        except OSError as error:  # a file system or a socket that answers oddly: named in the report, like a late one
            print(f"probe {name}: {error}", file=sys.stderr)

    threads = [threading.Thread(target=work, args=item, daemon=True) for item in probes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until + GRACE_S - time.monotonic()))
    done = dict(results)
    facts["commands"] = {name: done.pop(name) for name in COMMANDS if done.get(name) is not None}
    facts["unfinished"] = [name for name in probes if name not in results]
    facts.update((name, value) for name, value in done.items() if value is not None and name not in COMMANDS)
    return Machine(**facts)


def _basics() -> dict[str, Any]:
    return {
        "arch": platform.machine(),
        "python": platform.python_version(),
        "prefix": sys.prefix,
        "container": _in_container(),
        "root": os.geteuid() == 0,
    }


def _in_container() -> bool:
    if (
        any(os.path.exists(path) for path in ("/.dockerenv", "/run/.containerenv"))
        or "ASCEND_DOCKER_RUNTIME" in os.environ
    ):
        return True
    return bool(re.search(r"docker|kubepods|containerd|lxc", read("/proc/1/cgroup")))


def environment() -> dict[str, str]:
    """The variables that some check reads, without secrets."""
    return {
        name: "(set)" if is_secret_name(name) else hide(value)
        for name, value in os.environ.items()
        if VARIABLES.match(name)
    }


def _packages() -> dict[str, str]:
    from importlib import metadata

    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            # The first one on sys.path is the one that is imported.
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return found


def _files(root: Path) -> dict[str, str]:
    """Version files of driver, firmware, CANN and NNAL, and the set_env.sh scripts alongside them."""
    text: list[str] = list(TEXT_FILES)
    if nnal := os.environ.get("ATB_HOME_PATH"):  # …/nnal/atb/latest/atb/cxx_abi_1, wherever it was installed
        text.append(os.path.normpath(f"{nnal}/../../version.info"))
    homes = ["/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann", os.path.expanduser("~/Ascend/cann")]
    homes += sorted(glob.glob("/usr/local/Ascend/cann-*"), reverse=True)
    chosen = os.environ.get("ASCEND_HOME_PATH", "")
    present = list(OTHER_FILES)
    for home in dict.fromkeys([chosen, *homes]):
        if home:
            text += [f"{home}/{arch}-linux/ascend_toolkit_install.info" for arch in ("aarch64", "x86_64")]
            present += [f"{home}/set_env.sh", f"{os.path.dirname(home)}/set_env.sh", home]
    found = {path: read(_under(root, path)) for path in text if _under(root, path).is_file()}
    found.update({path: "" for path in present if path not in found and _under(root, path).exists()})
    return found


def _under(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _devices(root: Path) -> dict[str, Device]:
    import grp
    import pwd
    import stat

    found = {}
    for pattern in ("dev/davinci*", "dev/devmm_svm", "dev/hisi_hdc"):
        for path in sorted(root.glob(pattern)):
            status = path.stat()
            try:
                owner = f"{pwd.getpwuid(status.st_uid).pw_name}:{grp.getgrgid(status.st_gid).gr_name}"
            except KeyError:
                owner = f"{status.st_uid}:{status.st_gid}"
            usable = os.access(path, os.R_OK | os.W_OK)
            found["/" + str(path.relative_to(root))] = Device(stat.filemode(status.st_mode), owner, usable)
    return found


def _pci_accelerators(root: Path) -> int:
    """Huawei's (0x19e5) processing accelerators (PCI class 0x1200)."""
    count = 0
    for folder in (root / "sys/bus/pci/devices").glob("*"):
        if read(folder / "vendor").strip() == "0x19e5" and read(folder / "class").strip().startswith("0x1200"):
            count += 1
    return count


def _command(line: str, until: float) -> Command | None:
    """Run it without a shell; None when it is not installed. `ray status` runs only alongside a Ray process."""
    words = line.split()
    program = shutil.which(words[0])
    if program is None or (words[0] == "ray" and not _ray_runs()):
        return None
    return run([program, *words[1:]], until)


def _ray_runs() -> bool:
    return any(process.name in ("raylet", "gcs_server") for process in _processes(Path("/")))


def _processes(root: Path) -> list[Process]:
    """All processes: a check looks some up by id."""
    found = []
    for path in (root / "proc").glob("[0-9]*/stat"):
        match = re.match(r"(\d+) \((.*)\) (\S) (\d+)", read(path), re.DOTALL)
        if match:
            found.append(Process(int(match[1]), int(match[4]), match[3], match[2]))
    return found


def _listening(root: Path) -> list[int]:
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in read(root / "proc/net" / name).splitlines()[1:]:
            words = line.split()
            if len(words) > 3 and words[3] == "0A":
                ports.add(int(words[1].rsplit(":", 1)[1], 16))
    return sorted(ports)


def _interfaces() -> dict[str, str]:
    import fcntl
    import socket
    import struct

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", name[:15].encode()))  # SIOCGIFADDR
                found[name] = socket.inet_ntoa(packed[20:24])
            except OSError:
                found[name] = ""
    return found


def _free_gb(env: dict[str, str]) -> dict[str, float]:
    places = {
        "outputs": Path("outputs") if Path("outputs").exists() else Path(),
        "models": Path(env.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))),
        "tmp": Path(os.environ.get("TMPDIR", "/tmp")),
    }
    found = {}
    for what, path in places.items():
        path = path.absolute()
        while not path.exists():
            path = path.parent
        found[what] = shutil.disk_usage(path).free / 1e9
    return found


def _shm_gb(root: Path) -> float | None:
    path = root / "dev/shm"
    return shutil.disk_usage(path).total / 2**30 if path.is_dir() else None


def _torch(packages: dict[str, str], until: float) -> dict[str, Any]:
    """What child.py sees. Run by this Python, with no thread pool of its own to start."""
    import json

    if "torch" not in packages:
        return {}
    limit = until - time.monotonic()
    env = dict(os.environ, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    done = run([sys.executable, str(Path(__file__).with_name("child.py"))], until, env)
    if done.code == 124:
        return {"timeout": round(limit, 1)}
    lines = done.output.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"error": f"exit {done.code}: {lines[-1] if lines else 'no output'}"}
