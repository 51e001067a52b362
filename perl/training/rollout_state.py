"""What TRL forgets in a checkpoint: its position in the generation window, and the rollouts that later updates still
use (num_iterations or steps_per_generation above gradient_accumulation_steps). Without them a resumed run samples again
and is another run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from perl.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState:
    """Of one process."""

    step: int
    """Micro-batches trained so far, TRL's `_step`."""
    buffered_inputs: list[dict[str, Any]] | None
    """Micro-batches of the window's rollout; None where the next micro-batch begins a window."""
    processes: int


def state_file(checkpoint: str | Path, rank: int) -> Path:
    return Path(checkpoint) / f"rollout_state_{rank}.pt"


def save(checkpoint: str | Path, rank: int, state: RolloutState) -> None:
    torch.save(asdict(state), state_file(checkpoint, rank))


def load(checkpoint: str | Path, rank: int, processes: int) -> RolloutState | None:
    """The state of this process, its tensors on the CPU; None for a checkpoint that has none (TRL's own).

    Raises a UserError, on every process alike, where another number of processes wrote the checkpoint in the middle of
    a window: its rollouts belong to those processes.
    """
    saved = sorted(Path(checkpoint).glob("rollout_state_*.pt"))
    if not saved:
        return None
    mine = state_file(checkpoint, rank)
    state = torch.load(mine if mine.exists() else saved[0], map_location="cpu", weights_only=True)
    wrote = state.setdefault("processes", len(saved))
    if wrote == processes and mine.exists():
        return RolloutState(**state)
    if state["buffered_inputs"] is None:
        return RolloutState(**state)
    raise UserError(
        f"--config.training.resume_from_checkpoint {checkpoint}: it was written by {wrote} processes in the middle of a"
        f" generation window, and {processes} go on now; start {wrote} processes, or resume from a checkpoint whose"
        " step is a multiple of steps_per_generation * num_iterations / gradient_accumulation_steps"
    )
