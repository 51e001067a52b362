"""The only place that knows an Ascend NPU from a CUDA GPU from a CPU.

Everything else asks here. Hardware that is not recognised reads as "cpu" only when torch itself reports no
accelerator; nothing is guessed from names.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from perl.base.errors import UserError, say_once

if TYPE_CHECKING:
    import torch

    from perl.device.kernels import Kernel

Result = TypeVar("Result")

log = logging.getLogger(__name__)

Kind = Literal["npu", "cuda", "cpu"]

HIDDEN_DEVICES = "PERL_HIDDEN_DEVICES"
"""Ids of the devices that the launch script hides from a training's only process, for its workers."""
VISIBILITY_VARIABLE: dict[Kind, str | None] = {
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "cuda": "CUDA_VISIBLE_DEVICES",
    "cpu": None,
}

START_VARIABLES: dict[Kind, dict[str, str]] = {
    "npu": {
        "HCCL_BUFFSIZE": "512",  # MB for each communicator's buffer
        "HCCL_OP_BASE_FFTS_MODE_ENABLE": "TRUE",  # launch collectives on the device
        "HCCL_WHITELIST_DISABLE": "1",  # no allow-list of hosts
        "HCCL_CONNECT_TIMEOUT": "1200",  # ranks may load at different speeds
        "VLLM_ASCEND_ENABLE_NZ": "0",  # weights stay in ND, as trained
        "VLLM_USE_V1": "1",
    },
    "cuda": {},
    "cpu": {  # glibc keeps freed memory: pages that each step gives back and asks for again take a third of its time
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TOP_PAD_": str(256 * 2**20),
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
    },
}
"""What a training is started with, unless the user has set it."""
VLLM_TRAINS_WITH: dict[Kind, dict[str, Any]] = {
    "npu": {"additional_config": {"weight_nz_mode": 0}},  # vllm-ascend's wake_up refuses weights that may be in NZ
    "cuda": {},
    "cpu": {},
}
"""Arguments of vLLM's engine in a training, whatever the environment says."""
WARM_UP = 3
"""Products that are not timed: the first ones make threads and kernels."""
CANN_FOLDERS = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest")

RAY_RESOURCE: dict[Kind, str] = {"npu": "NPU", "cuda": "GPU", "cpu": "CPU"}
"""What Ray calls them, best first. It finds them itself, unless it is started with --num-gpus or --resources."""

OWN_QUANTIZES: dict[str, tuple[str, ...]] = {
    "npu": ("int8", "int8_w8a8", "int4"),
    "cuda": (),
    "cpu": ("int8", "int8_w8a8", "int4", "fp8", "nvfp4"),
}
"""Quantised weights that perl.engines.quantised has products for."""
VLLM_QUANTIZES: dict[str, tuple[str, ...]] = {
    "npu": ("int8_w8a8",),
    "cuda": ("int8", "int8_w8a8", "int4", "fp8", "nvfp4"),
    "cpu": ("int8_w8a8", "int4", "fp8"),
}
"""Those of vLLM 0.31, on a CPU int4 with bfloat16 alone, and of vllm-ascend 0.23. Tried on a CPU alone."""
HAS_BITSANDBYTES: dict[Kind, bool] = {"npu": False, "cuda": True, "cpu": True}
"""Whether bitsandbytes has kernels of its own for the device."""
VLLM_TAKES_WEIGHTS: dict[Kind, bool] = {"npu": True, "cuda": True, "cpu": False}
"""Whether a running vLLM engine can be given other weights of the base: on a CPU it has packed its own, and dropped
what could be replaced, so that it takes an adapter alone."""


@dataclass(frozen=True, slots=True)
class Devices:
    """What this process can compute on."""

    kind: Kind
    count: int
    """Accelerators visible to this process; on a CPU the number of cores this process may use."""


