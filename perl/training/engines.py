"""The engine that a training samples with, by rollout.engine. To add one: a class of PolicyEngine and its
line in POLICY_ENGINES; for workers a Copy and its line in COPIES."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedType

from perl.adapters.none import autocast_dtype
from perl.base.errors import UserError
from perl.config.derived import batches_ahead, correction_of, drawn_at_once, pieces_of
from perl.device.numerics import Numerics
from perl.engines.attention import adopted_from
from perl.engines.base import PolicyEngine
from perl.engines.torch_copy import TorchCopy
from perl.engines.torch_policy import TorchPolicyEngine, TorchRules
from perl.models.few_bits import is_4bit
from perl.models.folders import content_hash, resolve_model, token_ids
from perl.models.images import has_images
from perl.prompts import ChatTemplate
from perl.training.pool import PoolEngine
from perl.training.processes import Processes
from perl.workers.conversations import Talks
from perl.workers.executors import make_executor
from perl.workers.pool import WorkerPool
from perl.workers.rollouts import Copy, RolloutJob

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from perl.config.load import Config
    from perl.config.schema import RolloutConfig
    from perl.config.training import TrainingConfig
    from perl.environments.conversation import Conversations
    from perl.noise.injector import NoiseInjector
    from perl.training.policy import Policy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What is drawn with in a training: the policy, and what an engine must know of the run."""

    policy: Policy
    config: Config
    peft_config: Any
    """PEFT's, of the policy's adapter; None: all weights are trained."""
    processing: Any
    """Its tokenizer or processor."""
    generation_config: GenerationConfig
    """TRL's, for the eos and pad tokens, and for engine generate."""
    generation_kwargs: dict[str, Any]
    """The user's."""
    noise: NoiseInjector | None
    accelerator: Accelerator
    conversations: Conversations | None
    """With an environment."""

    @property
    def args(self) -> TrainingConfig:
        return self.config.training

    @property
    def rollout(self) -> RolloutConfig:
        return self.config.rollout

    @property
    def batch(self) -> tuple[int, int]:
        """Completions of a group, and of a generation batch."""
        return self.args.num_generations or 1, self.args.generation_batch_size or 1

    @property
    def piece_size(self) -> int:
        return pieces_of(*self.batch, self.rollout)

    @property
    def eos_token_ids(self) -> list[int]:
        return token_ids(self.generation_config.eos_token_id)

    def vllm_options(self, rows: int) -> dict[str, Any]:
        args = self.args
        return {
            "gpu_memory_utilization": args.vllm_share(self.rollout.workers, args.device.type),
            "max_model_len": args.vllm_max_model_length,
            "max_num_seqs": rows,
            "model_impl": args.vllm_model_impl,
        }


def _rules(drawing: Drawing) -> TorchRules:
    return TorchRules(
        rollout=drawing.rollout,
        processing=drawing.processing,
        generation_config=drawing.generation_config,
        generation_kwargs=drawing.generation_kwargs,
        kernels=drawing.args.attention_kernels,
        dtype=autocast_dtype(drawing.args),
    )


def _torch(drawing: Drawing) -> TorchPolicyEngine:
    return TorchPolicyEngine(
        drawing.policy.bare,
        _rules(drawing),
        noise=drawing.noise,
        gathered=drawing.policy.gathered,
        reserves=drawing.accelerator.distributed_type != DistributedType.DEEPSPEED,
    )


def _vllm(drawing: Drawing) -> PolicyEngine:
    from perl.engines.vllm_policy import VLLMPolicyEngine

    args = drawing.args
    sharing = args.vllm_tensor_parallel_size
    options = drawing.vllm_options(args.per_device_train_batch_size * sharing * (args.steps_per_generation or 1))
    return VLLMPolicyEngine(
        drawing.policy.bare,
        drawing.peft_config,
        options | {"tensor_parallel_size": sharing, "enable_sleep_mode": args.vllm_enable_sleep_mode},
        processes=drawing.accelerator,
        gather=drawing.policy.whole,
        generation_kwargs=drawing.generation_kwargs,
        regex=args.vllm_structured_outputs_regex,
        noise=drawing.noise,
        eos_token_ids=drawing.eos_token_ids,
        seed=args.seed,
        quantization=drawing.rollout.quantization,
    )


POLICY_ENGINES: dict[str, Callable[[Drawing], PolicyEngine]] = {"fast": _torch, "generate": _torch, "vllm": _vllm}
"""By rollout.engine."""


