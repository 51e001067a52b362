"""One rank of a tiny GRPO run that trains all weights: python -m tests.npu.full_worker OUT_FOLDER SETTINGS.

SETTINGS is JSON for make_trainer; OUT_FOLDER/base holds the model. Writes OUT_FOLDER/rank<N>.json: a checksum of every
weight after the training, how far each has moved, whether the loss saw each norm weight as it was before the noise, and
what was logged. The model is saved to OUT_FOLDER/model.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from perl.config.schema import NoiseConfig
from perl.device.sharding import whole
from perl.runs.run import save_result
from tests.ranks import leave
from tests.trainers import make_trainer


def main() -> None:
    out, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    noise = NoiseConfig(enabled=True, seed=3, sigma_start=0.5, sigma_end=0.1, num_stages=2)
    model = AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float32).train()
    settings = {"max_steps": 2, "learning_rate": 1e-2, "beta": 0.1, "engine": "fast"} | settings
    trainer = make_trainer(out / "run", model=model, noise=noise, adapter="none", **settings)
    assert trainer.noise is not None
    target = trainer.noise.targets[0]
    clean: list[torch.Tensor] = []
    seen: list[bool] = []
    noisy: list[bool] = []
    applied = trainer.noise.applied

    @contextlib.contextmanager
    def recorded(*args):
        clean.append(whole(target.weight).cpu().clone())
        with applied(*args):
            noisy.append(not torch.equal(whole(target.weight).cpu(), clean[-1]))
            yield

    trainer.noise.applied = recorded

    def look(module, _):
        if torch.is_grad_enabled():
            weight = whole(module.weight).cpu()
            # Under mixed precision FSDP2 casts it, and with DDP rollouts have a copy in bfloat16.
            coarse = min(weight.dtype, clean[-1].dtype, key=lambda dtype: dtype.itemsize)
            seen.append(torch.equal(weight.to(coarse), clean[-1].to(coarse)))

    target.module.register_forward_pre_hook(look)
    trainer.train()
    save_result(trainer, out)
    with trainer.policy.gathered() as policy:
        weights = {name: whole(weight).float().cpu().clone() for name, weight in policy.named_parameters()}
    before = load_file(out / "base" / "model.safetensors")
    report = {
        "sums": {name: weight.double().sum().item() for name, weight in weights.items()},
        "moved": {name: (weight - before[name].float()).abs().max().item() for name, weight in weights.items()},
        "noisy": noisy,
        "clean_in_loss": seen,
        "kl": [row["kl"] for row in trainer.state.log_history if "kl" in row],
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "tolerance": trainer.step.comparison.tolerance,
        "dtype": str(policy.dtype),
    }
    if trainer.args.process_index == 0:
        saved = load_file(out / "model" / "model.safetensors")
        report["apart"] = {name: (saved[name].float() - weight).abs().max().item() for name, weight in weights.items()}
        report["extra"] = sorted(saved.keys() - weights.keys())
    leave(out, trainer.args.process_index, report)


if __name__ == "__main__":
    main()