def start_environment(kind: Kind) -> dict[str, str]:
    """Variables of START_VARIABLES that the user has not set, and on an NPU the folder of CANN, which DeepSpeed reads
    and fails without."""
    variables = {name: value for name, value in START_VARIABLES[kind].items() if not os.environ.get(name)}
    if kind == "npu" and not os.environ.get("ASCEND_HOME_PATH"):
        folders = (os.environ.get("ASCEND_TOOLKIT_HOME", ""), *CANN_FOLDERS)
        variables |= [("ASCEND_HOME_PATH", folder) for folder in folders if folder and os.path.isdir(folder)][:1]
    return variables


def detect() -> Devices:
    """The accelerators this process sees: NPUs if there are any, else CUDA GPUs, else CPU cores."""
    for kind in ("npu", "cuda"):
        module = _backend(kind)
        if module is not None and module.is_available() and module.device_count() > 0:
            return Devices(kind, module.device_count())
        if kind == "npu" and module is not None:
            _say_what_hides_the_npus()
    return Devices("cpu", len(os.sched_getaffinity(0)))


@functools.cache  # once a process
def _say_what_hides_the_npus() -> None:
    variable = "ASCEND_RT_VISIBLE_DEVICES"
    if value := os.environ.get(variable):
        log.warning(
            "%s=%s leaves no npu visible: CANN reads ids of devices that exist, ascending, with commas only",
            variable,
            value,
        )


def _backend(kind: Kind) -> ModuleType | None:
    """torch.npu or torch.cuda, or None where there is no such thing."""
    import torch

    if kind == "npu" and not hasattr(torch, "npu") and importlib.util.find_spec("torch_npu"):
        import torch_npu  # noqa: F401  # pyright: ignore[reportMissingImports]  # registers torch.npu
    return getattr(torch, kind, None)


def _accelerator() -> ModuleType | None:
    """torch's module of this process's accelerator, or None on a CPU."""
    kind = detect().kind
    return None if kind == "cpu" else _backend(kind)


def time_products(rows: int, inputs: int, outputs: int, repeats: int = 15) -> dict[str, float]:
    """Milliseconds of the product [rows, inputs] x [inputs, outputs] on this CPU, in "float32" and in "bfloat16":
    medians over `repeats`, the two in turn, so that what else runs slows both."""
    import torch

    states, weight = torch.rand(rows, inputs), torch.rand(outputs, inputs)
    matrices = {"float32": (states, weight), "bfloat16": (states.bfloat16(), weight.bfloat16())}
    times: dict[str, list[float]] = {name: [] for name in matrices}
    for repeat in range(WARM_UP + repeats):
        for name, pair in matrices.items():
            started = time.perf_counter()
            torch.nn.functional.linear(*pair)
            if repeat >= WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(each) for name, each in times.items()}


def multiplies_bfloat16() -> bool:
    """Whether this CPU has units for products of bfloat16 matrices (AMX), which torch uses: a rollout's products of
    them are at least twice as fast as float32's. By name and not by `time_products`: a run that goes on draws the same
    completions."""
    import torch

    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # which older versions of torch have not
    return bool(capabilities.get("amx_bf16")) and torch.backends.mkldnn.is_available()


def torch_device() -> torch.device:
    """The torch device of the first visible accelerator, or the CPU."""
    import torch

    kind = detect().kind
    return torch.device(kind) if kind == "cpu" else torch.device(kind, 0)


def current() -> int | None:
    """The accelerator that this thread computes on where nothing else is said; None on a CPU, and before the first use
    of one."""
    module = _accelerator()
    return module.current_device() if module is not None and module.is_initialized() else None


def use(index: int | None) -> None:
    """Have this thread, which began on the first accelerator, compute on the one that was `current` in another."""
    if index is not None and (module := _accelerator()) is not None:
        module.set_device(index)


def default_dtype() -> torch.dtype:
    """bfloat16 where the device computes in it, float32 on a CPU and on GPUs before Ampere."""
    import torch

    kind = detect().kind
    # A GPU before Ampere emulates bfloat16, slower than float32; without the argument that counts as support.
    if kind == "cpu" or (kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)):
        return torch.float32
    return torch.bfloat16


