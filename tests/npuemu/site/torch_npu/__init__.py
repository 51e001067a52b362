"""TEST FIXTURE, not Huawei's torch_npu: an emulated "npu" device in host memory. See tests/npuemu/README.md."""

import atexit
import contextlib
import os
import sys
import time
from pathlib import Path

import torch

__version__ = "2.13.0+emulated"
IS_EMULATED = True


def _start():
    library = os.environ.get("NPUEMU_LIBRARY")
    if library is None:
        raise ImportError("this is the emulated torch_npu of the tests: start the program with tests/npuemu/run")
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend("npu")
    from . import hccl, npu

    torch._register_device_module("npu", npu)  # torch.npu and sys.modules["torch.npu"]
    for submodule in ("amp", "graphs", "memory", "random", "streams"):
        sys.modules[f"torch.npu.{submodule}"] = getattr(npu, submodule)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    hccl.register()
    atexit.register(_end_backward_threads)


def _end_backward_threads():
    """Wait until the threads that ran this process's backwards have ended (2 s at most).

    Such a thread lets go of its graph after backward() has returned, and takes the interpreter's lock for that: in an
    interpreter that is ending, CPython 3.11 ends the thread within C++, which aborts the process.
    """
    torch.ops.npuemu.stop_backward_threads()
    end = time.monotonic() + 2
    while any(name.startswith("pt_autograd_") for name in _threads()) and time.monotonic() < end:
        time.sleep(0.001)


def _threads():
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            yield (task / "comm").read_text()


def _autoload():
    """Entry point of the group torch.backends: `import torch` calls it, and importing this module has done the work."""


class _C:
    @staticmethod
    def _storage_Use_Count(storage_impl):  # trl.models.activation_offloading calls it
        return torch._C._storage_Use_Count(storage_impl)


if not hasattr(torch, "npu"):
    _start()

from . import npu  # noqa: E402  # needs the library
from .attention import (  # noqa: E402
    _npu_fused_infer_attention_score_get_max_workspace,  # noqa: F401
    _npu_fused_infer_attention_score_infer_output,  # noqa: F401
    npu_fused_infer_attention_score,
    npu_fusion_attention,
)
from .quantised import (  # noqa: E402
    npu_convert_weight_to_int4pack,
    npu_dynamic_quant,
    npu_quant_matmul,
    npu_weight_quant_batchmatmul,
)


def _emulator_counters():
    """Of the emulation only: how often the host has waited for a device in this process, by what it did.

    "item" (item(), tolist() of one number, bool()), "nonzero" (and others whose result's shape has to be known),
    "copy" (to host memory; not with non_blocking=True to pinned memory), "synchronize" (of a device or a stream),
    "event" (synchronised with), "upload" (host memory to the device; likewise). "blocking" sums the first four: what
    waits for everything that the device was given.
    """
    waits = dict(torch.ops.npuemu.waits())
    counters = {kind: waits.get(kind, 0) for kind in ("item", "nonzero", "copy", "synchronize", "event", "upload")}
    counters["blocking"] = sum(counters[kind] for kind in ("item", "nonzero", "copy", "synchronize"))
    return counters


__all__ = [
    "IS_EMULATED",
    "npu",
    "npu_convert_weight_to_int4pack",
    "npu_dynamic_quant",
    "npu_fused_infer_attention_score",
    "npu_fusion_attention",
    "npu_quant_matmul",
    "npu_weight_quant_batchmatmul",
]
