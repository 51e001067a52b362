"""The adapter merged into the base's weights while completions are sampled, and gone bit for bit afterwards.

    with merge.applied():
        model.generate(...)

A decoded token then costs the base's products alone. On a CPU in float32 nothing is written to the base: the copy of
each weight in oneDNN's layout (perl.engines.linear) is made of the merged weight. Elsewhere the weights are written in
place, so that a captured graph finds them, and return from a copy: subtracting the update again would leave another
base behind each time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from perl.adapters.batched import BatchedUpdates
from perl.adapters.layers import ACCEPTED_ROUNDING_ERROR, AdaptedLayer, CannotMerge, RoundingError, adapted_layers
from perl.adapters.none import has_adapter
from perl.base.errors import say_once
from perl.device.sharding import any_rank, resharded
from perl.engines.linear import packable, prepack, unpack

log = logging.getLogger(__name__)

BEGIN_BELOW, STOP_ABOVE = 0.08, 0.12
"""Rounding errors at which "auto" begins to merge and stops again. A run's error falls through ACCEPTED_ROUNDING_ERROR
as its adapter grows, wavering by some per mille from one rollout to the next: with one bound it would change to and
fro, and each change makes all captured graphs again and moves the sampler's numbers."""
MEASURED_LAYERS = 8
"""Layers from which the rounding error is estimated, spread over the model."""
PINNED_BYTES = 2**29
"""Pinned memory is taken in pieces of this size: torch rounds each piece up to a power of two."""


