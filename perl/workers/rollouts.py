"""What a worker of a training does: it holds a copy of the policy, and completes pieces with the version that each
names.

A piece is a few prompts that are decoded together and with no others, as what is decoded together changes the last bits
of a number: so a completion does not depend on which worker draws it, nor on what else that worker has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from perl import device
from perl.base.errors import UserError
from perl.records import Completion, Prompt, Weights
from perl.workers.worker import Inbox, Ready, Result, WorkerEvent

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

    from perl.config.schema import NoiseConfig, RolloutConfig
    from perl.engines.torch_policy import TorchPolicyEngine


@dataclass(frozen=True, slots=True)
class Version:
    """A policy that was sent out."""

    run: str
    """Names the process that sent it: two runs, and a run that goes on, never have the same."""
    weights: Weights
    digest: str
    """perl.adapters.delivery.digest, by the trainer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Prompts that are decoded together, in this order, and with no others."""

    id: tuple[int, int]
    """(which call for completions, which piece of it)."""
    prompts: tuple[Prompt, ...]

    @property
    def prompt_id(self) -> tuple[int]:
        """What fails with it when it kills its workers (perl.workers.retries): nothing else does."""
        return self.id[:1]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A piece's completions, in the order of its prompts."""

    completions: tuple[Completion, ...]
    version: Version
    """That the piece asked for."""
    digest: str
    """Of what the engine held while it drew them."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutJob:
    """How a worker builds its copy of the policy, and draws with it; fields as the trainer has them."""

    model: str
    """Folder of the base."""
    load: dict[str, Any]
    """Keyword arguments of perl.models.folders.load_model."""
    peft_config: Any
    """PEFT's; None: all weights are trained."""
    processing: Any
    """The processor of a model that takes images; else None."""
    rollout: RolloutConfig
    noise: NoiseConfig | None
    generation_config: GenerationConfig
    generation_kwargs: dict[str, Any]
    kernels: bool | Literal["auto"]
    dtype: torch.dtype | None
    """That the trainer computes in."""
    threads: int
    """Of a CPU's cores, for each worker: a sum that is divided otherwise has other last bits."""

    def paths(self, weights: Version) -> list[str]:
        return [self.model]

    def serve(self, weights: Version, inbox: Inbox) -> Iterator[WorkerEvent]:
        from perl.adapters.delivery import base_digest, digest, put_into, unpacked

        started = time.monotonic()
        engine = self._engine()
        policy, noise = engine.model, engine.noise
        base = base_digest(policy)
        yield Ready(1, time.monotonic() - started)
        while (version := inbox.next_weights(wait=True)) is not None:
            payload, rms = inbox.payload
            try:
                put_into(policy, unpacked(payload))
            except UserError as error:  # another start of this worker would be told the same
                while inbox.next_weights(wait=True) == version:
                    yield Result(inbox.take().id, Completion.failed(str(error)), 1)
                continue
            if noise is not None:
                noise.rms[:] = rms
            engine.publish(version.weights)
            engine.merging = False  # what is merged depends on this version alone, whichever the worker had before
            with engine.holding():
                held = digest(policy, base, noise.held() if noise is not None else ())
                while inbox.next_weights(wait=True) == version:
                    piece, began = inbox.take(), time.monotonic()
                    made = dict(engine.stream(piece.prompts))
                    completions = tuple(made[place] for place in range(len(piece.prompts)))
                    yield Result(piece.id, Drawn(completions, version, held, time.monotonic() - began), 1)
        engine.close()

    def _engine(self) -> TorchPolicyEngine:
        import torch
        from peft import get_peft_model

        from perl.engines.torch_policy import TorchPolicyEngine
        from perl.models.folders import load_model
        from perl.noise.injector import NoiseInjector

        torch.set_num_threads(self.threads)
        model: Any = load_model(self.model, **self.load).eval().to(device.torch_device())
        if self.peft_config is not None:
            model = get_peft_model(model, self.peft_config).eval()
        noise = None if self.noise is None else NoiseInjector.of(model, self.noise)
        return TorchPolicyEngine(
            model,
            self.processing,
            self.rollout,
            generation_config=self.generation_config,
            generation_kwargs=self.generation_kwargs,
            noise=noise,
            kernels=self.kernels,
            dtype=self.dtype,
        )
