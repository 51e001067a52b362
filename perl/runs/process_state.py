"""What a process holds that a checkpoint must save, and TRL and transformers forget: process_state_R.pt of process R.

    run      AdapterTrainer._run_state   measured for the next log, counted over the run: the first log of a resumed run
                                         would be of fewer steps than it says, and what is counted would begin again
    rollout  RolloutState                the position in the generation window, and the rollouts that later updates
                                         still use: a resumed run would sample again, and be another run

Tensors and plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate.utils import send_to_device

from perl.base.errors import UserError
from perl.runs.checkpoints import FLAG

NOT_DATA = "holds more than tensors and plain values, which is not read; resume from a checkpoint of your own"
NAME = "process_state"
OF_ALL = ("total_loss", "tokens", "skipped", "in_a_row", "unusable_reward", "rms", "merging", "entropy")
"""What every process has the same in `run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState:
    """Of GRPO's rollouts."""

    step: int
    """Micro-batches trained so far, TRL's `_step`."""
    buffered_inputs: list[dict[str, Any]] | None
    """Micro-batches of the window's rollout; None where the next micro-batch begins a window."""
    settings: dict[str, int] = field(default_factory=dict)
    """How the window is cut into updates, by the names of the flags."""
    adapted: dict[str, float] | None = None
    """Fields of perl.noise.schedule.Adapted; None under other schedules than target_kl."""
    kl_coefficient: float | None = None
    """Of the KL divergence in the reward; None where it is not adapted."""
    stream: dict[str, Any]
    """PromptStream.state, the same of every process."""
    ahead: list[dict[str, Any]] = field(default_factory=list)
    """Of each batch that workers draw ahead: its first position, the weights that draw it, and what they are made of,
    unless they are the checkpoint's own; the same of every process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    run: dict[str, Any]
    rollout: RolloutState | None = None
    """None of perl.sft."""


def state_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"{NAME}_{rank}.pt"


def save(checkpoint: Path, rank: int, processes: int, state: ProcessState) -> None:
    checkpoint.mkdir(parents=True, exist_ok=True)
    rollout = state.rollout and {each.name: getattr(state.rollout, each.name) for each in fields(state.rollout)}
    torch.save({"processes": processes, "run": state.run, "rollout": rollout}, state_file(checkpoint, rank))


def load(
    checkpoint: Path, rank: int, processes: int, settings: Mapping[str, int], device: torch.device | str = "cpu"
) -> ProcessState:
    """The state of this process, its tensors on `device`, but for the policies of `ahead`, which stay in memory. Of
    another number of processes `run` is what is in OF_ALL. Where the next micro-batch begins a window its `step` is 0,
    so that it does whatever the settings are now.

    Args:
        settings: how a window is cut into updates now.

    Raises:
        UserError: on every process alike, where the checkpoint was written in the middle of a window, by another
            number of processes, to whom its rollouts belong, or with other settings; for a file that holds more than
            data; and for a checkpoint of TRL's or of a version before 0.13.
    """
    of_rank = state_file(checkpoint, rank)
    file = of_rank if of_rank.is_file() else next(iter(sorted(checkpoint.glob(f"{NAME}_*.pt"))), None)
    if file is None:
        raise UserError(f"{FLAG} {checkpoint}: it has no {of_rank.name}; name a checkpoint that perl has written")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise UserError(f"{file}: {NOT_DATA}") from error
    run: Any = send_to_device(state["run"], device)
    rollout = state["rollout"]
    if rollout is not None and "equal_share" not in (rollout.get("stream") or {}):
        raise UserError(f"{FLAG} {checkpoint}: a version before 0.13 has written it; finish the run with that version")
    if state["processes"] != processes:
        run = {name: run[name] for name in OF_ALL if name in run}
    if rollout is not None and rollout["buffered_inputs"] is None:
        rollout["step"] = 0
    elif rollout is not None:
        window = rollout["settings"]
        _require_same_window(checkpoint, window, settings, state["processes"], processes, file == of_rank)
        rollout["buffered_inputs"] = send_to_device(rollout["buffered_inputs"], device)
    return ProcessState(run=run, rollout=None if rollout is None else RolloutState(**rollout))


def _require_same_window(
    checkpoint: Path, then: Mapping[str, int], now: Mapping[str, int], wrote: int, processes: int, mine: bool
) -> None:
    if wrote == processes and mine and then == now:
        return
    changed = [f"{name} {value}, now {now[name]}" for name, value in then.items() if now[name] != value]
    if wrote != processes:
        changed.insert(0, f"{wrote} processes, now {processes}")
    raise UserError(
        f"{FLAG} {checkpoint}: it was written in the middle of a generation window,"
        f" with {', '.join(changed) or 'the state of another process'}; go on as it was begun, or resume from a"
        " checkpoint whose step is a multiple of steps_per_generation * num_iterations / gradient_accumulation_steps"
    )
