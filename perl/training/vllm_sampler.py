"""vLLM in the trainer's process as a PolicyEngine, driven by TRL's client of it (VLLMGeneration).

What is ours is how vLLM gets the policy (perl/training/vllm_sync.py), its noise and seeds, and what is known of its
log-probabilities.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator
from typing import Any

import torch

from perl.device.sharding import Gather
from perl.engines.base import Feed
from perl.noise.injector import NoiseInjector
from perl.records import Completion, Prompt, Sampling, Weights
from perl.training.vllm_sync import VLLMSync


class SeededLLM:
    """A vllm.LLM that gives each completion its own seed and length, (seed, most new tokens) in `rows`."""

    def __init__(self, llm: Any, rows: list[tuple[int, int]]):
        self.llm, self.rows = llm, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def generate(self, prompts: Any, sampling_params: Any, **kwargs: Any) -> Any:
        own = [sampling_params.clone() for _ in self.rows]
        for parameters, (seed, most) in zip(own, self.rows, strict=True):
            parameters.seed, parameters.max_tokens = seed, most
        return self.llm.generate(prompts, sampling_params=own, **kwargs)


@contextlib.contextmanager
def replaced(thing: Any, values: dict[str, Any]) -> Iterator[None]:
    """Inside, attributes of `thing` have these values."""
    before = {name: getattr(thing, name, None) for name in values}
    try:
        for name, value in values.items():
            setattr(thing, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


def start_client(trainer: Any, sync: VLLMSync, generation_kwargs: dict[str, Any]) -> Any:
    """TRL's VLLMGeneration, with the arguments that its GRPOTrainer gives it; its engine is started by `sync`."""
    from trl.generation import vllm_generation

    args = trainer.args
    with replaced(vllm_generation, {"LLM": sync.start}):
        return vllm_generation.VLLMGeneration(
            model=trainer.model,
            accelerator=trainer.accelerator,
            processing_class=trainer.processing_class,
            mode="colocate",
            structured_outputs_regex=args.vllm_structured_outputs_regex,
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            max_model_length=args.vllm_max_model_length,
            max_num_seqs=args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
            enable_sleep_mode=args.vllm_enable_sleep_mode,
            model_impl=args.vllm_model_impl,
            trust_remote_code=args.trust_remote_code,
            repetition_penalty=args.repetition_penalty,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            max_completion_length=args.max_completion_length,
            logprobs=0,  # those of the drawn tokens
            generation_kwargs=generation_kwargs,
        )


