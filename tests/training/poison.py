"""What makes a loss or a gradient NaN at one step of a training, and a record of what each step did."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import TrainerCallback

from perl.device.sharding import whole


def poison(trainer: Any, what: str, steps: Collection[int]) -> None:
    """In the updates `steps`, counted from 1, the loss (`what` is "loss") or its gradient alone ("gradient") is NaN."""

    def hook(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() or trainer.state.global_step + 1 not in steps:
            return output
        if what == "gradient":
            output.register_hook(lambda gradient: gradient * torch.nan)
            return output
        return output * torch.nan

    policy = trainer.accelerator.unwrap_model(trainer.model)
    norm = next(module for name, module in policy.named_modules() if name.endswith("model.norm"))
    norm.register_forward_hook(hook)


def gathered(parameters: Sequence[torch.nn.Parameter]) -> AbstractContextManager[Any]:
    """Where ZeRO-3's parameters are whole; nothing changes for others."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


class Steps(TrainerCallback):
    """What is trained, after each step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        with gathered(list(trained.values())):
            self.weights.append({name: whole(p).detach().float().clone() for name, p in trained.items()})

    def moved(self) -> list[bool]:
        """Of each step but the first: whether it has changed anything."""
        pairs = zip(self.weights[:-1], self.weights[1:], strict=True)
        return [any(not torch.equal(before[name], after[name]) for name in after) for before, after in pairs]
