"""What a process of a run has measured and counted, in a checkpoint: without it the first log of a resumed run would be
of fewer steps than it says, and what is counted over the whole run would begin again.

A dict of tensors and plain values, of AdapterTrainer._run_state."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from perl.errors import UserError
from perl.training.rollout_state import NOT_DATA

OF_ALL = ("total_loss", "tokens", "skipped", "rms")
"""What every process has the same."""


def state_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"run_state_{rank}.pt"


def save(checkpoint: Path, rank: int, state: dict[str, Any]) -> None:
    checkpoint.mkdir(parents=True, exist_ok=True)
    torch.save(state, state_file(checkpoint, rank))


def load(checkpoint: Path, rank: int, processes: int, device: torch.device) -> dict[str, Any] | None:
    """This process's state; of another number of processes what is in OF_ALL; None where the checkpoint has none."""
    file = state_file(checkpoint, rank)
    if not file.is_file():
        file = state_file(checkpoint, 0)
    if not file.is_file():
        return None
    try:
        state = torch.load(file, map_location=device, weights_only=True)
    except UnpicklingError as error:
        raise UserError(f"{file}: {NOT_DATA}") from error
    return state if state["processes"] == processes else {name: state[name] for name in OF_ALL if name in state}
