"""GRPO with LoRA on Ascend NPUs, CUDA GPUs and CPUs, and an evaluator for what comes out."""

__version__ = "0.1.0"
