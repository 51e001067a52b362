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
        eager_optimizer=trainer.is_deepspeed_enabled,
    )


def _vllm(trainer: Any, config: RolloutConfig, peft_config: Any, kwargs: dict[str, Any]) -> PolicyEngine:
    from perl.engines.vllm_policy import VLLMPolicyEngine

    args = trainer.args
    return VLLMPolicyEngine(
        trainer.policy(),
        peft_config,
        {
            "tensor_parallel_size": args.vllm_tensor_parallel_size,
            "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
            "max_model_len": args.vllm_max_model_length,
            "max_num_seqs": args.per_device_train_batch_size
            * args.vllm_tensor_parallel_size
            * args.steps_per_generation,
            "enable_sleep_mode": args.vllm_enable_sleep_mode,
            "model_impl": args.vllm_model_impl,
            "trust_remote_code": args.trust_remote_code,
        },
        processes=trainer.accelerator,
        gather=trainer.whole,
        generation_kwargs=kwargs,
        regex=args.vllm_structured_outputs_regex,
        noise=trainer.noise,
        eos_token_ids=trainer.eos_token_ids,
        seed=args.seed,
    )


POLICY_ENGINES: dict[str, Callable[..., PolicyEngine]] = {"fast": _torch, "generate": _torch, "vllm": _vllm}
"""name -> (trainer, the group `rollout`, PEFT's configuration, the user's generation_kwargs) -> engine."""


def open_engine(trainer: Any, config: RolloutConfig, peft_config: Any, kwargs: dict[str, Any]) -> PolicyEngine:
    return POLICY_ENGINES[config.engine](trainer, config, peft_config, kwargs)
