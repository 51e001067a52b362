"""A policy on its way to an engine in another process, and the proof that it has arrived.

    trainer   delivered(policy) -> to_bytes -> bytes                                digest(...) of what it sends
    engine    from_bytes(bytes) into a policy that was built alike -> the model     digest(...) of what it holds then

The bytes hold what training changes: the adapter, or all weights where there is none. Both ends compute one digest of
what they have in memory: these tensors, the scale that each layer multiplies them by, the frozen base, and the norms
with the noise that is on them while completions are drawn. Two engines with the same digest draw from one policy, as
far as its numbers decide.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load, save

from perl.base.errors import UserError
from perl.device.sharding import Gather, local, shard_of, unwrapped, whole
from perl.models.few_bits import state_of

ADAPTER = "default"
"""PEFT's name of the adapter that is trained."""
GATHERED = 2**28
"""Elements of a base that are whole at a time: a rank need not have room for all of it."""


def delivered(policy: Any) -> dict[str, torch.Tensor]:
    """What makes the policy of its base, by name, the tensors themselves: all of the adapter, what is frozen of it too;
    without an adapter every parameter.

    Args:
        policy: not wrapped by DDP or DeepSpeed.
    """
    if not hasattr(policy, "peft_config"):
        return {unwrapped(name): parameter for name, parameter in policy.named_parameters()}
    named = [*policy.named_parameters(), *policy.named_buffers()]
    return {unwrapped(name): tensor for name, tensor in named if ADAPTER in name.split(".")}


def to_bytes(tensors: Mapping[str, torch.Tensor], kept: bool = True) -> bytes:
    """`tensors`, whole, in the form of safetensors: equal tensors make equal bytes. Every rank must come here where
    they are split.

    Args:
        kept: this rank needs them. Another one, which gets b"", holds no more than one of them at a time.
    """
    if kept:
        return save({name: whole(tensor).cpu().contiguous() for name, tensor in tensors.items()})
    for tensor in tensors.values():
        whole(tensor)
    return b""


def from_bytes(payload: bytes) -> dict[str, torch.Tensor]:
    """What `to_bytes` was given. A UserError for bytes that are not whole."""
    try:
        return load(payload)
    except SafetensorError as error:
        raise UserError(f"rollout: the policy that was sent can't be read ({error})") from error


@torch.no_grad()
def put_into(policy: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write what was delivered into a policy that was built as the sender's. A UserError where it is another one.
    Weights take the sender's dtype where theirs is another and nothing computes their gradient."""
    own = delivered(policy)
    if own.keys() != tensors.keys():
        strange = sorted(own.keys() ^ tensors.keys())[0]
        raise UserError(f"rollout: the policy that was sent is another than this engine's, which differs in {strange}")
    for name, tensor in tensors.items():
        held = own[name]
        if held.shape != tensor.shape:
            raise UserError(f"rollout: {name} was sent as {list(tensor.shape)}, and is {list(held.shape)} here")
        if held.dtype != tensor.dtype:
            held.data = held.data.to(tensor.dtype)
        local(held).copy_(shard_of(tensor, held))


def base_digest(policy: Any, gathered: Gather = lambda parameters: contextlib.nullcontext()) -> str:
    """SHA-256 of all parameters that no training of this adapter changes, by name. Every rank must come here where
    they are split. (What the trainer keeps beside the policy, a critic or the reference's adapter, is not of it.)

    Args:
        gathered: inside it some parameters are whole that ZeRO-3 has spread; never more than GATHERED, or one.
    """
    if not hasattr(policy, "peft_config"):
        return ""
    others = {"critic", *policy.peft_config}
    named = sorted((unwrapped(name), each) for name, each in policy.named_parameters())
    base = [(name, each) for name, each in named if not others & set(name.split("."))]
    hashed = hashlib.sha256()
    while base:
        sizes = accumulate(getattr(parameter, "ds_numel", parameter.numel()) for _, parameter in base)
        some = max(1, sum(size <= GATHERED for size in sizes))
        with gathered([parameter for _, parameter in base[:some]]):
            for name, parameter in base[:some]:
                add_tensor(hashed, name, parameter)
                for part, tensor in sorted(state_of(parameter).items()):
                    add_tensor(hashed, f"{name}.{part}", tensor)
        del base[:some]
    return hashed.hexdigest()


def digest(policy: Any, base: str, norms: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 of all that an engine draws with.

    Args:
        base: base_digest of the policy, which is computed once.
        norms: the weights that get noise, with it.
    """
    hashed = hashlib.sha256(base.encode())
    for name, tensor in sorted(delivered(policy).items()):
        add_tensor(hashed, name, tensor)
    for name, module in policy.named_modules():
        if isinstance(module, BaseTunerLayer) and ADAPTER in (scaling := getattr(module, "scaling", {})):
            hashed.update(f"{unwrapped(name)} {float(scaling[ADAPTER])!r}".encode())
    for name, tensor in norms:
        add_tensor(hashed, name, tensor)
    return hashed.hexdigest()


def add_tensor(hashed: Any, name: str, tensor: torch.Tensor) -> None:
    """Its name, dtype, shape and bits. Every rank must come here where it is split."""
    full = whole(tensor).cpu().contiguous()
    hashed.update(f"{name} {full.dtype} {list(full.shape)}".encode())
    hashed.update(full.flatten().view(torch.uint8).numpy())
