"""Training without an adapter: --config.peft.type none trains all weights."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.base.files import read_json
from perl.device.sharding import is_split
from perl.models.folders import INDEX

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments

    from perl.config.schema import PeftConfig

NO_ADAPTER = "all weights are trained (--config.peft.type none)"
"""Why whatever needs an adapter has none."""
SIDE_FILES = ("config.json", "generation_config.json", "*token*.json", "*token*.model", "vocab*", "merges.txt",
              "chat_template*", "*processor_config.json", "*.py", "LICENSE*")  # fmt: skip
"""Of a model's folder, what belongs to its weights wherever they go."""


def no_adapter(config: PeftConfig) -> None:
    """PEFT is given no configuration: the trainers train the model as it is."""


def has_adapter(model: Any) -> bool:
    """Whether `model` is wrapped by PEFT; else all its weights are trained."""
    return hasattr(model, "peft_config")


def autocast_dtype(training: TrainingArguments) -> torch.dtype:
    """What mixed precision computes in; float32 without it."""
    import torch

    return torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else torch.float32


def trained_dtype(training: TrainingArguments) -> torch.dtype:
    """Of weights that are trained themselves, where the user names none: float32, so that no step of the optimizer is
    lost to rounding; DeepSpeed keeps float32 weights for its optimizer, and is given what it computes in."""
    import torch

    return torch.float32 if training.deepspeed_plugin is None else autocast_dtype(training)


def loses_updates(dtype: torch.dtype, training: TrainingArguments) -> bool:
    """Whether the optimizer would write to weights of `dtype`, in which a step smaller than half a number's spacing
    (of bfloat16 1/512 to 1/256 of the weight) changes nothing. Under mixed precision accelerate's FSDP2 makes them
    float32."""
    upcast = os.environ.get("ACCELERATE_USE_FSDP") == "true" and autocast_dtype(training).itemsize < 4
    return dtype.itemsize < 4 and training.deepspeed_plugin is None and not upcast


class RolloutCopies:
    """Copies of a policy's float32 weights in the dtype that mixed precision computes in, for rollouts: autocast would
    make them for each decoded token, and leave keys and values of two dtypes. Weights that FSDP2 has split are cast as
    they are gathered; other weights, and those of a policy with an adapter, stay as they are.

    Args:
        model: not wrapped by DDP or DeepSpeed.
        dtype: what is computed in; None, or float32, copies nothing.
    """

    def __init__(self, model: Any, dtype: torch.dtype | None):
        self.model, self.dtype = model, dtype
        self._copies: dict[int, torch.nn.Parameter] = {}
        """By the id of the weight. On an accelerator they stay for the run: a captured graph finds them."""

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model computes with the copies of what its weights hold now."""
        swapped = []
        if self.dtype is not None and self.dtype.itemsize < 4 and not has_adapter(self.model):
            swapped = [
                (module, name, weight)
                for module in self.model.modules()
                for name, weight in module._parameters.items()
                if weight is not None and weight.dtype.itemsize == 4 and weight.numel() and not is_split(weight)
            ]
        try:
            self._fill({id(weight): weight for _, _, weight in swapped})
            for module, name, weight in swapped:
                module._parameters[name] = self._copies[id(weight)]
            yield
        finally:
            for module, name, weight in swapped:
                module._parameters[name] = weight
                if weight.device.type == "cpu":
                    self._copies.pop(id(weight), None)

    def _fill(self, weights: dict[int, torch.nn.Parameter]) -> None:
        import torch

        for key, weight in weights.items():
            if key in self._copies:
                self._copies[key].data.copy_(weight.detach())
            else:
                self._copies[key] = torch.nn.Parameter(weight.detach().to(self.dtype), requires_grad=False)


def complete_model(folder: Path, base: str, dtype: torch.dtype) -> None:
    """Give the weights that a trainer has just saved in `folder` configuration and tokenizer of their base, byte for
    byte: transformers 5 writes them in a form that 4 misreads. The configuration names `dtype`, in which the weights
    are to be computed with, whatever they are stored in.

    Args:
        base: folder of the model that the training began with; "" for one that was made in memory.
    """
    if base:
        for file in sorted(Path(base).iterdir()):
            if file.is_file() and any(file.match(pattern) for pattern in SIDE_FILES):
                shutil.copyfile(file, folder / file.name)
    file = folder / "config.json"
    config = read_json(file)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def store_as(folder: Path, dtype: torch.dtype) -> None:
    """Rewrite the weights in `folder` in `dtype`, file by file."""
    from safetensors.torch import load_file, save_file

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = folder / INDEX
    if index.is_file():
        content = read_json(index)
        content["metadata"]["total_size"] = total
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
