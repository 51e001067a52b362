"""vLLM that does not start for want of memory: what it found, and which flag to set to which value, in one line.

The messages are those of vLLM 0.18 to 0.31 (v1/worker/utils.py, v1/core/kv_cache_utils.py, v1/worker/cpu_worker.py) and
of vllm-ascend's worker; each states its figures in GiB.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from perl import device
from perl.base.errors import UserError

LARGEST_SHARE = 0.97
"""The driver and other libraries keep some of the device."""
CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"
"""Variable: GiB of KV cache on a CPU, whole ones. While it is set, vLLM does not read gpu_memory_utilization there."""
TRAINING_FLAGS = {
    "--gpu_memory_utilization": "--config.training.vllm_gpu_memory_utilization",
    "--max_model_len": "--config.training.vllm_max_model_length",
    "--tp_size": "--config.training.vllm_tensor_parallel_size",
}
"""What a training calls the evaluator's flags. It has none for --enforce_eager."""

NUMBER = r"(-?[\d.]+)"
SHARE_TAKEN = re.compile(
    rf"Free memory on device.*?\({NUMBER}/{NUMBER} GiB\) on startup is less than desired", re.DOTALL
)
NO_CACHE = re.compile(r"No available memory for the cache blocks")
SHORT_CACHE = re.compile(rf"max seq len \((\d+)\).*?{NUMBER} GiB KV\s+cache is needed.*?\({NUMBER} GiB\)", re.DOTALL)
LONGEST = re.compile(r"estimated maximum model length is (\d+)")
CPU_SHORT = re.compile(
    rf"Available memory on node \S+ \({NUMBER}/{NUMBER} GiB\) on kv cache allocation is less than requested memory"
    rf" for kv \({NUMBER}(?:/{NUMBER})? GiB\)"
)
ALLOCATION = re.compile(r"out of memory", re.IGNORECASE)
MOVED = re.compile(rf"Error in memory profiling.*?{NUMBER} GiB.*?{NUMBER} GiB", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Start:
    """What an engine was started with, as far as its memory goes."""

    share: float
    """gpu_memory_utilization."""
    eager: bool
    """enforce_eager."""
    total_gib: float
    """Memory of the device; on a CPU, of the machine."""
    cpu: bool = False
    fixed_cache: bool = False
    """The KV cache has a size of its own, not what the share leaves (on a CPU, unless the user gives a share)."""


def explain(
    error: BaseException, share: float, eager: bool, fixed_cache: bool, training: bool = False
) -> UserError | None:
    """The UserError for an engine that did not start, or None where memory is not the reason.

    Args:
        share, eager, fixed_cache: as in Start.
        training: the flags are a training's, not the evaluator's.
    """
    memory = device.peak_memory()
    total = memory.total if memory else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    start = Start(share, eager or training, total / 2**30, cpu=memory is None, fixed_cache=fixed_cache)
    line = advice(str(error), start)
    if line is None:
        return None
    for flag, of_training in TRAINING_FLAGS.items() if training else ():
        line = line.replace(flag, of_training)
    return UserError(f"vLLM does not start: {line}")


def advice(message: str, start: Start) -> str | None:
    """What is short and what to write instead, or None where vLLM spoke of something else than memory."""
    if match := SHARE_TAKEN.search(message):
        return _share_is_taken(float(match[1]), float(match[2]), start)
    if match := SHORT_CACHE.search(message):
        longest = LONGEST.search(message)
        needed, available = float(match[2]), float(match[3])
        return _cache_is_short(int(match[1]), needed, available, int(longest[1]) if longest else None, start)
    if NO_CACHE.search(message):
        what = (
            f"weights and activations leave nothing of its share of the device (now {start.share:g}) for the KV cache"
        )
        return f"{what}; {_either(_room(start))}"
    if match := CPU_SHORT.search(message):
        available, total, wanted = (float(match[n]) for n in (1, 2, 3))
        return _cpu_is_short(available, total, wanted, float(match[4]) if match[4] else None)
    if match := MOVED.search(message):
        return (
            f"another process gave memory back while vLLM measured the device ({match[1]} GiB free, then {match[2]});"
            " the same command again, once the device is quiet"
        )
    if ALLOCATION.search(message):
        line = next(line for line in message.splitlines() if ALLOCATION.search(line)).strip()
        return f"{'. '.join(line.split('. ')[:3]).rstrip('.')}; {_either(_less(start))}"
    return None


def _share_is_taken(free: float, total: float, start: Start) -> str:
    share = _down(free / total)
    shortage = f"{free} of {total} GiB are free, and it takes {start.share} of all"
    if share < 0.05:
        return f"{shortage}; another process holds the device: end it, or choose another device"
    return f"{shortage}; write --gpu_memory_utilization {share:.2f}, or end what else uses the device"


def _cache_is_short(length: int, needed: float, available: float, longest: int | None, start: Start) -> str:
    shortage = f"one sequence of {length} tokens needs {needed} GiB of KV cache, {available} are left for it"
    ways = []
    if start.fixed_cache:
        ways.append(f"{CPU_CACHE}={math.ceil(needed)} in the environment")
    else:
        share = _up(start.share + (needed - available) / start.total_gib)
        if share <= LARGEST_SHARE:
            ways.append(f"--gpu_memory_utilization {share:.2f} (now {start.share:g})")
    if longest:
        ways.append(f"--max_model_len {longest} (completions that reach it are cut)")
    return f"{shortage}; {_either([*ways, *_eager(start)] if ways else _room(start))}"


def _cpu_is_short(available: float, total: float, wanted: float, requested: float | None) -> str:
    """`requested`: the share of `total`; None: VLLM_CPU_KVCACHE_SPACE says how much is wanted."""
    if requested is None:
        most = math.floor(available)
        other = "end what else uses it" if most < 1 else f"write {CPU_CACHE}={most} in the environment"
        return f"{CPU_CACHE} asks for {wanted} GiB of KV cache, {available} of {total} GiB are free; {other}"
    used = requested - wanted  # by the process without a cache
    if wanted <= 0:
        share = _up((used + 1) / total)
        shortage = f"without a KV cache it already uses {used:.2f} GiB, its share of {total} is {requested} GiB"
    else:
        share = _down((used + available) / total)
        shortage = f"{wanted} GiB of KV cache are wanted, {available} of {total} GiB are free"
    return f"{shortage}; write --gpu_memory_utilization {share:.2f} (1 GiB of KV cache is enough for small models)"


def _room(start: Start) -> list[str]:
    """Flags that give the KV cache more room."""
    larger = [share for share in (0.9, 0.95, LARGEST_SHARE) if share > start.share][:1]
    return [
        *(f"--gpu_memory_utilization {share:g} (now {start.share:g})" for share in larger),
        *_eager(start),
        "a larger --tp_size",
    ]


def _less(start: Start) -> list[str]:
    """Flags with which vLLM allocates less: its cache is sized before graphs are captured and samplers warmed up."""
    smaller = _down(start.share - 0.1)
    ways = [f"--gpu_memory_utilization {smaller:.2f} (now {start.share:g})"] if smaller > 0 else []
    return [*ways, *_eager(start), "a larger --tp_size"]


def _eager(start: Start) -> Iterator[str]:
    if not start.eager and not start.cpu:
        yield "--enforce_eager (no memory for captured graphs)"


def _either(ways: list[str]) -> str:
    return f"write {', or '.join(ways)}"


def _down(share: float) -> float:
    return math.floor(share * 100 + 1e-9) / 100


def _up(share: float) -> float:
    return math.ceil(share * 100 - 1e-9) / 100
