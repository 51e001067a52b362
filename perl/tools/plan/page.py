"""The answer: a table of what is held when, by which way to share the work it fits where, and what to write instead."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from perl.tools.plan.devices import SIZES
from perl.tools.plan.memory import GB, Device, Item, Job, Parallel, Shape, items, peak
from perl.tools.plan.search import TOKENS, USABLE, Proposal, cache_tokens, fits, peaks, propose, update_tokens

HOST = "host"


@dataclass(frozen=True)
class Plan:
    """What a run takes on each of its devices."""

    model: str
    shape: Shape
    job: Job
    device: Device
    notes: list[str]

    @functools.cached_property
    def items(self) -> list[Item]:
        return items(self.shape, self.job, self.device)

    @functools.cached_property
    def proposal(self) -> Proposal | None:
        return propose(self.shape, self.job, self.device, self.device.memory)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Memories that the run is held against, in bytes."""
        return [self.device.memory] if self.device.cpu else sorted({*SIZES, self.device.memory})

    def by_parallel(self) -> Iterator[tuple[Parallel, Job]]:
        """The job under each way to share the work that so many processes have."""
        for parallel in get_args(Parallel):
            if (parallel == "single") == (self.job.processes == 1):
                capture = self.job.capture and parallel not in ("zero3", "fsdp2")
                yield parallel, dataclasses.replace(self.job, parallel=parallel, capture=capture)

    def peaks(self, job: Job, capacity: int | None = None) -> tuple[int, int]:
        return peaks(self.shape, job, self.device, capacity or self.device.memory)

    def fits(self, job: Job, capacity: int) -> bool:
        return fits(self.shape, job, self.device, capacity)


# Text


def as_text(plan: Plan) -> str:
    """Lines for a person."""
    parts = [_head(plan), _table(plan), _sharing(plan), _sizes(plan), _advice(plan)]
    return "\n\n".join("\n".join(part) for part in parts)


def _head(plan: Plan) -> list[str]:
    job, shape = plan.job, plan.shape
    dtype = {4: "float32", 2: "two bytes a number"}[job.held_bytes]
    trained = "all trained" if job.full else f"adapter {shape.adapter / 1e6:.1f} M"
    return [
        f"{plan.model}: {shape.parameters / 1e9:.3f} B weights, {trained}; {dtype}",
        f"{plan.device.name} x {job.processes}, {job.parallel}, gradient checkpointing"
        f" {'on' if job.checkpointing else 'off'}, rollouts by {job.engine}",
        f"completions: {job.rows * job.processes} a rollout, {job.update_rows * job.processes} an update,"
        f" {job.micro_batch} a forward and device; prompts to {job.prompt}, completions to {job.completion} tokens",
        *plan.notes,
    ]


def _table(plan: Plan) -> list[str]:
    rows = [["GB (2^30 bytes) a device", "rollout", "update"]]
    for item in plan.items:
        if item.phase != HOST:
            shown = [_gb(item.bytes) if phase in (item.phase, *_both(item)) else "" for phase in ("rollout", "update")]
            rows.append([item.name + (" *" if item.moment else ""), *shown])
    rows.append(["peak", *(_gb(peak(plan.items, phase)) for phase in ("rollout", "update"))])
    host = [f"{item.name} in the host's memory: {_gb(item.bytes)} GB" for item in plan.items if item.phase == HOST]
    return [*_aligned(rows), "* for a moment: the largest of a phase counts", *host]


def _both(item: Item) -> tuple[str, ...]:
    return ("rollout", "update") if item.phase == "both" else ()


def _sharing(plan: Plan) -> list[str]:
    """Each way to share the work, with and without checkpointing."""
    states = "states" if plan.job.full else "adapter and states"
    rows = [["", "weights", states, "rollout", "update", "update, no checkpointing", "fits on"]]
    for parallel, job in plan.by_parallel():
        table = items(plan.shape, job, plan.device)
        held = [item for item in table if item.name == "weights"]
        own = [i for i in table if i.name.startswith(("adapter", "gradients", "float32", "optimizer"))]
        stored, again = (dataclasses.replace(job, checkpointing=flag) for flag in (False, True))
        fitting = [size for size in plan.sizes if plan.fits(job, size)]
        rows.append(
            [
                parallel + (" (this)" if parallel == plan.job.parallel else ""),
                _gb(sum(item.bytes for item in held)),
                _gb(sum(item.bytes for item in own)),
                _gb(plan.peaks(job)[0]),
                _gb(plan.peaks(again)[1]),
                _gb(plan.peaks(stored)[1]),
                ", ".join(_size(size) for size in fitting) + " GB" if fitting else "none",
            ]
        )
    return _aligned(rows)


