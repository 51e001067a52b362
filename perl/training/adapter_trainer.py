"""What every trainer of an adapter, or of all weights, adds to TRL's: the method's own start, optimizer and schedule,
what it has been applied to, a stop where numbers are not finite, whole models as other programs read them, and our
model card."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.distributed import DistributedBackend

from perl.adapters import Adapter
from perl.adapters.adalora import RankSchedule
from perl.adapters.applied import Applied, applied
from perl.adapters.none import complete_model, compute_dtype, has_adapter
from perl.config.schema import PeftConfig
from perl.sharding import whole
from perl.training.nonfinite import NonFinite

if TYPE_CHECKING:
    import torch

WriteCard = Callable[[Path, list[dict[str, Any]]], None]
"""Writes the model card into a folder that holds what was trained, given the log history."""


class AdapterTrainer:
    """Mixed into one of TRL's trainers.

    Attributes:
        adapter: the PEFT method; its optimizer replaces the default one when it has its own.
        adapter_config: the group `peft` of the configuration.
        write_card: None: TRL's card.
        nonfinite: what is done where loss or gradient are not finite.
        applied: what is trained.
        ranks: AdaLoRA's schedule; None for other methods.
    """

    adapter: Adapter
    adapter_config: PeftConfig
    write_card: WriteCard | None
    nonfinite: NonFinite
    applied: Applied
    ranks: RankSchedule | None
    accelerator: Any
    args: Any
    model: Any
    optimizer: Any
    state: Any
    control: Any
    save_model: Callable[..., None]
    get_optimizer_cls_and_kwargs: Callable[..., tuple[type, dict[str, Any]]]
    add_callback: Callable[[TrainerCallback], None]
    _get_output_dir: Callable[..., str]

    def start_adapter(self, adapter: Adapter, config: PeftConfig) -> None:
        """Once PEFT has wrapped the model: the method's own start, what is trained, and its schedule."""
        self.adapter, self.adapter_config = adapter, config
        policy = self.accelerator.unwrap_model(self.model)
        if adapter.start is not None:
            adapter.start(policy, config, DistributedBackend(self.accelerator).gather_params)
        self.applied, self.ranks = applied(policy, adapter, config), None
        if adapter.schedule is not None:
            self.ranks = adapter.schedule(policy, config)
            self.add_callback(AllocateRanks(self, self.ranks))

    def create_optimizer(self, *args: Any, **kwargs: Any):
        if self.optimizer is None and self.adapter.optimizer is not None:
            optimizer_class, optimizer_kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = self.adapter.optimizer(self.model, self.adapter_config, optimizer_class, optimizer_kwargs)
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.nonfinite.add(loss)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """transformers comes here once an update, before the optimizer's step (with DeepSpeed after it, which has made
        none where the norm is not finite)."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        scaled = self.accelerator.mixed_precision == "fp16"
        if what := self.nonfinite.found(None if scaled else whole(norm)):
            self.nonfinite.settle(self.state.global_step + 1, what, self._save_batch)
            model.zero_grad()
        return norm

    def _save_batch(self, folder: Path) -> None:
        """This process's part of the batch under way."""
        raise NotImplementedError

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.nonfinite.policy == "skip" and "loss" in logs:
            logs["nonfinite/skipped"] = float(self.nonfinite.skipped)
        super().log(logs, start_time)  # type: ignore[misc]

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """transformers looks after a step whether it was the last one: a resumed run that has made all its steps would
        make one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        folder, pushed = Path(output_dir or self.args.output_dir or "."), Path(self.args.output_dir or ".")
        (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle of every argument, which nothing reads
        model = self.accelerator.unwrap_model(self.model)
        if not has_adapter(model):
            complete_model(folder, model.config.name_or_path, self.compute_dtype())
        # A run that goes on takes TRL's reference from peft.adapter again. From a checkpoint that holds it transformers
        # would load the reference alone, and not the adapter.
        shutil.rmtree(folder / "ref", ignore_errors=True)
        if self.write_card is None:
            return
        self.write_card(folder, self.state.log_history)  # over PEFT's
        if self.args.push_to_hub and folder != pushed:
            shutil.copyfile(folder / "README.md", pushed / "README.md")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        if self.ranks is not None and self.args.process_index == 0:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self.ranks.save(Path(self._get_output_dir(trial=trial)) / name)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None and self.ranks is not None:
            self.ranks.load(Path(checkpoint))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.ranks is not None and "loss" in logs:
            logs |= self.ranks.metrics()
        super().log(logs, start_time)  # type: ignore[misc]

    def compute_dtype(self) -> torch.dtype:
        """What the model computes in: mixed precision's dtype, or that of its weights."""
        mixed, model = compute_dtype(self.args), self.accelerator.unwrap_model(self.model)
        return mixed if mixed.itemsize < 4 else model.dtype

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        if self.write_card is None:  # else `_save` has written it
            super().create_model_card(*args, **kwargs)  # type: ignore[misc]


class AllocateRanks(TrainerCallback):
    """Calls AdaLoRA's schedule after each optimizer step, while its gradients are there.

    DeepSpeed makes its step within the backward pass and drops the gradients there: they are copied just before. What
    is masked is written to its float32 weights too, which it would otherwise bring back in the next step.
    """

    def __init__(self, trainer: Any, ranks: RankSchedule):
        self.trainer, self.ranks = trainer, ranks
        self._gradients: dict[str, Any] | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.ranks.begin(state.max_steps)
        if args.deepspeed_plugin is not None:
            engine = self.trainer.model_wrapped
            theirs = engine.step

            def step(*words: Any, **more: Any) -> Any:
                from deepspeed.utils import safe_get_full_grad

                self._gradients = {name: safe_get_full_grad(p) for name, p in self.ranks.parameters().items()}
                return theirs(*words, **more)

            engine.step = step

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.ranks.after_step(state.global_step + 1, self._gradients)
        if self._gradients is not None:
            from deepspeed.utils import safe_set_full_fp32_param

            for parameter in self.ranks.masked():
                safe_set_full_fp32_param(parameter, parameter.detach().float())
