"""One rank of several, started by accelerate: python -m tests.training.pool_worker FOLDER MODEL LAGS [SETTINGS].

Trains with two workers, once for each lag, whole and resumed, with `lost_at` where the workers were lost after so many
batches; the first pieces are handed out `late_s` late, and ranks wait for each other `patience_s` at most. Writes
FOLDER/rank<N>.json: by lag whether both adapters are the same on this rank, how stale the batches were, and a digest of
the adapter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from perl.adapters.delivery import delivered, to_bytes
from perl.config.schema import NoiseConfig
from perl.models.folders import load_model
from perl.training.pool import PoolLost, _Background
from tests.ranks import leave
from tests.trainers import SUMS, make_trainer, reward_tokens

NOISE = NoiseConfig(enabled=True, seed=3, sigma_start=0.1, sigma_end=0.01, num_stages=3)
CUT = 3


def train(
    model: str, folder: Path, lag: int, checkpoint: Path | None, settings: dict[str, Any], lost_at: int = 0
) -> tuple[bytes, Any]:
    loaded = load_model(model)
    loaded.name_or_path = model
    fixed = {"max_steps": 5, "prompts": SUMS, "save_strategy": "steps", "save_steps": CUT}
    fixed |= {"per_device_train_batch_size": 2}
    rollout = {"workers": 2, "lag": lag, "piece_size": 4} | settings.pop("rollout", {})
    noise = NOISE if settings.pop("noise", True) else None
    calls: list[Any] = []

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        calls.append(completion_ids)
        if len(calls) == lost_at and (background := trainer.step.engine._background):  # on the main process
            background._fail("all workers died")
        return reward_tokens(completion_ids)

    trainer = make_trainer(
        folder, model=loaded, engine="fast", rollout=rollout, noise=noise, rewards=[reward], **fixed | settings
    )
    try:
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    finally:
        trainer.step.engine.close()
    with trainer.policy.gathered():
        return to_bytes(delivered(trainer.policy.bare)), trainer


def hand_out_late(seconds: float) -> None:
    """The first pieces reach the workers so late."""
    submit = _Background.submit

    def late(background: _Background, *pieces: Any) -> None:
        _Background.submit = submit
        threading.Timer(seconds, submit, (background, *pieces)).start()

    _Background.submit = late


def compare(out: Path, model: str, lag: int, settings: dict[str, Any]) -> dict[str, Any]:
    lost_at = settings.pop("lost_at", 0)
    whole, trainer = train(model, out / "whole", lag, None, dict(settings))
    checkpoint = out / "whole" / f"checkpoint-{CUT}"
    if lost_at:
        checkpoint = out / "lost" / f"checkpoint-{lost_at}"
        with contextlib.suppress(PoolLost):
            train(model, out / "lost", lag, None, dict(settings), lost_at)
    logged = [row for row in trainer.state.log_history if "rollout/logp_kl" in row]
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    resumed, _ = train(model, checkpoint.parent, lag, checkpoint, dict(settings))
    return {
        "same": whole == resumed,
        "staleness": [row.get("pool/staleness", 0.0) for row in logged],
        "mismatch": max(row.get("rollout/engine_mismatch", 0.0) for row in logged),
        "quantization_kl": [row.get("rollout/quantization_kl", 0.0) for row in logged],
        "digest": hashlib.sha256(whole).hexdigest(),
    }


def main() -> None:
    out, model = Path(sys.argv[1]), sys.argv[2]
    settings = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    if "late_s" in settings:
        hand_out_late(settings.pop("late_s"))
        PartialState(cpu=True, timeout=timedelta(seconds=settings.pop("patience_s")))
    found = {lag: compare(out / f"lag{lag}", model, lag, dict(settings)) for lag in json.loads(sys.argv[3])}
    leave(out, PartialState().process_index, found)


if __name__ == "__main__":
    main()
