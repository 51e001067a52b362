"""Attention kernels: torch's and our own in Triton on CUDA, torch_npu's on Ascend. Only perl.device imports this.

A decode step reads a paged KV cache, which every backend here takes in one layout, [blocks, block size, key heads,
head dim]: block i of a row lies at `cache[block_table[row, i]]`. A packed update has its rows one behind the other.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention kernel, and what it takes. Ask `missing` before the first call."""

    name: str
    compute: Callable[..., torch.Tensor] | None = None
    absent: Callable[[], str | None] = lambda: None
    """Why this process cannot use it whatever the shapes, or None."""
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    head_dims: range = range(0)
    block_sizes: range = range(0)
    """Of a paged cache, in tokens."""
    host_lengths: bool = False
    """Whether the lengths are a list of the host, which a captured graph keeps until it is given others
    (perl.device.Graph.update_lengths); else an int32 tensor on the device, which it reads."""

    def missing(self, dtype: torch.dtype, head_dim: int, block_size: int | None = None) -> str | None:
        """Why it cannot compute with these, for a log line, or None.

        Args:
            block_size: of a paged cache, tokens a block.
        """
        if (reason := self.absent()) is not None:
            return reason
        if dtype not in self.dtypes:
            return f"{self.name} does not compute in {str(dtype).removeprefix('torch.')}"
        if head_dim not in self.head_dims:
            return f"{self.name} has no heads of {head_dim}"
        if block_size is not None and block_size not in self.block_sizes:
            return f"{self.name} takes blocks of a multiple of {self.block_sizes.step} tokens, not {block_size}"
        return None

    def __call__(self, *arguments) -> torch.Tensor:
        """See PAGED and VARLEN for the arguments."""
        if self.compute is None:
            raise RuntimeError(self.absent())
        return self.compute(*arguments)


def _no_ampere(name: str) -> str | None:
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{name} needs an Ampere GPU or a later one, not {torch.cuda.get_device_name()}"
    return None


def _no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if "CC" not in os.environ and not any(shutil.which(name) for name in ("gcc", "clang", "cc")):
        return "triton finds no C compiler: install gcc, or name one in CC"
    # As in triton/runtime/build.py, which builds each kernel's launcher.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    if not Path(sysconfig.get_paths(scheme)["include"], "Python.h").is_file():
        return "triton finds no Python.h: install python3-dev"
    return _no_ampere("paged_decode")


@functools.cache
def _varlen_parameters() -> frozenset[str]:
    """Of torch's varlen_attn, empty where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _no_varlen_attn() -> str | None:
    if "scale" not in _varlen_parameters():
        return f"torch {torch.__version__} has no varlen_attn with a scale, 2.11 has"
    return _no_ampere("varlen_attn")


def _no_operator(name: str) -> str | None:
    import torch_npu  # pyright: ignore[reportMissingImports]

    return None if hasattr(torch_npu, name) else f"torch_npu {torch_npu.__version__} has no {name}"


def _none_on_a_cpu() -> str:
    return "there is no such kernel on a cpu"


# ---------------------------------------------------------------------------------------------- decode steps


def _paged_triton(*arguments: Any) -> torch.Tensor:
    from perl.device.paged_decode import paged_decode

    return paged_decode(*arguments)


def _paged_npu(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: list[int],
    scaling: float,
) -> torch.Tensor:
    import torch_npu  # pyright: ignore[reportMissingImports]

    if isinstance(lengths, torch.Tensor):  # the operator would wait for the device, number by number
        raise TypeError("npu_fused_infer_attention_score reads its lengths from a list of the host")
    output, _ = torch_npu.npu_fused_infer_attention_score(
        query.unsqueeze(2).contiguous(),
        key_cache.flatten(2),
        value_cache.flatten(2),
        actual_seq_lengths_kv=lengths,
        block_table=block_table,
        num_heads=query.shape[1],
        num_key_value_heads=key_cache.shape[2],
        scale=scaling,
        input_layout="BNSD",
        block_size=key_cache.shape[1],
    )
    return output.squeeze(2)


PAGED: dict[str, Kernel] = {
    "cuda": Kernel(
        "paged_decode",
        _paged_triton,
        _no_triton,
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        head_dims=range(8, 257, 8),
        block_sizes=range(64, 2**20, 64),
    ),
    "npu": Kernel(
        "npu_fused_infer_attention_score",
        _paged_npu,
        functools.partial(_no_operator, "npu_fused_infer_attention_score"),
        head_dims=range(16, 513, 16),
        block_sizes=range(128, 513, 128),
        host_lengths=True,
    ),
    "cpu": Kernel("paged attention", absent=_none_on_a_cpu),
}
"""Attention of one new token a row: (query, key_cache, value_cache, block_table, lengths, scaling) -> [rows, heads,
head dim], by the kind of device.

    query: [rows, heads, head dim]; the tokens' keys and values are in the cache already.
    key_cache, value_cache: [blocks, block size, key heads, head dim], contiguous, of the query's dtype.
    block_table: int32 [rows, blocks a row], on the device; entries behind a row's length are not read.
    lengths: tokens in the cache of each row, the new one included, at least 1: with `host_lengths` list[int], else
        int32 [rows] on the device. A row whose result is not wanted has a length too.
    scaling: of query times key.

