"""Weights that are split over ranks (FSDP2's DTensors, ZeRO-3's empty parameters), and how to write to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

Gather = Callable[[Any], AbstractContextManager[Any]]
"""From parameters to a context in which ZeRO-3's are whole."""


WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def unwrapped(name: str) -> str:
    """A module's or a parameter's name without the parts that wrappers have put into it (FSDP, and its activation
    checkpointing): the one that it has in another process."""
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that lies on this rank: itself, or the local shard of a DTensor (FSDP2)."""
    data = tensor.detach()
    return data.to_local() if is_split(data) else data  # type: ignore[operator]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of `tensor`: itself, or what the ranks hold of a DTensor together, which every rank must ask for."""
    data = tensor.detach()
    return data.full_tensor() if is_split(data) else data  # type: ignore[operator]


def whole_of(shard: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """All of what the ranks hold shards of, each as its part of `like`: the inverse of `shard_of`. Every rank must
    ask."""
    if not is_split(like):
        return shard
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return DTensor.from_local(shard, mesh, placements, shape=like.shape, stride=like.stride()).full_tensor()


def shard_of(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of `full` (the same on every rank) that corresponds to this rank's part of `like`."""
    if not is_split(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh  # type: ignore[attr-defined]
    # Every rank holds the same `full`, so nothing needs to be sent (src_data_rank None).
    return local(distribute_tensor(full.to(mesh.device_type), mesh, like.placements, src_data_rank=None))  # type: ignore[attr-defined]


def is_split(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    return hasattr(tensor, "placements")


def is_sharded(model: nn.Module) -> bool:
    """Whether each forward gathers parameters from other ranks (FSDP, FSDP2, or ZeRO-3 outside of a gather), so that
    all ranks must run the same number of forwards."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()) or any(
        is_split(parameter) or parameter.numel() == 0 for parameter in model.parameters()
    )


def any_rank(holds: bool, where: torch.device) -> bool:
    """Whether it holds on any rank, all of which must ask."""
    import torch
    import torch.distributed as dist

    number = torch.tensor(int(holds), device=where)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return bool(number.item())


def is_of_zero3(model: nn.Module) -> bool:
    """Whether DeepSpeed has spread the weights: whole only inside of a gather, and after each one elsewhere."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


@contextlib.contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """What is written to weights inside is what forwards inside use, and what is written back is what those after use.

    FSDP2 keeps a module gathered after its forward where reshard_after_forward is False (the last unit of a model is,
    or all of them): its next forward would use that copy, whatever has been written to the shards since. So every
    module drops its copy on entry, when its parameters are the shards again, and on exit. Other models stay as they
    are.
    """
    _reshard(model)
    try:
        yield
    finally:
        _reshard(model)


def _reshard(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
