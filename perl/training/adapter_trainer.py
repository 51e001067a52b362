"""What every trainer of an adapter, or of all weights, adds to TRL's: the method's own optimizer, whole
models as other programs read them, and our model card."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from perl.adapters import Adapter
from perl.adapters.none import complete_model, compute_dtype, has_adapter
from perl.config.schema import PeftConfig

if TYPE_CHECKING:
    import torch

WriteCard = Callable[[Path, list[dict[str, Any]]], None]
"""Writes the model card into a folder that holds what was trained, given the log history."""


def order_by_step(run_dir: Path) -> None:
    """Give the checkpoints in `run_dir` times of change in the order of their steps and before now, where they are not:
    save_total_limit deletes the oldest by this time, which after a clock was set back would be the newest."""
    found = [f for f in run_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if f.name.rpartition("-")[2].isdigit()]
    found.sort(key=lambda folder: int(folder.name.rpartition("-")[2]), reverse=True)
    now = time.time()
    if any(folder.stat().st_mtime > now for folder in found):
        for age, folder in enumerate(found, start=1):
            os.utime(folder, (now - age, now - age))


class AdapterTrainer:
    """Mixed into one of TRL's trainers.

    Attributes:
        adapter: the PEFT method; its optimizer replaces the default one when it has its own.
        adapter_config: the group `peft` of the configuration.
        write_card: None: TRL's card.
    """

    adapter: Adapter
    adapter_config: PeftConfig
    write_card: WriteCard | None
    accelerator: Any
    args: Any
    model: Any
    optimizer: Any
    state: Any
    control: Any
    save_model: Callable[..., None]
    get_optimizer_cls_and_kwargs: Callable[..., tuple[type, dict[str, Any]]]

    def create_optimizer(self, *args: Any, **kwargs: Any):
        if self.optimizer is None and self.adapter.optimizer is not None:
            optimizer_class, optimizer_kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = self.adapter.optimizer(self.model, self.adapter_config, optimizer_class, optimizer_kwargs)
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """transformers looks after a step whether it was the last one: a resumed run that has made all its steps would
        make one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.args.should_save:
            order_by_step(Path(self.args.output_dir or "."))
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

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

    def compute_dtype(self) -> torch.dtype:
        """What the model computes in: mixed precision's dtype, or that of its weights."""
        mixed, model = compute_dtype(self.args), self.accelerator.unwrap_model(self.model)
        return mixed if mixed.itemsize < 4 else model.dtype

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        if self.write_card is None:  # else `_save` has written it
            super().create_model_card(*args, **kwargs)  # type: ignore[misc]
