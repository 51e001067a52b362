"""The policy that samples: the adapter folded into the weights, proved, and measured against the trainer's."""

import json

import pytest
import torch

from perl.adapters.layers import adapted_layers
from perl.training.callbacks import MetricsWriter
from tests.training.test_trainer import adapter_state, guide_noise, make_trainer


def metrics(folder, name):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row[name] for row in map(json.loads, lines) if name in row]


@pytest.mark.parametrize("engine", ["fast", "generate"])
def test_rollouts_with_the_adapter_folded_teach_what_those_with_it_apart_do(tmp_path, engine):
    """Three steps with noise: the same tokens, so the same adapter up to rounding; the base stays bit for bit."""
    adapters = {}
    for merge in (True, False):
        writer = MetricsWriter(tmp_path / "metrics.jsonl")
        settings = {"noise": guide_noise(), "max_steps": 3, "callbacks": [writer], "rollout": {"merge_adapter": merge}}
        trainer = make_trainer(tmp_path, engine=engine, **settings)
        base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
        seen = []
        complete = trainer._complete

        def spy(*args, complete=complete, trainer=trainer, seen=seen, **kwargs):
            seen.append(all(adapted.layer.merged for adapted in adapted_layers(trainer.model)))
            return complete(*args, **kwargs)

        trainer._complete = spy
        trainer.train()
        assert seen == [merge] * 3
        assert all(torch.equal(p, base[n]) for n, p in trainer.model.named_parameters() if n in base)
        assert not any(adapted.layer.merged for adapted in adapted_layers(trainer.model))
        adapters[merge] = adapter_state(trainer)
    moved = {name: tensor for name, tensor in adapters[True].items() if "lora_B" in name}
    assert all(tensor.abs().max() > 1e-3 for tensor in moved.values())
    for name, tensor in adapters[True].items():
        assert torch.allclose(tensor, adapters[False][name], atol=1e-5), name
    assert metrics(tmp_path, "rollout/merge_share_lost") == [0.0] * 3  # float32: nothing is rounded away; False: none
