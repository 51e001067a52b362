"""The engine that a training samples with, by rollout.engine. To add one: a class of PolicyEngine, and its line."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from perl.config.load import pieces_of
from perl.engines.attention import adopted_from
from perl.engines.base import PolicyEngine
from perl.engines.torch_policy import TorchPolicyEngine
from perl.models.folders import resolve_model
from perl.models.images import has_images
from perl.training.pool import PoolEngine
from perl.training.processes import Processes
from perl.workers.executors import make_executor
from perl.workers.pool import WorkerPool
from perl.workers.rollouts import RolloutJob

if TYPE_CHECKING:
    from perl.config.schema import RolloutConfig

log = logging.getLogger(__name__)


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
    """The engine, or what stands for it where workers draw."""
    engine = POLICY_ENGINES[config.engine](trainer, config, peft_config, kwargs)
    if not config.workers:
        return engine
    assert isinstance(engine, TorchPolicyEngine)
    open_pool = functools.partial(_open_pool, trainer, config, peft_config, kwargs)
    processes, size = Processes(trainer.accelerator), piece_size(trainer, config)
    return PoolEngine(engine, open_pool, processes, trainer.gathered, size, config.lag)


def piece_size(trainer: Any, config: RolloutConfig) -> int:
    """Of what workers draw: by default a quarter of the generation batch, in whole groups. It depends on nothing that
    differs from one machine to the next."""
    return pieces_of(trainer.num_generations, trainer.args.generation_batch_size, config)


def _open_pool(trainer: Any, config: RolloutConfig, peft_config: Any, kwargs: dict[str, Any]) -> WorkerPool:
    """On the main process, at the first rollout."""
    policy = trainer.policy()
    images = has_images(trainer.processing_class)
    job = RolloutJob(
        model=str(resolve_model(policy.config.name_or_path, "--config.model.model_name_or_path")),
        load={
            "dtype": policy.dtype,
            "attn_implementation": adopted_from(policy.config),
            "config": copy.deepcopy(policy.config),
        },
        peft_config=peft_config,
        processing=trainer.processing_class if images else None,
        rollout=config,
        noise=trainer.noise_config if trainer.noise else None,
        generation_config=trainer.generation_config,
        generation_kwargs=kwargs,
        kernels=trainer.args.attention_kernels,
        dtype=trainer.compute_dtype(),
        threads=torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 1,
    )
    name = "local" if config.executor == "processes" else "ray"
    taken = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    executor = make_executor(name, config.workers, 1, config.ray_address, taken=taken)
    log.info("rollouts: %d workers (%s), pieces of %d, lag %d", config.workers, config.executor,
             piece_size(trainer, config), config.lag)  # fmt: skip
    return WorkerPool(executor, job, Path(trainer.args.output_dir) / "logs")
