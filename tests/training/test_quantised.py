"""A training whose rollouts are drawn by a quantised base: what it measures, corrects, and leaves alone."""

import pytest
import torch

from perl.config.schema import NoiseConfig
from tests.trainers import make_trainer

NOISE = {"enabled": True, "seed": 3, "sigma_start": 0.05, "sigma_end": 0.01, "num_stages": 2}


def trained(folder, **settings):
    trainer = make_trainer(folder, engine="fast", max_steps=2, logging_steps=1, **settings)
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    assert all(torch.equal(dict(trainer.model.named_parameters())[name], tensor) for name, tensor in base.items())
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return weights, [row for row in trainer.state.log_history if "rollout/logp_kl" in row]


@pytest.mark.parametrize("noise", [None, NoiseConfig(**NOISE)], ids=["no noise", "AQN"])
def test_a_training_measures_and_corrects_the_quantisation(tmp_path, noise):
    weights, logged = trained(tmp_path, noise=noise, rollout={"quantization": "int8_w8a8"})
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert len(logged) == 2
    for row in logged:
        assert row["rollout/logp_mismatch"] > 1e-3  # float32 rounds less
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=0.3)
        assert ("aqn/sigma_realized" in row) == (noise is not None)


def test_none_is_the_training_that_was(tmp_path):
    plain, _ = trained(tmp_path / "plain")
    none, logged = trained(tmp_path / "none", rollout={"quantization": "none"})
    assert all(torch.equal(plain[name], tensor) for name, tensor in none.items())
    assert "sampling/importance_sampling_ratio/mean" not in logged[0]
