"""Rollouts: token ids, sampling, seeds and which weights go in; completions and log-probabilities come out.

`Sampler` is all that the trainer knows of how completions come about. RolloutPolicy is the one in this process: the
trained model itself, without dropout, with noise on its norm weights and the adapter merged while tokens are drawn. A
pool of engines in other processes, which are sent the adapter, would be another implementation.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as List
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from transformers import GenerationConfig

from perl import device
from perl.adapters.none import RolloutCopies
from perl.adapters.rollout_merge import RolloutMerge
from perl.base.errors import UserError
from perl.config.schema import RolloutConfig
from perl.engines.attention import stock_attention
from perl.engines.decoder import Decoder
from perl.engines.sequence import Sequence
from perl.engines.stock import generate_plain, generate_stock
from perl.models.folders import token_ids
from perl.models.pixels import MakeImages
from perl.noise.injector import NoiseInjector
from perl.prompts import row_seed
from perl.records import Sampling


class Weights(NamedTuple):
    """Which weights sample: the adapter after `step` optimizer steps, with noise of standard deviation `sigma`."""

    step: int
    number: int
    """Rollouts of this step before it; with `step` it names the noise and the random numbers."""
    sigma: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorRules:
    """What a completion must keep to for being the evaluator's: nothing of TRL's generation config, or of the run's
    generation_kwargs, is heeded."""

    eos_token_ids: frozenset[int]
    context: int | None
    """Most tokens of prompt and completion together; None: the model names no limit."""

    def room(self, prompt_ids: list[int], max_new_tokens: int) -> int:
        """Most new tokens after this prompt."""
        return max_new_tokens if self.context is None else min(max_new_tokens, self.context - len(prompt_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """What a Sampler is asked for."""

    prompt_ids: list[list[int]]
    """One prompt for each completion, without padding."""
    seeds: list[int]
    """One for each completion, which depends on nothing else (perl.engines.sampling)."""
    sampling: Sampling
    """The distribution, and the most new tokens; its n and seed are not read."""
    weights: Weights
    group_size: int = 1
    """Completions of each prompt, one after the other."""
    on_finished: Callable[[int, list[int]], None] | None = None
    """Told a completion's place and tokens as soon as it ends, while others are drawn, by samplers that know."""
    images: List[MakeImages | None] = ()
    """One for each completion; empty where no prompt has any."""
    more: Callable[[], list[tuple[list[int], int]]] | None = None
    """Asked between the steps of decoding, by samplers that `take_more`: further prompts, each with its seed, whose
    completions come after those of `prompt_ids`. Nothing means nothing now, and while nothing is drawn it means the
    end: it waits itself for what it has to know."""
    rules: EvaluatorRules | None = None
    """Complete as the evaluator does, by `sampling` and `seeds` alone; None: a rollout, as TRL asks for it."""

    def sequences(self, room: Callable[[list[int], int], int]) -> list[Sequence]:
        """The completions to make.

        Args:
            room: (prompt, sampling.max_new_tokens) -> most new tokens.
        """
        rows = zip(self.prompt_ids, self.seeds, self.images or [None] * len(self.seeds), strict=True)
        most = self.sampling.max_new_tokens
        return [Sequence(tuple(prompt), seed, room(prompt, most), images=images) for prompt, seed, images in rows]


class Completions(NamedTuple):
    """What a Sampler gives back, completion by completion."""

    token_ids: list[list[int]]
    """Drawn tokens, the end-of-sequence token included."""
    logprobs: list[list[float]]
    """log_softmax(logits / temperature) of each, by the sampler, in nats."""
    metrics: dict[str, float] = {}  # noqa: RUF012
    """What else the sampler measured, by the name that is logged."""


class Sampler(Protocol):
    """Completes prompts with the policy."""

    itemsize: int
    """Bytes of a number that it computes in, at most."""
    elsewhere: bool
    """It computes on devices that are not the trainer's."""
    context: int | None
    """Most tokens of prompt and completion together that another program allows; None: no further limit."""
    noise: NoiseInjector | None
    """What puts the noise on the weights that it samples with."""

    @property
    def takes_more(self) -> bool:
        """It heeds `RolloutRequest.more`, and every process asks it for as many completions as it likes; otherwise all
        processes must call `complete` equally often, with as many prompts."""
        ...

    def complete(self, request: RolloutRequest) -> Completions: ...

    def not_comparable(self, sampling: Sampling) -> str | None:
        """What its log-probabilities are, where they are not log_softmax(logits / temperature) of all tokens."""