def open_engine(drawing: Drawing) -> PolicyEngine:
    """The engine, or what stands for it where workers draw."""
    rollout = drawing.rollout
    if not rollout.workers:
        return POLICY_ENGINES[rollout.engine](drawing)
    local, further = drawing, {}
    if rollout.engine == "vllm":
        further = _compared_with_vllm(drawing)
        # The trainer's own model only validates, and is compared with, where vLLM's copies draw.
        unquantised = replace(drawing.config, rollout=replace(rollout, quantization="none"))
        local = replace(drawing, config=unquantised, generation_kwargs={})
    return PoolEngine(
        _torch(local),
        functools.partial(_open_pool, drawing),
        Processes(drawing.accelerator),
        drawing.policy.whole,
        drawing.piece_size,
        batches_ahead(rollout),
        newest=bool(rollout.max_staleness),
        quantization=rollout.quantization,
        **further,
    )


def _compared_with_vllm(drawing: Drawing) -> dict[str, Any]:
    """Arguments of PoolEngine; a UserError where vLLM can't serve the policy's adapter. Every process must come
    here."""
    from perl.engines.vllm_copy import HeldByVLLM
    from perl.engines.vllm_policy import not_comparable
    from perl.engines.vllm_sync import odd_layer

    if why := odd_layer(drawing.policy.bare):
        raise UserError(f"--config.rollout.engine vllm: {why}; use --config.rollout.engine fast")
    hashed = [content_hash(_folder_of_base(drawing))] if drawing.accelerator.is_main_process else []
    (base,) = Processes(drawing.accelerator).gathered(hashed)
    regex = drawing.args.vllm_structured_outputs_regex
    further = drawing.generation_kwargs or ({"regex": regex} if regex else {})
    return {
        "held": HeldByVLLM(drawing.policy.dtype, base),
        "incomparable": functools.partial(not_comparable, further=further),
    }


# What workers hold of the policy


def _torch_copy(drawing: Drawing, base: str) -> Callable[[], Copy]:
    policy = drawing.policy.bare
    load = {
        "dtype": policy.dtype,
        "attn_implementation": adopted_from(policy.config),
        "config": copy.deepcopy(policy.config),
    }
    if is_4bit(policy) and not policy.hf_quantizer.pre_quantized:
        del load["config"].quantization_config  # which would say that the files hold it
        load["quantization"] = "nf4"
    return functools.partial(
        TorchCopy,
        base,
        rules=_rules(replace(drawing, processing=drawing.processing if has_images(drawing.processing) else None)),
        load=load,
        peft_config=drawing.peft_config,
        noise=drawing.config.noise_injection if drawing.noise else None,
    )


def _vllm_copy(drawing: Drawing, base: str) -> Callable[[], Copy]:
    from perl.engines.vllm_copy import VLLMCopy, outline

    return functools.partial(
        VLLMCopy,
        base,
        drawing.peft_config,
        drawing.vllm_options(drawn_at_once(*drawing.batch, drawing.rollout)),
        dtype=drawing.policy.dtype,
        generation_kwargs=drawing.generation_kwargs,
        regex=drawing.args.vllm_structured_outputs_regex,
        noise=outline(drawing.noise) if drawing.noise else None,
        eos_token_ids=drawing.eos_token_ids,
        quantization=drawing.rollout.quantization,
    )


COPIES: dict[str, Callable[[Drawing, str], Callable[[], Copy]]] = {"fast": _torch_copy, "vllm": _vllm_copy}
"""By rollout.engine: given the folder of the base, what a worker calls."""


def _talks(drawing: Drawing) -> Talks | None:
    if drawing.conversations is None:
        return None
    template = ChatTemplate(drawing.processing, drawing.args.chat_template_kwargs)  # type: ignore[arg-type]
    return Talks.of(drawing.conversations.config, template)


def _folder_of_base(drawing: Drawing) -> Path:
    return resolve_model(drawing.policy.bare.config.name_or_path, "--config.model.model_name_or_path")


def _open_pool(drawing: Drawing) -> WorkerPool:
    """On the main process, at the first rollout."""
    rollout = drawing.rollout
    base = str(_folder_of_base(drawing))
    job = RolloutJob(
        base=base,
        open_copy=COPIES[rollout.engine](drawing, base),
        piece_size=drawing.piece_size,
        newest=bool(rollout.max_staleness),
        talks=_talks(drawing),
        numerics=Numerics.now(torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 1),
    )
    name = "local" if rollout.executor == "processes" else "ray"
    taken = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    executor = make_executor(name, rollout.workers, 1, rollout.ray_address, taken=taken)
    ahead = f"staleness {rollout.max_staleness} at most" if rollout.max_staleness else f"lag {rollout.lag}"
    if rollout.quantization != "none":
        ahead += f", {rollout.quantization}"
    ahead += f", importance correction {correction_of(rollout)}"
    log.info("rollouts: %d workers (%s), pieces of %d, %s", rollout.workers, rollout.executor, job.piece_size, ahead)
    logs = Path(drawing.args.output_dir or ".") / "logs"
    return WorkerPool(executor, job, logs, deadline_s=rollout.deadline_s, newest=job.newest, all_needed=True)
