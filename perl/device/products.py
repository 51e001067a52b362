"""Products with quantised weights by torch_npu's kernels, within what an Atlas A2 or A3 takes of them (torch_npu's
reference: npu_weight_quant_batchmatmul, npu_convert_weight_to_int4pack, npu_dynamic_quant, npu_quant_matmul).

Each computes x W^T + bias, bfloat16 [rows, out], of x, bfloat16 [rows, in], bias float32 [out] or None.
"""

from __future__ import annotations

import torch

NAMES = ("npu_weight_quant_batchmatmul", "npu_convert_weight_to_int4pack", "npu_dynamic_quant", "npu_quant_matmul")
LARGEST = 65535
"""Inputs and outputs of a weight."""
INT4_OUTPUTS = 8
"""What an int4 weight has a multiple of."""


def multiply_on(kind: str) -> bool:
    """Whether they are those of a kind of device."""
    return kind == "npu"


def missing() -> str | None:
    """Which kernel this torch_npu lacks, for a message; None: it has all."""
    lacking = [name for name in NAMES if not hasattr(torch.ops.npu, name)]
    return f"this torch_npu has no {lacking[0]}" if lacking else None


def refused(weight: torch.Tensor, bits: int) -> str | None:
    """Why they do not take a weight [out, in], for a message, or None."""
    if max(weight.shape) > LARGEST:
        return f"a layer has {max(weight.shape)} inputs or outputs, and torch_npu's products {LARGEST} at most"
    if bits == 4 and len(weight) % INT4_OUTPUTS:
        return f"a layer has {len(weight)} outputs, and torch_npu's int4 products a multiple of {INT4_OUTPUTS}"
    return None


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """int32 [in, out / 8] of whole numbers from -8 to 7, int8 [out, in]."""
    return torch.ops.npu.npu_convert_weight_to_int4pack(numbers.t().contiguous().to(torch.int32))


def weight_only(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, group: int = 0
) -> torch.Tensor:
    """
    Args:
        weight: int8 [in, out], or what `pack_int4` has made.
        scale: bfloat16 [1, out], or [in / group, out].
        group: inputs that share a scale, a multiple of 32 and less than all; 0: all do.
    """
    return torch.ops.npu.npu_weight_quant_batchmatmul(x, weight, scale, bias=bias, antiquant_group_size=group)


def by_rows(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Of x as int8 with a scale per row.

    Args:
        weight: int8 [in, out].
        scale: float32 [out].
    """
    numbers, of_rows = torch.ops.npu.npu_dynamic_quant(x)
    return torch.ops.npu.npu_quant_matmul(
        numbers, weight, scale, pertoken_scale=of_rows, bias=bias, output_dtype=torch.bfloat16
    )