def worker_environment(index: int, tp_size: int = 1) -> dict[str, str]:
    """Environment that shows worker `index` (of one node) its own `tp_size` devices and no others.

    Ids are taken from the visibility variable when the user has set it, so that `ASCEND_RT_VISIBLE_DEVICES=4,5`
    gives worker 0 device 4. On a CPU the result holds thread counts only: see `pin_cpu`.
    """
    devices = detect()
    variable = VISIBILITY_VARIABLE[devices.kind]
    if variable is None:
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    ids = visible_ids()
    share = ids[index * tp_size : (index + 1) * tp_size]
    if len(share) < tp_size:
        raise UserError(
            f"--dp_size: worker {index} needs {tp_size} {devices.kind} device(s), but only {len(ids)} are visible"
            f" ({variable}={os.environ.get(variable) or 'unset'}); write a smaller --dp_size or --tp_size"
        )
    return {variable: ",".join(share)}


def require_all_visible() -> None:
    """Raise a UserError where the visibility variable names more devices than this process sees: the drivers read up to
    the first id that they do not take, without a word, and a run on fewer devices is another run."""
    devices = detect()
    variable = VISIBILITY_VARIABLE[devices.kind]
    named = os.environ.get(variable or "", "").strip().strip(",")
    if named and (count := named.count(",") + 1) != devices.count:
        raise UserError(
            f"{variable}={named}: names {count} devices, of which {devices.count} are visible; write ids of devices"
            " that exist, with commas and no spaces (NPUs: ascending; of MIG one instance)"
        )


def visible_ids() -> list[str]:
    """Of the accelerators that this process sees, as its visibility variable has them; of a CPU none."""
    devices = detect()
    variable = VISIBILITY_VARIABLE[devices.kind]
    if variable is None:
        return []
    visible = os.environ.get(variable, "").strip()
    ids = [i.strip() for i in visible.split(",")] if visible else [str(i) for i in range(devices.count)]
    return ids[: devices.count]  # the drivers drop ids from the first one on that does not exist, without a word


def ids_beside(taken: int) -> list[str]:
    """Of this machine's accelerators that a training of `taken` processes leaves to workers: those behind its own, or
    those that the launch script has hidden from its only process."""
    hidden = os.environ.get(HIDDEN_DEVICES)
    return visible_ids()[taken:] if hidden is None else [i for i in hidden.split(",") if i]


def pin_cpu(index: int, workers: int) -> None:
    """On a CPU, keep this process on its own share of the cores, so that workers do not chase each other's, and of the
    memory (`available_memory`)."""
    if detect().kind != "cpu":
        return
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // workers)
    start = (index * share) % len(cores)
    os.sched_setaffinity(0, cores[start : start + share])
    os.environ["LOCAL_WORLD_SIZE"] = str(workers)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of this process's accelerator in bytes: the peaks since the process began, and all there is."""

    allocated: int
    """In tensors."""
    reserved: int
    """Held by torch, in tensors or not."""
    total: int


def peak_memory() -> Memory | None:
    """Peaks of torch's allocator, or None on a CPU."""
    module = _accelerator()
    if module is None:
        return None
    return Memory(module.max_memory_allocated(), module.max_memory_reserved(), module.mem_get_info()[1])


def free_memory() -> int | None:
    """Bytes that this process can still put into tensors on its accelerator, what torch holds unused included; None
    on a CPU."""
    module = _accelerator()
    if module is None:
        return None
    return module.mem_get_info()[0] + module.memory_reserved() - module.memory_allocated()


def available_memory() -> int:
    """Bytes that this process can still put into tensors: on its accelerator, or on a CPU in the machine's memory."""
    free = free_memory()
    return host_memory() if free is None else free