class RolloutPolicy:
    """The trained model samples: in the decode loop, or by transformers' `generate` or `generate_batch`.

    Args:
        model: the policy, not wrapped by DDP or DeepSpeed.
        config: the group `rollout`.
        noise: what adds the noise, or None.
        generation_config: TRL's, for eos and pad tokens, and for transformers' own `generate` and `generate_batch`.
        generation_kwargs: the user's part of it.
        batching_config: transformers' ContinuousBatchingConfig, for the engine continuous_batching.
        kernels: training.attention_kernels.
        gathered: inside it the weights that ZeRO-3 or FSDP has spread are whole.
        dtype: what the trainer computes in; None is the weights'.
    """

    itemsize = 4  # its dtype is the policy's
    elsewhere = False
    context: int | None = None

    def __init__(
        self,
        model: Any,
        config: RolloutConfig,
        noise: NoiseInjector | None,
        generation_config: GenerationConfig,
        generation_kwargs: dict[str, Any],
        batching_config: Any = None,
        kernels: bool | Literal["auto"] = "auto",
        gathered: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        dtype: torch.dtype | None = None,
    ):
        self.model, self.config, self.noise = model, config, noise
        self.generation_config, self.batching_config = generation_config, batching_config
        self.generation_kwargs, self.gathered = generation_kwargs, gathered
        if batching_config is not None:
            batching_config.return_logprobs = True
        require_possible(generation_kwargs)
        self.merge, self.copies = RolloutMerge(model, config.merge_adapter), RolloutCopies(model, dtype)
        self.dtype = dtype
        self.kernel = device.paged_attention(kernels)
        further = {name: value for name, value in generation_kwargs.items() if name not in SERVED}
        if generation_config.suppress_tokens is not None:  # TRL's: a drawn image token has no image
            further["suppress_tokens"] = generation_config.suppress_tokens
        self.decoder = self._make_decoder(token_ids(generation_config.eos_token_id), further)

    def _make_decoder(self, eos_token_ids: Collection[int], generation_kwargs: dict[str, Any]) -> Decoder:
        config, capture = self.config, self.config.capture_graphs
        return Decoder(
            self.model,
            eos_token_ids=eos_token_ids,
            pad_token_id=int(self.generation_config.pad_token_id),  # type: ignore[arg-type]
            max_batch_tokens=None if config.max_batch_tokens is None else int(config.max_batch_tokens),
            capture=device.captures_by_default() if capture == "auto" else capture,
            kernel=self.kernel,
            generation_kwargs=generation_kwargs,
        )

    @property
    def takes_more(self) -> bool:
        return self.config.engine == "fast" and self.decoder.stock_reason() is None

    def complete(self, request: RolloutRequest) -> Completions:
        if request.rules is not None:
            return self._complete_by(request.rules, request)
        sequences = request.sequences(lambda _, most: most)
        # The copies first: noise is added to the weights that compute, and what rounding leaves of it is measured.
        with self.gathered(), self.copies.applied(), sampling_weights(self.model, self.noise, request.weights):
            if self.config.engine == "continuous_batching":  # which takes no noise
                return self._generate_batch(request.prompt_ids)
            with self.merge.applied(self.dtype):
                if self.config.engine == "generate":
                    generate_plain(self.model, sequences, self.generation_config)
                else:
                    for sequence in self.decoder.run(_asked(request, sequences), request.sampling):
                        if request.on_finished is not None:
                            request.on_finished(sequence.index, sequence.token_ids)
        self.decoder.release_if_short()
        error = self.merge.rounding_error
        metrics = {} if error is None else {"rollout/merge_rounding_error": error}
        metrics |= realized(self.noise)
        return Completions([s.token_ids for s in sequences], [s.logprobs for s in sequences], metrics)

    def _complete_by(self, rules: EvaluatorRules, request: RolloutRequest) -> Completions:
        """By the decode loop, or the model's own `generate` under the engine of that name. The loop is another one
        than that of rollouts, whose cache and captured graphs stay as they are; there is no noise."""
        sampling = request.sampling
        sequences = request.sequences(rules.room)
        decoder = self._make_decoder(rules.eos_token_ids, {})
        run = decoder.run if self.config.engine != "generate" else functools.partial(_stock_batches, decoder)
        with (
            self.gathered(),
            self.copies.applied(),
            sampling_weights(self.model, None, request.weights),
            self.merge.applied(),  # in float32 where it packs: on a CPU the evaluator computes in that
        ):
            for sequence in run(sequences, sampling):
                if request.on_finished is not None:
                    request.on_finished(sequence.index, sequence.token_ids)
        decoder.release()
        device.empty_cache()
        return Completions([s.token_ids for s in sequences], [s.logprobs for s in sequences])

    def not_comparable(self, sampling: Sampling) -> str | None:
        own = self.config.engine in ("fast", "generate")
        if own or not (self.generation_kwargs or sampling.truncates):
            return None
        return "of a truncated distribution"

    def _generate_batch(self, prompt_ids: list[list[int]]) -> Completions:
        """transformers' continuous batching, with the adapter unmerged."""
        with torch.no_grad(), stock_attention(self.model):
            outputs = self.model.generate_batch(
                prompt_ids,
                generation_config=self.generation_config,
                continuous_batching_config=self.batching_config,
                progress_bar=False,
            ).values()
        return Completions([o.generated_tokens for o in outputs], [o.logprobs for o in outputs])