No gradients.
"""

# ---------------------------------------------------------------------------------------------- packed updates


def _varlen_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_query: Sequence[int],
    cu_key: Sequence[int],
    scaling: float,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # 2.11 takes fewer key heads than query heads as they are, later versions on request.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _varlen_parameters() else {}
    result = varlen_attn(
        query,
        key,
        value,
        _on_device(tuple(cu_query), query.device),
        _on_device(tuple(cu_key), query.device),
        _longest(cu_query),
        _longest(cu_key),
        scale=scaling,
        window_size=(-1, 0),  # causal, to the bottom right
        **grouped,
    )
    assert isinstance(result, torch.Tensor)
    return result


def _varlen_npu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_query: Sequence[int],
    cu_key: Sequence[int],
    scaling: float,
) -> torch.Tensor:
    import torch_npu  # pyright: ignore[reportMissingImports]

    return torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "TND",
        atten_mask=_triangle(query.device),
        scale=scaling,
        actual_seq_qlen=list(cu_query[1:]),  # without the leading 0
        actual_seq_kvlen=list(cu_key[1:]),
        sparse_mode=3,  # causal to the bottom right
    )[0]


def _longest(cu: Sequence[int]) -> int:
    return max(end - start for start, end in itertools.pairwise(cu))


@functools.lru_cache(maxsize=4)  # every layer of a forward asks for the same two
def _on_device(cu: tuple[int, ...], where: torch.device) -> torch.Tensor:
    return torch.tensor(cu, dtype=torch.int32, pin_memory=True).to(where, non_blocking=True)


@functools.cache
def _triangle(where: torch.device) -> torch.Tensor:
    """True where a key is hidden: the compressed mask that sparse_mode 2 and 3 want, whatever the lengths (4 MiB)."""
    with torch.inference_mode(False):  # it may be saved for a backward later
        return torch.triu(torch.ones(2048, 2048, device=where), diagonal=1).bool()


VARLEN: dict[str, Kernel] = {
    "cuda": Kernel("varlen_attn", _varlen_torch, _no_varlen_attn, head_dims=range(8, 257, 8)),
    "npu": Kernel(
        "npu_fusion_attention",
        _varlen_npu,
        functools.partial(_no_operator, "npu_fusion_attention"),
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        head_dims=range(1, 769),
    ),
    "cpu": Kernel("packed attention", absent=_none_on_a_cpu),
}
"""Attention of packed rows without a mask: (query, key, value, cu_query, cu_key, scaling) -> [tokens, heads, head dim],
by the kind of device. Differentiable.

    query: [tokens, heads, head dim].
    key, value: [key tokens, key heads, head dim], of the query's dtype.
    cu_query, cu_key: where each row begins and, last, where the last one ends: integers of the host, [rows + 1] from 0.
        Each row's queries are the last of its keys: query i of n sees keys 0 to m - n + i of m.
    scaling: of query times key.
"""
