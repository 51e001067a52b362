"""Memory statistics: what the emulated allocator (csrc/memory.cpp) booked, in bytes."""

import torch

from ._index import device_index


def memory_stats(device=None):
    return torch.accelerator.memory_stats(device_index(device))


def memory_allocated(device=None):
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device=None):
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device=None):
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device=None):
    return memory_stats(device)["reserved_bytes.all.peak"]


def mem_get_info(device=None):
    """Free and total bytes of the device, as far as this process knows: others on the same device do not count."""
    return torch.accelerator.get_memory_info(device_index(device))


def reset_peak_memory_stats(device=None):
    torch.accelerator.reset_peak_memory_stats(device_index(device))


def reset_accumulated_memory_stats(device=None):
    torch.accelerator.reset_accumulated_memory_stats(device_index(device))


def empty_cache():
    torch.accelerator.empty_cache()


# Older names, which DeepSpeed's accelerator still calls.
memory_cached = memory_reserved
max_memory_cached = max_memory_reserved
reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats
