"""The checks, in the order they are printed: from the machine up to what runs on it.

A check returns None where it does not apply; those of ASCEND are asked only on machines with something of Ascend's.
"""

from __future__ import annotations

from collections.abc import Callable

from perl.tools.doctor.checks import ascend, hardware, network, runtime, software
from perl.tools.doctor.findings import Finding
from perl.tools.doctor.machine import Machine

CHECKS: dict[str, Callable[[Machine], Finding | None]] = {
    "architecture": hardware.architecture,
    "python": hardware.python,
    "accelerator": hardware.accelerator,
    "npu-smi": ascend.npu_smi,
    "driver": ascend.driver,
    "firmware": ascend.firmware,
    "device-files": ascend.device_files,
    "health": ascend.health,
    "device-memory": ascend.device_memory,
    "cann": ascend.cann,
    "nnal": ascend.nnal,
    "set-env": ascend.set_env,
    "versions": software.versions,
    "libraries": software.libraries,
    "torch": software.torch,
    "visible-devices": runtime.visible_devices,
    "allocator": runtime.allocator,
    "hccl": network.hccl,
    "ports": network.ports,
    "interface": network.interface,
    "ray": runtime.ray,
    "processes": runtime.processes,
    "disk": hardware.disk,
    "shm": hardware.shm,
}
ASCEND = {"npu-smi", "driver", "firmware", "device-files", "cann", "nnal", "set-env", "hccl"}


def diagnose(machine: Machine) -> dict[str, Finding]:
    """The findings of every check that applies, by check name."""
    asked = {name: check for name, check in CHECKS.items() if machine.kind == "npu" or name not in ASCEND}
    findings = {name: check(machine) for name, check in asked.items()}
    return {name: finding for name, finding in findings.items() if finding is not None}
