"""What the probes found on a machine: plain facts, so that a test can also stage a machine from a file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from perl.tools.doctor import smi


@dataclass(frozen=True)
class Command:
    """What a command printed."""

    code: int
    """Exit status; 124 when it ran past its limit."""
    output: str
    """stdout and stderr together."""


@dataclass(frozen=True)
class Device:
    """A device file."""

    mode: str
    """As ls prints it: "crw-rw----"."""
    owner: str
    """ "root:HwHiAiUser"."""
    usable: bool
    """This user may read and write it."""


@dataclass(frozen=True)
class Process:
    """A process that may matter: a zombie, one of Ray's, or one that npu-smi names."""

    pid: int
    parent: int
    state: str
    """The letter of /proc/PID/stat: R, S, D, Z …"""
    name: str


@dataclass(frozen=True)
class Machine:
    """All facts. A fact that is missing from its mapping does not exist on the machine, or could not be read."""

    arch: str = "x86_64"
    python: str = "3.11.0"
    prefix: str = ""
    """Where the Python that is examined keeps its packages (sys.prefix)."""
    container: bool = False
    root: bool = True
    pci_accelerators: int = 0
    """Ascend accelerators on the PCI bus, as sysfs shows them: the host's, even inside a container."""
    commands: dict[str, Command] = field(default_factory=dict)
    """By command line; a command that is not installed is absent."""
    files: dict[str, str] = field(default_factory=dict)
    """Text of small files, and "" for other paths that exist."""
    devices: dict[str, Device] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    """Variables that matter here; secrets as "(set)"."""
    packages: dict[str, str] = field(default_factory=dict)
    """Installed versions by normalised distribution name."""
    missing_libraries: dict[str, list[str]] = field(default_factory=dict)
    """By Python package: shared objects that the loader does not find for it. Absent: not looked up."""
    torch: dict[str, Any] = field(default_factory=dict)
    """What the child that imports torch saw: version, npu, cuda (counts), or error, timeout."""
    processes: list[Process] = field(default_factory=list)
    interfaces: dict[str, str] = field(default_factory=dict)
    """IPv4 address ("" when it has none) by network interface."""
    listening: list[int] = field(default_factory=list)
    """TCP ports that something listens on."""
    free_gb: dict[str, float] = field(default_factory=dict)
    """Free disk space by what is stored there: "outputs", "models", "tmp"."""
    shm_gb: float | None = None
    """Size of /dev/shm."""
    unfinished: list[str] = field(default_factory=list)
    """Probes that did not end in time."""

    @property
    def kind(self) -> str:
        """ "npu" when a device, the driver or CANN is here, else "cuda" when GPUs are listed, else "cpu".

        An installed torch-npu alone does not count: on a laptop it is the fault to find, not a sign of an NPU.
        """
        ascend = (
            self.pci_accelerators
            or self.npu_devices
            or any(name.startswith("npu-smi") for name in self.commands)
            or any(path.startswith("/usr/local/Ascend") for path in self.files)
        )
        if ascend:
            return "npu"
        return "cuda" if self.gpus else "cpu"

    @property
    def npu_devices(self) -> list[str]:
        """/dev/davinci0, /dev/davinci1 … (not /dev/davinci_manager)."""
        return sorted(
            (path for path in self.devices if re.fullmatch(r"/dev/davinci\d+", path)), key=lambda p: int(p[12:])
        )

    @property
    def table(self) -> smi.Table:
        """`npu-smi info`, parsed; empty where it did not run."""
        return smi.parse_info(self.output("npu-smi info"))

    @property
    def gpus(self) -> list[str]:
        """Names of the GPUs that nvidia-smi lists."""
        return re.findall(r"^GPU \d+: (.+?) \(UUID", self.output("nvidia-smi -L"), re.MULTILINE)

    def output(self, command: str) -> str:
        return self.commands[command].output if command in self.commands else ""