def _sizes(plan: Plan) -> list[str]:
    """What of the run's settings fits on devices of each size."""
    rows = [["device of", "rollout", "update", f"{USABLE:.0%} of it", "largest micro-batch that fits"]]
    for size in plan.sizes:
        found = propose(plan.shape, plan.job, plan.device, size)
        shown = "none" if found is None else f"{found.job.micro_batch}{_besides(found)}"
        both = [_gb(held) for held in plan.peaks(plan.job, size)]
        rows.append([f"{_size(size)} GB", *both, "fits" if plan.fits(plan.job, size) else "too much", shown])
    return _aligned(rows)


def _besides(found: Proposal) -> str:
    batch = {"per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"}
    more = {flag.partition(".")[2]: value for flag, value in found.flags.items()}
    shown = [f"{name} {_value(value)}" for name, value in more.items() if name not in batch]
    return f" ({', '.join(shown)})" if shown else ""


def _advice(plan: Plan) -> list[str]:
    where = f"{plan.device.name}, {_size(plan.device.memory)} GB"
    found = plan.proposal
    if found is None:
        cure = "shorter prompts or completions"
        if plan.job.processes > 1 and plan.job.parallel not in ("zero3", "fsdp2"):
            cure = "ACCELERATE_CONFIG with ZeRO-3 or FSDP2, or " + cure
        return [f"nothing fits on {where} with the same batch: {cure}, or more devices"]
    lines = [
        f"for {where}, with the same completions in each rollout and update"
        f" (rollout {_gb(found.rollout)}, update {_gb(found.update)} GB):",
        "  " + " ".join(f"--config.{flag} {_value(value)}" for flag, value in found.flags.items()),
    ]
    if tokens := update_tokens(plan.shape, found.job, plan.device, plan.device.memory):
        lines.append(f"or, instead of a number of rows: --config.training.max_tokens_per_microbatch {tokens}")
    if found.job.engine == "fast":
        lines.append(_cache_advice(found.job, most_cache(plan, found)))
    return lines


def _cache_advice(job: Job, most: int | None) -> str:
    whole = job.rows * job.length
    if most is None or most + TOKENS > whole:
        return f"the KV cache has room for all {job.rows} sequences of {job.length} tokens: no max_batch_tokens needed"
    return f"--config.rollout.max_batch_tokens up to {most} fits; all {job.rows} sequences would take {whole}"


def most_cache(plan: Plan, found: Proposal) -> int | None:
    """The largest bound on the cache that fits with a proposal."""
    return cache_tokens(plan.shape, found.job, plan.device, plan.device.memory)


# JSON


def as_json(plan: Plan) -> str:
    """One object on one line; memory in bytes."""
    found = plan.proposal
    content: dict[str, Any] = {
        "model": plan.model,
        "device": plan.device.name,
        "device_bytes": plan.device.memory,
        "count": plan.job.processes,
        "parallel": plan.job.parallel,
        "parameters": plan.shape.parameters,
        "adapter_parameters": plan.shape.adapter,
        "items": [dataclasses.asdict(item) for item in plan.items],
        "peak": _phases(plan.peaks(plan.job)),
        "by_parallel": {
            parallel: {
                f"checkpointing_{str(flag).lower()}": _phases(plan.peaks(dataclasses.replace(job, checkpointing=flag)))
                for flag in (True, False)
            }
            for parallel, job in plan.by_parallel()
        },
        "fits": {_size(size): plan.fits(plan.job, size) for size in plan.sizes},
        "proposal": None if found is None else {f"--config.{flag}": value for flag, value in found.flags.items()},
        "notes": plan.notes,
    }
    if found is not None:
        content["proposal_peak"] = _phases((found.rollout, found.update))
        content["max_batch_tokens"] = most_cache(plan, found) if found.job.engine == "fast" else None
        content["max_tokens_per_microbatch"] = update_tokens(plan.shape, found.job, plan.device, plan.device.memory)
    return json.dumps(content)


def _phases(both: tuple[int, int]) -> dict[str, int]:
    return {"rollout": both[0], "update": both[1]}


# Numbers and columns


def _gb(size: int) -> str:
    return f"{size / GB:.2f}"


def _size(size: int) -> str:
    return f"{size / GB:.0f}"


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
