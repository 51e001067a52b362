"""Batch sizes that fit: the same completions per rollout and per update, dealt out otherwise."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from perl.tools.plan.memory import Device, Job, Shape, items, micro_batch, peak, with_batch

USABLE = 0.9
"""Of a device's memory, how much a plan may take. Assumed: the rest is what the allocator holds in pieces that are too
small."""
TOKENS = 512
"""max_tokens_per_microbatch and max_batch_tokens are proposed in multiples of this."""
MOST_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings that fit, by their flags without --config., and the peaks with them in bytes."""

    job: Job
    flags: dict[str, int | float | bool]
    rollout: int
    update: int


def peaks(shape: Shape, job: Job, device: Device, capacity: int) -> tuple[int, int]:
    """Of the rollout and of the update."""
    table = items(shape, job, device, capacity)
    return peak(table, "rollout"), peak(table, "update")  # where nothing is sampled the first is what always stays


def fits(shape: Shape, job: Job, device: Device, capacity: int) -> bool:
    """Whether both phases do."""
    return max(peaks(shape, job, device, capacity)) <= USABLE * capacity


def propose(shape: Shape, job: Job, device: Device, capacity: int) -> Proposal | None:
    """The largest micro-batch that fits on `capacity` bytes, with what else must change for it: a bound on the cache,
    then checkpointing, then a smaller share for vLLM. None where nothing of that is enough."""
    for tried in _variants(job, shape, device, capacity):
        for rows in _divisors(job):
            candidate = with_batch(tried, rows)
            if fits(shape, candidate, device, capacity):
                rollout, update = peaks(shape, candidate, device, capacity)
                return Proposal(candidate, _flags(candidate, job), rollout, update)
    return None


def _divisors(job: Job) -> list[int]:
    """Rows of a forward that divide a process's part of the update and of the rollout, the most first."""
    both = math.gcd(job.update_rows, job.rows)
    return [rows for rows in range(both, 0, -1) if both % rows == 0]


def _variants(job: Job, shape: Shape, device: Device, capacity: int) -> Iterator[Job]:
    """The job, and what costs time but changes no result."""
    job = dataclasses.replace(job, max_tokens=None)
    for checkpointing in dict.fromkeys((job.checkpointing, True)):
        one = dataclasses.replace(job, checkpointing=checkpointing)
        yield one
        if one.engine == "fast":
            if tokens := cache_tokens(shape, one, device, capacity):
                yield dataclasses.replace(one, max_batch_tokens=tokens)
        elif one.vllm_share:
            needed = shape.parameters * one.weight_bytes / one.vllm_devices / capacity
            for percent in range(int(one.vllm_share * 100) // 5 * 5, 0, -5):
                if percent / 100 > needed:
                    yield dataclasses.replace(one, vllm_share=percent / 100)


def cache_tokens(shape: Shape, job: Job, device: Device, capacity: int) -> int | None:
    """The largest max_batch_tokens, in TOKENS, with which the rollout fits; None where one longest row does not."""
    least = -(-job.length // TOKENS)
    bounds = range(least, max(least, job.rows * job.length // TOKENS) + 1)

    def too_much(bound: int) -> bool:
        bounded = dataclasses.replace(job, max_batch_tokens=bound * TOKENS)
        return peaks(shape, bounded, device, capacity)[0] > USABLE * capacity

    count = bisect_left(bounds, True, key=too_much)
    return bounds[count - 1] * TOKENS if count else None


def update_tokens(shape: Shape, job: Job, device: Device, capacity: int) -> int | None:
    """The largest max_tokens_per_microbatch, in TOKENS, that fits; all tokens of an update at most. None where the
    setting has no effect, or a single row does not fit."""
    if not (job.packed and job.regrouped):
        return None
    window = math.gcd(job.steps_per_generation, job.accumulation) * job.micro_batch
    whole = micro_batch(dataclasses.replace(job, micro_batch=window, max_tokens=None)).tokens
    least = -(-job.length // TOKENS)
    bounds = range(least, max(least, -(-whole // TOKENS)) + 1)

    def too_much(bound: int) -> bool:
        bounded = dataclasses.replace(job, max_tokens=bound * TOKENS)
        return peaks(shape, bounded, device, capacity)[1] > USABLE * capacity

    count = bisect_left(bounds, True, key=too_much)
    return bounds[count - 1] * TOKENS if count else None


def _flags(job: Job, before: Job) -> dict[str, int | float | bool]:
    flags: dict[str, int | float | bool] = {
        "training.per_device_train_batch_size": job.micro_batch,
        "training.gradient_accumulation_steps": job.accumulation,
    }
    if job.engine is not None:
        flags["training.steps_per_generation"] = job.steps_per_generation
    if job.checkpointing != before.checkpointing:
        flags["training.gradient_checkpointing"] = job.checkpointing
    if job.max_batch_tokens is not None:
        flags["rollout.max_batch_tokens"] = job.max_batch_tokens
    if job.vllm_share != before.vllm_share:
        flags["training.vllm_gpu_memory_utilization"] = job.vllm_share
    return flags
