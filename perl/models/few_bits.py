"""A base that is loaded in 8 or 4 bits and stays so: what config.json, or model.quantization, says of it; and NF4, its
scales quantised too (QLoRA, arXiv 2305.14314), by bitsandbytes.

NF4 is of frozen linear layers: embeddings, norms and the head keep the model's dtype, in which products are computed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from perl import device
from perl.base.errors import UserError

if TYPE_CHECKING:
    import torch

BaseQuantisation = Literal["none", "nf4"]
FIELDS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
"""Of the quantization_config that a base is loaded with."""


def fields_of(config: Any) -> dict[str, Any]:
    """The quantization_config of a PretrainedConfig, as config.json has it; empty where there is none."""
    found = getattr(config, "quantization_config", None) or {}
    return dict(found) if isinstance(found, Mapping) else found.to_dict()


def bits_of(fields: Mapping[str, Any]) -> int | None:
    """Of a weight of a linear layer, where bitsandbytes or a field `bits` (GPTQ, AWQ) says so."""
    if fields.get("load_in_4bit"):
        return 4
    return 8 if fields.get("load_in_8bit") else fields.get("bits")


def described(fields: Mapping[str, Any]) -> str:
    """ "4 bits (bitsandbytes, nf4)"; "" of no fields."""
    if not fields:
        return ""
    named = fields.get("quant_method") or "bitsandbytes"  # its own flags alone name no method
    method = str(getattr(named, "value", named))
    kind = f", {fields.get('bnb_4bit_quant_type', 'fp4')}" if fields.get("load_in_4bit") else ""
    bits = bits_of(fields)
    return f"{bits} bits ({method}{kind})" if bits else method


def require_kernels(flag: str, kind: device.Kind) -> None:
    """A UserError, which begins with `flag`, where bitsandbytes has no kernels for a kind of device."""
    if not device.HAS_BITSANDBYTES[kind]:
        raise UserError(f"{flag}: bitsandbytes has no kernels for a device of kind {kind}; write none")


def require_bitsandbytes(flag: str) -> None:
    """A UserError, which begins with `flag`, where bitsandbytes is not installed, or has no kernels for the device."""
    require_kernels(flag, device.detect().kind)
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"{flag}: bitsandbytes is not installed; pip install 'bitsandbytes>=0.48', or write none")


def options(dtype: torch.dtype) -> dict[str, Any]:
    """Of transformers' from_pretrained, which quantises on this process's device."""
    from transformers import BitsAndBytesConfig

    return {"quantization_config": BitsAndBytesConfig(**FIELDS, bnb_4bit_compute_dtype=dtype)}


def is_4bit(model: Any) -> bool:
    """Whether layers of the base of `model` are in 4 bits: as they were loaded, or as its files hold them."""
    return getattr(model, "is_loaded_in_4bit", False)


def keep_packing(model: Any) -> None:
    """On a CPU with AVX512-BF16 bitsandbytes packs a layer otherwise the first time that it computes in evaluation
    mode: its bits change, what computes is bfloat16 whatever the dtype, and nothing can be differentiated any more."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def state_of(parameter: Any) -> dict[str, torch.Tensor]:
    """What a quantised parameter is multiplied by, by name; of another one nothing."""
    state = getattr(parameter, "quant_state", None)
    return {} if state is None else state.as_dict(packed=True)
