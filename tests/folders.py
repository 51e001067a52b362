"""The file of problems that a training reads, and what it leaves in its folder, for tests of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def write_sums(file: Path, count: int = 8) -> Path:
    """Problems in GSM8K's schema, with worked answers."""
    rows = [{"question": f"What is {i} + 3 ?", "answer": f"{i} + 3 = {i + 3} #### {i + 3}"} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of its metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def adapter_of(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of its adapter."""
    return load_file(run / "adapter" / "adapter_model.safetensors")
