"""PEFT methods, and training without one: how each is configured, started and optimised. Merging is the same for all
(perl/adapters/merge.py).

To add one: a builder, and its line in ADAPTERS; one that reads other fields than LoRA has a line in READS too, one that
is a sum of the base's product and its own stands in UNMERGED (both perl/config/peft_fields.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from perl.adapters import svd
from perl.adapters.adalora import RankSchedule, adalora, check_schedule
from perl.adapters.lora import dora, lora, lora_plus_optimizer, only_b_learns, require_no_embedding, rslora
from perl.adapters.none import no_adapter
from perl.adapters.other_methods import (
    check_blocks,
    check_hra,
    hra,
    ia3,
    ln_tuning,
    miss,
    oft,
    require_norms,
    start_ln_tuning,
    vera,
)
from perl.config.schema import PeftConfig
from perl.device.sharding import Gather

if TYPE_CHECKING:
    import peft
    import torch

HALF_TRAINED = {"fsdp2": "it puts other parameters in the place of those whose gradients are masked"}
"""Why FSDP2 can't have a method that changes the gradients of a parameter on their way."""
SINGULAR = {"nf4": "it starts from singular components of the base's weights"}


@dataclass(frozen=True, slots=True)
class Adapter:
    """One PEFT method."""

    build: Callable[[PeftConfig], peft.PeftConfig | None]
    """From the group `peft` of the configuration to PEFT's own; None: all weights are trained."""
    title: str
    """As its paper writes it, for pages and cards."""
    optimizer: Callable[[torch.nn.Module, PeftConfig, type, dict[str, Any]], torch.optim.Optimizer] | None = None
    """(model, config, optimizer class, its keyword arguments incl. lr) -> optimizer; None is the trainer's own."""
    result: str = "adapter"
    """Name of the folder in the run's that holds what was trained."""
    trains: tuple[str, ...] = ("lora_A", "lora_B")
    """PEFT's names of what it trains in each adapted layer; nothing else may be trainable."""
    start: Callable[[Any, PeftConfig, Gather], None] | None = None
    """(model wrapped by PEFT, config, gather): what PEFT's own initialisation leaves to do, before the first step and
    before a checkpoint is loaded."""
    schedule: Callable[[Any, PeftConfig], RankSchedule] | None = None
    """(model wrapped by PEFT, config) -> what changes the adapter after each optimizer step."""
    check: Callable[[PeftConfig, Any], None] | None = None
    """(config, training arguments): a UserError for values that PEFT would refuse later, or heed silently."""
    fits: Callable[[Any, PeftConfig], None] | None = None
    """(model wrapped by PEFT on the meta device, config): a UserError for values that its layers can't have."""
    trained_share: float = 1.0
    """Of the numbers in the trainable tensors, those that the optimizer moves."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Where it can't be trained ("zero3", "fsdp2", "nf4") -> why."""


PISSA = Adapter(
    svd.doubled,
    "PiSSA",
    start=svd.principal,
    check=svd.check_optimizer,
    fits=svd.check_rank,
    trained_share=0.5,
    refused=HALF_TRAINED | SINGULAR,
)
ADAPTERS: dict[str, Adapter] = {
    "lora": Adapter(lora, "LoRA"),
    "rslora": Adapter(rslora, "rsLoRA"),
    "dora": Adapter(dora, "DoRA", trains=("lora_A", "lora_B", "lora_magnitude_vector")),
    "lora_plus": Adapter(lora, "LoRA+", lora_plus_optimizer),
    "lora_fa": Adapter(
        lora, "LoRA-FA", trains=("lora_B",), start=only_b_learns, fits=require_no_embedding, refused=HALF_TRAINED
    ),
    "pissa": PISSA,
    "milora": replace(PISSA, title="MiLoRA", start=svd.minor),
    "milora_plus": Adapter(lora, "MiLoRA+", start=svd.minor_directions, fits=svd.check_rank, refused=SINGULAR),
    "adalora": Adapter(
        adalora,
        "AdaLoRA",
        trains=("lora_A", "lora_B", "lora_E"),
        schedule=RankSchedule,
        check=check_schedule,
        refused=dict.fromkeys(("zero3", "fsdp2"), "its ranks are allocated by whole gradients, which are split"),
    ),
    "vera": Adapter(vera, "VeRA", trains=("vera_lambda_b", "vera_lambda_d")),
    "miss": Adapter(miss, "MiSS", trains=("miss_block",)),
    "ia3": Adapter(ia3, "(IA)³", trains=("ia3_l",)),
    "ln_tuning": Adapter(
        ln_tuning, "LN tuning", trains=("ln_tuning_layers",), start=start_ln_tuning, fits=require_norms
    ),
    "hra": Adapter(
        hra,
        "HRA",
        trains=("hra_u",),
        check=check_hra,
        refused=dict.fromkeys(("zero3", "fsdp2", "nf4"), "PEFT multiplies the base's weight, which is split or packed"),
    ),
    "oft": Adapter(oft, "OFT", trains=("oft_R",), fits=check_blocks),
    "none": Adapter(no_adapter, "all weights", result="model", trains=(), refused={"nf4": "4 bits can't be trained"}),
}

SPELLED = ("rsLoRA", "HRA", "LN tuning")
"""Titles that begin with the name of a letter, which begins with a vowel."""


def title_of(method: str) -> str:
    """The title of a method by `config.peft.type` or PEFT's peft_type; others stand as they have it."""
    adapter = ADAPTERS.get(method.lower())
    return method if adapter is None else adapter.title


def with_article(title: str) -> str:
    """A LoRA, An OFT, An (IA)³."""
    return f"{'An' if title.lstrip('(')[:1] in 'AEIO' or title in SPELLED else 'A'} {title}"