class RolloutMerge:
    """Prepares the weights of `model` for a rollout.

    Args:
        model: the policy, not wrapped by DDP or DeepSpeed. One without an adapter is prepared all the same.
        merge: True merges wherever it is possible, False never does, "auto" merges unless rounding to the weights'
            dtype would lose too much of the update: from BEGIN_BELOW on, until it is over STOP_ABOVE.
        fixed: as of perl.engines.linear.packable.
    """

    def __init__(self, model: nn.Module, merge: bool | Literal["auto"] = "auto", fixed: bool = False):
        self.model, self.merge, self.fixed = model, merge, fixed
        self.layers = adapted_layers(model)
        self.merged = False
        """Whether the weights that compute hold the adapter now."""
        self.merging = False
        """Whether "auto" merged in the last rollout. Between its bounds this decides, so a resumed run must take it up
        (perl.engines.PolicyEngine); outside of them the weights alone do."""
        self.rounding_error: float | None = None
        """Relative rounding error of the update in the last rollout (perl.adapters.layers.RoundingError), None where
        nothing was to be merged."""
        self._written: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        """While merged in place: each weight's name, itself, and the copy it returns from."""
        self._batched = BatchedUpdates()
        self._kept: dict[str, _Kept] = {}
        self._host = _HostMemory()
        self._changes = True
        """Whether the adapter changes a weight at all: until the first update it does not, and the base's weights are
        the merged ones as they are, so that nothing is written or copied."""
        self._logged = ""

    @contextlib.contextmanager
    def applied(self, dtype: torch.dtype | None = None) -> Iterator[None]:
        """The weights that compute hold the adapter inside this context, unless something stands against it, which one
        line in the log says; the base has its own bits at the end, also on an exception. An unmerged adapter computes
        its updates in fewer products (perl.adapters.batched). On a CPU all linear layers are prepacked. The adapter
        must not change inside, and nothing can be differentiated.

        Args:
            dtype: what the trainer's autocast computes in, and so packed weights (perl.engines.linear.prepack) and an
                unmerged adapter above weights of that dtype; None is float32.
        """
        with resharded(self.model), contextlib.ExitStack() as stack:
            to_pack = set(packable(self.model, self.fixed))
            stack.callback(self._restore)
            if self._wanted():
                self.merged = True
                for adapted in self.layers:
                    layer: Any = adapted.layer
                    if layer.get_base_layer() in to_pack:
                        weights = adapted.merged() if self._changes else adapted.weights()
                        prepack(layer, weights["weight"], weights.get("bias"), dtype, merged=self._changes)
                        stack.callback(unpack, layer)
                    else:
                        if self._changes:
                            self._write(adapted)
                        layer.merged_adapters[:] = layer.active_adapters
                    to_pack -= set(layer.modules())
            else:
                stack.enter_context(self._batched.applied(self.layers, dtype))
            for layer in to_pack:
                prepack(layer, layer.weight, layer.bias, dtype)
                stack.callback(unpack, layer)
            yield

    def _wanted(self) -> bool:
        """Decide for this rollout; the log says so where it was decided otherwise before."""
        self.rounding_error = None
        if self.merge is False or not has_adapter(self.model):
            return False
        if reason := self._impossible():
            self._log(f"rollouts: the adapter is not merged into the weights: {reason}")
            return False
        self._changes = self._changes_weights()
        if not self._changes:
            self.rounding_error = 0.0
            self._log("rollouts: nothing is merged: the adapter changes no weight yet, and the base alone computes")
            return True
        self.rounding_error = error = self._measure()
        dtype = str(next(iter(self.layers[0].weights().values())).dtype).removeprefix("torch.")
        if self.merge == "auto":
            self.merging = error <= (STOP_ABOVE if self.merging else BEGIN_BELOW)
            if not self.merging:
                why = f"rounding to {dtype} loses over {BEGIN_BELOW:.0%} of it"
                self._log(f"rollouts: the adapter stays unmerged, as {why}", f" ({error:.0%} now)")
                return False
            loses = f"at most {STOP_ABOVE:.0%}"
        else:
            loses = f"{'at most' if error <= ACCEPTED_ROUNDING_ERROR else 'over'} {ACCEPTED_ROUNDING_ERROR:.0%}"
        loss = f"rounding to {dtype} loses {loses} of it"
        self._log(f"rollouts: the adapter is merged into the weights; {loss}", f" ({error:.2%} now)")
        return True

    def _log(self, decision: str, now: str = "") -> None:
        if decision != self._logged:
            log.info("%s%s", decision, now)
        self._logged = decision

    def _impossible(self) -> str | None:
        """Why the adapter can't be merged, or None where it can."""
        if not self.layers:
            return "this method changes no weights"
        merged = {id(p) for adapted in self.layers for p in adapted.layer.get_base_layer().parameters(recurse=False)}
        seen: set[int] = set()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) in merged & seen:
                return f"{name.removeprefix('base_model.model.')} is tied to another weight"
            seen.add(id(parameter))
        for adapted in self.layers:
            if reason := adapted.cannot_merge():
                return reason
        try:
            self.layers[0].merged()
        except CannotMerge as error:
            return str(error)
        return None

    @torch.no_grad()
    def _changes_weights(self) -> bool:
        """Whether any weight, on any rank, is another one with the adapter merged into it in float32. Layer by layer on
        all ranks together, as the merge of a shard gathers; mostly the first layer answers."""
        for adapted in self.layers:
            weights = adapted.weights()
            changed = any(not torch.equal(new, weights[name].float()) for name, new in adapted.merged().items())
            if dist.is_available() and dist.is_initialized():
                changed = any_rank(changed, next(iter(weights.values())).device)
            if changed:
                return True
        return False

    @torch.no_grad()
    def _measure(self) -> float:
        """Relative rounding error over a few layers, the same on all ranks."""
        error = RoundingError()
        stride = -(-len(self.layers) // MEASURED_LAYERS)
        for adapted in self.layers[::stride]:
            weights = adapted.weights()
            if all(weight.dtype == torch.float32 for weight in weights.values()):
                continue  # merged weights are float32: nothing is rounded
            for name, merged in adapted.merged().items():
                error.add(weights[name], merged, weights[name].dtype)
        if dist.is_available() and dist.is_initialized():
            both = torch.tensor([error.lost, error.update], device=next(iter(self.layers[0].weights().values())).device)
            dist.all_reduce(both)
            error.lost, error.update = both.tolist()
        return error.relative

    @torch.no_grad()
    def _write(self, adapted: AdaptedLayer) -> None:
        merged = adapted.merged()
        for part, weight in adapted.weights().items():
            name = f"{adapted.name}.{part}"
            self._written.append((name, weight, self._clean(name, weight)))
            weight.copy_(merged[part])

    def _clean(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A copy of a weight without the adapter. An accelerator's lies in pinned host memory, and is kept for the run,
        as the base is frozen: it is copied again only where the tensor is another one (ZeRO-3 gathers again for each
        rollout) or has been written to by somebody else."""
        if weight.device.type == "cpu":
            return weight.clone()
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = _Kept(self._host.like(weight))
        if kept.storage != _identity(weight):
            kept.copy.copy_(weight)
        return kept.copy

    @torch.no_grad()
    def _restore(self) -> None:
        for name, weight, clean in self._written:
            weight.copy_(clean, non_blocking=True)
            if name in self._kept:
                self._kept[name].storage = _identity(weight)
        self._written.clear()
        for adapted in self.layers:
            adapted.layer.merged_adapters.clear()
        self.merged = False


@dataclass
class _Kept:
    """The copy of a clean weight that is kept for the run."""

    copy: torch.Tensor
    storage: tuple[int, int] | None = None
    """`_identity` of the weight when it was last known to equal the copy."""


def _identity(weight: torch.Tensor) -> tuple[int, int]:
    """Changes with the tensor's place in memory and with each write to it."""
    return weight.data_ptr(), weight._version


class _HostMemory:
    """Pinned host memory for tensors that stay: an accelerator copies to and from it directly."""

    def __init__(self):
        self._free = torch.empty(0, dtype=torch.uint8)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor of the shape and dtype of `tensor`."""
        size = -(-tensor.nbytes // 64) * 64  # aligned
        if len(self._free) < size:
            self._free = self._take(max(size, PINNED_BYTES))
        place, self._free = self._free[: tensor.nbytes], self._free[size:]
        return place.view(tensor.dtype).view(tensor.shape)

    def _take(self, size: int) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # the limit on locked memory (ulimit -l), as containers have it
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            say_once(f"the base's weights are kept in host memory that is not pinned, which is slower: {reason}")
            return torch.empty(size, dtype=torch.uint8)