class VLLMSampler:
    """
    Args:
        client: TRL's VLLMGeneration.
        sync: what has started the engine of `client`.
        policy: the trained model (a PeftModel), as VLLMSync.weights takes it.
        gather: ZeRO-3's and FSDP's parameters.
        generation_kwargs: the user's further SamplingParams.
        noise: the trainer's, or None.
        eos_token_ids: tokens that end a completion of a rollout.

    Attributes:
        noise: the same noise on the engine's weights.
        itemsize: bytes of a weight in vLLM, which chooses its own dtype.
    """

    context: int | None = None

    def __init__(
        self,
        client: Any,
        sync: VLLMSync,
        *,
        policy: Any,
        gather: Gather,
        generation_kwargs: dict[str, Any],
        noise: NoiseInjector | None,
        eos_token_ids: Collection[int],
    ):
        self.client, self.sync, self.generation_kwargs = client, sync, generation_kwargs
        self.eos_token_ids = {*eos_token_ids, *(generation_kwargs.get("stop_token_ids") or ())}
        # What TRL calls to give vLLM the policy: its own would merge into the base, and subtract again.
        client._iter_named_params = lambda: sync.weights(policy, gather)
        self.noise = None if noise is None else sync.noise_for_engine(noise)
        self.itemsize = client.llm.llm_engine.model_config.dtype.itemsize
        self.max_num_seqs = client.max_num_seqs
        self.weights = Weights(version=-1)

    def publish(self, weights: Weights) -> None:
        if weights.version != self.weights.version:
            self.client.sync_weights()
        self.weights = weights

    def stream(self, feed: Feed) -> Iterator[tuple[int, Completion]]:
        """One call of vLLM for all that is asked. Every process must come here."""
        prompts = [prompt for prompt in feed if prompt is not None]
        limit = self.generation_kwargs.get("max_tokens", math.inf)
        rows = [(prompt.seed, int(min(limit, prompt.sampling.max_new_tokens))) for prompt in prompts]
        yield from self._generate(prompts, rows, self.eos_token_ids, {}, self._noisy())

    def evaluating(self, eos_token_ids: frozenset[int], context: int | None) -> Evaluating:
        return Evaluating(self, sorted(eos_token_ids), context)

    def _generate(
        self,
        prompts: list[Prompt],
        rows: list[tuple[int, int]],
        eos_token_ids: Collection[int],
        values: dict[str, Any],
        around: Any,
    ) -> Iterator[tuple[int, Completion]]:
        """
        Args:
            rows: seed and most new tokens of each.
            eos_token_ids: tokens that end a completion.
            values: what attributes of the client are meanwhile.
        """
        values = values | {"llm": SeededLLM(self.client.llm, self._of_tensor_parallel(rows))}
        with around, replaced(self.client, values):
            _, token_ids, logprobs, _ = self.client.generate(
                prompts=[list(prompt.token_ids) for prompt in prompts], images=None, num_generations=1
            )
        for place, (ids, numbers) in enumerate(zip(token_ids, logprobs, strict=True)):
            drawn = tuple(math.nan if number is None else number for number, *_ in numbers)
            finish = "stop" if ids and ids[-1] in eos_token_ids else "length"
            yield place, Completion(token_ids=tuple(ids), logprobs=drawn, finish_reason=finish)

    def _of_tensor_parallel(self, rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of all processes that share an engine, which each gives it all of."""
        if self.client.tensor_parallel_size == 1:
            return rows
        gathered: list[Any] = [None] * self.client.tensor_parallel_size
        torch.distributed.all_gather_object(gathered, rows, group=self.client.tp_group)
        return [row for part in gathered for row in part]

    @contextlib.contextmanager
    def _noisy(self) -> Iterator[None]:
        """Inside, the engine's norm weights hold the noise while it draws. Keys and values that vLLM keeps of prompts
        are of the weights that computed them, so none is found by another noise, nor by the clean weights."""
        if self.noise is None or not self.weights.sigma:
            yield
            return
        self.client.llm.perturbed = self._perturbed
        try:
            yield
        finally:
            self.client.llm.perturbed = contextlib.nullcontext

    @contextlib.contextmanager
    def _perturbed(self) -> Iterator[None]:
        assert self.noise is not None
        with self.noise.applied(self.weights.sigma, (self.weights.version, self.weights.draw)):
            self._forget_prompts()
            yield
        self._forget_prompts()

    def _forget_prompts(self) -> None:
        if self.client.llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM's prefix cache could not be emptied between rollouts of different noise")

    def not_comparable(self, sampling: Sampling) -> str | None:
        if sampling.truncates or self.generation_kwargs:
            return "of a truncated distribution"
        return None

    def take_metrics(self) -> dict[str, float]:
        return {} if self.noise is None else {"aqn/sigma_realized": self.noise.realized_sigma}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """There is nothing: what vLLM holds is published before each rollout."""

    def close(self) -> None:
        """The engine lives as long as the trainer."""


class Evaluating:
    """The same engine as the evaluator's vLLM draws. TRL's client draws with its own fields: they have other values
    meanwhile."""

    def __init__(self, sampler: VLLMSampler, stop_token_ids: list[int], context: int | None):
        self.sampler, self.stop_token_ids, self.context = sampler, stop_token_ids, context
        self.max_num_seqs = sampler.max_num_seqs

    def stream(self, feed: Feed) -> Iterator[tuple[int, Completion]]:
        prompts = [prompt for prompt in feed if prompt is not None]
        if not prompts:
            return
        sampling = prompts[0].sampling
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values: dict[str, Any] = {name: getattr(sampling, name) for name in names}
        values |= {"generation_kwargs": {"stop_token_ids": self.stop_token_ids}, "structured_outputs_regex": None}
        rows = [(prompt.seed, self._room(prompt)) for prompt in prompts]
        yield from self.sampler._generate(prompts, rows, self.stop_token_ids, values, contextlib.nullcontext())

    def _room(self, prompt: Prompt) -> int:
        most = prompt.sampling.max_new_tokens
        return most if self.context is None else min(most, self.context - len(prompt.token_ids))

    def close(self) -> None:
        """Nothing of its own."""
