"""The engine that a training samples with, by rollout.engine. To add one: a class of PolicyEngine, and its line."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from perl.adapters.none import compute_dtype
from perl.base.errors import UserError
from perl.config.derived import batches_ahead, correction_of, drawn_at_once, pieces_of
from perl.engines.attention import adopted_from
from perl.engines.base import PolicyEngine
from perl.engines.torch_policy import TorchPolicyEngine
from perl.models.folders import resolve_model
from perl.models.images import has_images
from perl.models.nf4 import is_4bit
from perl.training.pool import PoolEngine
from perl.training.processes import Processes
from perl.workers.conversations import Talks, absolute, hashes_of
from perl.workers.executors import make_executor
from perl.workers.pool import WorkerPool
from perl.workers.rollouts import RolloutJob

if TYPE_CHECKING:
    from perl.config.schema import RolloutConfig

log = logging.getLogger(__name__)


def _torch(trainer: Any, config: RolloutConfig, peft_config: Any, kwargs: dict[str, Any]) -> TorchPolicyEngine:
    return TorchPolicyEngine(
        trainer.policy(),
        trainer.processing_class,
        config,
        generation_config=trainer.generation_config,
        generation_kwargs=kwargs,
        noise=trainer.noise,
        kernels=trainer.args.attention_kernels,
        gathered=trainer.gathered,
        dtype=compute_dtype(trainer.args),
        eager_optimizer=trainer.is_deepspeed_enabled,
    )


def _vllm(trainer: Any, config: RolloutConfig, peft_config: Any, kwargs: dict[str, Any]) -> PolicyEngine:
    from perl.engines.vllm_policy import VLLMPolicyEngine

    args = trainer.args
    rows = args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation
    return VLLMPolicyEngine(
        trainer.policy(),
        peft_config,
        _vllm_options(args, rows, 0)
        | {
            "tensor_parallel_size": args.vllm_tensor_parallel_size,
            "enable_sleep_mode": args.vllm_enable_sleep_mode,
        },
        processes=trainer.accelerator,
        gather=trainer.whole,
        generation_kwargs=kwargs,
        regex=args.vllm_structured_outputs_regex,
        noise=trainer.noise,
        eos_token_ids=trainer.eos_token_ids,
        seed=args.seed,
        quantization=config.quantization,
    )


def _vllm_options(args: Any, rows: int, workers: int) -> dict[str, Any]:
    return {
        "gpu_memory_utilization": args.vllm_share(workers, args.device.type),
        "max_model_len": args.vllm_max_model_length,
        "max_num_seqs": rows,
        "model_impl": args.vllm_model_impl,
        "trust_remote_code": args.trust_remote_code,
    }


POLICY_ENGINES: dict[str, Callable[..., PolicyEngine]] = {"fast": _torch, "generate": _torch, "vllm": _vllm}
"""name -> (trainer, the group `rollout`, PEFT's configuration, the user's generation_kwargs) -> engine."""


def open_engine(trainer: Any, config: RolloutConfig, peft_config: Any, kwargs: dict[str, Any]) -> PolicyEngine:
    """The engine, or what stands for it where workers draw."""
    if not config.workers:
        return POLICY_ENGINES[config.engine](trainer, config, peft_config, kwargs)
    open_pool = functools.partial(_open_pool, trainer, config, peft_config, kwargs)
    by_vllm, further = config.engine == "vllm", {}
    if by_vllm:
        from perl.engines.vllm_copy import HeldByVLLM
        from perl.engines.vllm_policy import not_comparable
        from perl.engines.vllm_sync import odd_layer

        if why := odd_layer(trainer.policy()):
            raise UserError(f"--config.rollout.engine vllm: {why}; use --config.rollout.engine fast")
        regex = trainer.args.vllm_structured_outputs_regex
        further = {
            "held": HeldByVLLM(trainer.compute_dtype()),
            "incomparable": functools.partial(not_comparable, further=kwargs or ({"regex": regex} if regex else {})),
        }
    # The trainer's own model only validates, and is compared with, where vLLM's copies draw.
    local = replace(config, quantization="none") if by_vllm else config
    return PoolEngine(
        _torch(trainer, local, peft_config, {} if by_vllm else kwargs),
        open_pool,
        Processes(trainer.accelerator),
        trainer.whole,
        piece_size(trainer, config),
        batches_ahead(config),
        newest=bool(config.max_staleness),
        quantization=config.quantization,
        **further,
    )


def piece_size(trainer: Any, config: RolloutConfig) -> int:
    """Of what workers draw: by default a quarter of the generation batch, in whole groups. It depends on nothing that
    differs from one machine to the next."""
    return pieces_of(trainer.num_generations, trainer.args.generation_batch_size, config)


def _vllm_copy(trainer: Any, config: RolloutConfig, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of perl.engines.vllm_copy.VLLMCopy."""
    from perl.engines.vllm_copy import outline

    args = trainer.args
    rows = drawn_at_once(trainer.num_generations, args.generation_batch_size, config)
    return {
        "options": _vllm_options(args, rows, config.workers),
        "dtype": trainer.compute_dtype(),
        "generation_kwargs": kwargs,
        "regex": args.vllm_structured_outputs_regex,
        "noise": outline(trainer.noise) if trainer.noise else None,
        "eos_token_ids": trainer.eos_token_ids,
        "quantization": config.quantization,
    }


