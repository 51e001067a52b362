"""vLLM in the trainer's process as a PolicyEngine: it is given the policy, its noise, and a seed for each completion.

Processes that share an engine (tensor parallel) each run it on the prompts of all of them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from perl import device
from perl.base.errors import UserError
from perl.device.sharding import Gather
from perl.engines.base import Feed, InProcess
from perl.engines.quantised import SCHEMES, Quantisation
from perl.engines.vllm import RunningVLLM, import_vllm, random_state_kept
from perl.engines.vllm_quantised import start_quantised
from perl.engines.vllm_sync import VLLMSync, noise_of_engine
from perl.noise.injector import NoiseInjector
from perl.records import Prompt, Sampling, Weights, row_seed

if TYPE_CHECKING:
    from peft import PeftConfig

log = logging.getLogger(__name__)

KWARGS = "--config.training.generation_kwargs"
BATCHED_TOKENS = 4096
"""Tokens that vLLM computes at once. It measures the memory for its cache with a batch of as many, and with its own
default of 32768 finds too little."""
LOGPROBS = "processed_logprobs"
"""Of the distribution that is drawn from."""


class DrawingVLLM(RunningVLLM):
    """A vLLM that draws with a policy under its noise: a training's own engine, and a worker's.

    Args:
        llm: the vllm.LLM.
        adapter: the LoRARequest of the policy as it is now, or None.
        further: fields of SamplingParams that are the user's (further_fields).
        noise: what puts the trainer's noise on the weights of the engine, or None.
        eos_token_ids: tokens that end a completion of a rollout.
        settings: RunningVLLM's.

    Attributes:
        weights: that were published last.
    """

    def __init__(
        self,
        llm: Any,
        adapter: Callable[[], Any],
        further: Mapping[str, Any],
        noise: NoiseInjector | None,
        eos_token_ids: Collection[int],
        **settings: Any,
    ):
        super().__init__(llm.llm_engine, eos_token_ids=eos_token_ids, lora=lambda prompt: adapter(), **settings)
        self.llm, self.further, self.noise = llm, further, noise
        self.weights = Weights(version=-1)

    def _fields(self, prompt: Prompt) -> dict[str, Any]:
        """The user's override the run's, but for seeds, and for lengths where those are smaller."""
        fields, further = super()._fields(prompt), self.further
        ends = set() if further.get("ignore_eos") else self.eos_token_ids
        return {
            **fields,
            "logprobs": 0,  # those of the drawn tokens
            "detokenize": bool(further.get("stop")),
            **further,
            **({"temperature": 0.0} if prompt.sampling.temperature == 0 else {}),  # of a baseline's
            "max_tokens": min(fields["max_tokens"], further.get("max_tokens") or math.inf),
            "seed": fields["seed"],
            "stop_token_ids": sorted(ends | set(further.get("stop_token_ids") or ())),
            "output_kind": fields["output_kind"],
        }

    @contextlib.contextmanager
    def noisy(self) -> Iterator[None]:
        """Inside, the engine's norm weights hold the noise. Keys and values that vLLM keeps of prompts are of the
        weights that computed them, so none is found by another noise, nor by the clean weights."""
        if self.noise is None or not self.weights.sigma:
            yield
            return
        try:
            with self.noise.applied(self.weights.sigma, (self.weights.version, self.weights.draw)):
                self.forget_prompts()
                yield
        finally:
            self.forget_prompts()

    def forget_prompts(self) -> None:
        if self.llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM's prefix cache could not be emptied between rollouts of different weights")


class VLLMPolicyEngine(InProcess, DrawingVLLM):
    """Draws with the policy that was published last. See `perl.engines.PolicyEngine` for what it promises.

    Args:
        policy: the trained model (a PeftModel where it has an adapter), not wrapped by DDP or DeepSpeed.
        peft_config: of its adapter, or None.
        options: of the vllm.LLM, by its names; `tensor_parallel_size` processes share an engine.
        processes: accelerate's Accelerator, of the trainer.
        gather: ZeRO-3's and FSDP's parameters.
        generation_kwargs: the user's further SamplingParams.
        regex: what each completion must match; None: anything.
        noise: the trainer's, or None.
        eos_token_ids: tokens that end a completion of a rollout.
        seed: of the run.
        quantization: of the engine's base, which is given the adapter alone then.

    Attributes:
        noise: the same noise on the engine's weights.
        itemsize: bytes of a weight in vLLM, which chooses its own dtype, or of a quantised one.

    Raises:
        UserError: for generation_kwargs that no rollout can heed, too little memory, and noise that vLLM's layers can't
            be given.
    """

    merging = False

    def __init__(
        self,
        policy: Any,
        peft_config: PeftConfig | None,
        options: Mapping[str, Any],
        *,
        processes: Any,
        gather: Gather,
        generation_kwargs: Mapping[str, Any],
        regex: str | None,
        noise: NoiseInjector | None,
        eos_token_ids: Collection[int],
        seed: int,
        quantization: Quantisation = "none",
    ):
        with random_state_kept():
            import_vllm()
            further = further_fields(generation_kwargs, regex)
            self.policy, self.gather, self.sync = policy, gather, VLLMSync(peft_config)
            sharing = Sharing(processes, options["tensor_parallel_size"])
            engine_seed = row_seed(seed, "vllm", sharing.number) % 2**31  # the same in all that share the engine
            started_with = {
                **options,
                "model": policy.name_or_path,
                "seed": engine_seed,
                "distributed_executor_backend": "external_launcher",
                "max_num_batched_tokens": BATCHED_TOKENS,
                "logprobs_mode": LOGPROBS,
            }
            served = self.sync.options(started_with, policy)
            llm: Any = start_policy(served, self.sync, quantization)
        self.sleeps = self.asleep = bool(options["enable_sleep_mode"])
        self.sleep_level = 1 if self.sync.reason is None else 2  # 2 throws the base away, which is sent again
        if self.sleeps:
            llm.sleep(level=self.sleep_level)
        processes.wait_for_everyone()  # DeepSpeed's own start hangs where some are still loading
        on_engine = None if noise is None else noise_of_engine(llm, noise)
        self._settings: dict[str, Any] = {"shared": sharing.gathered, "applied": self._drawing}
        super().__init__(llm, lambda: self.sync.adapter, further, on_engine, eos_token_ids, **self._settings)
        dtype: Any = self.engine.vllm_config.model_config.dtype
        self.quantised = quantization != "none"
        self.itemsize: float = SCHEMES[quantization].bits / 8 if self.quantised else dtype.itemsize

    def publish(self, weights: Weights) -> None:
        if weights.version != self.weights.version:
            self._load()
        self.weights = weights

    def evaluating(self, eos_token_ids: frozenset[int], context: int | None, *, quantised: bool = False) -> RunningVLLM:
        assert quantised == self.quantised, "vLLM holds one base"
        return RunningVLLM(self.engine, eos_token_ids=eos_token_ids, context=context, lora=self._lora, **self._settings)

    def not_comparable(self, sampling: Sampling) -> str | None:
        return not_comparable(sampling, self.further)

    def take_metrics(self) -> dict[str, float]:
        return {} if self.noise is None else {"aqn/sigma_realized": self.noise.realized_sigma}

    def close(self) -> None:
        """The engine lives as long as the trainer."""

    def _load(self) -> None:
        """Give vLLM the policy as it is now. Every process must come here."""
        if self.asleep:
            device.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self.asleep = False
        self.sync.load(self.llm, self.policy, self.gather)
        self.forget_prompts()

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        with self._awake(), self.noisy():
            yield

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        """Inside, the engine has its weights and a cache."""
        if not self.sleeps:
            yield
            return
        if self.asleep:  # since the policy was published
            self._load()
        self.llm.wake_up(tags=["kv_cache"])
        try:
            yield
        finally:
            self.llm.sleep(level=self.sleep_level)
            self.asleep = True


class Sharing:
    """The processes that share one engine: `size` of them, one after the other by their ranks.

    Attributes:
        number: of this process's engine.
    """

    def __init__(self, processes: Any, size: int):
        rank, count = processes.process_index, processes.num_processes
        if count % size:
            raise UserError(
                f"--config.training.vllm_tensor_parallel_size {size}: does not divide the {count} processes; write a"
                " number that does"
            )
        self.processes, self.size, self.number, self.place = processes, size, rank // size, rank % size
        self.group: Any = None
        if size > 1:
            import torch.distributed as dist

            self.group, _ = dist.new_subgroups_by_enumeration(
                [list(range(first, first + size)) for first in range(0, count, size)]
            )
        of_process = {"RANK": rank, "LOCAL_RANK": processes.local_process_index, "WORLD_SIZE": count}
        os.environ.update({name: str(value) for name, value in of_process.items()})
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", str(free_port()))

    def gathered(self, feed: Feed) -> tuple[int, float, Feed]:
        """Place of this process's first prompt among those of all that share the engine, how many it has, and all."""
        if self.size == 1:
            return 0, math.inf, feed
        import torch.distributed as dist

        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, [prompt for prompt in feed if prompt is not None], group=self.group)
        # What the backward still sends elsewhere may hang vLLM's own sends (huggingface/trl#3671).
        self.processes.wait_for_everyone()
        first = sum(len(part) for part in parts[: self.place])
        return first, len(parts[self.place]), [prompt for part in parts for prompt in part]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


