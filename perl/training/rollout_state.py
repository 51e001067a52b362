"""What TRL forgets in a checkpoint: its position in the generation window, and the rollouts that later updates still
use (num_iterations or steps_per_generation above gradient_accumulation_steps). Without them a resumed run samples again
and is another run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from perl.errors import UserError

NOT_DATA = "holds more than tensors and plain values, which is not read; resume from a checkpoint of your own"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState:
    """Of one process."""

    step: int
    """Micro-batches trained so far, TRL's `_step`."""
    buffered_inputs: list[dict[str, Any]] | None
    """Micro-batches of the window's rollout; None where the next micro-batch begins a window."""
    processes: int
    settings: dict[str, int] = field(default_factory=dict)
    """How the window is cut into updates, by the names of the flags."""
    adapted: dict[str, float] | None = None
    """Fields of perl.noise.schedule.Adapted; None under other schedules than target_kl."""
    kl_coefficient: float | None = None
    """Of the KL divergence in the reward, where it is adapted; None in a checkpoint of an older version."""
    stream: dict[str, Any] | None = None
    """PromptStream.state, the same of every process; None without dynamic sampling."""


def state_file(checkpoint: str | Path, rank: int) -> Path:
    return Path(checkpoint) / f"rollout_state_{rank}.pt"


def save(checkpoint: str | Path, rank: int, state: RolloutState) -> None:
    torch.save(asdict(state), state_file(checkpoint, rank))


def load(checkpoint: str | Path, rank: int, processes: int, settings: dict[str, int]) -> RolloutState | None:
    """The state of this process, its tensors on the CPU; None for a checkpoint that has none (TRL's own). Where the
    next micro-batch begins a window its `step` is 0, so that it does whatever the settings are now.

    Raises a UserError, on every process alike, where the checkpoint was written in the middle of a window, by another
    number of processes, to whom its rollouts belong, or with other settings, by which they are cut into updates.
    """
    saved = sorted(Path(checkpoint).glob("rollout_state_*.pt"))
    if not saved:
        return None
    mine = state_file(checkpoint, rank)
    file = mine if mine.exists() else saved[0]
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise UserError(f"{file}: {NOT_DATA}") from error
    wrote = state.setdefault("processes", len(saved))
    if state["buffered_inputs"] is None:
        return RolloutState(**state | {"step": 0})
    then = state.setdefault("settings", settings)
    if wrote == processes and mine.exists() and then == settings:
        return RolloutState(**state)
    changed = [f"{name} {value}, now {settings[name]}" for name, value in then.items() if settings[name] != value]
    if wrote != processes:
        changed.insert(0, f"{wrote} processes, now {processes}")
    raise UserError(
        f"--config.training.resume_from_checkpoint {checkpoint}: it was written in the middle of a generation window,"
        f" with {', '.join(changed) or 'the state of another process'}; go on as it was begun, or resume from a"
        " checkpoint whose step is a multiple of steps_per_generation * num_iterations / gradient_accumulation_steps"
    )
