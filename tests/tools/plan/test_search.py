"""perl.tools.plan.search: what is proposed fits, what is larger does not, and the batch stays what it was."""

import math
from dataclasses import replace

import pytest

from perl.tools.plan.devices import DEVICES
from perl.tools.plan.memory import GB, Job, Shape, with_batch
from perl.tools.plan.search import TOKENS, USABLE, cache_tokens, fits, peaks, propose, update_tokens

SHAPE = Shape(  # Qwen2.5-7B with LoRA r 16 on all linears
    parameters=7_615_616_512,
    linear=7_070_285_824,
    adapter=40_370_176,
    largest_adapted=3584 * 18_944,
    adapted_weights=6_525_288_448,
    adapted={
        "q_proj": (3584, 3584),
        "k_proj": (3584, 512),
        "v_proj": (3584, 512),
        "o_proj": (3584, 3584),
        "gate_proj": (3584, 18_944),
        "up_proj": (3584, 18_944),
        "down_proj": (18_944, 3584),
    },
    rank=16,
    layers=28,
    hidden=3584,
    heads=28,
    key_heads=4,
    head_dim=128,
    intermediate=18_944,
    vocabulary=152_064,
)
JOB = Job(
    prompt=512,
    completion=2048,
    group=8,
    micro_batch=4,
    accumulation=16,
    steps_per_generation=32,
    processes=4,
    parallel="zero2",
    weight_bytes=2,
    compute_bytes=2,
    checkpointing=True,
)
DEVICE = DEVICES["910b"]


@pytest.mark.parametrize("size", [32, 64, 80, 141])
def test_the_largest_micro_batch_that_fits_keeps_the_batch(size):
    found = propose(SHAPE, JOB, DEVICE, size * GB)
    assert found is not None
    assert (found.job.update_rows, found.job.rows) == (64, 128)
    assert max(found.rollout, found.update) <= USABLE * size * GB
    assert found.flags["training.gradient_accumulation_steps"] == 64 // found.job.micro_batch
    larger = [rows for rows in range(found.job.micro_batch + 1, 65) if 64 % rows == 0]
    assert not any(fits(SHAPE, with_batch(found.job, rows), DEVICE, size * GB) for rows in larger)


def test_checkpointing_is_proposed_where_nothing_else_fits():
    stored = replace(JOB, checkpointing=False, completion=8192)
    assert not fits(SHAPE, with_batch(stored, 1), DEVICE, 32 * GB)
    found = propose(SHAPE, stored, DEVICE, 32 * GB)
    assert found is not None
    assert found.flags["training.gradient_checkpointing"] is True


def test_nothing_is_proposed_where_the_weights_alone_are_too_much():
    assert propose(SHAPE, JOB, DEVICE, 16 * GB) is None


def test_a_batch_of_an_odd_number_has_odd_parts():
    found = propose(SHAPE, replace(JOB, micro_batch=3, accumulation=5, steps_per_generation=5), DEVICE, 64 * GB)
    assert found is not None
    assert 15 % found.job.micro_batch == 0
    assert math.gcd(found.job.update_rows, found.job.rows) == 15


def test_tokens_of_a_micro_batch_are_the_most_that_fit():
    tokens = update_tokens(SHAPE, JOB, DEVICE, 64 * GB)
    assert tokens is not None
    assert tokens % TOKENS == 0
    assert peaks(SHAPE, replace(JOB, max_tokens=tokens), DEVICE, 64 * GB)[1] <= USABLE * 64 * GB
    assert peaks(SHAPE, replace(JOB, max_tokens=tokens + 16 * TOKENS), DEVICE, 64 * GB)[1] > USABLE * 64 * GB
    assert update_tokens(SHAPE, replace(JOB, regrouped=False), DEVICE, 64 * GB) is None


def test_the_bound_on_the_cache_is_the_largest_that_fits():
    long = replace(JOB, completion=32_768)
    tokens = cache_tokens(SHAPE, long, DEVICE, 32 * GB)
    assert tokens is not None
    assert peaks(SHAPE, replace(long, max_batch_tokens=tokens), DEVICE, 32 * GB)[0] <= USABLE * 32 * GB
    assert tokens >= long.length
    assert cache_tokens(SHAPE, long, DEVICE, 16 * GB) is None


def test_a_smaller_share_for_vllm_still_holds_the_weights():
    job = replace(JOB, engine="vllm", vllm_share=0.7)
    assert not fits(SHAPE, with_batch(job, 1), DEVICE, 64 * GB)
    found = propose(SHAPE, job, DEVICE, 64 * GB)
    assert found is not None
    share = found.flags["training.vllm_gpu_memory_utilization"]
    assert 2 * SHAPE.parameters / (64 * GB) < share < 0.7
