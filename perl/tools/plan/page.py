"""The answer: a table of what is held when, by which way to share the work it fits where, and the batch that fits."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from perl.adapters.checks import STRATEGIES
from perl.device import HAS_BITSANDBYTES, OWN_QUANTIZES, VLLM_QUANTIZES
from perl.engines.cache import BLOCK_SIZE
from perl.engines.quantised import by_size
from perl.tools.plan.devices import SIZES
from perl.tools.plan.memory import (
    COPY,
    GB,
    NF4,
    Device,
    Job,
    Parallel,
    Shape,
    base_bytes,
    items,
    peak,
    vllm_least,
    vllm_weights,
    with_batch,
    worker_items,
)

USABLE = 0.9
"""Of a device's memory, how much a plan may take. Assumed: the rest is what the allocator holds in pieces that are too
small."""
SHARE = "--config.training.vllm_gpu_memory_utilization"
WIDTH = 88
"""Columns of the text at most, but for names of models and files."""


@dataclass(frozen=True)
class Plan:
    """What a run takes on each of its devices."""

    model: str
    shape: Shape
    job: Job
    device: Device
    notes: list[str]

    @property
    def sizes(self) -> list[int]:
        """Memories that the run is held against, in bytes."""
        return [self.device.memory] if self.device.cpu else sorted({*SIZES, self.device.memory})

    def by_parallel(self) -> Iterator[tuple[Parallel, Job]]:
        """The job as it is, and under each other way to share the work that so many processes have, and a base in fewer
        bits can be had with."""
        for parallel in get_args(Parallel):
            split = self.job.loaded and parallel in STRATEGIES
            possible = (parallel == "single") == (self.job.processes == 1) and not split
            if parallel == self.job.parallel or possible:
                yield parallel, dataclasses.replace(self.job, parallel=parallel)

    def by_quantisation(self) -> Iterator[tuple[str, Job]]:
        """The job with its base, or the sampler's copy of it, in fewer bits; none where all weights are trained."""
        if self.job.full:
            return
        whole = dataclasses.replace(self.job, loaded=None, quantization="none")
        yield "as it is", whole
        by_layer = self.job.parallel == "fsdp2" and not self.job.workers
        if self.job.engine == "vllm" or (self.job.engine == "fast" and not by_layer):
            known = VLLM_QUANTIZES if self.job.engine == "vllm" else OWN_QUANTIZES
            for name in by_size(known[self.device.kind]):
                yield f"rollouts in {name}", dataclasses.replace(whole, quantization=name)
        loads = self.job.parallel not in STRATEGIES and HAS_BITSANDBYTES[self.device.kind]
        if self.job.engine != "vllm" and loads:
            yield "loaded in 4 bits", dataclasses.replace(whole, loaded=NF4)

    def with_room(self, job: Job, capacity: int) -> Job:
        """The job with a share for vLLM in which it starts, on a device of `capacity` bytes."""
        return dataclasses.replace(job, vllm_share=max(job.vllm_share, self.least_share(job, capacity)))

    def sizes_that_fit(self, job: Job) -> list[int]:
        """Those of `sizes`, with the share for vLLM that each takes."""
        return [size for size in self.sizes if self.fits(self.with_room(job, size), size)]

    def peaks(self, job: Job, capacity: int | None = None) -> dict[str, int]:
        """The peak of each phase on a device of `capacity` bytes (None: the plan's)."""
        table = items(self.shape, job, self.device, capacity)
        return {phase: peak(table, phase) for phase in job.phases}

    def worker_peak(self, job: Job, capacity: int | None = None) -> int:
        """The most that each worker holds on a device of `capacity` bytes (None: the plan's); 0: there is none."""
        return peak(worker_items(self.shape, job, self.device, capacity), "rollout") if job.workers else 0

    def held(self, job: Job, capacity: int | None = None) -> int:
        """The most that lies where the trainer's process does: of that process, on a CPU of all and their workers, none
        of which gives back what it has freed (perl.device.START_VARIABLES)."""
        trainer = max(self.peaks(job, capacity).values())
        if not self.device.cpu:
            return trainer
        return job.processes * trainer + job.workers * self.worker_peak(job, capacity)

    def draws(self, job: Job, capacity: int) -> bool:
        """Whether vLLM starts in its share, and a worker has room on a device of `capacity` bytes that is its own.
        There vLLM may have all that is free."""
        if job.engine == "vllm" and job.vllm_share * capacity < vllm_least(self.shape, job):
            return False
        return self.worker_peak(job, capacity) <= capacity * (1 if job.engine == "vllm" else USABLE)

    def fits(self, job: Job, capacity: int) -> bool:
        """Whether devices of `capacity` bytes hold all that the run's processes do."""
        return self.draws(job, capacity) and self.held(job, capacity) <= USABLE * capacity

    def least_share(self, job: Job, capacity: int) -> float:
        """Of a device of `capacity` bytes, what vLLM does not start without; in hundredths. 0: no vLLM."""
        return math.ceil(100 * vllm_least(self.shape, job) / capacity) / 100 if job.engine == "vllm" else 0.0

    def proposal(self) -> tuple[Job, dict[str, Any]] | None:
        """The job of the same completions per rollout and update with the largest micro-batch that fits, and its flags;
        with checkpointing where nothing fits without."""
        rows = math.gcd(self.job.update_rows, self.job.rows)
        for checkpointing in dict.fromkeys((self.job.checkpointing, True)):
            for micro_batch in range(rows, 0, -1):
                job = dataclasses.replace(with_batch(self.job, micro_batch), checkpointing=checkpointing)
                if rows % micro_batch == 0 and self.fits(job, self.device.memory):
                    return job, self._flags(job)
        return None

    def _flags(self, job: Job) -> dict[str, Any]:
        flags: dict[str, Any] = {
            "training.per_device_train_batch_size": job.micro_batch,
            "training.gradient_accumulation_steps": job.accumulation,
        }
        if job.engine is not None and not job.by_batch_size:
            flags["training.steps_per_generation"] = job.steps_per_generation
        if job.checkpointing != self.job.checkpointing:
            flags["training.gradient_checkpointing"] = job.checkpointing
        return flags