def host_memory() -> int:
    """Bytes of the machine's memory that this process can still take: its share of what is available, where torch's
    launcher or perl's evaluator have started several here (LOCAL_WORLD_SIZE)."""
    return _of_machine("MemAvailable") // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def total_memory() -> int:
    """Bytes of this process's accelerator, or of the machine, whatever they hold and however many processes there
    are."""
    module = _accelerator()
    return _of_machine("MemTotal") if module is None else module.mem_get_info()[1]


def _of_machine(name: str) -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def to_device(tensor: torch.Tensor, where: torch.device | str) -> torch.Tensor:
    """A small tensor of the host, on a device. The host waits for nothing: copied from memory that is not pinned, it
    would wait for all that the device still has to compute."""
    import torch

    return tensor if torch.device(where).type == "cpu" else tensor.pin_memory().to(where, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Read:
    """A tensor on its way to the host."""

    value: torch.Tensor
    event: Any = None
    """What the device reaches when it has come; None on a CPU."""

    def wait(self) -> torch.Tensor:
        """The tensor on the host."""
        if self.event is not None:
            self.event.synchronize()
        return self.value


def start_read(tensor: torch.Tensor) -> Read:
    """Begin to copy a tensor to the host, behind all that the device was given so far, without waiting for it. On a
    device it may be written to as soon as this returns."""
    import torch

    if tensor.device.type == "cpu":
        return Read(tensor)
    module = _accelerator()
    assert module is not None
    value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    value.copy_(tensor, non_blocking=True)
    event = module.Event()
    event.record()
    return Read(value, event)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an accelerator ran out of memory; older torch_npu raises a plain RuntimeError."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "NPU out of memory" in str(error)
    )


def synchronize() -> None:
    """Wait until the accelerator has done all that it was given; on a CPU there is nothing to wait for."""
    if (module := _accelerator()) is not None:
        module.synchronize()


def name() -> str:
    """What the driver calls this process's accelerator ("Ascend910B3", "NVIDIA H200"), or "cpu"."""
    module = _accelerator()
    return "cpu" if module is None else module.get_device_name()


def _cubes(cores: int, mhz: int) -> float:
    """FLOP/s of Ascend's cube cores, each 16 x 16 x 16 multiply-adds a cycle."""
    return cores * 16**3 * 2 * mhz * 1e6


PEAK_FLOPS: dict[str, float] = {
    # Ascend: cube_core_cnt and cube_freq of the chip's file in CANN's data/platform_config (8.1.RC1; 9.0.0 for
    # 910B4-1 and 9382). A 910C is two devices of one die each; CANN's runtime puts 9392 into one bin with 9391, and
    # 9381 with 9382.
    "Ascend910B1": _cubes(24, 1850),
    "Ascend910B2": _cubes(24, 1800),
    "Ascend910B2C": _cubes(24, 1800),
    "Ascend910B3": _cubes(20, 1800),
    "Ascend910B4": _cubes(20, 1500),
    "Ascend910B4-1": _cubes(20, 1500),
    "Ascend910_9391": _cubes(24, 1850),
    "Ascend910_9392": _cubes(24, 1850),
    "Ascend910_9381": _cubes(24, 1800),
    "Ascend910_9382": _cubes(24, 1800),
    "Ascend910_9362": _cubes(20, 1500),
    # NVIDIA's data sheets, dense: half of what they print with sparsity.
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
}
"""Dense bfloat16 and float16 FLOP/s by exact name: variants differ by a half, so that a similar name is no answer."""


def peak_flops() -> float | None:
    """Peak FLOP/s of this process's accelerator, or None where it is not known, as on a CPU."""
    return PEAK_FLOPS.get(name())


def empty_cache() -> None:
    """Give memory that torch holds but no tensor uses back to the accelerator; on a CPU there is nothing to do."""
    if (module := _accelerator()) is not None:
        module.empty_cache()


