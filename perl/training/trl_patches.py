"""Functions of TRL that are replaced for a moment: each a context manager, which puts TRL's own back."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from perl.config.training import TrainingConfig
from perl.training.vllm_sync import VLLMSync


@contextlib.contextmanager
def _replaced(module: Any, name: str, ours: Any) -> Iterator[None]:
    theirs = getattr(module, name, None)
    setattr(module, name, ours)
    try:
        yield
    finally:
        setattr(module, name, theirs)


@contextlib.contextmanager
def vllm_started_by(sync: VLLMSync) -> Iterator[None]:
    """The engine that TRL starts inside is the one of `sync`. TRL has no LLM where vLLM is not installed."""
    with _replaced(vllm_generation, "LLM", sync.start):
        yield


@contextlib.contextmanager
def reference_loaded_like(model: Any) -> Iterator[None]:
    """Where all weights of `model` are trained TRL loads the reference of beta > 0 inside. It is loaded as `model` was:
    of the same configuration, and to the CPU; TRL's own would be spread over several NPUs."""

    def load(folder: str, *, dtype: torch.dtype, attn_implementation: str, **_: Any) -> Any:
        own = {"dtype": dtype, "attn_implementation": attn_implementation, "config": copy.deepcopy(model.config)}
        return type(model).from_pretrained(folder, **own)

    with _replaced(grpo_trainer, "create_model_from_path", load):
        yield


@contextlib.contextmanager
def reference_kept(args: TrainingConfig, wanted: bool) -> Iterator[None]:
    """TRL keeps a reference policy where the loss has a KL divergence: with beta above 0 while it is made."""
    with _replaced(args, "beta", 1.0 if wanted and args.beta == 0.0 else args.beta):
        yield


@contextlib.contextmanager
def on_this_process_alone() -> Iterator[None]:
    """TRL's `_calculate_rewards` gathers nothing inside."""
    with _replaced(grpo_trainer, "gather", lambda rewards: rewards):
        yield
