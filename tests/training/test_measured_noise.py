"""Noise in a run that is measured: against its weights, and by the KL divergence that the schedule target_kl holds."""

import itertools
import logging
from dataclasses import asdict

import pytest
import torch

from perl.base.errors import UserError
from perl.config.schema import NoiseConfig
from perl.engines.torch_policy import TorchPolicyEngine
from perl.noise.schedule import Adapted, adapt
from perl.runs.process_state import state_file
from tests.tiny import tiny_model
from tests.trainers import kept_batches, make_trainer, reward_tokens


def noise_of(**changes):
    return NoiseConfig(**({"enabled": True, "seed": 3, "sigma_start": 0.5, "sigma_end": 0.1} | changes))


def target_kl(**changes):
    return noise_of(
        schedule="target_kl", **({"target_kl_start": 0.02, "target_kl_end": 0.005, "num_stages": 3} | changes)
    )


def trainer_of(folder, noise, **settings):
    """No two rewards of a group are equal, so the update computes every row."""
    return make_trainer(
        folder, noise=noise, rewards=(reward_tokens,), **({"engine": "fast", "max_steps": 3} | settings)
    )


def steps(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


def weights_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same_base(trainer, before):
    frozen = [name for name, p in trainer.model.named_parameters() if not p.requires_grad]
    return all(torch.equal(dict(trainer.model.named_parameters())[name], before[name]) for name in frozen)


def small_norms():
    model = tiny_model(scale=4.0)
    with torch.no_grad():
        for size, layer in zip((0.25, 2.0), model.model.layers, strict=True):
            layer.post_attention_layernorm.weight.fill_(size)
    return model


def test_a_run_logs_how_large_its_noise_is_for_the_weights(tmp_path):
    trainer = trainer_of(tmp_path, noise_of(sigma_start=0.05, sigma_end=0.025, num_stages=2), model=small_norms())
    trainer.train()
    # 0.05 / 0.25 = 0.2 and 0.05 / 2 = 0.025, then half of them
    assert [row["aqn/sigma_relative"] for row in steps(trainer)] == pytest.approx([0.1125, 0.1125, 0.05625])
    assert [row["aqn/sigma_relative_max"] for row in steps(trainer)] == pytest.approx([0.2, 0.2, 0.1])


def test_a_run_with_relative_noise(tmp_path):
    trainer = trainer_of(tmp_path, noise_of(relative=True, num_stages=2), model=small_norms())
    before = weights_of(trainer)
    trainer.train()
    for row, sigma in zip(steps(trainer), (0.5, 0.5, 0.1), strict=True):
        assert row["aqn/sigma"] == row["aqn/sigma_relative"] == pytest.approx(sigma)
        # 128 numbers: the standard error of their RMS is 6 %
        assert row["aqn/sigma_realized"] == pytest.approx(sigma, rel=0.25)
    assert same_base(trainer, before)


def test_noise_too_large_for_the_weights_is_warned_of_once_at_the_start(tmp_path, caplog):
    trainer = trainer_of(tmp_path, noise_of(sigma_start=0.5, sigma_end=0.05, warmup_stage=True), max_steps=2)
    with caplog.at_level(logging.WARNING, logger="perl"):
        trainer.train()
    (said,) = [record.message for record in caplog.records if "RMS" in record.message]
    assert "have an RMS of 1: sigma_start 0.5 is 0.5 of it" in said
    assert "write --config.noise_injection.sigma_start 0.02 --config.noise_injection.sigma_end 0.0002 or" in said


def test_the_kl_divergence_is_that_of_noisy_and_clean_policy_on_the_drawn_tokens(tmp_path):
    trainer = trainer_of(tmp_path, target_kl(), max_steps=1)
    model, kept = trainer.model, kept_batches(trainer)
    adapter = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    trainer.train()
    with torch.no_grad():
        for parameter, first in zip([p for p in model.parameters() if p.requires_grad], adapter, strict=True):
            parameter.copy_(first)  # as it was when the tokens were drawn

    def logps():
        (batch,), found = kept, []
        for row in batch.rows:
            logits = model(input_ids=torch.tensor([[*row.prompt_ids, *row.token_ids]])).logits
            drawn = logits[0, len(row.prompt_ids) - 1 : -1].log_softmax(-1)
            found.append(drawn.gather(-1, torch.tensor(row.token_ids)[:, None])[:, 0])
        return torch.cat(found)

    with torch.no_grad():
        clean = logps()
        with trainer.noise.applied(0.5, (0, 0)):
            noisy = logps()
    ratio = clean - noisy
    expected = (ratio.exp() - 1 - ratio).mean().item()
    assert expected > 1e-3
    assert steps(trainer)[0]["aqn/kl"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("old_logps", ["clean", "noisy"])
def test_each_rollouts_sigma_follows_from_the_one_before(tmp_path, old_logps):
    trainer = trainer_of(tmp_path, target_kl(old_logps=old_logps), max_steps=4)
    before = weights_of(trainer)
    drawn = []
    applied = trainer.noise.applied
    trainer.noise.applied = lambda sigma, draw: drawn.append((draw, sigma)) or applied(sigma, draw)
    trainer.train()
    logged = steps(trainer)
    assert [row["aqn/target_kl"] for row in logged] == pytest.approx([0.02, 0.02, 0.01, 0.005])
    assert logged[0]["aqn/sigma"] == 0.5
    adapted = Adapted(0.5)
    for row, after in itertools.pairwise(logged):
        adapted = adapt(adapted, row["aqn/kl"], row["aqn/target_kl"], 0.5)
        assert after["aqn/sigma"] == adapted.sigma != row["aqn/sigma"]
    assert dict(drawn) == {(step, 0): row["aqn/sigma"] for step, row in enumerate(logged)}
    if old_logps == "clean":  # the same comparison, over the same tokens
        assert [r["aqn/kl"] for r in logged] == pytest.approx([r["rollout/logp_kl"] for r in logged], rel=1e-4)
    else:
        assert max(r["rollout/logp_kl"] for r in logged) < 1e-6 < min(r["aqn/kl"] for r in logged)
    assert same_base(trainer, before)


def test_a_second_update_with_the_same_rollout_does_not_count(tmp_path):
    """By then the policy has moved: what is measured would be the update's KL divergence too."""
    trainer = trainer_of(tmp_path, target_kl(), max_steps=4, num_iterations=2)
    trainer.train()
    assert ["aqn/kl" in row for row in steps(trainer)] == [True, False, True, False]


@pytest.mark.parametrize("window", [{}, {"num_iterations": 2}])
def test_a_resumed_run_adapts_as_if_it_had_not_been_interrupted(tmp_path, window):
    whole = trainer_of(tmp_path / "whole", target_kl(), save_strategy="steps", save_steps=1, **window)
    whole.train()
    torch.manual_seed(456)
    resumed = trainer_of(tmp_path / "again", target_kl(), **window)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    logged = [row["aqn/sigma"] for row in steps(whole)]
    assert logged[0] != logged[1]  # what the checkpoint must hold
    assert [row["aqn/sigma"] for row in steps(resumed)] == logged
    expected = weights_of(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(resumed).items())


def test_the_checkpoint_of_another_schedule_holds_no_adapted_noise(tmp_path):
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    for name, noise in (("linear", noise_of()), ("target_kl", target_kl())):
        trainer = trainer_of(tmp_path / name, noise, **settings)
        trainer.train()
        state = torch.load(state_file(tmp_path / name / "checkpoint-1", 0), weights_only=True)["rollout"]
        assert state["adapted"] == (asdict(trainer.noise_stage.adapted) if name == "target_kl" else None)


def test_target_kl_is_refused_where_the_samplers_numbers_are_of_another_distribution(tmp_path, monkeypatch):
    """As vLLM's are with top_k."""
    monkeypatch.setattr(TorchPolicyEngine, "not_comparable", lambda engine, sampling: "of a truncated distribution")
    with pytest.raises(UserError, match=r"target_kl: .* of a truncated distribution; write .*schedule linear"):
        trainer_of(tmp_path, target_kl(), top_k=5)
