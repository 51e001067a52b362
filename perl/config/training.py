"""`config.training`: TRL's GRPOConfig, whole, plus what TRL dropped or decides without asking the device."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import GRPOConfig

from perl import device


@dataclass
class TrainingConfig(GRPOConfig):
    """GRPOConfig of the installed TRL with max_prompt_length (TRL removed it), and a default dtype that the device
    decides: TRL's own, bf16, raises on a CPU."""

    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Same as --config.dataset.max_prompt_length, where the guides write it."}
    )
    max_tokens_per_microbatch: int | None = field(
        default=None,
        metadata={
            "help": "Deal the rows of an optimizer update into micro-batches of up to this many tokens, each prompt"
            " counted once, instead of per_device_train_batch_size rows. The update is the same; memory and speed are"
            " not. Off by default."
        },
    )

    def __post_init__(self):
        if self.max_tokens_per_microbatch is not None and self.max_tokens_per_microbatch < 1:
            raise ValueError(f"max_tokens_per_microbatch must be at least 1, not {self.max_tokens_per_microbatch}")
        kind = device.detect().kind
        self.use_cpu = self.use_cpu or kind == "cpu"
        if self.bf16 is None and not self.fp16:
            self.bf16 = str(device.default_dtype()) == "torch.bfloat16" and not self.use_cpu
        if self.disable_tqdm is None:
            self.disable_tqdm = True  # a bar redraws itself all over a log file; training/callbacks.py has our own line
        super().__post_init__()
