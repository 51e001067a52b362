"""The trained model completes prompts itself: without dropout, with noise on its norm weights and the adapter merged
while tokens are drawn."""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import GenerationConfig

from perl import device
from perl.adapters.none import RolloutCopies
from perl.adapters.rollout_merge import RolloutMerge
from perl.base.errors import UserError
from perl.config.derived import draws_alike
from perl.config.schema import RolloutConfig
from perl.device.sharding import local
from perl.engines.base import Engine, Feed, InProcess, evaluation_mode
from perl.engines.quantised import SCHEMES
from perl.engines.quantised_base import QuantisedBase
from perl.engines.scheduler import Sequence
from perl.engines.stock import generate_plain
from perl.engines.torch_engine import TorchEngine
from perl.models.folders import token_ids
from perl.models.images import has_images
from perl.noise.injector import NoiseInjector
from perl.records import Completion, Sampling, Trajectory, Weights

SERVED = {"do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
SERVED |= {"eos_token_id", "pad_token_id", "bos_token_id", "use_cache", "cache_implementation"}
"""Fields of a GenerationConfig that the decode loop heeds, or that change no token; with any other of the user's the
model's own `generate` draws."""
REFUSED = {"num_beams", "num_return_sequences", "stop_strings", "num_assistant_tokens", "prompt_lookup_num_tokens"}
REFUSED |= {"penalty_alpha", "dola_layers", "force_words_ids", "token_healing", "is_assistant", "guidance_scale"}
REFUSED |= {"return_dict_in_generate", "max_new_tokens", "max_length"}
REFUSED |= {"disable_compile"}  # TRL's own


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRules:
    """How a policy draws, in the trainer's process and in a worker alike."""

    rollout: RolloutConfig
    """The group `rollout`. Its engine "generate" takes the distribution from `generation_config`, and torch's own
    random numbers."""
    processing: Any
    """The policy's tokenizer or processor; None will do for a model of text."""
    generation_config: GenerationConfig
    """TRL's, for the eos and pad tokens, and for "generate"."""
    generation_kwargs: dict[str, Any]
    """The user's part of it."""
    kernels: bool | Literal["auto"] = "auto"
    """training.attention_kernels."""
    dtype: torch.dtype | None = None
    """What the trainer's autocast computes in; float32, or None, without it."""


class TorchPolicyEngine(InProcess, TorchEngine):
    """Draws with the trained model: in the decode loop, or by transformers' `generate` as TRL calls it. See
    `perl.engines.PolicyEngine` for what it promises.

    Args:
        model: the policy, not wrapped by DDP or DeepSpeed.
        noise: what adds the noise, or None.
        gathered: inside it the weights that ZeRO-3 or FSDP has spread are whole.
        reserves: memory of an accelerator is kept free for an update in this process, which makes gradients and the
            optimizer's state; DeepSpeed's has made them when it was built.

    Raises:
        UserError: for generation_kwargs that no rollout can heed.
    """

    itemsize: float = 4  # its dtype is the policy's, unless it is quantised

    def __init__(
        self,
        model: Any,
        rules: TorchRules,
        *,
        noise: NoiseInjector | None = None,
        gathered: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        reserves: bool = True,
    ):
        config, generation_config = rules.rollout, rules.generation_config
        require_possible(rules.generation_kwargs)
        self.generation_config, self.noise, self.gathered = generation_config, noise, gathered
        alike = draws_alike(config)
        self.merge = RolloutMerge(model, config.merge_adapter, fixed=alike)
        self.copies = RolloutCopies(model, rules.dtype)
        self.quantised: QuantisedBase | None = None
        if config.quantization != "none":
            self.itemsize = SCHEMES[config.quantization].bits / 8
            if has_images(rules.processing):
                raise UserError(
                    f"--config.rollout.quantization {config.quantization}: is of models of text alone; write none"
                )
            with gathered():
                self.quantised = QuantisedBase(model, config.quantization)
        self.plain = config.engine == "generate"
        self.weights, self.merging = Weights(), False
        self.piece_size = config.piece_size
        self.reserves = reserves
        capture = config.capture_graphs
        self._settings: dict[str, Any] = {
            "pad_token_id": int(generation_config.pad_token_id),  # type: ignore[arg-type]
            "max_batch_tokens": config.max_batch_tokens,
            "capture": device.captures_by_default() if capture == "auto" else capture,
            "kernel": device.paged_attention(rules.kernels),
        }
        self._metrics: dict[str, float] = {}
        further = {name: value for name, value in rules.generation_kwargs.items() if name not in SERVED}
        if generation_config.suppress_tokens is not None:  # TRL's: a drawn image token has no image
            further["suppress_tokens"] = generation_config.suppress_tokens
        super().__init__(
            model,
            rules.processing,
            eos_token_ids=token_ids(generation_config.eos_token_id),
            context=None,
            applied=functools.partial(self._measured, rules.dtype),
            generation_kwargs=further,
            fixed=alike,
            **self._settings,
        )

    def stream(self, feed: Feed) -> Iterator[tuple[int, Completion]]:
        """In pieces where there are any: each is decoded by itself, as a worker decodes it (perl.workers.rollouts)."""
        if self.piece_size is None:
            yield from super().stream(feed)
            return
        prompts, size = [prompt for prompt in feed if prompt is not None], self.piece_size
        with self.holding() as held:
            for first in range(0, len(prompts), size):
                for place, completion in held.stream(prompts[first : first + size]):
                    yield first + place, completion

    def converse(self, conversations: Any, rows: list[Trajectory]) -> Iterator[Trajectory]:
        if self.piece_size is None:
            yield from super().converse(conversations, rows)
            return
        size = self.piece_size
        with self.holding() as held:
            for first in range(0, len(rows), size):
                yield from conversations.run(rows[first : first + size], held, in_step=True)

    @contextlib.contextmanager
    def holding(self) -> Iterator[Engine]:
        """Inside, the model is the policy that was published, whatever number of pieces is drawn by the engine that
        this gives."""
        self.merging = False  # what is merged depends on this version alone, whichever was held before
        with self.applied():
            yield self.held()

    def held(self) -> Engine:
        """This engine as it is inside of `holding`: each stream is of a piece."""
        held = copy.copy(self)
        held.applied, held.piece_size = contextlib.nullcontext, None
        return held

    def publish(self, weights: Weights) -> None:
        """The model is what draws: only the noise has to be known, and on an accelerator the memory that the update
        will take. See `perl.engines.PolicyEngine`."""
        self.weights = weights
        if self.reserves and device.free_memory() is not None:
            self.decoder.reserved = update_memory(self.model, first=weights.version == 0)

    def evaluating(self, eos_token_ids: frozenset[int], context: int | None, *, quantised: bool = False) -> TorchEngine:
        """By a decode loop of its own, or the model's own `generate` under the engine of that name. Packed weights are
        float32, which the evaluator computes in on a CPU. See `perl.engines.PolicyEngine`."""
        return TorchEngine(
            self.model,
            self.processing,
            eos_token_ids=eos_token_ids,
            context=context,
            applied=functools.partial(self._applied, quantised=quantised),
            stock=self.plain,
            **self._settings,
        )

    def not_comparable(self, sampling: Sampling) -> str | None:
        return None

    def take_metrics(self) -> dict[str, float]:
        metrics, self._metrics = self._metrics, {}
        return metrics

    @contextlib.contextmanager
    def _measured(self, dtype: torch.dtype | None) -> Iterator[None]:
        """As `_applied`, for a rollout: what became of merge and noise stands in the metrics then."""
        with self._applied(dtype, quantised=True):
            self.merging = self.merge.merging
            self.decoder.copied = self.quantised.nbytes if self.quantised else 0
            yield
        if self.quantised is None and self.merge.rounding_error is not None:
            self._metrics["rollout/merge_rounding_error"] = self.merge.rounding_error
        if self.noise is not None:
            self._metrics["aqn/sigma_realized"] = self.noise.realized_sigma

    @contextlib.contextmanager
    def _applied(self, dtype: torch.dtype | None = None, *, quantised: bool = False) -> Iterator[None]:
        """The model is the policy that was published, `quantised` with the quantised base where the run has one. The
        copies come first: noise is added to the weights that compute, and what rounding leaves of it is measured."""
        self.merge.merging = self.merging  # of the last rollout, whatever was evaluated since
        weights, noisy = self.weights, contextlib.nullcontext()
        if self.noise is not None:
            noisy = self.noise.applied(weights.sigma, (weights.version, weights.draw))
        base = self.quantised.applied(dtype) if quantised and self.quantised else self.merge.applied(dtype)
        with self.gathered(), self.copies.applied(), evaluation_mode(self.model), noisy, base:
            yield

    def _complete(self, source: Iterable[Sequence | None], sampling: Sampling) -> Iterator[Sequence]:
        if self.plain:
            config = copy.copy(self.generation_config)
            if sampling.temperature == 0:
                config.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
            return generate_plain(self.model, source, config)
        return super()._complete(source, sampling)


def update_memory(model: torch.nn.Module, first: bool) -> int:
    """Bytes that the next update will still allocate on this rank for what `model` trains, in float32: gradients where
    there are none, and before the first update Adam's two moments."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum(4 * local(p).numel() * ((p.grad is None) + 2 * first) for p in trained)


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
            " prompt, of at most training.max_completion_length tokens, drawn from the model's own distribution);"
            " leave it out"
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
