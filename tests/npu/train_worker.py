"""One rank of a tiny GRPO run, started by accelerate: python -m tests.npu.train_worker OUT_FOLDER SETTINGS.

SETTINGS is JSON for make_trainer. Writes OUT_FOLDER/rank<N>.json: what the ranks' norm weights held while completions
were generated and while the loss was computed, the losses, and how far the adapter moved.
"""

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import PartialState

from perl import device
from perl.config.schema import NoiseConfig
from tests.ranks import leave
from tests.trainers import make_trainer


def full(weight: torch.Tensor) -> list[float]:
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().float().cpu().tolist()


def sampling_on_cpu():
    """Every device has its own random stream. To compare two devices, both sample from the CPU's."""
    multinomial = torch.multinomial
    generator = torch.Generator().manual_seed(5)

    def on_cpu(probabilities, num_samples):
        return multinomial(probabilities.cpu(), num_samples, generator=generator).to(probabilities.device)

    return mock.patch.object(torch, "multinomial", on_cpu)


def run(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The report."""
    fixed = {"enabled": True, "seed": 3, "sigma_start": 0.5, "sigma_end": 0.1, "num_stages": 2}
    noise = NoiseConfig(**(fixed | settings.pop("noise", {})))
    trainer = make_trainer(out / "run", noise=noise, **settings)
    seen: dict[str, list] = {"generate": [], "loss": []}
    generating = False
    applied = trainer.noise.applied

    @contextlib.contextmanager
    def sampling(*args):
        """While tokens are drawn, and while sampler and trainer are compared."""
        nonlocal generating
        with applied(*args):
            generating = True
            try:
                yield
            finally:
                generating = False

    trainer.noise.applied = sampling
    merged: list[set[bool]] = []
    drawing = False
    engine = trainer.step.engine
    stream = engine.stream

    def watched(feed):
        nonlocal drawing
        drawing = True
        merged.append(set())
        try:
            yield from stream(feed)
        finally:
            drawing = False

    engine.stream = watched
    for name, module in trainer.accelerator.unwrap_model(trainer.model).named_modules():
        if name.endswith("0.post_attention_layernorm"):

            def look(m, _):
                if drawing:
                    merged[-1].add(engine.merge.merged)
                if not (hasattr(torch, "npu") and torch.npu.is_current_stream_capturing()):
                    seen["generate" if generating else "loss"].append(full(m.weight))

            module.register_forward_pre_hook(look)
    captured: list[object] = []
    capture = device.capture

    def captures(*args, **kwargs):
        captured.append(args)
        return capture(*args, **kwargs)

    with sampling_on_cpu(), mock.patch.object(device, "capture", captures):
        trainer.train()
    trainer.save_model(str(out / "adapter"))
    logs = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "world_size": trainer.args.world_size,
        "device": str(trainer.args.device),
        "distributed_type": str(trainer.accelerator.distributed_type),
        "generate": [seen["generate"][0], seen["generate"][-1]],
        "loss": [seen["loss"][0], seen["loss"][-1]],
        "losses": [row["loss"] for row in logs],
        "rewards": [row["reward"] for row in logs],
        "sigma": [row["aqn/sigma"] for row in logs],
        "kl": [row["aqn/kl"] for row in logs],
        "adapted": asdict(trainer.noise_stage.adapted),
        "rms": trainer.noise.rms,
        "merged": [sorted(rollout) for rollout in merged],
        "tolerance": trainer.step.comparison.tolerance,
        "graphs": len(captured),
    }


def main() -> None:
    out = Path(sys.argv[1])
    report = run(out, json.loads(sys.argv[2]))
    leave(out, PartialState().process_index, report)


if __name__ == "__main__":
    main()
