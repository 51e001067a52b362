"""An accelerator that runs out of memory ends the run with one line: where it happened, and what to set instead."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from perl import device
from perl.base.errors import RankError
from perl.config.load import Config
from perl.config.peft_fields import reads_of
from perl.config.training import TrainingConfig
from perl.runs.metrics import StepClock

if TYPE_CHECKING:
    from perl.config.sft import SFTRunConfig
    from perl.config.sft_training import SFTTrainingConfig

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


@dataclass
class Watch:
    """Where the run is; without a clock, before the first step."""

    clock: StepClock | None = None

    @property
    def phase(self) -> str:
        return "setup" if self.clock is None else self.clock.failed_in or self.clock.phase


@contextlib.contextmanager
def explain_out_of_memory(config: Config | SFTRunConfig) -> Iterator[Watch]:
    """Turns an accelerator's out-of-memory error inside into a RankError with advice."""
    watch = Watch()
    try:
        yield watch
    except RuntimeError as error:
        if not device.is_out_of_memory(error):
            raise
        raise RankError(message(watch.phase, config)) from error


def message(phase: str, config: Config | SFTRunConfig) -> str:
    """One line: the phase, the three settings that cost least, and ZeRO-3 where weights are whole on every device."""
    possible = changes(phase, config) if isinstance(config, Config) else sft_changes(phase, config)
    settings = "; ".join(islice(possible, 3))
    where = f"{PHASE_NAMES[phase]} on rank {config.training.process_index}"
    text = f"out of memory {where}. Set the first of these that is enough: {settings}"
    if config.training.world_size > 1 and not weights_are_sharded():
        text += (
            f". Or split the base's weights over the {config.training.world_size} devices with ZeRO-3:"
            " accelerate launch --config_file scripts/accelerate/npu_zero3.yaml"
        )
    return text


def changes(phase: str, config: Config) -> Iterator[str]:
    """Settings that need less memory in this phase, the cheapest first: those that keep what is learned and cost
    time, then those that change what is learned."""
    training = config.training
    group = training.num_generations or 1
    if training.use_vllm:
        share = training.vllm_gpu_memory_utilization
        yield change({"training.vllm_gpu_memory_utilization": (round(share * 0.7, 2), share)}, "slower sampling")
    if phase == "setup":
        if config.model.dtype == "float32":
            yield change({"model.dtype": ("bfloat16", "float32")}, "half the weights' memory, rounded")
    elif phase == "validation":
        if config.rollout.engine == "fast":
            bound = config.rollout.max_batch_tokens
            yield change({"rollout.max_batch_tokens": (int(bound or 32_768) // 2, bound or "what was free")}, "slower")
        if longest := config.validation.max_new_tokens:  # null is each task's own, which is not known here
            yield halved("validation.max_new_tokens", int(longest), "cuts long answers")
    elif phase in ("rollout", "prepare", "reward", "advantages"):
        if phase == "rollout" and config.rollout.engine == "fast":
            yield smaller_cache(config)
        if parts := smaller_rollouts(training, group):
            yield change({"training.steps_per_generation": parts}, "same batch, sampled in parts")
    else:
        if training.per_device_train_batch_size > 1:
            yield smaller_micro_batches(training)
        if phase == "update" and not training.gradient_checkpointing:
            yield change({"training.gradient_checkpointing": ("true", "false")}, "same result, a second forward")
    if phase not in ("setup", "validation"):
        yield halved("training.max_completion_length", training.max_completion_length, "cuts long answers")
        limit = config.dataset.max_prompt_length
        yield halved("dataset.max_prompt_length", limit, "drops long prompts")
    if phase == "rollout" and group % 4 == 0 and (parts := smaller_rollouts(training, group // 2)):
        fewer = {"training.num_generations": (group // 2, group), "training.steps_per_generation": parts}
        yield change(fewer, "fewer answers a prompt")
    yield from smaller_adapter(config)


def sft_changes(phase: str, config: SFTRunConfig) -> Iterator[str]:
    """As `changes`, of perl.sft."""
    training = config.training
    if phase == "setup":
        if config.model.dtype == "float32":
            yield change({"model.dtype": ("bfloat16", "float32")}, "half the weights' memory, rounded")
    else:
        if training.per_device_train_batch_size > 1:
            yield smaller_micro_batches(training)
        if not training.gradient_checkpointing:
            yield change({"training.gradient_checkpointing": ("true", "false")}, "same result, a second forward")
        yield halved("training.max_length", training.max_length, "cuts long rows")
    yield from smaller_adapter(config)


def smaller_cache(config: Config) -> str:
    """Half of what the key-value cache holds at most; rows wait for a place, and each still draws the same tokens."""
    training = config.training
    rows = training.per_device_train_batch_size * (training.steps_per_generation or 1)
    length = int(config.dataset.max_prompt_length or 512) + (training.max_completion_length or 512)
    bound = config.rollout.max_batch_tokens
    now = rows * length if bound is None else min(int(bound), rows * length)
    return change({"rollout.max_batch_tokens": (max(1, now // 2), bound or "what was free")}, "same batch, slower")


def smaller_rollouts(training: TrainingConfig, group: int) -> tuple[int, int] | None:
    """(new, present) steps_per_generation: the largest part of an update's batch that holds whole groups."""
    now = training.steps_per_generation or 1
    sequences = training.per_device_train_batch_size * training.world_size
    for fewer in range(now - 1, 0, -1):
        if training.gradient_accumulation_steps % fewer == 0 and sequences * fewer % group == 0:
            return fewer, now
    return None


def smaller_micro_batches(training: TrainingConfig | SFTTrainingConfig) -> str:
    """Half the sequences at a time, accumulated twice as often."""
    now, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
    fewer = now // 2 if now % 2 == 0 else 1
    flags = {
        "training.per_device_train_batch_size": (fewer, now),
        "training.gradient_accumulation_steps": (steps * now // fewer, steps),
    }
    generation = getattr(training, "steps_per_generation", None)  # GRPO's
    if generation is not None and generation != steps:  # set by the user: it does not follow on its own
        flags["training.steps_per_generation"] = (generation * now // fewer, generation)
    return change(flags, "same batch, slower")


def smaller_adapter(config: Config | SFTRunConfig) -> Iterator[str]:
    """Of half the rank, or one at all; of a method without ranks there is none."""
    if config.peft.type == "none":
        yield change({"peft.type": ("lora", "none")}, "an adapter in the place of all weights")
    elif "r" in reads_of(config.peft.type):
        yield halved("peft.r", int(config.peft.r), "a smaller adapter")


def halved(flag: str, now: int | None, cost: str) -> str:
    return change({flag: (max(1, now // 2) if now else 512, now or "unlimited")}, cost)


def change(flags: dict[str, tuple[Any, Any]], cost: str) -> str:
    """`--config.flag NEW --config.other NEW (now OLD, OLD: cost)`"""
    new = " ".join(f"--config.{flag} {value}" for flag, (value, _) in flags.items())
    return f"{new} (now {', '.join(str(now) for _, now in flags.values())}: {cost})"


def weights_are_sharded() -> bool:
    from transformers.integrations import is_deepspeed_zero3_enabled

    return is_deepspeed_zero3_enabled() or os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"
