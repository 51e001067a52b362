"""The adapter folded into the base's weights while completions are sampled, and out of them bit for bit afterwards.

    with fold.applied():
        model.generate(...)

A decoded token then costs the base's products alone. The weights return from a copy: subtracting the update again
would leave another base behind each time. They are written in place, so that a captured graph finds them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from perl import device
from perl.adapters.batched import batched
from perl.adapters.layers import adapted_layers, expected
from perl.adapters.merge import ACCEPTED_LOSS
from perl.errors import RankError
from perl.sharding import resharded

log = logging.getLogger(__name__)

MEASURED_LAYERS = 8
"""Layers from which the loss by rounding is estimated, spread over the model."""
SHARE_OF_FREE_MEMORY = 0.5
"""Of the accelerator's free memory, how much the copy may take; the rest is for the key-value cache."""


class AdapterFold:
    """Folds the active adapter of `model` into its base.

    Args:
        model: a PeftModel, not wrapped by DDP or DeepSpeed.
        merge: True folds wherever it is possible, False never does, "auto" folds unless rounding to the weights' dtype
            would lose more than ACCEPTED_LOSS of the update (what MergeReport.share_lost says).
    """

    def __init__(self, model: nn.Module, merge: bool | Literal["auto"] = "auto"):
        self.model, self.merge = model, merge
        self.layers = adapted_layers(model)
        self.share_lost: float | None = None
        """Share of the update that rounding loses in the last rollout, None where it was not measured."""
        self._clean: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """While folded: each weight and the copy it returns from."""
        self._said = ""

    @property
    def folded(self) -> bool:
        """Whether the weights hold the adapter now."""
        return bool(self._clean)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The base's weights hold the adapter inside this context, unless something stands against it, which one line
        in the log says; the saved bits return at its end, also on an exception. An adapter that stays apart computes
        its updates in fewer products (perl.adapters.batched)."""
        with resharded(self.model):
            if not self._wanted():
                with batched(self.layers):
                    yield
                return
            try:
                self._fold()
                yield
            finally:
                self._restore()

    @torch.no_grad()
    def check(self) -> None:
        """Every adapted layer either applies its adapter or holds base + scale * BA, computed anew in float32, within
        rounding to its dtype. Raises a RankError that names the first that does neither. Inside `applied`.

        A method without a formula here (see layers.expected) is not looked at.
        """
        for adapted in adapted_layers(self.model):
            layer = adapted.layer
            if layer.disable_adapters or not layer.active_adapters:
                raise RankError(f"rollout: the sampler missed the adapter of {adapted.name}: it is switched off")
            if not layer.merged:
                continue
            for name, weight in adapted.weights().items():
                _, clean = self._clean.get(name, (weight, weight))
                want = expected(adapted, name, clean.to(weight.device))
                if want is None:
                    continue
                numbers = torch.finfo(weight.dtype)
                allowed = want.slack + want.weight.abs() * numbers.eps / 2 + numbers.tiny
                off = (weight.float() - want.weight).abs()
                if not bool((off <= allowed).all()):
                    raise RankError(
                        f"rollout: the sampler missed the adapter in {name}: the weight is {float(off.max()):.2g} from"
                        f" base + update, where the update is {float((want.weight - clean.to(off)).abs().max()):.2g}"
                    )

    def _wanted(self) -> bool:
        """Decide for this rollout; the log says so where it was decided otherwise before."""
        self.share_lost = None
        if self.merge is False:
            return False
        if reason := self._impossible():
            self._say(f"rollouts: the adapter is not folded into the weights: {reason}")
            return False
        self.share_lost = lost = self._rounding_loss()
        dtype = str(next(iter(self.layers[0].weights().values())).dtype).removeprefix("torch.")
        loss = f"rounding to {dtype} loses {'at most' if lost <= ACCEPTED_LOSS else 'over'} {ACCEPTED_LOSS:.0%} of it"
        if lost > ACCEPTED_LOSS and self.merge == "auto":
            self._say(f"rollouts: the adapter is kept apart, as {loss}", f" ({lost:.0%} now)")
            return False
        self._say(f"rollouts: the adapter is folded into the weights; {loss}", f" ({lost:.2%} now)")
        return True

    def _say(self, decision: str, now: str = "") -> None:
        if decision != self._said:
            log.info("%s%s", decision, now)
        self._said = decision

    def _impossible(self) -> str | None:
        """Why the adapter can't be folded, or None where it can."""
        if not self.layers:
            return "this method changes no weights"
        mine = {id(p) for adapted in self.layers for p in adapted.layer.get_base_layer().parameters(recurse=False)}
        seen: set[int] = set()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) in mine & seen:
                return f"{name.removeprefix('base_model.model.')} is tied to another weight"
            seen.add(id(parameter))
        for adapted in self.layers:
            if reason := adapted.cannot_merge():
                return reason
        try:
            self.layers[0].merged()
        except (NotImplementedError, RuntimeError, ValueError) as error:
            if device.is_out_of_memory(error):
                raise
            return f"PEFT can't merge it: {' '.join(str(error).split())[:200]}"
        return None

    @torch.no_grad()
    def _rounding_loss(self) -> float:
        """||round(merged) - merged|| / ||merged - base|| over a few layers, the same on all ranks: Frobenius norms,
        `merged` in float32, round() to the weight's dtype. 0 for an adapter that changes nothing yet."""
        lost = update = 0.0
        stride = -(-len(self.layers) // MEASURED_LAYERS)
        for adapted in self.layers[::stride]:
            weights = adapted.weights()
            for name, merged in adapted.merged().items():
                weight = weights[name]
                lost += float((merged.to(weight.dtype).float() - merged).square().sum())
                update += float((merged - weight.float()).square().sum())
        if dist.is_available() and dist.is_initialized():
            both = torch.tensor([lost, update], device=next(iter(self.layers[0].weights().values())).device)
            dist.all_reduce(both)
            lost, update = both.tolist()
        return (lost / update) ** 0.5 if update else 0.0

    @torch.no_grad()
    def _fold(self) -> None:
        on_host = self._needs_host()
        for adapted in self.layers:
            weights, merged = adapted.weights(), adapted.merged()
            for name, weight in weights.items():
                self._clean[name] = (weight, weight.to("cpu", copy=True) if on_host else weight.clone())
                weight.copy_(merged[name])
            adapted.layer.merged_adapters[:] = adapted.layer.active_adapters

    def _needs_host(self) -> bool:
        """Whether a copy of the weights would take too much of the accelerator's memory."""
        size = sum(w.numel() * w.element_size() for adapted in self.layers for w in adapted.weights().values())
        free = device.free_memory()
        return free is not None and size > SHARE_OF_FREE_MEMORY * free

    @torch.no_grad()
    def _restore(self) -> None:
        for weight, clean in self._clean.values():
            weight.copy_(clean)
        self._clean.clear()
        for adapted in self.layers:
            adapted.layer.merged_adapters.clear()
