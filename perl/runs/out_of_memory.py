"""An accelerator that runs out of memory ends the run with one line: where it happened, and what to set instead."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from perl import device
from perl.base.errors import RankError, RunError
from perl.config.derived import drawn_at_once, rows_stand
from perl.config.load import Config
from perl.config.peft_fields import UNMERGED, reads_of
from perl.engines.quantised import SCHEMES, by_size
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


def set_first(phase: str, config: Config | SFTRunConfig) -> str:
    return f"Set the first of these that is enough: {'; '.join(islice(changes(phase, config), 3))}"


def changes(phase: str, config: Any) -> Iterator[str]:
    """Settings that need less memory in this phase, the cheapest first: those that keep what is learned and cost
    time, then those that change what is learned. ("worker": as a worker draws.)"""
    training, rewarded = config.training, isinstance(config, Config)
    workers = config.rollout.workers if phase == "worker" else 0
    own_vllm = rewarded and training.use_vllm and bool(workers or not config.rollout.workers)
    if own_vllm:
        share = training.vllm_share(workers, training.device.type)
        yield change("slower sampling", {"training.vllm_gpu_memory_utilization": (round(share * 0.7, 2), share)})
    if phase == "setup" and config.model.dtype == "float32":
        yield change("half the weights' memory, rounded", {"model.dtype": ("bfloat16", "float32")})
    draws = rewarded and (phase in ("worker", "validation") or not config.rollout.workers)
    if draws and phase in ("rollout", "worker", "validation") and config.rollout.engine == "fast":
        rows = training.per_device_train_batch_size * (training.steps_per_generation or 1)
        if phase == "worker":
            rows = drawn_at_once(training.num_generations or 1, training.generation_batch_size or 1, config.rollout)
        most = rows * (int(config.dataset.max_prompt_length or 512) + training.max_completion_length)
        bound = config.rollout.max_batch_tokens
        fewer = max(1, min(int(bound or most), most) // 2)
        yield change("same batch, slower", {"rollout.max_batch_tokens": (fewer, bound or "what was free")})
    # max_new_tokens null is each task's own, which is not known here.
    if rewarded and phase == "validation" and config.validation.max_new_tokens:
        yield halved("cuts long answers", "validation.max_new_tokens", int(config.validation.max_new_tokens))
    passes = rewarded and phase == "rollout" and not draws  # the trainer's, over what workers have drawn
    if passes and training.max_tokens_per_microbatch and not rows_stand(training):
        yield halved("same batch, slower", "training.max_tokens_per_microbatch", training.max_tokens_per_microbatch)
    if draws and phase in ("rollout", "prepare", "reward", "advantages") and (parts := smaller_rollouts(training)):
        yield change("same batch, sampled in parts", parts)
    if phase in ("old_logps", "update") and training.per_device_train_batch_size > 1:
        yield change("same batch, slower", smaller_micro_batches(training))
    if phase == "update" and not training.gradient_checkpointing:
        yield change("same result, a second forward", {"training.gradient_checkpointing": ("true", "false")})
    if (
        own_vllm
        and config.peft.type in UNMERGED
        and (fewer := fewer_bits(config.rollout.quantization, device.detect().kind))
    ):
        yield change("rounds the base that draws", {"rollout.quantization": (fewer, config.rollout.quantization)})
    if phase not in ("setup", "validation"):
        longest = "max_completion_length" if rewarded else "max_length"
        yield halved("cuts long answers", f"training.{longest}", getattr(training, longest))
    if config.peft.type == "none":
        yield change("an adapter in the place of all weights", {"peft.type": ("lora", "none")})
    elif "r" in reads_of(config.peft.type):
        yield halved("a smaller adapter", "peft.r", int(config.peft.r))


def fewer_bits(now: str, kind: str) -> str | None:
    """The value of rollout.quantization with which vLLM takes next less memory than with `now` on a kind of device."""
    held = SCHEMES[now].bytes_a_weight if now in SCHEMES else math.inf
    names = by_size(device.VLLM_QUANTIZES[kind])
    return next((name for name in names if SCHEMES[name].bytes_a_weight < held), None)


def smaller_rollouts(training: Any) -> dict[str, tuple[int, int]] | None:
    """The largest part of an update's batch that holds whole groups."""
    now, group = training.steps_per_generation or 1, training.num_generations or 1
    sequences = training.per_device_train_batch_size * training.world_size
    for fewer in range(now - 1, 0, -1):
        if training.gradient_accumulation_steps % fewer == 0 and sequences * fewer % group == 0:
            if training.rollout_by == "generation_batch_size":
                return {"training.generation_batch_size": (sequences * fewer, sequences * now)}
            return {"training.steps_per_generation": (fewer, now)}
    return None


def smaller_micro_batches(training: Any) -> dict[str, tuple[int, int]]:
    """Half the sequences at a time, accumulated twice as often."""
    now, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
    fewer = now // 2 if now % 2 == 0 else 1
    settings = {
        "per_device_train_batch_size": (fewer, now),
        "gradient_accumulation_steps": (steps * now // fewer, steps),
    }
    if getattr(training, "rollout_by", None) == "steps_per_generation":  # GRPO's; else it follows on its own
        generation = training.steps_per_generation
        settings["steps_per_generation"] = (generation * now // fewer, generation)
    return {f"training.{name}": values for name, values in settings.items()}


def halved(cost: str, setting: str, now: int | None) -> str:
    return change(cost, {setting: (max(1, now // 2) if now else 512, now or "unlimited")})


def change(cost: str, settings: dict[str, tuple[Any, Any]]) -> str:
    """`--config.setting NEW --config.other NEW (now OLD, OLD: cost)`"""
    new = " ".join(f"--config.{name} {value}" for name, (value, _) in settings.items())
    return f"{new} (now {', '.join(str(now) for _, now in settings.values())}: {cost})"


def weights_are_sharded() -> bool:
    from transformers.integrations import is_deepspeed_zero3_enabled

    return is_deepspeed_zero3_enabled() or os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"
