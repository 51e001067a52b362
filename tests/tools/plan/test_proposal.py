"""perl.tools.plan.page: what is proposed fits, what is larger does not, and the batch stays what it was."""

from dataclasses import replace

import pytest

from perl.tools.plan.devices import DEVICES
from perl.tools.plan.memory import GB, Job, Shape, with_batch
from perl.tools.plan.page import USABLE, Plan, as_text

SHAPE = Shape(  # Qwen2.5-7B with LoRA r 16 on all linears
    parameters=7_615_616_512,
    linear=7_070_285_824,
    outputs=1_542_656,
    adapter=40_370_176,
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
    query=3584,
    key=512,
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


def plan(job, size):
    return Plan("a model", SHAPE, job, replace(DEVICES["910b"], memory=size * GB), [])


@pytest.mark.parametrize("size", [32, 64, 80, 141])
def test_the_largest_micro_batch_that_fits_keeps_the_batch(size):
    planned = plan(JOB, size)
    found = planned.proposal()
    assert found is not None
    job, flags = found
    assert (job.update_rows, job.rows) == (64, 128)
    assert max(planned.peaks(job).values()) <= USABLE * size * GB
    assert flags["training.gradient_accumulation_steps"] == 64 // job.micro_batch
    larger = [rows for rows in range(job.micro_batch + 1, 65) if 64 % rows == 0]
    assert not any(planned.fits(with_batch(job, rows), size * GB) for rows in larger)


def test_checkpointing_is_proposed_where_nothing_else_fits():
    stored = plan(replace(JOB, checkpointing=False, completion=8192), 32)
    assert not stored.fits(with_batch(stored.job, 1), 32 * GB)
    found = stored.proposal()
    assert found is not None
    assert found[1]["training.gradient_checkpointing"] is True


@pytest.mark.parametrize(
    ("size", "cure"),
    [
        (64, "--config.training.vllm_gpu_memory_utilization 0.23; or a base in fewer bits"),
        (
            16,
            "a base in fewer bits; vLLM's weights split over several devices, --config.training.vllm_tensor_parallel_",
        ),
    ],
)
def test_a_share_for_vllm_is_advised_where_the_training_fits_beside_it(size, cure):
    """14.2 GB of weights: of 16 GB they leave the training too little."""
    job = replace(JOB, engine="vllm", vllm_share=0.05)
    assert cure in " ".join(as_text(plan(job, size)).split())


def test_one_process_under_deepspeed_is_compared_too():
    alone = plan(replace(JOB, processes=1), 64)
    assert [parallel for parallel, _ in alone.by_parallel()] == ["single", "zero2"]
    assert "zero2 (this)" in as_text(alone)


def test_nothing_is_proposed_where_the_weights_alone_are_too_much():
    assert plan(JOB, 16).proposal() is None


def test_a_batch_of_an_odd_number_has_odd_parts():
    found = plan(replace(JOB, micro_batch=3, accumulation=5, steps_per_generation=5), 64).proposal()
    assert found is not None
    assert 15 % found[0].micro_batch == 0
    assert found[0].update_rows == found[0].rows == 15
