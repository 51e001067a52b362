"""The policy that samples: the trained one without dropout, with noise on its norm weights and, while tokens are
drawn, with the adapter merged into the base. It knows transformers' `generate` and nothing of TRL.

A rollout is `with behaviour.in_generate(rollout): …`, in which the model's own `generate` does all this. It is wrapped
there, rather than its caller, because the weights of ZeRO-3 are gathered right around it: what is added to a weight
outside of that is not seen inside.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from perl import device
from perl.adapters.rollout_merge import RolloutMerge
from perl.config.schema import RolloutConfig
from perl.engines.attention import stock_attention
from perl.noise.injector import NoiseInjector
from perl.sharding import local
from perl.training.proof import DrawnRows, Evidence, drawn_rows, require_same_policy
from perl.training.rollout import generate_fast, rollout_seeds

log = logging.getLogger(__name__)

LogProbs = Callable[[Any, DrawnRows], torch.Tensor]
"""Log-probabilities of the drawn tokens by a forward pass of the model as it is: float32 [tokens]."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout, as the trainer asks for it."""

    step: int
    """Optimizer steps before it."""
    count: int
    """Rollouts of this step before it."""
    group_size: int
    """Completions of each prompt."""
    sigma: float
    """Standard deviation of the noise."""
    prove: bool
    """False: no proof, even if one is due (an evaluation's rollout)."""

    @property
    def draw(self) -> tuple[int, int]:
        """Names its noise and its random numbers."""
        return self.step, self.count


class BehaviourPolicy:
    """
    Args:
        model: the policy, wrapped by PEFT but not by DDP or DeepSpeed.
        config: the group `rollout`.
        noise: what adds the noise, or None.
        log_probs: the trainer's forward pass.
        seed: the run's.
        rank: this process among all.
    """

    def __init__(
        self,
        model: Any,
        config: RolloutConfig,
        noise: NoiseInjector | None,
        log_probs: LogProbs,
        *,
        seed: int,
        rank: int,
    ):
        self.model, self.config, self.noise = model, config, noise
        self.log_probs, self.seed, self.rank = log_probs, seed, rank
        self.merge = RolloutMerge(model, config.merge_adapter)
        self.logps: list[list[float]] | None = None
        """Log-probabilities of the tokens of the last rollout when they were drawn, where the engine gives them."""
        self._proved: int | None = None
        """Step of the last proof."""

    @contextlib.contextmanager
    def sampling(self, rollout: Rollout) -> Iterator[None]:
        """No dropout (TRL samples in training mode, with lora_dropout at work, while the loss's ratio takes sampler and
        learner for the same policy), and the rollout's noise."""
        training = self.model.training
        self.model.eval()
        try:
            with self.noise.applied(rollout.sigma, rollout.draw) if self.noise else contextlib.nullcontext():
                yield
        finally:
            self.model.train(training)

    @contextlib.contextmanager
    def in_generate(self, rollout: Rollout) -> Iterator[None]:
        """The model's `generate` or `generate_batch` samples for this rollout, once."""
        self.logps = None
        names = ("generate", "generate_batch")
        own = {name: vars(self.model)[name] for name in names if name in vars(self.model)}  # FSDP2's must come back

        def restore() -> None:
            for name in names:
                vars(self.model).pop(name, None)
            vars(self.model).update(own)

        def generate(**inputs: Any) -> torch.Tensor:
            restore()
            with self.sampling(rollout):
                return self._sample(rollout, **inputs)

        def generate_batch(*args: Any, **kwargs: Any) -> dict[str, Any]:
            restore()
            with self.sampling(rollout), stock_attention(self.model):
                outputs = self.model.generate_batch(*args, **kwargs)
            self.logps = [output.logprobs for output in outputs.values()]
            return outputs

        self.model.generate, self.model.generate_batch = generate, generate_batch
        try:
            yield
        finally:
            restore()

    def _sample(self, rollout: Rollout, **inputs: Any) -> torch.Tensor:
        rows, evidence = None, None
        with self.merge.applied():
            output = self._complete(rollout, **inputs)
            if self.proof_is_due(rollout):
                rows = drawn_rows(
                    inputs["input_ids"],
                    inputs["attention_mask"],
                    output[:, inputs["input_ids"].shape[1] :],
                    eos_token_ids(inputs["generation_config"]),
                )
                evidence = self.log_probs(self.model, rows) if self.logps is None else rows.of_lists(self.logps)
        if rows is not None and evidence is not None:
            self.prove(rollout, self.model, rows, evidence)
        return output

    def _complete(self, rollout: Rollout, **inputs: Any) -> torch.Tensor:
        """Prompts and completions, by the engine that `rollout.engine` names."""
        if self.config.engine != "fast":
            return self.model.generate(**inputs)
        ids, capture = inputs["input_ids"], self.config.capture_graphs
        seeds = rollout_seeds(self.seed, rollout.draw, len(ids), self.rank, rollout.group_size)
        output, self.logps = generate_fast(
            self.model,
            ids,
            inputs["attention_mask"],
            inputs["generation_config"],
            seeds,
            int(self.config.max_batch_tokens),
            device.captures_by_default() if capture == "auto" else capture,
        )
        return output

    def proof_is_due(self, rollout: Rollout) -> bool:
        """At the first rollout of this process, and every `verify_steps` steps."""
        if not rollout.prove or self._proved is None:
            return rollout.prove
        return 0 < self.config.verify_steps <= rollout.step - self._proved

    def skip_proof(self, rollout: Rollout) -> None:
        """There is nothing to hold against the trainer's: the next proof is due as if this one had been."""
        self._proved = rollout.step

    def prove(
        self,
        rollout: Rollout,
        model: Any,
        rows: DrawnRows,
        sampler: torch.Tensor,
        *,
        comparable: bool = True,
        itemsize: int | None = None,
    ) -> None:
        """Hold the sampler's log-probabilities against the trainer's, with the adapter apart and without it, inside
        `sampling`. Every process must come here: the weights may be spread over them. Raises RankError.

        Args:
            comparable: see Evidence.
            itemsize: bytes of a weight of a sampler that has weights of its own.
        """
        adapted = self.log_probs(model, rows)
        with self.model.disable_adapter():
            base = self.log_probs(model, rows)
        require_same_policy(
            Evidence(
                sampler=sampler,
                adapted=adapted,
                base=base,
                itemsize=min(itemsize or 4, self.model.dtype.itemsize),
                largest_b=self._largest_b(),
                share_lost=self.merge.rounding_error or 0.0,
                comparable=comparable,
                merges=self.config.engine in ("fast", "generate"),
            )
        )
        if self._proved is None:
            difference = float((sampler - adapted).abs().mean()) if len(sampler) else 0.0
            log.info("rollouts: the first is proved to be the trained policy's (%.2g apart in nats)", difference)
        self._proved = rollout.step

    def _largest_b(self) -> float:
        """Of this rank's part of all B; 0 for methods that have none."""
        parts = [local(parameter) for name, parameter in self.model.named_parameters() if "lora_B" in name]
        return max((float(part.abs().max()) for part in parts if part.numel()), default=0.0)


def eos_token_ids(config: Any) -> list[int]:
    """Of a GenerationConfig."""
    eos = config.eos_token_id
    return [eos] if isinstance(eos, int) else list(eos)
