"""A training whose rollouts are drawn by a quantised base: what it measures, corrects, and leaves alone."""

import pytest
import torch

from perl.algorithms import ALGORITHMS
from perl.config.schema import NoiseConfig
from perl.models.folders import load_model
from perl.training.passes import Passes
from tests.environments.training import fields_of
from tests.quantised import needs_int8
from tests.tiny import save_tiny
from tests.trainers import make_trainer

pytestmark = needs_int8
NOISE = {"enabled": True, "seed": 3, "sigma_start": 0.05, "sigma_end": 0.01, "num_stages": 2}


def trained(folder, checkpoint=None, **settings):
    trainer = make_trainer(folder, engine="fast", **({"max_steps": 2, "logging_steps": 1} | settings))
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        trainer.step.engine.close()
    assert all(torch.equal(dict(trainer.model.named_parameters())[name], tensor) for name, tensor in base.items())
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return weights, [row for row in trainer.state.log_history if "rollout/logp_kl" in row]


def from_folder(folder):
    """A model that workers can load too."""
    model = load_model(save_tiny(folder, scale=4.0))
    model.name_or_path = str(folder)
    return model


@pytest.mark.parametrize("noise", [None, NoiseConfig(**NOISE)], ids=["no noise", "AQN"])
def test_a_training_measures_and_corrects_the_quantisation(tmp_path, noise):
    weights, logged = trained(tmp_path, noise=noise, rollout={"quantization": "int8_w8a8"})
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert len(logged) == 2
    for row in logged:
        assert row["rollout/logp_mismatch"] > 1e-3  # float32 rounds less
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=0.3)
        assert row["rollout/quantization_kl"] > 1e-5  # of each batch: it was the first one's alone
        assert ("aqn/sigma_realized" in row) == ("aqn/kl" in row) == (noise is not None)


def test_none_is_the_training_that_was(tmp_path):
    plain, _ = trained(tmp_path / "plain")
    none, logged = trained(tmp_path / "none", rollout={"quantization": "none"})
    assert all(torch.equal(plain[name], tensor) for name, tensor in none.items())
    assert "sampling/importance_sampling_ratio/mean" not in logged[0]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_each_part_does_to_the_policy_is_measured_apart(tmp_path, quantization):
    weights, logged = trained(
        tmp_path / "run",
        model=from_folder(tmp_path / "base"),
        noise=NoiseConfig(**NOISE),
        rollout={"quantization": quantization, "workers": 1, "lag": 1},
    )
    assert all(tensor.isfinite().all() for tensor in weights.values())
    first, second = logged
    assert first["rollout/staleness_kl"] == pytest.approx(0.0, abs=1e-6)  # the policy of step 0 drew it
    assert second["rollout/staleness_kl"] > 1e-4
    for row in logged:
        assert row["rollout/quantization_kl"] > 1e-5
        assert row["aqn/kl"] > 1e-6
        assert row["rollout/engine_mismatch"] > 1e-3


def test_workers_draw_what_the_trainer_draws_itself(tmp_path):
    rollout = {"quantization": "int4", "piece_size": 4}
    ways = {"alone": {}, "one worker": {"workers": 1}, "two workers": {"workers": 2}}
    found = {}
    for name, way in ways.items():
        model = from_folder(tmp_path / name / "base")
        found[name], _ = trained(tmp_path / name / "run", model=model, rollout=rollout | way)
    for name in ways:
        assert all(torch.equal(found["alone"][each], tensor) for each, tensor in found[name].items())


def test_without_quantisation_the_parts_are_not_there(tmp_path):
    _, logged = trained(tmp_path)
    assert not [name for row in logged for name in row if name.endswith(("quantization_kl", "staleness_kl"))]


def test_the_exact_policy_leaves_the_quantisation_out_of_the_correction(tmp_path):
    """Without noise and lag the policy that drew, its base not quantised, is the one that is trained."""
    _, logged = trained(tmp_path, rollout={"quantization": "int8_w8a8", "behaviour": "exact"})
    for row in logged:
        assert row["rollout/logp_kl"] == pytest.approx(0.0, abs=1e-6)
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["rollout/quantization_kl"] > 1e-5


@pytest.mark.parametrize(
    ("behaviour", "correction", "sigma", "passes"),
    [
        ("engine", "token", 0.05, [4, 4]),  # a few rows: the policy that drew, and without its noise
        ("exact", "token", 0.05, [32, 4]),  # all rows for the loss, a few for aqn/kl
        ("exact", "token", 0.0, [32]),  # there is no noise yet
        ("exact", "none", 0.05, [4, 4]),  # nothing is corrected
    ],
)
def test_no_pass_over_all_rows_is_for_the_log_alone(tmp_path, monkeypatch, behaviour, correction, sigma, passes):
    made, compute = [], Passes.logps
    monkeypatch.setattr(
        Passes, "logps", lambda self, model, rows, width: made.append(len(rows)) or compute(self, model, rows, width)
    )
    noise = NoiseConfig(**(NOISE | {"sigma_start": sigma, "sigma_end": min(sigma, 0.01)}))
    rollout = {"quantization": "int8", "behaviour": behaviour, "importance_correction": correction}
    _, (row,) = trained(
        tmp_path, noise=noise, rollout=rollout, max_steps=1, per_device_train_batch_size=16, num_generations=4
    )
    assert made == passes
    assert row["rollout/quantization_kl"] > 1e-6
    assert ("aqn/kl" in row) == (sigma > 0.0)


def test_target_kl_follows_the_noise_and_not_the_quantisation(tmp_path):
    """Four bits move the policy by far more than the target, which would bring sigma down to its bound."""
    noise = NoiseConfig(enabled=True, seed=3, schedule="target_kl", sigma_start=0.01, target_kl_start=0.01)
    _, logged = trained(tmp_path, noise=noise, rollout={"quantization": "int4"})
    first, second = logged
    for row in logged:  # sigma followed the first batch alone
        assert row["rollout/quantization_kl"] > row["aqn/kl"]
    expected = 0.01 * (0.01 / first["aqn/kl"]) ** 0.5  # the target over the first measurement
    assert second["aqn/sigma"] == pytest.approx(min(max(expected, 0.005), 0.02), rel=1e-3)


@pytest.mark.parametrize("quantization", ["int8_w8a8", "int4"])
def test_a_resumed_run_is_the_run(tmp_path, quantization):
    """Which inputs keep 16 bits is found again, without the noise of the step that goes on."""
    settings = {"noise": NoiseConfig(**NOISE), "rollout": {"quantization": quantization}, "max_steps": 3}
    settings |= {"save_strategy": "steps", "save_steps": 1}
    whole, _ = trained(tmp_path / "run", **settings)
    resumed, _ = trained(tmp_path / "run", checkpoint=str(tmp_path / "run" / "checkpoint-1"), **settings)
    assert all(torch.equal(whole[name], tensor) for name, tensor in resumed.items())


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_so_it_is_with_every_algorithm(tmp_path, algorithm):
    weights, logged = trained(tmp_path, rollout={"quantization": "int8"}, **fields_of(algorithm))
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert all(row["rollout/quantization_kl"] > 1e-6 for row in logged)
