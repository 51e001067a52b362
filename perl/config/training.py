"""`config.training`: TRL's GRPOConfig, whole, plus what TRL dropped or decides without asking the device; of perl.sft
TRL's SFTConfig."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trl import GRPOConfig, SFTConfig

from perl import device
from perl.base.errors import UserError
from perl.base.redact import drop_secrets

if TYPE_CHECKING:
    import torch


class OnThisDevice:
    """Mixed into a configuration of TRL's: a default dtype that the device decides (TRL's own, bf16, raises on a CPU),
    and no progress bar."""

    use_cpu: bool
    bf16: bool | None
    fp16: bool
    disable_tqdm: bool | None

    def __post_init__(self):
        kind = device.detect().kind
        self.use_cpu = self.use_cpu or kind == "cpu"
        if self.bf16 is None and not self.fp16:
            self.bf16 = str(device.default_dtype()) == "torch.bfloat16" and not self.use_cpu
        if self.disable_tqdm is None:
            self.disable_tqdm = True  # a bar redraws itself all over a log file; runs/callbacks.py has our own line
        super().__post_init__()  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        """What trackers are given: without secrets (transformers leaves out those of its own fields alone)."""
        return drop_secrets(super().to_dict())  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        """On a CPU without the index that accelerate gives its processes: torch.load knows no "cpu:0", so that no
        checkpoint of several CPU processes could be resumed."""
        import torch

        chosen = super().device  # type: ignore[misc]
        return torch.device("cpu") if chosen.type == "cpu" else chosen


@dataclass
class TrainingConfig(OnThisDevice, GRPOConfig):
    """GRPOConfig of the installed TRL with max_prompt_length (TRL removed it)."""

    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Same as --config.dataset.max_prompt_length, where the guides write it."}
    )
    max_completion_length: int = field(  # type: ignore[override]
        default=512, metadata={"help": "Maximum length of the generated completion."}
    )
    max_tokens_per_microbatch: int | None = field(
        default=None,
        metadata={
            "help": "Deal the rows of an optimizer update into micro-batches of up to this many tokens, each prompt"
            " counted once, instead of per_device_train_batch_size rows. The update is the same; memory and speed are"
            " not. Off by default."
        },
    )

    cispo_min_ratio: float | None = field(
        default=None,
        metadata={"help": "Lowest ratio of loss_type cispo, verl's 1 - clip_ratio_low; null: none, as in TRL."},
    )

    attention_kernels: bool | Literal["auto"] = field(
        default="auto",
        metadata={
            "help": "Attention of decode steps and packed micro-batches by kernels for blocks and packed rows instead"
            " of sdpa: perl's in Triton and torch's (CUDA), torch_npu's (Ascend, not checked on a device yet); auto: on"
            " CUDA."
        },
    )

    vllm_gpu_memory_utilization: float | None = field(  # type: ignore[override]
        default=None,
        metadata={
            "help": "Share of a device's memory (on a CPU: of the machine's) that vLLM takes; null: 0.3 beside the"
            " trainer, 0.8 where a worker has its device alone."
        },
    )

    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={
            "help": "With engine vllm TRL's word for rollout.importance_correction. TRL's own default, sequence_mask,"
            " weighs a completion of thousands of tokens by nearly 0."
        },
    )

    def __post_init__(self):
        if self.max_tokens_per_microbatch is not None and self.max_tokens_per_microbatch < 1:
            raise ValueError(f"max_tokens_per_microbatch must be at least 1, not {self.max_tokens_per_microbatch}")
        names = "generation_batch_size", "steps_per_generation"
        self.rollout_by = next((name for name in names if getattr(self, name) is not None), None)
        """Which of them was given, if any: TRL sets both, and takes one alone."""
        try:
            self._check_trls()
        except (ValueError, ZeroDivisionError):
            with contextlib.suppress(AttributeError):  # refused before it knows its processes
                self._check_groups()
            raise

    def vllm_share(self, workers: int, kind: str) -> float:
        """vllm_gpu_memory_utilization of each engine.

        Args:
            workers: that draw, on devices of their own; on a CPU they share the machine's memory.
            kind: of the devices.
        """
        if self.vllm_gpu_memory_utilization is not None:
            return self.vllm_gpu_memory_utilization
        if not workers:
            return 0.3
        return 0.3 / workers if kind == "cpu" else 0.8

    def _check_trls(self) -> None:
        """GRPOConfig's own checks. It refuses one completion of a prompt, which algorithms without groups may have
        (perl/config/checks.py refuses it for the others): it is shown groups of a process's whole rollout instead."""
        if self.num_generations != 1:
            super().__post_init__()
            return
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        rows = self.generation_batch_size or self.per_device_train_batch_size * steps
        if rows == 1:
            raise UserError(
                "--config.training.num_generations 1: a rollout of one completion of each process; raise"
                " --config.training.per_device_train_batch_size or gradient_accumulation_steps"
            )
        self.num_generations = rows
        super().__post_init__()
        self.num_generations = 1

    def _check_groups(self) -> None:
        """What GRPOConfig says of a batch without whole groups, in the words of the flags."""
        groups = self.num_generations or 0
        if groups < 1:
            raise UserError(
                f"--config.training.num_generations {groups}: a prompt needs at least 1 completion, and a group, whose"
                " rewards are compared, at least 2; write 2 or more"
            )
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        batch = self.generation_batch_size or self.per_device_train_batch_size * self.world_size * steps
        if batch % groups:
            raise UserError(
                f"--config.training.num_generations {groups} does not divide the {batch} completions of a step"
                f" (per_device_train_batch_size {self.per_device_train_batch_size} x {self.world_size} processes x"
                f" {steps} accumulation steps); change one of them"
            )


@dataclass
class SFTTrainingConfig(OnThisDevice, SFTConfig):
    """`config.training` of perl.sft: SFTConfig of the installed TRL."""


def planned(training: type, processes: int) -> type:
    """A `training` (such as TrainingConfig) that checks itself for a run of so many processes, but starts no process
    group and touches no device: for the process that plans the run."""
    import torch

    class Planned(training):
        world_size = processes  # type: ignore[assignment]
        process_index = 0  # type: ignore[assignment]
        _setup_devices = torch.device("cpu")  # type: ignore[assignment]

    return Planned
