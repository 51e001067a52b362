"""Reference versions of the quantised products, as operators of the namespace npu with the real signatures.

As in attention.py: computed by plain PyTorch, and what the documentation of the real ones refuses is refused.
"""

import torch

from .attention import _define, _require

_SIDE = 65535


def _weight_quant_batchmatmul(
    x,
    weight,
    antiquant_scale,
    antiquant_offset=None,
    quant_scale=None,
    quant_offset=None,
    bias=None,
    antiquant_group_size=0,
    inner_precise=0,
):
    name = "npu_weight_quant_batchmatmul"
    if antiquant_offset is not None or quant_scale is not None or quant_offset is not None or inner_precise:
        raise NotImplementedError(f"emulated {name}: offsets, a quantised output, inner_precise")
    _require(x.dim() == 2 and weight.dim() == 2, f"{name}: x and weight must be 2D")
    _require(x.numel() > 0, f"{name}: empty tensors are not supported")
    _require(x.dtype in (torch.float16, torch.bfloat16), f"{name}: x must be float16 or bfloat16, not {x.dtype}")
    _require(weight.dtype in (torch.int8, torch.int32), f"{name}: weight must be int8 or int32, not {weight.dtype}")
    _require(antiquant_scale.dtype == x.dtype, f"{name}: antiquant_scale must have the dtype of x")
    if weight.dtype == torch.int32:
        _require(weight.is_contiguous(), f"{name}: a packed weight must be contiguous")
        weight = _unpacked(weight)
    inputs, outputs = weight.shape
    _require(x.shape[1] == inputs, f"{name}: K of x is {x.shape[1]}, of weight {inputs}")
    _require(max(inputs, outputs) <= _SIDE, f"{name}: K and N must be in [1, {_SIDE}]")
    groups = 1
    if antiquant_group_size:
        fits = antiquant_group_size % 32 == 0 and 32 <= antiquant_group_size <= inputs - 1
        _require(fits, f"{name}: antiquant_group_size must be a multiple of 32 in [32, {inputs - 1}]")
        groups = -(-inputs // antiquant_group_size)
    shapes = [(groups, outputs), (outputs,)] if groups == 1 else [(groups, outputs)]
    _require(tuple(antiquant_scale.shape) in shapes, f"{name}: antiquant_scale has shape {antiquant_scale.shape}")
    scale = antiquant_scale.float().reshape(groups, outputs).repeat_interleave(-(-inputs // groups), 0)[:inputs]
    product = x.float() @ (weight.float() * scale)
    return _plus(name, product, bias, {torch.bfloat16: (torch.float32,), torch.float16: (torch.float16,)}, x.dtype)


def _convert_weight_to_int4pack(weight, inner_k_tiles=0):
    name = "npu_convert_weight_to_int4pack"
    _require(weight.dtype == torch.int32 and weight.dim() == 2, f"{name}: weight must be int32 and 2D")
    _require(weight.is_contiguous() and weight.shape[1] % 8 == 0, f"{name}: the last dim must be a multiple of 8")
    _require(bool(((weight >= -8) & (weight <= 7)).all()), f"{name}: a number is no int4")
    digits = (weight & 15).unflatten(1, (-1, 8)).to(torch.int64)
    shifts = torch.arange(0, 32, 4, device=weight.device)
    whole = (digits << shifts).sum(-1)
    return torch.where(whole >= 2**31, whole - 2**32, whole).to(torch.int32)


def _unpacked(packed):
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    digits = (packed[:, :, None] >> shifts) & 15
    return torch.where(digits > 7, digits - 16, digits).flatten(1)


def _dynamic_quant(input, smooth_scales=None, group_index=None, dst_type=None):
    name = "npu_dynamic_quant"
    if smooth_scales is not None or group_index is not None or dst_type not in (None, torch.int8):
        raise NotImplementedError(f"emulated {name}: smooth_scales, group_index, other types")
    _require(input.dtype in (torch.float16, torch.bfloat16), f"{name}: input must be float16 or bfloat16")
    scale = input.float().abs().amax(-1, keepdim=True) / 127
    return (input.float() / scale.clamp_min(1e-30)).round().to(torch.int8), scale.squeeze(-1)


def _quant_matmul(x1, x2, scale, *, offset=None, pertoken_scale=None, bias=None, output_dtype=None, group_sizes=None):
    name = "npu_quant_matmul"
    if offset is not None or group_sizes is not None or pertoken_scale is None or output_dtype != torch.bfloat16:
        raise NotImplementedError(f"emulated {name}: offset, groups, no pertoken_scale, outputs but bfloat16")
    _require(x1.dtype == x2.dtype == torch.int8, f"{name}: x1 and x2 must be int8")
    _require(x1.shape[1] == x2.shape[0] and max(x2.shape) <= _SIDE, f"{name}: x1 is {x1.shape}, x2 {x2.shape}")
    fits = scale.dtype in (torch.float32, torch.bfloat16) and tuple(scale.shape) in ((1,), (x2.shape[1],))
    _require(fits, f"{name}: scale is {scale.dtype} {scale.shape}")
    fits = pertoken_scale.dtype == torch.float32 and tuple(pertoken_scale.shape) == (x1.shape[0],)
    _require(fits, f"{name}: pertoken_scale is {pertoken_scale.dtype} {pertoken_scale.shape}")
    product = (x1.double() @ x2.double()).float() * pertoken_scale[:, None] * scale.float()
    return _plus(name, product, bias, {output_dtype: (torch.float32, torch.bfloat16)}, output_dtype)


def _plus(name, product, bias, dtypes, dtype):
    if bias is not None:
        _require(bias.dtype in dtypes[dtype], f"{name}: bias must be one of {dtypes[dtype]}, not {bias.dtype}")
        _require(tuple(bias.shape) in ((product.shape[1],), (1, product.shape[1])), f"{name}: bias is {bias.shape}")
        product = product + bias.float()
    return product.to(dtype)


for _name, _arguments, _returns, _function in (
    (
        "npu_weight_quant_batchmatmul",
        "Tensor x, Tensor weight, Tensor antiquant_scale, Tensor? antiquant_offset=None, Tensor? quant_scale=None,"
        " Tensor? quant_offset=None, Tensor? bias=None, int antiquant_group_size=0, int inner_precise=0",
        "Tensor",
        _weight_quant_batchmatmul,
    ),
    (
        "npu_convert_weight_to_int4pack",
        "Tensor weight, int inner_k_tiles=0",
        "Tensor",
        _convert_weight_to_int4pack,
    ),
    (
        "npu_dynamic_quant",
        "Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, ScalarType? dst_type=None",
        "(Tensor, Tensor)",
        _dynamic_quant,
    ),
    (
        "npu_quant_matmul",
        "Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? pertoken_scale=None, Tensor? bias=None,"
        " ScalarType? output_dtype=None, int[]? group_sizes=None",
        "Tensor",
        _quant_matmul,
    ),
):
    _define(_name, _arguments, _returns, _function, "PrivateUse1")

npu_weight_quant_batchmatmul = torch.ops.npu.npu_weight_quant_batchmatmul
npu_convert_weight_to_int4pack = torch.ops.npu.npu_convert_weight_to_int4pack
npu_dynamic_quant = torch.ops.npu.npu_dynamic_quant
npu_quant_matmul = torch.ops.npu.npu_quant_matmul
