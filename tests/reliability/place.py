"""A folder in which one mistake is made: a tiny model, eight sums and an adapter that are right, and what changes them.

Everything is named relative to the folder, in which the programs run, so that a message is the same on every machine.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.tiny import save_tiny, tiny_model

Words = list[str]


@functools.cache
def originals() -> Path:
    """model/ and adapter/, made once a process."""
    import torch
    from peft import LoraConfig, get_peft_model

    folder = Path(tempfile.mkdtemp())
    save_tiny(folder / "model", scale=4.0)
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, base_model_name_or_path="model")
    get_peft_model(tiny_model(scale=4.0), config).save_pretrained(str(folder / "adapter"))
    return folder


class Place:
    """The folder, and the inputs in it; each method writes one and returns its name."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def write(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return name

    def rows(self, *rows: Any, name: str = "data.jsonl") -> str:
        return self.write(name, "".join(json.dumps(row) + "\n" for row in rows))

    def sums(self, count: int = 8, name: str = "data.jsonl", **changes: Any) -> str:
        """GSM8K's schema; `changes` are columns of the third row."""
        rows = [{"question": f"What is {i} + 3 ?", "answer": f"#### {i + 3}"} for i in range(count)]
        if changes:
            rows[2] |= changes
        return self.rows(*({k: v for k, v in row.items() if v is not ...} for row in rows), name=name)

    def sparse(self, name: str, size: int) -> str:
        """A file of `size` bytes, all zero, of which the disk holds none."""
        with (self.folder / name).open("wb") as file:
            file.truncate(size)
        return name

    def table(self, rows: list[dict[str, Any]], name: str = "data.parquet") -> str:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), self.folder / name)
        return name

    def model(self, **changes: Callable[[Path], object]) -> str:
        """The folder model, with files changed: a name, `_` for its dots, and what is done to the file."""
        return self.copy("model", changes)

    def adapter(self, **changes: Callable[[Path], object]) -> str:
        return self.copy("adapter", changes)

    def copy(self, name: str, changes: dict[str, Callable[[Path], object]]) -> str:
        target = self.folder / name
        if not target.exists():
            shutil.copytree(originals() / name, target)
        for file, change in changes.items():
            change(target / next(k for k in FILES if k.replace(".", "_") == file))
        return name

    def train(self, data: str | None = None, *words: str, **settings: Any) -> Words:
        """A command line of perl.train; settings are fields, `__` for their dots."""
        return self._training(SETTINGS, data, words, settings)

    def sft(self, data: str | None = None, *words: str, **settings: Any) -> Words:
        return self._training(SFT_SETTINGS, data, words, settings)

    def _training(self, common: dict[str, Any], data: str | None, words: Iterable[str], settings: Any) -> Words:
        both = common | {"model.model_name_or_path": "model", "training.output_dir": "run"}
        both |= {"dataset.dataset_name_or_path": data or self.sums()}
        both |= {name.replace("__", "."): value for name, value in settings.items()}
        if both["model.model_name_or_path"] == "model":
            self.model()
        flags = [word for name, value in both.items() if value is not ... for word in (f"--config.{name}", str(value))]
        return [*flags, *words]

    def evaluate(self, data: str | None = None, *words: str) -> Words:
        model = [] if "--model" in words else ["--model", self.model()]
        return [*model, "--dataset", data or self.sums(), "--max_new_tokens", "4", "--result_dir", "results", *words]


FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "chat_template.jinja",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
SETTINGS: dict[str, Any] = {
    "training.max_steps": 2,
    "training.per_device_train_batch_size": 4,
    "training.num_generations": 4,
    "training.max_completion_length": 8,
    "training.report_to": "none",
    "peft.r": 4,
}
SFT_SETTINGS: dict[str, Any] = {
    "training.max_steps": 2,
    "training.per_device_train_batch_size": 4,
    "training.report_to": "none",
    "peft.r": 4,
}


# ------------------------------------------------------------------------------------- what is done to a file


def remove(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    """To its first half, as a copy that broke off."""
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def text(content: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(content)


def field(**changes: Any) -> Callable[[Path], object]:
    """Fields of a JSON file; `...` takes one out."""

    def change(file: Path) -> None:
        both = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({name: value for name, value in both.items() if value is not ...}))

    return change


def tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], object]:
    """The tensors of a safetensors file, changed in their dict."""

    def write(file: Path) -> None:
        from safetensors.torch import load_file, save_file

        held = load_file(file)
        change(held)
        save_file(held, file, metadata={"format": "pt"})

    return write


def garbage(file: Path) -> None:
    file.write_bytes(b"\xff" * 100)