def _talks(trainer: Any) -> Talks | None:
    if trainer.conversations is None:
        return None
    environment = absolute(trainer.conversations.config)
    return Talks(
        environment=environment,
        hashes=hashes_of(environment),
        tokenizer=trainer.processing_class,
        template_kwargs=trainer.args.chat_template_kwargs,
        prompt=trainer.step.collector.prompt,
    )


def _open_pool(trainer: Any, config: RolloutConfig, peft_config: Any, kwargs: dict[str, Any]) -> WorkerPool:
    """On the main process, at the first rollout."""
    policy = trainer.policy()
    images = has_images(trainer.processing_class)
    load = {
        "dtype": policy.dtype,
        "attn_implementation": adopted_from(policy.config),
        "config": copy.deepcopy(policy.config),
    }
    if is_4bit(policy) and not policy.hf_quantizer.pre_quantized:
        del load["config"].quantization_config  # which would say that the files hold it
        load["quantization"] = "nf4"
    job = RolloutJob(
        model=str(resolve_model(policy.config.name_or_path, "--config.model.model_name_or_path")),
        load=load,
        peft_config=peft_config,
        processing=trainer.processing_class if images else None,
        rollout=config,
        noise=trainer.noise_config if trainer.noise else None,
        generation_config=trainer.generation_config,
        generation_kwargs=kwargs,
        kernels=trainer.args.attention_kernels,
        dtype=compute_dtype(trainer.args),
        piece_size=piece_size(trainer, config),
        newest=bool(config.max_staleness),
        talks=_talks(trainer),
        vllm=_vllm_copy(trainer, config, kwargs) if config.engine == "vllm" else {},
        threads=torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 1,
    )
    name = "local" if config.executor == "processes" else "ray"
    taken = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    executor = make_executor(name, config.workers, 1, config.ray_address, taken=taken)
    ahead = f"staleness {config.max_staleness} at most" if config.max_staleness else f"lag {config.lag}"
    if config.quantization != "none":
        ahead += f", {config.quantization}"
    ahead += f", importance correction {correction_of(config)}"
    log.info("rollouts: %d workers (%s), pieces of %d, %s", config.workers, config.executor, job.piece_size, ahead)
    logs = Path(trainer.args.output_dir) / "logs"
    return WorkerPool(executor, job, logs, deadline_s=config.deadline_s, newest=job.newest, all_needed=True)
