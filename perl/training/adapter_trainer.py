"""What every trainer of an adapter adds to TRL's: the method's own optimizer, and our model card."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perl.adapters import Adapter
from perl.config.schema import PeftConfig

WriteCard = Callable[[Path, list[dict[str, Any]]], None]
"""Writes the model card into a folder that holds an adapter, given the log history."""


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
    args: Any
    model: Any
    optimizer: Any
    state: Any
    save_model: Callable[..., None]
    get_optimizer_cls_and_kwargs: Callable[..., tuple[type, dict[str, Any]]]

    def create_optimizer(self, *args: Any, **kwargs: Any):
        if self.optimizer is None and self.adapter.optimizer is not None:
            optimizer_class, optimizer_kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = self.adapter.optimizer(self.model, self.adapter_config, optimizer_class, optimizer_kwargs)
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        folder, pushed = Path(output_dir or self.args.output_dir or "."), Path(self.args.output_dir or ".")
        (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle of every argument, which nothing reads
        # A run that goes on takes TRL's reference from peft.adapter again. From a checkpoint that holds it transformers
        # would load the reference alone, and not the adapter.
        shutil.rmtree(folder / "ref", ignore_errors=True)
        if self.write_card is None:
            return
        self.write_card(folder, self.state.log_history)  # over PEFT's
        if self.args.push_to_hub and folder != pushed:
            shutil.copyfile(folder / "README.md", pushed / "README.md")

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        if self.write_card is None:  # else `_save` has written it
            super().create_model_card(*args, **kwargs)  # type: ignore[misc]
