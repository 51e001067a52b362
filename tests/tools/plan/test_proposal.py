"""perl.tools.plan.page: what is proposed fits, what is larger does not, and the batch stays what it was."""

from dataclasses import replace

import pytest

from perl.tools.plan.devices import DEVICES
from perl.tools.plan.memory import GB, Job, Shape, with_batch
from perl.tools.plan.page import USABLE, Plan, as_text, sampler_bytes

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
            "a base in fewer bits; or vLLM's weights split over several devices, --config.training.vllm_tensor_paral",
        ),
    ],
)
def test_a_share_for_vllm_is_advised_where_the_training_fits_beside_it(size, cure):
    """14.2 GB of weights: of 16 GB they leave the training too little."""
    job = replace(JOB, engine="vllm", vllm_share=0.05)
    assert cure in " ".join(as_text(plan(job, size)).split())


DRAWN = replace(JOB, parallel="fsdp2", workers=2, piece=80, alike=True, completion=128, group=4)


def test_a_run_fits_where_its_workers_do_too():
    """A worker: 3.5 GB of runtime, 7.6 B weights, an adapter in float32, 80 x 640 tokens of 57,344 bytes in the cache,
    and for a moment 16 prompts of 512 tokens. A trainer has a fourth of the weights."""
    planned = plan(DRAWN, 64)
    prefill = 16 * (512 * (2 * (3 * 18_944 + 2 * 3584) + 4 * 3584 + 57_344) + 4 * 152_064)
    worker = 7 * GB // 2 + 2 * 7_615_616_512 + 4 * 40_370_176 + 80 * 640 * 57_344 + prefill  # 22.10 GB
    assert planned.worker_peak(DRAWN) == planned.worker_peak(DRAWN, 24 * GB) == worker
    assert max(planned.peaks(DRAWN, 24 * GB).values()) < 14 * GB
    assert [planned.fits(DRAWN, size * GB) for size in (24, 25, 64)] == [False, True, True]
    small = plan(DRAWN, 24)
    assert small.proposal() is None
    text = " ".join(as_text(small).split())
    said = "a worker takes 22.10 GB, more than 90% of 910b, 24 GB: --config.rollout.max_batch_tokens 41600; or larger"
    assert said in text  # 21.6 GB are 65 x 640 tokens
    assert small.fits(replace(DRAWN, max_batch_tokens=65 * 640), 24 * GB)
    assert not small.fits(replace(DRAWN, max_batch_tokens=66 * 640), 24 * GB)


def test_what_is_drawn_with_is_the_workers():
    """Its int8 copy is beside the base: a byte for each of 6,525,288,448 weights but the head's, and the scales."""
    drawn = dict(plan(DRAWN, 64).by_quantisation())["rollouts in int8"]
    assert sampler_bytes(plan(DRAWN, 64), drawn) == 6_525_288_448 + 2 * (1_542_656 - 152_064)
    assert sampler_bytes(plan(DRAWN, 64), DRAWN) == 0


def test_on_a_cpu_all_processes_share_one_memory():
    """Of float32 weights a worker holds two copies, one without the embedding; it decodes 64 rows at once there."""
    job = replace(DRAWN, parallel="ddp", weight_bytes=4, compute_bytes=4, processes=2)
    planned = Plan("a model", SHAPE, job, replace(DEVICES["cpu"], memory=512 * GB), [])
    prefill = 16 * (512 * (4 * (3 * 18_944 + 2 * 3584) + 4 * 3584 + 114_688) + 4 * 152_064)
    worker = 4 * (7_615_616_512 + 7_070_285_824 + 40_370_176) + 64 * 640 * 114_688 + prefill
    assert planned.worker_peak(job) == worker
    both = 2 * max(planned.peaks(job).values())
    assert planned.held(job) == both + 2 * worker
    least = (both + 2 * worker) * 10 // 9
    assert [planned.fits(job, least + more) for more in (2, -2)] == [True, False]
    alone = replace(job, workers=0, piece=0, alike=False)
    assert planned.held(alone) == 2 * max(planned.peaks(alone).values())


@pytest.mark.parametrize(
    ("share", "size", "fits"),
    [(0.94, 64, True), (0.95, 64, False), (0.8, 32, True), (0.4, 32, False), (0.99, 16, False)],
)
def test_a_workers_vllm_has_all_that_is_free_and_no_more(share, size, fits):
    """Of 64 GB 3.5 are taken: 0.945 are free. 0.4 of 32 GB do not hold 14.18."""
    job = replace(DRAWN, engine="vllm", vllm_share=share)
    assert plan(job, size).fits(job, size * GB) == fits


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
