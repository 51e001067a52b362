"""AdaLoRA (arXiv 2303.10512): PEFT's layers and rank allocator, called after each optimizer step of ours.

    schedule = RankSchedule(model, config)
    schedule.begin(total_steps)
    …backward, optimizer step…
    schedule.after_step(1)               importance, budget, mask: the gradients must still be there
    schedule.save(folder), schedule.load(folder)

What is saved as an adapter holds all ranks, the masked ones as zeros: it is what the model computes, and what training
goes on from. (PEFT would cut the tensors to the ranks that are left, which an optimizer's state does not fit.)
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.adapters.lora import layers_of
from perl.base.errors import UserError

if TYPE_CHECKING:
    import peft
    import torch

    from perl.config.schema import PeftConfig

STATE = "adalora.safetensors"
"""In a checkpoint: smoothed importance and its uncertainty of each number, and which ranks are left."""


def adalora(config: PeftConfig) -> peft.PeftConfig:
    """AdaLoRA: B diag(E) A with r ranks a layer at first, adalora_target_r on average in the end. Without the paper's
    orthogonality term, as in the PeRL paper's runs: PEFT adds it to a loss that the model computes, and GRPO's is none.
    """
    from peft import AdaLoraConfig

    return AdaLoraConfig(
        **layers_of(config),
        init_r=config.r,
        target_r=target_rank(config),
        tinit=config.adalora_tinit,
        tfinal=config.adalora_tfinal,
        total_step=config.adalora_tinit + config.adalora_tfinal + 1,  # until RankSchedule.begin
        orth_reg_weight=0.0,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
    )


def target_rank(config: PeftConfig) -> int:
    """Mean rank of a layer in the end; null is two thirds of the initial one, as in the paper."""
    return config.adalora_target_r if config.adalora_target_r is not None else max(1, 2 * config.r // 3)


def check_schedule(config: PeftConfig, training: Any) -> None:
    """A UserError where there is nothing to prune, or no step to prune in."""
    if target_rank(config) >= config.r:
        raise UserError(
            f"--config.peft.adalora_target_r {target_rank(config)}: the ranks fall from --config.peft.r {config.r} to"
            " it; write a smaller one, or a larger r"
        )
    if training.max_steps > 0:
        _require_steps(config.adalora_tinit, config.adalora_tfinal, training.max_steps)


def _require_steps(first: int, last: int, steps: int) -> None:
    if first + last >= steps:
        raise UserError(
            f"--config.peft.adalora_tinit {first} and adalora_tfinal {last}: no step is left between them to lower the"
            f" ranks in, of {steps}; write less"
        )


class RankSchedule:
    """The ranks of `model` (a PeftModel with AdaLoRA) over the steps of a training.

    Attributes:
        ranks: of each adapted layer by its name in the base, those that are not masked.
    """

    def __init__(self, model: Any, config: PeftConfig):
        self.model, self.config = model, config
        self.tuner = model.base_model
        self.peft_config = model.peft_config["default"]
        self._pattern: dict[str, list[bool]] | None = None
        """PEFT's rank_pattern: by the name of lora_E, which ranks are left. PEFT's configuration holds it only while
        PEFT is called: with it there an adapter is saved cut."""

    @property
    def ranks(self) -> dict[str, int]:
        pattern = self._pattern or {}
        return {
            name.removesuffix(".lora_E.default"): sum(pattern.get(name, [True] * len(e)))
            for name, e in self._named("lora_E").items()
        }

    def begin(self, total_steps: int) -> None:
        """Before the first step, also of a run that goes on."""
        _require_steps(self.config.adalora_tinit, self.config.adalora_tfinal, total_steps)
        self.peft_config.total_step = total_steps

    def after_step(self, step: int, gradients: dict[str, torch.Tensor] | None = None) -> None:
        """Measure importance and mask ranks, as PEFT's `update_and_allocate` does.

        Args:
            step: optimizer steps made, from 1.
            gradients: of `parameters`, where the parameters no longer have them (DeepSpeed).
        """
        settled = self.peft_config.total_step - self.peft_config.tfinal
        if step > settled and sum(self.ranks.values()) > self.peft_config.target_r * len(self.ranks):
            step = settled  # its update was skipped (common.on_nonfinite): the last ranks are chosen now
        self.peft_config.rank_pattern = self._pattern
        with self._with_gradients(gradients):
            self.tuner.update_and_allocate(step)
        self._pattern, self.peft_config.rank_pattern = self.peft_config.rank_pattern, None

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What importance is measured on, by PEFT's names."""
        return {name: p for name, p in self.tuner.model.named_parameters() if "lora_" in name and p.requires_grad}

    def masked(self) -> list[torch.nn.Parameter]:
        """The parameters that `after_step` writes to."""
        return list(self._named("lora_E").values())

    def metrics(self) -> dict[str, float]:
        ranks = self.ranks.values()
        return {"adalora/mean_rank": sum(ranks) / len(ranks), "adalora/min_rank": float(min(ranks))}

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        allocator = self.tuner.rankallocator
        tensors = {f"importance.{name}": t for name, t in allocator.exp_avg_ipt.items()}
        tensors |= {f"uncertainty.{name}": t for name, t in allocator.exp_avg_unc.items()}
        tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        save_file(tensors, folder / STATE, metadata={"rank_pattern": json.dumps(self._pattern)})

    def load(self, folder: Path) -> None:
        """Raises a UserError where the file is missing."""
        from safetensors import safe_open

        if not (folder / STATE).is_file():
            raise UserError(
                f"--config.training.resume_from_checkpoint {folder}: holds no {STATE}, without which AdaLoRA's ranks"
                " can't go on; name another checkpoint"
            )
        allocator, parameters = self.tuner.rankallocator, dict(self.tuner.model.named_parameters())
        allocator.reset_ipt()
        with safe_open(folder / STATE, framework="pt") as file:
            self._pattern = json.loads(file.metadata()["rank_pattern"])
            for key in file.keys():  # noqa: SIM118  # not a dict
                kind, _, name = key.partition(".")
                tensor = file.get_tensor(key).to(parameters[name].device)
                (allocator.exp_avg_ipt if kind == "importance" else allocator.exp_avg_unc)[name] = tensor
                allocator.ipt.setdefault(name, tensor)  # computed again before it is read

    def _named(self, kind: str) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.tuner.model.named_parameters() if f"{kind}.default" in name}

    @contextlib.contextmanager
    def _with_gradients(self, gradients: dict[str, torch.Tensor] | None) -> Iterator[None]:
        """PEFT's allocator asks DeepSpeed for gradients that are gone by now: inside it gets `gradients`."""
        if gradients is None:
            yield
            return
        import deepspeed

        by_id = {id(p): gradients[name] for name, p in self.parameters().items()}
        original = deepspeed.utils.safe_get_full_grad
        deepspeed.utils.safe_get_full_grad = lambda parameter: by_id[id(parameter)]
        try:
            yield
        finally:
            deepspeed.utils.safe_get_full_grad = original
