"""PEFT methods, and training without one: how each is configured and optimised. Merging is the same for all
(perl/adapters/merge.py).

To add one: a builder, and its line in ADAPTERS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perl.adapters.none import no_adapter
from perl.config.schema import PeftConfig

if TYPE_CHECKING:
    import peft
    import torch


@dataclass(frozen=True, slots=True)
class Adapter:
    """One PEFT method."""

    build: Callable[[PeftConfig], peft.PeftConfig | None]
    """From the group `peft` of the configuration to PEFT's own; None: all weights are trained."""
    optimizer: Callable[[torch.nn.Module, PeftConfig, type, dict[str, Any]], torch.optim.Optimizer] | None = None
    """(model, config, optimizer class, its keyword arguments incl. lr) -> optimizer; None is the trainer's own."""
    result: str = "adapter"
    """Name of the folder in the run's that holds what was trained."""


def _lora(config: PeftConfig, **method: Any) -> peft.PeftConfig:
    from peft import LoraConfig, TaskType

    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=int(config.r),
        lora_alpha=int(config.lora_alpha),
        lora_dropout=float(config.lora_dropout),
        target_modules=config.target_modules,
        exclude_modules=config.exclude_modules or None,
        bias="none",
        **method,
    )


def _rslora(config: PeftConfig) -> peft.PeftConfig:
    """Rank-stabilised LoRA (arXiv 2312.03732): scale lora_alpha / sqrt(r)."""
    return _lora(config, use_rslora=True)


def _dora(config: PeftConfig) -> peft.PeftConfig:
    """Weight-decomposed LoRA (arXiv 2402.09353): a trained magnitude for each output."""
    return _lora(config, use_dora=True)


def _lora_plus_optimizer(
    model: torch.nn.Module, config: PeftConfig, optimizer_class: type, kwargs: dict[str, Any]
) -> torch.optim.Optimizer:
    """LoRA+ (arXiv 2402.12354): B learns lora_plus_lr_ratio times faster than A."""
    from peft.optimizers import create_loraplus_optimizer

    kwargs = dict(kwargs)
    return create_loraplus_optimizer(
        model,  # type: ignore[arg-type]
        optimizer_class,
        lr=kwargs.pop("lr"),
        loraplus_lr_ratio=float(config.lora_plus_lr_ratio),
        **kwargs,
    )


ADAPTERS: dict[str, Adapter] = {
    "lora": Adapter(_lora),
    "rslora": Adapter(_rslora),
    "dora": Adapter(_dora),
    "lora_plus": Adapter(_lora, _lora_plus_optimizer),
    "none": Adapter(no_adapter, result="model"),
}
