"""The devices that a plan can be made for."""

from __future__ import annotations

import os

from perl.tools.plan.memory import GB, Device

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
HCCL_BYTES = 2 * 512 * 2**20
"""Send and receive buffers of one communicator, with the HCCL_BUFFSIZE that the launch script sets (docs/ascend.md)."""
IDLE_ASCEND = 7 * GB // 2
"""What an idle 910B shows as taken, at most (docs/ascend.md)."""
CONTEXT_CUDA = 5 * GB // 4
"""Assumed: context and kernels of torch, NCCL's buffers."""


def _ascend(name: str) -> Device:
    return Device(name=name, kind="npu", memory=64 * GB, runtime=IDLE_ASCEND, communicator=HCCL_BYTES)


def _cuda(name: str, memory: int) -> Device:
    return Device(name=name, kind="cuda", memory=memory, runtime=CONTEXT_CUDA, fused_tiles=True, packs=True)


DEVICES = {
    "910b": _ascend("910b"),
    "910c": _ascend("910c"),  # one of its two chips, each of which is a device
    "a100": _cuda("a100", 80 * GB),
    "h100": _cuda("h100", 80 * GB),
    "h200": _cuda("h200", 141 * GB),
    "cpu": Device(name="cpu", kind="cpu", memory=MACHINE, runtime=0),
}
SIZES = (32 * GB, 64 * GB, 80 * GB, 141 * GB)
"""Of devices that are sold; those of --device are among them."""
