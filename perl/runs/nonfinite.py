"""A reward, a loss or a gradient that is NaN or infinite: the run stops with its batch saved, or makes no update of it.

    rollout  the rewards                                         NonFinite.unusable: a stop, or advantages that are NaN
    update   the loss of each micro-batch, the gradient's norm   NonFinite.found: the same answer on every process
    stop     RUN/nonfinite_step_N/rank-R.json, .safetensors      NonFinite.stop: one line, exit code 1
    skip     no optimizer step on any process                    NonFinite.settle: counted; a stop after MOST_IN_A_ROW

An optimizer skips parameters without a gradient, and DeepSpeed all of them where their norm is not finite.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import save_file

from perl.base.errors import RunError, UserError
from perl.device.sharding import local, whole

log = logging.getLogger(__name__)

MOST_IN_A_ROW = 10
"""Updates that are skipped one after the other, before the run stops all the same."""


class NonFinite:
    """
    Args:
        policy: common.on_nonfinite.
        run_dir: where the batch is left.
        accelerator: of the trainer.
    """

    def __init__(self, policy: Literal["stop", "skip"], run_dir: Path, accelerator: Any):
        self.policy, self.run_dir, self.accelerator = policy, run_dir, accelerator
        self.skipped = 0
        """Updates since the run began, before it was resumed too."""
        self.in_a_row = 0
        """Of these, up to now."""
        self.unusable_reward: str | None = None
        """The first reward that was not finite, of the rollouts that the update under way is of."""
        self._rewarded_for: int | None = None
        """The step whose rollouts were looked at last."""
        self._losses: list[torch.Tensor] = []

    def state(self) -> dict[str, Any]:
        """What a checkpoint must save, the same on every process."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "unusable_reward": self.unusable_reward}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
        self.unusable_reward = state["unusable_reward"]

    @property
    def unusable(self) -> bool:
        """Whether no update can be made of the rollouts of the update under way."""
        return self.unusable_reward is not None

    def look_at(
        self,
        step: int,
        rewards: torch.Tensor,
        functions: Sequence[str],
        infinite: list[str],
        shown: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> None:
        """No update can be made of a rollout where a reward is infinite (perl.rewards.files makes that of NaN too), or
        where there is none at all. Every process must come here.

        Args:
            step: of the update, from 1.
            rewards: float [rows of all processes, functions], NaN where a function gave a row none.
            functions: their names.
            infinite: this process's infinite rewards, in words.
            shown: what is saved of this process's completions.

        Raises:
            RunError: none can be made, and the run stops.
        """
        if step != self._rewarded_for:  # a step may have several rollouts, and a rollout several steps
            self.unusable_reward, self._rewarded_for = None, step
        if not rewards.isinf().any() and not rewards.isnan().all():
            return
        if named := gather_object(infinite):
            what = f"a reward is not finite: {named[0]}" + (f", and {len(named) - 1} more" if named[1:] else "")
        else:
            what = f"no reward of {', '.join(functions)} for any of the {len(rewards)} completions"
        self.unusable_reward = self.unusable_reward or what
        if self.policy == "stop":
            self.stop(step, what, lambda folder: save_batch(folder, self.accelerator.process_index, shown()))

    def add(self, loss: torch.Tensor) -> None:
        """[]: the loss of a micro-batch of the update under way. Nothing is exchanged, nor waited for."""
        self._losses.append(loss.detach().float())

    def found(self, norm: float | torch.Tensor | None) -> str | None:
        """What was not finite in the update under way, of any process; None: nothing. Every process must come here.

        Args:
            norm: of the gradient, DeepSpeed's as a number; None where gradients are scaled, as infinite ones then set
                the scale.
        """
        losses = torch.stack(self._losses)
        self._losses.clear()
        norm = float(whole(norm) if isinstance(norm, torch.Tensor) else norm or 0.0)
        wrong = torch.tensor([not losses.isfinite().all(), not math.isfinite(norm)], dtype=torch.float32)
        counts = self.accelerator.reduce(wrong.to(losses.device), reduction="sum")
        names = [name for name, count in zip(("loss", "norm of the gradient"), counts.tolist(), strict=True) if count]
        if self.unusable_reward is not None:  # where no row of it is computed the loss is 0
            return self.unusable_reward
        if not names:
            self.in_a_row = 0
            return None
        return f"the {' and the '.join(names)} {'is' if len(names) == 1 else 'are'} not finite"

    def settle(self, step: int, what: str, save: Callable[[Path], None]) -> None:
        """An update, the `step`-th, that must not be made: RunError, or it is counted. Every process must come here."""
        self.in_a_row += 1
        if self.policy == "stop":
            self.stop(step, what, save)
        if self.in_a_row == MOST_IN_A_ROW:
            self.stop(step, f"{what}, as in {MOST_IN_A_ROW - 1} updates before, which were skipped", save)
        self.skipped += 1
        log.warning("step %d: %s: no update is made (%d skipped so far)", step, what, self.skipped)

    def stop(self, step: int, what: str, save: Callable[[Path], None]) -> None:
        """RunError on every process, once all have saved their part of the batch.

        Args:
            save: writes this process's part into a folder.
        """
        folder = self.run_dir / f"nonfinite_step_{step}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save(folder)
            saved = f"the batch is in {folder}"
        except (OSError, SafetensorError) as error:
            saved = f"the batch cannot be saved ({error})"
        self.accelerator.wait_for_everyone()
        advice = "; --config.common.on_nonfinite skip goes on without this update" if self.policy == "stop" else ""
        raise RunError(f"step {step}: {what}; {saved}{advice}")


@torch.no_grad()
def require_finite_weights(model: Any, where: str) -> None:
    """Raise a UserError for a weight of `model` that holds NaN or infinity, as a broken copy or a diverged training
    leaves it: one sum of each tensor, where it lies. What lies on another rank (ZeRO-3's partitions) is left out.

    Args:
        where: the flag and the model that it names.
    """
    named = [(name, local(p)) for name, p in model.named_parameters() if p.is_floating_point()]
    named = [(name, weight) for name, weight in named if weight.numel() and not weight.is_meta]
    if not named or torch.stack([weight.sum().float() for _, weight in named]).isfinite().all():
        return
    for name, weight in named:  # a sum of finite numbers may be infinite
        if not weight.isfinite().all():
            own = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            raise UserError(f"{where}: {own} holds NaN or infinity; copy the model again, or name another one")


def save_batch(
    folder: Path, rank: int, rows: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Leave one process's part of a batch as rank-R.json, and rank-R.safetensors where there are tensors."""
    text = json.dumps([_plain(row) for row in rows], ensure_ascii=False, indent=1, default=str)
    (folder / f"rank-{rank}.json").write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    if tensors:
        whole = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / f"rank-{rank}.safetensors")


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they become their names."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
