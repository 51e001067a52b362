"""The engine that a training samples with, by rollout.engine. To add one: a class of PolicyEngine, and its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perl.engines.base import PolicyEngine
from perl.engines.torch_policy import TorchPolicyEngine

if TYPE_CHECKING:
    from perl.config.schema import RolloutConfig


def _torch(trainer: Any, config: RolloutConfig, peft_config: Any, kwargs: dict[str, Any]) -> PolicyEngine:
    return TorchPolicyEngine(
        trainer.policy(),
        trainer.processing_class,
        config,
        generation_config=trainer.generation_config,
        generation_kwargs=kwargs,
        noise=trainer.noise,
        kernels=trainer.args.attention_kernels,
        gathered=trainer.gathered,
        dtype=trainer.compute_dtype(),
    )


def _vllm(trainer: Any, config: RolloutConfig, peft_config: Any, kwargs: dict[str, Any]) -> PolicyEngine:
    from perl.training.vllm_sampler import VLLMSampler, start_client
    from perl.training.vllm_sync import VLLMSync

    sync = VLLMSync(peft_config, trainer.args.seed)
    return VLLMSampler(
        start_client(trainer, sync, kwargs),
        sync,
        policy=trainer.policy(),
        gather=trainer.whole,
        generation_kwargs=kwargs,
        noise=trainer.noise,
        eos_token_ids=trainer.eos_token_ids,
    )


POLICY_ENGINES: dict[str, Callable[..., PolicyEngine]] = {"fast": _torch, "generate": _torch, "vllm": _vllm}
"""name -> (trainer, the group `rollout`, PEFT's configuration, the user's generation_kwargs) -> engine."""


def open_engine(trainer: Any, config: RolloutConfig, peft_config: Any, kwargs: dict[str, Any]) -> PolicyEngine:
    return POLICY_ENGINES[config.engine](trainer, config, peft_config, kwargs)
