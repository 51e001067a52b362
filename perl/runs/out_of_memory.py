"""An accelerator that runs out of memory ends the run with one line: where it happened, and what to set instead."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from perl import device
from perl.base.errors import RankError, RunError
from perl.config.derived import rows_stand
from perl.config.load import Config
from perl.config.peft_fields import UNMERGED, reads_of
from perl.runs.metrics import StepClock

if TYPE_CHECKING:
    from perl.config.sft import SFTRunConfig

PHASE_NAMES = {
    "setup": "before the first step",
    "rollout": "in the rollout",
    "reward": "in the reward",
    "validation": "in the validation",
    "advantages": "in the reward",
    "prepare": "in the rollout",
    "old_logps": "in the log-probabilities of the old policy",
    "update": "in the update",
}
WHOLE_WITH_ZERO3 = ("rollout", "prepare", "validation")
"""Where ZeRO-3 gathers all weights."""


@dataclass
class Watch:
    """Where the run is; without a clock, before the first step."""

    clock: StepClock | None = None

    @property
    def phase(self) -> str:
        return "setup" if self.clock is None else self.clock.failed_in or self.clock.phase


@contextlib.contextmanager
def explain_out_of_memory(config: Config | SFTRunConfig) -> Iterator[Watch]:
    """Turns an accelerator's out-of-memory error inside into a RankError with advice; a worker's, of which a RunError
    tells, gets advice too."""
    watch = Watch()
    try:
        yield watch
    except RunError as error:
        if "out of memory" not in str(error):
            raise
        raise RunError(f"{error}. {set_first('worker', config)}") from error
    except RuntimeError as error:
        if not device.is_out_of_memory(error):
            raise
        asked = re.search(r"Tried to allocate ([\d.]+ \w*B)", str(error))
        free = (device.free_memory() or 0) / 2**30
        sizes = f" ({asked[1]} asked for, {free:.2f} GiB free)" if asked else ""
        raise RankError(message(watch.phase, config, sizes)) from error


def message(phase: str, config: Config | SFTRunConfig, sizes: str = "") -> str:
    """One line: the phase, the three settings that cost least, and ZeRO-3 where weights are whole on every device."""
    where = f"{PHASE_NAMES[phase]} on rank {config.training.process_index}{sizes}"
    text = f"out of memory {where}. {set_first(phase, config)}"
    if config.training.world_size > 1 and not weights_are_sharded():
        sharding = "FSDP2" if phase in WHOLE_WITH_ZERO3 else "ZeRO-3"
        text += (
            f". Or split the base's weights over the {config.training.world_size} devices with {sharding}:"
            f" accelerate launch --config_file scripts/accelerate/npu_{sharding.lower().replace('-', '')}.yaml"
            f" --num_processes {config.training.world_size}"
        )
    return text


def set_first(phase: str, config: Any) -> str:
    first = (f"--config.{flag} (now {now(flag, config)}: {cost})" for flag, cost in islice(settings(phase, config), 3))
    return f"Set the first of these that is enough, a number lower: {'; '.join(first)}"


def settings(phase: str, config: Any) -> Iterator[tuple[str, str]]:
    """Flags that need less memory in this phase and what each costs, the cheapest first: those that keep what is
    learned and cost time, then those that change what is learned. ("worker": as a worker draws.)"""
    training, rewarded = config.training, isinstance(config, Config)
    workers = rewarded and config.rollout.workers > 0
    draws = rewarded and (phase in ("worker", "validation") or not workers)
    vllm = rewarded and training.use_vllm and (phase == "worker" or not workers)
    if vllm:
        yield "training.vllm_gpu_memory_utilization", "slower sampling"
    if phase == "setup" and config.model.dtype == "float32":
        yield "model.dtype bfloat16", "half the weights' memory, rounded"
    if draws and phase in ("rollout", "worker", "validation") and config.rollout.engine == "fast":
        yield "rollout.max_batch_tokens", "same batch, slower"
    # max_new_tokens null is each task's own, which is not known here.
    if rewarded and phase == "validation" and config.validation.max_new_tokens:
        yield "validation.max_new_tokens", "cuts long answers"
    passes = phase == "rollout" and workers  # the trainer's, over what workers have drawn
    if passes and training.max_tokens_per_microbatch and not rows_stand(training):
        yield "training.max_tokens_per_microbatch", "same batch, slower"
    samples = draws and phase in ("rollout", "prepare", "reward", "advantages")
    if samples and training.generation_batch_size > training.num_generations:
        rows = training.rollout_by or "steps_per_generation"
        yield f"training.{rows}", "same batch, sampled in parts of whole groups"
    if phase in ("old_logps", "update") and training.per_device_train_batch_size > 1:
        also = "gradient_accumulation_steps"
        if rewarded and training.rollout_by == "steps_per_generation":
            also += " and steps_per_generation"
        yield "training.per_device_train_batch_size", f"same batch with {also} as much higher, slower"
    if phase == "update" and not training.gradient_checkpointing:
        yield "training.gradient_checkpointing true", "same result, a second forward"
    if vllm and config.peft.type in UNMERGED and config.rollout.quantization == "none":
        yield "rollout.quantization", "fewer bits round the base that draws"
    if phase not in ("setup", "validation"):
        yield f"training.{'max_completion_length' if rewarded else 'max_length'}", "cuts long answers"
    if config.peft.type == "none":
        yield "peft.type lora", "an adapter in the place of all weights"
    elif "r" in reads_of(config.peft.type):
        yield "peft.r", "a smaller adapter"


def now(flag: str, config: Any) -> Any:
    """The value that a flag has, as recipes write it."""
    if flag == "training.vllm_gpu_memory_utilization":
        return config.training.vllm_share(config.rollout.workers, config.training.device.type)
    value = attrgetter(flag.split()[0])(config)
    return value if isinstance(value, str) else json.dumps(value)


def weights_are_sharded() -> bool:
    from transformers.integrations import is_deepspeed_zero3_enabled

    return is_deepspeed_zero3_enabled() or os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"