def _asked(request: RolloutRequest, sequences: list[Sequence]) -> Iterator[Sequence | None]:
    """`sequences`, then those that come by `more`, which are added to them, with None after each of its answers."""
    yield from list(sequences)
    while request.more is not None:
        most = request.sampling.max_new_tokens
        further = [Sequence(tuple(prompt), seed, most) for prompt, seed in request.more()]
        sequences += further
        yield from further
        yield None


def _stock_batches(decoder: Decoder, sequences: list[Sequence], sampling: Sampling) -> Iterator[Sequence]:
    """Complete `sequences` by the model's own `generate`, in batches of the decoder's size: a sharded model would take
    all of them at once."""
    for first in range(0, len(sequences), decoder.max_num_seqs):
        batch = sequences[first : first + decoder.max_num_seqs]
        for sequence in generate_stock(
            decoder.model,
            batch,
            sampling,
            eos_token_ids=decoder.eos_token_ids,
            pad_token_id=decoder.pad_token_id,
            max_batch_tokens=decoder.max_batch_tokens,
            max_num_seqs=decoder.max_num_seqs,
        ):
            sequence.index += first
            yield sequence


@contextlib.contextmanager
def sampling_weights(model: Any, noise: NoiseInjector | None, weights: Weights) -> Iterator[None]:
    """Inside, `model` is the policy that samples, its adapter unmerged. No dropout: TRL samples in training mode, with
    lora_dropout at work, while the loss's ratio takes sampler and learner for one policy."""
    noisy = noise.applied(weights.sigma, (weights.step, weights.number)) if noise else contextlib.nullcontext()
    with evaluation_mode(model), noisy:
        yield


def realized(noise: NoiseInjector | None) -> dict[str, float]:
    """What the noise of the rollout that has just been drawn came to, by the name that is logged."""
    return {} if noise is None else {"aqn/sigma_realized": noise.realized_sigma}


@contextlib.contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Switch dropout and gradient checkpointing off, and put each module's training flag back afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def rollout_seeds(seed: int, draw: tuple[int, ...], rows: int, rank: int, group_size: int) -> list[int]:
    """A seed for each of this rank's `rows`: it depends on the run's seed, the rollout, and the row's place among the
    rows of all ranks, so another number of ranks samples the same completions.

    Args:
        draw: names the rollout (global step, count within it).
        rows: rows of each rank; TRL gives rank k the k-th slice of the batch, groups one after the other.
        group_size: completions of each prompt.
    """
    places = range(rank * rows, (rank + 1) * rows)
    key = "-".join(map(str, draw))
    return [row_seed(seed, f"{key}-{place // group_size}", place % group_size) for place in places]


SERVED = {"do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"}
SERVED |= {"eos_token_id", "pad_token_id", "bos_token_id", "use_cache", "cache_implementation"}
"""Fields of a GenerationConfig that the decode loop heeds, or that change no token; with any other of the user's the
model's own `generate` draws."""

REFUSED = {"num_beams", "num_return_sequences", "stop_strings", "num_assistant_tokens", "prompt_lookup_num_tokens"}


def require_possible(generation_kwargs: dict[str, Any]) -> None:
    """A UserError for what no rollout can heed, and for a name that is no field of a GenerationConfig."""
    known = sorted(name for name in GenerationConfig().to_dict() if not name.startswith("_"))
    for name in generation_kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or known
            raise UserError(
                f"--config.training.generation_kwargs: unknown name {name!r}; write one of transformers'"
                f" GenerationConfig, such as {', '.join(near[:3])}"
            )
    if refused := sorted(REFUSED & generation_kwargs.keys()):
        raise UserError(
            f"--config.training.generation_kwargs: {refused[0]} has no place in a rollout (one completion for each"
            " prompt, as long as max_completion_length); leave it out"
        )


def sampling_of(config: GenerationConfig) -> Sampling:
    """The distribution that a GenerationConfig describes: None is off, and do_sample false is greedy."""
    greedy = config.do_sample is False
    return Sampling(
        temperature=0.0 if greedy else 1.0 if config.temperature is None else float(config.temperature),
        top_p=1.0 if greedy or config.top_p is None else float(config.top_p),
        top_k=0 if greedy else int(config.top_k or 0),
        min_p=0.0 if greedy else float(config.min_p or 0.0),
        repetition_penalty=1.0 if config.repetition_penalty is None else float(config.repetition_penalty),
        max_new_tokens=int(config.max_new_tokens or 256),
    )
