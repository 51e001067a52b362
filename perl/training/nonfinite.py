"""A reward, a loss or a gradient that is NaN or infinite: the run stops with its batch saved, or makes no update of it.

    update   the loss of each micro-batch, the gradient's norm   NonFinite.found: the same answer on every process
    stop     RUN/nonfinite_step_N/rank-R.json, .safetensors      NonFinite.stop: one line, exit code 1
    skip     no optimizer step on any process                    NonFinite.skip: counted; a stop after MOST_IN_A_ROW

A rollout with a reward that is not finite gets advantages that are NaN, and so a loss that is: there is one way from
there. An optimizer skips parameters without a gradient, and DeepSpeed all of them where their norm is not finite.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from perl.errors import RunError
from perl.sharding import whole

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
        self._in_a_row = 0
        self._losses: list[torch.Tensor] = []

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
        if not names:
            self._in_a_row = 0
            return None
        return f"the {' and the '.join(names)} {'is' if len(names) == 1 else 'are'} not finite"

    def settle(self, step: int, what: str, save: Callable[[Path], None]) -> None:
        """An update, the `step`-th, that must not be made: RunError, or it is counted. Every process must come here."""
        self._in_a_row += 1
        if self.policy == "stop":
            self.stop(step, what, save)
        if self._in_a_row == MOST_IN_A_ROW:
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


def save_batch(
    folder: Path, rank: int, rows: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Leave one process's part of a batch as rank-R.json, and rank-R.safetensors where there are tensors."""
    text = json.dumps([_plain(row) for row in rows], ensure_ascii=False, indent=1, default=str)
    (folder / f"rank-{rank}.json").write_text(text + "\n", encoding="utf-8")
    if tensors:
        whole = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / f"rank-{rank}.safetensors")


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: they become their names."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
