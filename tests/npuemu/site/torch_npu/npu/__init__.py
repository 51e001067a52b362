"""What the emulated device publishes as torch.npu: the functions that PyTorch's users call, under their real names."""

# ruff: noqa: F401  # what is imported here is published as torch.npu.*

from types import SimpleNamespace

import torch

from . import amp, graphs, memory, random, streams
from ._index import device_index
from .graphs import NPUGraph, graph, graph_pool_handle, is_current_stream_capturing
from .memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_memory_stats,
)
from .random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from .streams import Event, Stream, current_stream, default_stream, set_stream, stream

_ops = torch.ops.npuemu


def is_available():
    return device_count() > 0


def is_initialized():
    return _ops.is_initialized()


def init():
    _ops.initialize()


_lazy_init = init


def _lazy_call(function):
    # The real one waits for the first use of a device; nothing here depends on that.
    function()


def _is_in_bad_fork():
    return _ops.is_in_bad_fork()


def device_count():
    return _ops.device_count()


def current_device():
    return _ops.current_device()


def set_device(device):
    _ops.set_device(device_index(device))


def synchronize(device=None):
    _ops.synchronize(device_index(device))


def _checked_index(device):
    index = device_index(device)
    if not 0 <= index < device_count():
        raise AssertionError("Invalid device id")
    return index


def get_device_name(device=None):
    return get_device_properties(device).name


def get_device_properties(device=None):
    """Names no real chip, so that nothing is looked up for it that only a real chip has, such as its peak FLOP/s."""
    total_memory = mem_get_info(_checked_index(device))[1]
    return SimpleNamespace(name="Ascend-emulated", total_memory=total_memory, multi_processor_count=0)


def get_device_capability(device=None):
    return None  # CANN has no such thing


def is_bf16_supported():
    return True


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16]


def can_device_access_peer(device, peer):
    return _checked_index(device) != _checked_index(peer)


class device:
    """Context in which a device is the current one; None and negative indices change nothing."""

    def __init__(self, device):
        self.index = None if device is None else device_index(device)

    def __enter__(self):
        self.previous = current_device()
        if self.index is not None:
            _ops.set_device(self.index)

    def __exit__(self, *exception):
        _ops.set_device(self.previous)
        return False


class device_of(device):
    """Context in which the device of a tensor is the current one, if it is on an npu."""

    def __init__(self, tensor):
        super().__init__(tensor.get_device() if tensor.device.type == "npu" else None)


class _DefaultGenerators:
    def __len__(self):
        return device_count()

    def __getitem__(self, index):
        return _ops.default_generator(index)


default_generators = _DefaultGenerators()


def _tensor_type(dtype):
    """torch.npu.FloatTensor and its like: make a tensor of one dtype on the current device (DeepSpeed uses them)."""

    def make(*arguments):
        if len(arguments) == 1 and isinstance(arguments[0], list | tuple):
            return torch.tensor(arguments[0], dtype=dtype, device="npu")
        return torch.empty(*arguments, dtype=dtype, device="npu")

    return make


FloatTensor = _tensor_type(torch.float32)
HalfTensor = _tensor_type(torch.float16)
BFloat16Tensor = _tensor_type(torch.bfloat16)
DoubleTensor = _tensor_type(torch.float64)
LongTensor = _tensor_type(torch.int64)
IntTensor = _tensor_type(torch.int32)
ByteTensor = _tensor_type(torch.uint8)
BoolTensor = _tensor_type(torch.bool)


def operator_calls():
    """Of the emulation only: how often each operator ran on any device of this process, {"aten::mm": 3}."""
    return dict(_ops.operator_calls())
