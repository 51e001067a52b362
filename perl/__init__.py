"""GRPO with LoRA on Ascend NPUs, CUDA GPUs and CPUs, and an evaluator for what comes out."""

import logging

__version__ = "0.13.0"
"""CHANGELOG.md says what changed, and what a step of each number means."""

# PEFT imports bitsandbytes where it is installed, which warns on some CPUs of a kernel that perl does not use
# (perl.models.few_bits.keep_packing).
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
