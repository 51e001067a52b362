"""LoRA that starts from singular components of the base's weights: PiSSA, MiLoRA and MiLoRA+.

PiSSA and MiLoRA train the components that they start from: W = (W - s B0 A0) + s B A, from B = B0 and A = A0. PEFT
takes s B0 A0 out of the base's weights, which then are no longer the base's: its rounding is lost in bfloat16, the
reference policy without the adapter is another model, and neither vLLM nor a merge can use the adapter on the base.

Here the base stays as it is, and the same update is a plain LoRA of twice the rank,

    s (B A - B0 A0) = s [B, -B0] [A; A0],

whose second half is frozen: its gradients are zero. What is saved is that LoRA, which PEFT and vLLM load on the
original base, and which is exactly what is resumed. It is what PEFT's conversion of a PiSSA adapter writes
(`path_initial_model_for_weight_conversion`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from perl import device
from perl.adapters.lora import lora, require_no_embedding
from perl.base.errors import UserError

if TYPE_CHECKING:
    import peft
    import torch

    from perl.config.schema import PeftConfig

log = logging.getLogger(__name__)

ITERATIONS = 4
"""Of the randomised SVD that finds the principal components (PEFT's pissa_niter_4)."""
Components = Callable[["torch.Tensor", int], tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]]
"""(weight [out, in], rank) -> U [out, rank], S [rank], V^T [rank, in]."""


def doubled(config: PeftConfig) -> peft.PeftConfig:
    """LoRA of rank 2 r with the scale lora_alpha / r."""
    return lora(config, r=2 * config.r, lora_alpha=2 * config.lora_alpha, lora_dropout=0.0)


def check_optimizer(config: PeftConfig, training: Any) -> None:
    """A zero gradient must leave a number as it is."""
    name = str(getattr(training.optim, "value", training.optim))
    if training.weight_decay:
        raise UserError(
            f"--config.training.weight_decay {training.weight_decay:g}: would change the half of the adapter that"
            f" peft.type {config.type} holds still; write 0"
        )
    if not name.startswith(("adam", "sgd", "lion")):
        raise UserError(
            f"--config.training.optim {name}: peft.type {config.type} needs an optimizer that leaves a number with"
            " gradient 0 as it is; write adamw_torch"
        )


def principal(model: Any, config: PeftConfig, gather: Any) -> None:
    """PiSSA (arXiv 2404.02948): from the largest singular values."""
    _from_components(model, config, gather, _largest)


def minor(model: Any, config: PeftConfig, gather: Any) -> None:
    """MiLoRA (arXiv 2406.09044): from the smallest singular values."""
    _from_components(model, config, gather, _smallest)


def minor_directions(model: Any, config: PeftConfig, gather: Any) -> None:
    """MiLoRA+ (the PeRL paper's code, arXiv 2512.23165): A is the right singular vectors of the smallest singular
    values, orthonormal, and B is zero, as LoRA's."""
    import torch

    with torch.no_grad(), _timed("MiLoRA+"):
        for layer, weight in _layers(model, gather, config.r):
            _, _, vt = _smallest(weight, config.r)
            a = layer.lora_A["default"].weight
            a.copy_(vt.to(a.device, a.dtype))


def _from_components(model: Any, config: PeftConfig, gather: Any, components: Components) -> None:
    import torch

    with torch.no_grad(), _timed(config.type):
        for layer, weight in _layers(model, gather, config.r):
            u, s, vt = components(weight, config.r)
            root = (s / layer.scaling["default"]).sqrt()
            b0, a0 = u * root, root[:, None] * vt
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            a.copy_(torch.cat([a0, a0]).to(a.device, a.dtype))
            b.copy_(torch.cat([b0, -b0], dim=1).to(b.device, b.dtype))
            a.register_hook(lambda gradient: _first_half(gradient, dim=0))
            b.register_hook(lambda gradient: _first_half(gradient, dim=1))


def _first_half(gradient: torch.Tensor, dim: int) -> torch.Tensor:
    """`gradient` with zeros in the half that is frozen."""
    masked = gradient.clone()
    half = gradient.shape[dim] // 2
    masked.narrow(dim, half, half).zero_()
    return masked


def _layers(model: Any, gather: Any, rank: int) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each adapted layer with the base's whole weight, float32 [out, in], where an SVD of `rank` can be computed."""
    from peft.tuners.lora import Linear, LoraLayer

    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        name = name.removeprefix("base_model.model.")
        base: Any = layer.get_base_layer()
        if not isinstance(layer, Linear) or not base.weight.is_floating_point():
            raise UserError(
                f"--config.peft.target_modules: {name} is no linear layer of floating numbers, and has no singular"
                " components to start from; leave it out"
            )
        with gather([base.weight]):
            weight = base.weight.detach().float()
            weight = weight.T if layer.fan_in_fan_out else weight
            _require_rank(name, weight, rank)
            yield layer, weight.to(device.for_decompositions(weight.device))


def check_rank(model: Any, config: PeftConfig) -> None:
    """A UserError for an embedding, and for a layer with fewer singular components than config.r."""
    from peft.tuners.lora import LoraLayer

    require_no_embedding(model, config)
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            base: Any = layer.get_base_layer()
            _require_rank(name.removeprefix("base_model.model."), base.weight, config.r)


def _require_rank(name: str, weight: torch.Tensor, rank: int) -> None:
    if rank > min(weight.shape):
        raise UserError(
            f"--config.peft.r {rank}: {name} is {list(weight.shape)} and has {min(weight.shape)} singular components;"
            " write no more"
        )


def _largest(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same numbers in every process: the random start of the iteration has a seed of its own."""
    import torch

    where = weight.device
    with torch.random.fork_rng([] if where.type == "cpu" else [where], device_type=where.type):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(weight, rank, niter=ITERATIONS)
    return u, s, v.T


def _smallest(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    u, s, vt = torch.linalg.svd(weight, full_matrices=False)
    return u[:, -rank:], s[-rank:], vt[-rank:]


@contextlib.contextmanager
def _timed(method: str) -> Iterator[None]:
    """One line about how long the decompositions took."""
    started = time.perf_counter()
    yield
    log.info("%s: the base's weights are decomposed (%.1f s)", method, time.perf_counter() - started)
