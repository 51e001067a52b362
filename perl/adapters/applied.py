"""What a method has done to the model, checked after it is loaded; what comes before is in perl/adapters/checks.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from perl.adapters import Adapter
from perl.adapters.none import has_adapter
from perl.base.files import read_json
from perl.config.schema import PeftConfig
from perl.models.few_bits import described, fields_of

APPLIED = "peft.json"
"""Applied, in the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What is trained of a model; APPLIED in the run's folder."""

    type: str
    """Key of ADAPTERS."""
    method: str
    """PEFT's name of it; "" where all weights are trained."""
    trained: int
    """Numbers that the optimizer moves."""
    parameters: int
    """Of the model, without the adapter."""
    tensors: dict[str, int]
    """PEFT's name of what is trained in a layer ("lora_A") -> how many tensors."""
    modules: dict[str, int]
    """Kind of adapted layer ("q_proj") -> how many."""
    quantised: str = ""
    """How the base is held that it is trained above, "4 bits (bitsandbytes, nf4)"; "" where it is not quantised."""

    def line(self) -> str:
        share = self.trained / max(self.parameters, 1)
        modules = ", ".join(f"{count} {name}" for name, count in self.modules.items())
        what = f"{self.trained:,} of {self.parameters:,} parameters are trained ({share:.3%})"
        above = f"; above a base in {self.quantised}" if self.quantised else ""
        return f"{self.type}: {what}" + (f": {', '.join(self.tensors)} of {modules}" if self.modules else "") + above


def applied(model: Any, adapter: Adapter, config: PeftConfig) -> Applied:
    """What is trainable in `model`, as it was wrapped.

    Raises:
        UserError: the method has found no layer.
        RuntimeError: something else is trainable than the method trains, or less.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not has_adapter(model):
        count = sum(_count(p) for p in trainable.values())
        return Applied(type=config.type, method="", trained=count, parameters=count, tensors={}, modules={})
    kinds: Counter[str] = Counter()
    layers: dict[str, None] = {}
    for name in trainable:
        layer, kind = _parts(name, adapter)
        kinds[kind] += 1
        layers[layer] = None
    if kinds.keys() != set(adapter.trains):
        raise RuntimeError(
            f"peft.type {config.type} should train {', '.join(adapter.trains)}, but {', '.join(kinds) or 'nothing'} is"
            " trainable"
        )
    prefix = model.base_model.prefix
    method = model.peft_config["default"].peft_type
    of_base = [p for name, p in model.named_parameters() if prefix not in name and "ranknum" not in name]
    return Applied(
        type=config.type,
        method=str(getattr(method, "value", method)),
        trained=int(sum(_count(p) for p in trainable.values()) * adapter.trained_share),
        parameters=sum(_count(p) for p in of_base),
        tensors=dict(kinds),
        modules=dict(Counter(layer.rpartition(".")[2] for layer in layers)),
        quantised=described(fields_of(model.get_base_model().config)),
    )


class Above(TypedDict):
    """What is read of APPLIED, which an older run wrote without it."""

    quantised: NotRequired[str]


def trained_above(adapter: Path) -> str:
    """Applied.quantised of the run whose folder `adapter` lies in; "" where no run is known."""
    file = adapter.resolve().parent / APPLIED
    return read_json(file, kind=Above).get("quantised", "") if file.is_file() else ""


def _parts(name: str, adapter: Adapter) -> tuple[str, str]:
    """Layer and kind of a trainable parameter; a RuntimeError for one that the method does not train."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        kind = part.replace("lora_embedding_", "lora_")
        if kind in adapter.trains:
            return ".".join(parts[:place]), kind
    raise RuntimeError(f"{name} is trainable, and the method trains {', '.join(adapter.trains)} alone")


def _count(parameter: Any) -> int:
    state = getattr(parameter, "quant_state", None)  # of 4 bits, two of which are one number of the tensor
    return state.shape.numel() if state else getattr(parameter, "ds_numel", None) or parameter.numel()
