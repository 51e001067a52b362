"""One rank of a tiny GRPO run with noise on every norm layer, for tests.npu.runs_worker."""

from pathlib import Path
from typing import Any

import torch

from perl.config.schema import NoiseConfig
from perl.noise.injector import is_norm
from tests.trainers import make_trainer


def run(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """For every norm layer, whether its weight was another one in a rollout's first forward, and whether each forward
    of the loss saw the clean bits; the same for the adapted weights, which hold the adapter in the rollout."""
    noise = NoiseConfig(
        enabled=True, seed=3, sigma_start=0.5, sigma_end=0.1, target_modules=["norm"], exclude_patterns=[]
    )
    trainer = make_trainer(out / "run", noise=noise, max_steps=2, learning_rate=5e-2, **settings)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    base = {n: m for n, m in policy.named_modules() if is_norm(m) or n.endswith("base_layer")}
    clean = {name: module.weight.detach().clone() for name, module in base.items()}  # whole: nothing is sharded yet
    noisy: dict[str, list[bool]] = {name: [] for name in base}
    exact: dict[str, list[bool]] = {name: [] for name in base}

    def look(name):
        def hook(module, _):
            weight = module.weight.detach()
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            if torch.is_grad_enabled():  # the loss
                exact[name].append(torch.equal(weight.cpu(), clean[name].cpu()))
            elif trainer.step.engine.merge.merged:
                noisy[name].append(not torch.equal(weight.cpu(), clean[name].cpu()))

        return hook

    for name, module in base.items():
        module.register_forward_pre_hook(look(name))
    trainer.train()
    return {
        "norms": [name for name, module in base.items() if is_norm(module)],
        "in_rollout": {name: all(seen) for name, seen in noisy.items()},
        "last_in_rollout": {name: seen[-1] for name, seen in noisy.items()},
        "exact_in_loss": {name: (len(seen), all(seen)) for name, seen in exact.items()},
    }