def not_comparable(sampling: Sampling, further: Mapping[str, Any]) -> str | None:
    """What the log-probabilities of such completions are, where they are not of all tokens.

    Args:
        further: the user's fields of SamplingParams.
    """
    return "of a truncated distribution" if sampling.truncates or further else None


def start_policy(options: Mapping[str, Any], sync: VLLMSync, quantization: Quantisation) -> Any:
    """A vllm.LLM that draws in a training, its base quantised.

    Args:
        options: that `sync` has given.
    """
    flag = f"--config.rollout.quantization {quantization}"
    if quantization != "none" and sync.reason is not None:
        raise UserError(
            f"{flag}: vLLM would be sent merged weights, and only an adapter of its own can be served above quantised"
            f" ones: {sync.reason}; write none"
        )
    return start_quantised(options, quantization, flag, training=True)


def further_fields(generation_kwargs: Mapping[str, Any], regex: str | None) -> dict[str, Any]:
    """The user's fields of SamplingParams; a UserError for what no rollout can heed."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    further = dict(generation_kwargs)
    if regex is not None:
        if further.get("structured_outputs") is not None:
            log.warning(
                "%s: structured_outputs has no effect: training.vllm_structured_outputs_regex takes its place", KWARGS
            )
        further["structured_outputs"] = StructuredOutputsParams(regex=regex)
    elif isinstance(outputs := further.get("structured_outputs"), dict):
        further["structured_outputs"] = StructuredOutputsParams(**outputs)
    try:
        parameters = SamplingParams(**further)
    except (TypeError, ValueError) as error:
        raise UserError(f"{KWARGS}: {' '.join(str(error).split())}; write fields of vLLM's SamplingParams") from error
    if parameters.n != 1:
        raise UserError(f"{KWARGS}: n has no place in a rollout (one completion for each prompt); leave it out")
    return further
