"""Gaussian noise on chosen norm weights, present only inside a context and gone bit for bit after it.

    with injector.applied(sigma, draw=(global_step, k)):
        model.generate(...)

The noise is drawn on the CPU from a generator seeded with (seed, draw, parameter name), so every rank and every
device draws the same numbers, and a resumed run draws what the uninterrupted one would have.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from perl.base.errors import UserError
from perl.config.schema import NoiseConfig
from perl.device.sharding import local, resharded, shard_of, unwrapped, whole

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """A norm layer that receives noise. The module is kept, not its weight: FSDP2 puts another parameter in its
    place when it shards the model."""

    name: str
    module: nn.Module

    @property
    def weight(self) -> nn.Parameter:
        return self.module.weight  # type: ignore[return-value]


class NoiseInjector:
    """Adds N(0, sigma^2) to the weights of the norm layers chosen by name; relative: N(0, (sigma * RMS)^2), with the
    root mean square of the layer's clean weights. The numbers depend on the names and shapes alone, so that the same
    layers of another model (`on`) get the same ones.

    Args:
        model: the policy; wrapped by PEFT or not, but not by DDP or DeepSpeed.
        target_modules: a module is chosen if its name holds one of these, as a whole part of the dotted path or as
            a substring of it.
        exclude_patterns: … unless its name holds one of these.
        seed: seed of all draws.
        relative: sigma is a fraction of the RMS of each layer's weights; `measure` must have been called.

    Raises:
        UserError: nothing is chosen; the message lists the norm layers that there are.
    """

    def __init__(
        self,
        model: nn.Module,
        target_modules: Sequence[str],
        exclude_patterns: Sequence[str],
        seed: int,
        relative: bool,
    ):
        self.model, self.seed, self.relative = model, seed, relative
        self.targets = find_targets(model, target_modules, exclude_patterns)
        self.realized_sigma = 0.0
        """Root mean square of what the last draw really changed, in units of sigma: rounding to the weight's dtype
        eats small noise (the spacing of bfloat16 just above 1 is 2^-7, so a sigma of 0.0005 there changes almost
        nothing)."""
        self.rms: list[float] = []
        """Root mean square of each target's clean weights, the same on every rank; empty before `measure`."""

    @classmethod
    def of(cls, model: nn.Module, config: NoiseConfig) -> NoiseInjector:
        """As the group `noise_injection` of the configuration asks for it."""
        assert config.seed is not None
        return cls(model, config.target_modules, config.exclude_patterns, config.seed, config.relative)

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and weight of each target, as they are now."""
        for target in self.targets:
            yield target.name, target.weight

    def measure(self) -> None:
        """Compute `rms`. Every rank must call it, while the weights are clean and ZeRO-3's are gathered: each computes
        it of the whole weights, so all get the same bits.

        Raises:
            UserError: relative, and a layer's weights are all 0.
        """
        self.rms.clear()  # in place: a copy of this injector shares it
        for target in self.targets:
            weight = whole(target.weight).to("cpu").double()  # an NPU has no float64
            self.rms.append(float(weight.square().mean().sqrt()))
            if self.relative and self.rms[-1] == 0:
                raise UserError(
                    f"--config.noise_injection.relative: all weights of {target.name} are 0, so no share of them is"
                    " noise; write --config.noise_injection.relative false"
                )

    def sigmas(self, sigma: float) -> list[float]:
        """Standard deviation of each target's noise: sigma, or as much of its weights' RMS."""
        if not self.relative:
            return [sigma] * len(self.targets)
        if not self.rms:
            raise RuntimeError("relative noise: measure() comes before the first draw")
        return [sigma * rms for rms in self.rms]

    def on(self, model: nn.Module, modules: Sequence[nn.Module]) -> NoiseInjector:
        """The same noise on another copy of the policy: on `modules` of `model`, one for each of `targets`."""
        twin = copy.copy(self)
        twin.model, twin.realized_sigma = model, 0.0
        twin.targets = [Target(target.name, module) for target, module in zip(self.targets, modules, strict=True)]
        return twin

    @contextlib.contextmanager
    def applied(self, sigma: float, draw: tuple[int, ...]) -> Iterator[None]:
        """Weights hold the noise of `draw` inside this context; the saved bits return at its end, also on an
        exception. sigma 0 leaves them alone."""
        if sigma == 0.0:
            self.realized_sigma = 0.0
            yield
            return
        with resharded(self.model):
            weights = [target.weight for target in self.targets]
            saved = [local(weight).clone() for weight in weights]
            try:
                self._add(sigma, draw)
                yield
            finally:
                with torch.no_grad():
                    for weight, clean in zip(weights, saved, strict=True):
                        local(weight).copy_(clean)

    @torch.no_grad()
    def _add(self, sigma: float, draw: tuple[int, ...]) -> None:
        squares, count = 0.0, 0
        for target, deviation in zip(self.targets, self.sigmas(sigma), strict=True):
            weight = local(target.weight)
            if target.weight.numel() == 0:
                raise UserError(
                    f"--config.noise_injection: {target.name} is not gathered while completions are generated;"
                    " set --config.training.ds3_gather_for_generation true"
                )
            noise = shard_of(self._draw(target, draw), target.weight).to(weight.device)
            clean = weight.to(torch.float32, copy=True)
            weight.copy_(clean + deviation * noise)
            squares += float((weight.float() - clean).square().sum()) * (sigma / deviation) ** 2
            count += weight.numel()
        self.realized_sigma = (squares / max(count, 1)) ** 0.5

    def _draw(self, target: Target, draw: tuple[int, ...]) -> torch.Tensor:
        """Standard normal noise of the weight's full shape, float32 on the CPU."""
        digest = hashlib.blake2b(repr((self.seed, draw, target.name)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        return torch.randn(tuple(target.weight.shape), generator=generator)


def find_targets(model: nn.Module, target_modules: Sequence[str], exclude_patterns: Sequence[str]) -> list[Target]:
    """The norm modules whose name holds a target pattern and no excluded one, in the model's order. One that an adapter
    trains (ln_tuning) is the trained copy, which computes, under the name of the one that it stands for."""
    norms = {
        unwrapped(name).removesuffix(".ln_tuning_layers.default"): module
        for name, module in model.named_modules()
        if is_norm(module) and computes(name)
    }
    chosen = [
        Target(name, module)
        for name, module in norms.items()
        if any(pattern in name for pattern in target_modules)
        and not any(pattern in name for pattern in exclude_patterns)
    ]
    if not chosen:
        kinds = sorted({name.rsplit(".", 1)[-1] for name in norms})
        raise UserError(
            f"--config.noise_injection.target_modules {list(target_modules)} (without {list(exclude_patterns)}) match"
            f" no norm layer of this model; its norm layers are: {', '.join(kinds) or 'none'}"
        )
    return chosen


def computes(name: str) -> bool:
    """Whether a norm module of this name is in the policy's way: not the original of one that an adapter trains."""
    return not name.endswith(".base_layer")


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is a normalisation layer: its class is named so (every model family has its own RMSNorm
    class) and it has a one-dimensional weight. Under ZeRO-3 the weight's own shape is (0,) until it is gathered."""
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and isinstance(weight, nn.Parameter) and weight.ndim == 1
