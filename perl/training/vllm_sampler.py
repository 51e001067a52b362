"""vLLM as a Sampler: an engine in the trainer's process, or a server, driven by TRL's client of it (VLLMGeneration).

What is ours is how vLLM gets the policy (perl/training/vllm_sync.py), and what is known of its log-probabilities.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from perl.device.sharding import Gather
from perl.engines.base import warn_once
from perl.noise.injector import NoiseInjector
from perl.records import Sampling
from perl.training.rollout import Completions, EvaluatorRules, RolloutRequest, Weights, realized
from perl.training.vllm_sync import VLLMSync

OfAllProcesses = Callable[[list[int]], torch.Tensor]
"""[processes, numbers]: the numbers that each process gives."""


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
    before = {name: getattr(thing, name) for name in values}
    try:
        for name, value in values.items():
            setattr(thing, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


class VLLMSampler:
    """
    Args:
        client: TRL's VLLMGeneration.
        sync: what has started the engine of `client`, if that is in this process.
        policy: the trained model (a PeftModel), as VLLMSync.weights takes it.
        gather: ZeRO-3's and FSDP's parameters.
        of_all_processes: every process constructs a sampler at the same time.
        generation_kwargs: the user's further SamplingParams.
        folder: where a server in another process finds the adapter.
        noise: the trainer's, or None.

    Attributes:
        noise: the same noise on the engine's weights.
        itemsize: bytes of a weight in vLLM, which chooses its own dtype.
        elsewhere: it computes on devices that are not the trainer's.
        takes_more: False; it draws what it is asked for.
        context: a server's max_model_len; None in the trainer's process.
    """

    takes_more = False

    def __init__(
        self,
        client: Any,
        sync: VLLMSync,
        *,
        policy: Any,
        gather: Gather,
        of_all_processes: OfAllProcesses,
        generation_kwargs: dict[str, Any],
        folder: Path,
        noise: NoiseInjector | None,
    ):
        self.client, self.sync, self.generation_kwargs = client, sync, generation_kwargs
        self.of_all_processes = of_all_processes
        self.elsewhere, self.context = client.mode == "server", None
        self._synced_step = -1
        # What TRL calls to give vLLM the policy: its own would merge into the base, and subtract again.
        client._iter_named_params = lambda: sync.weights(policy, gather)
        self.noise = None
        if not self.elsewhere:
            self.noise = None if noise is None else sync.noise_for_engine(noise)
            self.itemsize, self._scaled = client.llm.llm_engine.model_config.dtype.itemsize, True
            return
        url, told = None, [0, 0, 0, 0]
        if client.accelerator.is_main_process:  # the one that talks to the server
            url, info = client.vllm_client.base_url, client.vllm_client.get_server_info()
            dtype = getattr(torch, info["model_config"]["dtype"].removeprefix("torch."))
            scaled = info["model_config"]["logprobs_mode"] == "processed_logprobs"
            lora, context = info.get("lora_config") is not None, info["model_config"]["max_model_len"]
            told = [dtype.itemsize, int(scaled), int(lora), int(context)]
        self.itemsize, scaled, with_lora, self.context = of_all_processes(told).amax(dim=0).tolist()
        self._scaled = bool(scaled)
        sync.use_server(bool(with_lora))

        def publish() -> None:
            name = sync.publish(policy, gather, url, folder)
            if url is not None:
                client.vllm_client.model = name

        if sync.reason is None:
            client.sync_weights = publish

    def complete(self, request: RolloutRequest) -> Completions:
        """Every process must come here. `client` was made with the run's sampling; a server knows no seeds."""
        if request.weights.step != self._synced_step:
            self.client.sync_weights()
            self._synced_step = request.weights.step
        if self.noise is not None:
            self.client.llm.perturbed = functools.partial(self._noisy, request.weights)
        if request.rules is not None:
            return self._complete_by(request.rules, request)
        values = {}
        if not self.elsewhere:
            most = (self.generation_kwargs or {}).get("max_tokens", request.sampling.max_new_tokens)
            rows = [(seed, most) for seed in request.seeds]
            values["llm"] = SeededLLM(self.client.llm, self._of_tensor_parallel(rows))
        with replaced(self.client, values):
            _, token_ids, logprobs, _ = self.client.generate(
                prompts=request.prompt_ids, images=None, num_generations=request.group_size
            )
        drawn = [[logprob for logprob, *_ in of_tokens] for of_tokens in logprobs]
        return Completions(token_ids, drawn, realized(self.noise))

    def _complete_by(self, rules: EvaluatorRules, request: RolloutRequest) -> Completions:
        """As the evaluator's vLLM draws. TRL's client draws with its own fields: they have other values meanwhile. A
        server takes one seed and one length for all completions; it is asked for greedy ones only."""
        sampling, ends = request.sampling, sorted(rules.eos_token_ids)
        rooms = [rules.room(prompt, sampling.max_new_tokens) for prompt in request.prompt_ids]
        values = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        most = self._shortest(rooms, sampling.max_new_tokens) if self.elsewhere else min(rooms)
        values |= {"repetition_penalty": sampling.repetition_penalty, "max_completion_length": most}
        values |= {"generation_kwargs": {"stop_token_ids": ends}, "structured_outputs_regex": None}
        if not self.elsewhere:
            rows = list(zip(request.seeds, rooms, strict=True))
            values["llm"] = SeededLLM(self.client.llm, self._of_tensor_parallel(rows))
        with replaced(self.client, values):
            _, token_ids, _, _ = self.client.generate(prompts=request.prompt_ids, images=None, num_generations=1)
        return Completions(token_ids, [[] for _ in token_ids])

    def _shortest(self, rooms: list[int], asked: int) -> int:
        """The length that a server can give all completions of all processes."""
        most = int(self.of_all_processes([min(rooms)]).min())
        if most < asked:
            warn_once(
                f"validation: completions end after {most} tokens, not {asked}: the longest prompt leaves no more of"
                " the model's context, and a vLLM server takes one length for all; --config.training.vllm_mode colocate"
                " gives each its own"
            )
        return most

    def _of_tensor_parallel(self, rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of all processes that share an engine, which each gives it all of."""
        if self.client.tensor_parallel_size == 1:
            return rows
        found: list[Any] = [None] * self.client.tensor_parallel_size
        torch.distributed.all_gather_object(found, rows, group=self.client.tp_group)
        return [row for own in found for row in own]

    @contextlib.contextmanager
    def _noisy(self, weights: Weights) -> Iterator[None]:
        """Inside, the engine's norm weights hold the noise. Keys and values that vLLM keeps of prompts are of the
        weights that computed them, so none is found by another noise, nor by the clean weights."""
        assert self.noise is not None
        with self.noise.applied(weights.sigma, (weights.step, weights.number)):
            self._forget_prompts()
            yield
        self._forget_prompts()

    def _forget_prompts(self) -> None:
        if self.client.llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM's prefix cache could not be emptied between rollouts of different noise")

    def not_comparable(self, sampling: Sampling) -> str | None:
        if not self._scaled and sampling.temperature != 1.0:
            return "before temperature, as the vLLM server runs without --logprobs-mode processed_logprobs"
        if sampling.truncates or self.generation_kwargs:
            return "of a truncated distribution"
        return None
