"""GRPO with LoRA on Ascend NPUs, CUDA GPUs and CPUs, and an evaluator for what comes out."""

__version__ = "0.13.0"
"""CHANGELOG.md says what changed, and what a step of each number means."""