def as_text(plan: Plan) -> str:
    """Lines for a person."""
    parts = [_head(plan), _table(plan), _sharing(plan), _quantised(plan), _advice(plan)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _head(plan: Plan) -> list[str]:
    job, shape = plan.job, plan.shape
    trained = "all trained" if job.full else f"adapter {shape.adapter / 1e6:.1f} M"
    dtype = {4: "float32", 2: "two bytes a number"}[job.trained_bytes if job.full else job.weight_bytes]
    dtype += f", loaded in {job.loaded}" if job.loaded else ""
    rows = f"{job.update_rows * job.processes} an update, {job.micro_batch} a forward and device"
    drawn = "" if job.quantization == "none" else f" in {job.quantization}"
    by, batch = f"rollouts by {job.engine}{drawn}", f"prompts to {job.prompt}, completions to {job.completion} tokens"
    batch = f"completions: {job.rows * job.processes} a rollout, {rows}; {batch}"
    if job.engine is None:
        by, batch = "supervised fine-tuning", f"rows: {rows}, of up to {job.length} tokens"
    lines = [
        f"{plan.model}: {shape.parameters / 1e9:.3f} B weights, {trained}; {dtype}",
        f"{plan.device.name} x {job.processes}, {job.parallel}, gradient checkpointing"
        f" {'on' if job.checkpointing else 'off'}, {by}",
        batch,
        *plan.notes,
    ]
    return [part for line in lines for part in _wrapped(line)]


def _table(plan: Plan) -> list[str]:
    phases = plan.job.phases
    rows = [[f"GB (2^30 bytes) a {'process' if plan.device.cpu else 'device'}", *phases]]
    for item in items(plan.shape, plan.job, plan.device):
        shown = [_gb(item.bytes) if item.phase in (phase, "both") else "" for phase in phases]
        rows.append([item.name + (" *" if item.moment else ""), *shown])
    rows.append(["peak", *map(_gb, plan.peaks(plan.job).values())])
    return [*_aligned(rows), "* for a moment: the largest of a phase counts"]


def _sharing(plan: Plan) -> list[str]:
    """Each way to share the work, with and without checkpointing."""
    rows = [["", *plan.job.phases[:-1], "update, checkpointing", "without", "fits on GB"]]
    for parallel, job in plan.by_parallel():
        both = [plan.peaks(dataclasses.replace(job, checkpointing=flag))["update"] for flag in (True, False)]
        fitting = ", ".join(f"{size / GB:.0f}" for size in plan.sizes if plan.fits(job, size))
        name = parallel + (" (this)" if parallel == plan.job.parallel else "")
        peaks = [*plan.peaks(job).values()][:-1] + both
        rows.append([name, *map(_gb, peaks), fitting or "none"])
    what = "; a worker on such a device too" if plan.job.workers else ""
    if plan.device.cpu:
        what = f"; all processes together, here {_gb(plan.held(plan.job))} GB"
    return [*_aligned(rows), *_wrapped(f"fits: in {USABLE:.0%} of it, with gradient checkpointing as it is set{what}")]


def sampler_bytes(plan: Plan, job: Job) -> int:
    """Of weights that are held for the rollouts alone, where they are drawn."""
    if job.engine == "vllm":
        return vllm_weights(plan.shape, job)
    table = (worker_items if job.workers else items)(plan.shape, job, plan.device)
    return sum(item.bytes for item in table if item.name.endswith(COPY))


def _quantised(plan: Plan) -> list[str]:
    """The base in fewer bits, and which devices that is enough for."""
    worker = ["a worker"] if plan.job.workers else []
    rows = [["the base", "trained above", "draws", *plan.job.phases, *worker, "fits on GB"]]
    options = dict(plan.by_quantisation())
    if plan.job not in options.values() and options:
        options["this run"] = plan.job
    for name, job in options.items():
        held = base_bytes(plan.shape, job.weight_bytes, job.loaded)
        roomy = plan.with_room(job, plan.device.memory)
        fitting = ", ".join(f"{size / GB:.0f}" for size in plan.sizes_that_fit(job))
        draws = sampler_bytes(plan, job)
        cells = [_gb(held), _gb(draws) if draws else "", *map(_gb, plan.peaks(roomy).values())]
        cells += [_gb(plan.worker_peak(roomy)) for _ in worker]
        rows.append([name + (" (this)" if job == plan.job else ""), *cells, fitting or "none"])
    if len(rows) == 1:
        return []
    share = ["with a share for vLLM that holds its weights and a completion"] if plan.job.engine == "vllm" else []
    return [*_aligned(rows), *share]


def _advice(plan: Plan) -> list[str]:
    where = f"{plan.device.name}, {plan.device.memory / GB:.0f} GB"
    proposal = plan.proposal()
    if proposal is None:
        problem, cures = _nothing_fits(plan, where)
        return _wrapped(f"{problem}: {'; or '.join(cures)}")
    job, flags = proposal
    same = "rows in each update" if job.engine is None else "completions in each rollout and update"
    peaks = ", ".join(f"{phase} {_gb(held)}" for phase, held in plan.peaks(job).items())
    lines = _wrapped(f"for {where}, with the same {same} ({peaks} GB):")
    return [*lines, *(f"  --config.{flag} {_value(value)}" for flag, value in flags.items())]


def _nothing_fits(plan: Plan, where: str) -> tuple[str, list[str]]:
    """Why there is no proposal, and what helps."""
    job, memory = plan.job, plan.device.memory
    if plan.least_share(job, memory) > job.vllm_share:
        return _share_too_small(plan, where)
    if not plan.device.cpu and not plan.draws(job, memory):
        return _worker_too_large(plan, where)
    cures = ["shorter rows" if job.engine is None else "shorter prompts or completions"]
    if plan.device.cpu:
        cures += ["fewer workers"] * bool(job.workers) + ["fewer processes"] * (job.processes > 1)
    elif job.processes > 1 and job.parallel not in STRATEGIES and not job.loaded:
        cures.insert(0, "ACCELERATE_CONFIG with ZeRO-3 or FSDP2")
    more = "more memory" if plan.device.cpu else "more devices"
    return f"nothing fits on {where} with the same batch", [*cures, more]


def _share_too_small(plan: Plan, where: str) -> tuple[str, list[str]]:
    job, memory = plan.job, plan.device.memory
    cures = ["a base in fewer bits"]
    if dataclasses.replace(plan, job=plan.with_room(job, memory)).proposal() is not None:
        cures.insert(0, f"{SHARE} {plan.least_share(job, memory)}")
    elif job.workers:
        cures.append("larger devices")
    else:  # the rest of the device does not hold the training
        cures.append("vLLM's weights split over several devices, --config.training.vllm_tensor_parallel_size")
        cures.append("devices of its own for it, --config.rollout.workers")
    weights = f"its weights, {_gb(vllm_weights(plan.shape, job))} GB, and a completion"
    return f"vLLM does not start on {where} with a share of {job.vllm_share}, which does not hold {weights}", cures


def _worker_too_large(plan: Plan, where: str) -> tuple[str, list[str]]:
    job, memory = plan.job, plan.device.memory
    others = (other for _, other in plan.by_quantisation())
    cures = ["a base of the table above that fits"] if any(plan.draws(other, memory) for other in others) else []
    if job.engine == "vllm":
        free = memory - plan.device.runtime
        most = math.floor(100 * free / memory) / 100
        if plan.draws(dataclasses.replace(job, vllm_share=most), memory):
            cures.insert(0, f"{SHARE} {most}")
        problem = f"vLLM does not start on {where} with a share of {job.vllm_share}, as {_gb(free)} GB are free"
    else:
        longest = -(-job.length // BLOCK_SIZE) * BLOCK_SIZE
        smaller = (dataclasses.replace(job, max_batch_tokens=rows * longest) for rows in range(job.piece, 0, -1))
        if bound := next((other.max_batch_tokens for other in smaller if plan.draws(other, memory)), None):
            cures.insert(0, f"--config.rollout.max_batch_tokens {bound}")
        problem = f"a worker takes {_gb(plan.worker_peak(job))} GB, more than {USABLE:.0%} of {where}"
    return problem, [*cures, "larger devices"]


def as_json(plan: Plan) -> str:
    """One object on one line; memory in bytes."""
    proposal = plan.proposal()
    content: dict[str, Any] = {
        "model": plan.model,
        "device": plan.device.name,
        "device_bytes": plan.device.memory,
        "count": plan.job.processes,
        "parallel": plan.job.parallel,
        "parameters": plan.shape.parameters,
        "adapter_parameters": plan.shape.adapter,
        "items": [dataclasses.asdict(item) for item in items(plan.shape, plan.job, plan.device)],
        "method": "sft" if plan.job.engine is None else "grpo",
        "peak": plan.peaks(plan.job),
        "worker_peak": plan.worker_peak(plan.job),
        "by_parallel": {
            parallel: {
                f"checkpointing_{_value(flag)}": plan.peaks(dataclasses.replace(job, checkpointing=flag))
                for flag in (True, False)
            }
            for parallel, job in plan.by_parallel()
        },
        "fits": {f"{size / GB:.0f}": plan.fits(plan.job, size) for size in plan.sizes},
        "by_quantisation": {
            name: {
                "weights": base_bytes(plan.shape, job.weight_bytes, job.loaded),
                "sampler": sampler_bytes(plan, job),
                "peak": plan.peaks(plan.with_room(job, plan.device.memory)),
                "worker_peak": plan.worker_peak(plan.with_room(job, plan.device.memory)),
                "fits": [f"{size / GB:.0f}" for size in plan.sizes_that_fit(job)],
            }
            for name, job in plan.by_quantisation()
        },
        "proposal": {f"--config.{flag}": value for flag, value in proposal[1].items()} if proposal else None,
        "proposal_peak": plan.peaks(proposal[0]) if proposal else None,
        "notes": plan.notes,
    }
    return json.dumps(content)


def _gb(size: int) -> str:
    return f"{size / GB:.2f}"


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return ["  ".join(line).rstrip() for line in cells]
