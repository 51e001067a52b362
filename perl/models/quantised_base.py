"""A base that is loaded in 8 or 4 bits and stays so: what config.json, or model.quantization, says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