def takes_bottom_right(where: torch.device) -> bool:
    """Whether sdpa on such a device computes torch.nn.attention.bias.causal_lower_right without making a mask of it."""
    return where.type == "cuda"


def fuses_rms_norm(where: torch.device) -> bool:
    """Whether torch computes rms_norm on such a device as one kernel."""
    return where.type == "cuda"


def captures_by_default() -> bool:
    """Whether decode steps are captured unless somebody says otherwise: on CUDA; on Ascend eager is the default."""
    return detect().kind == "cuda"


def graph_pool() -> Any:
    """Memory that captured graphs may share, as long as one's results are read before the next is replayed."""
    module = _accelerator()
    assert module is not None
    return module.graph_pool_handle()


class Graph:
    """What was captured by `capture`."""

    def __init__(self, graph: Any, module: ModuleType, waits_for_update: bool):
        self._graph, self._module = graph, module
        self._waits = self._must_update = waits_for_update

    def update_lengths(self, lengths: list[int]) -> None:
        """The lengths that the next replay's paged attention computes with, in every layer; before each replay.

        Does nothing where the kernel reads them from the device, as on CUDA. Never waits for the device.
        """
        if not self._waits:
            return
        # An update ends with an event that the replay waits for and then resets. So it may not come before the
        # previous replay is through, which would reset the new event: the update's stream waits for it, not the host.
        stream = self._graph.graph_dispatch_mode.update_stream
        stream.wait_stream(self._module.current_stream())
        self._graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        self._must_update = False

    def replay(self) -> None:
        """Launch it on the current stream."""
        if self._must_update:
            raise RuntimeError("a captured graph with lengths of the host needs update_lengths() before each replay")
        self._graph.replay()
        self._must_update = self._waits


def capture(function: Callable[[], Result], pool: Any, host_lengths: bool = False) -> tuple[Graph, Result]:
    """A graph of what `function` launches on this process's accelerator, and what it returned: the tensors that each
    `graph.replay()` writes its results to. Nothing is computed now. Raises RuntimeError where `function` does what a
    graph can't hold. Other threads (a dataloader's, a collective's watchdog) may go on using the device meanwhile.

    Args:
        host_lengths: whether it calls a kernel whose `host_lengths` is true, so that `graph.update_lengths` comes
            before each replay.
    """
    kind, module = detect().kind, _accelerator()
    assert module is not None
    graph = module.CUDAGraph() if kind == "cuda" else module.NPUGraph()
    updates = host_lengths and kind == "npu"
    more = {"auto_dispatch_capture": True} if updates else {}
    with module.graph(graph, pool=pool, capture_error_mode="thread_local", **more):
        result = function()
    return Graph(graph, module, updates), result


def paged_attention(wanted: bool | Literal["auto"]) -> Kernel | None:
    """The kernel for the attention of a decode step over a paged KV cache (perl.device.kernels.PAGED), or None.

    Args:
        wanted: "auto" is on CUDA, where it can be had; Ascend's have not been checked on a device.
    """
    from perl.device import kernels

    return _where_wanted(kernels.PAGED[detect().kind], wanted)


def varlen_attention(wanted: bool | Literal["auto"]) -> Kernel | None:
    """The kernel for causal attention of packed rows without a mask (perl.device.kernels.VARLEN), or None; as above."""
    from perl.device import kernels

    return _where_wanted(kernels.VARLEN[detect().kind], wanted)


def _where_wanted(kernel: Kernel, wanted: bool | Literal["auto"]) -> Kernel | None:
    if wanted != "auto":
        return kernel if wanted else None
    if detect().kind != "cuda":
        return None
    if (reason := kernel.absent()) is not None:
        say_once(f"attention is computed by sdpa: {reason}", logging.INFO)
        return None
    return kernel


def for_decompositions(where: torch.device) -> torch.device:
    """Where the singular values of a tensor on `where` are computed: CANN has no operator for them."""
    import torch

    return torch.device("cpu") if where.type == "npu" else where
