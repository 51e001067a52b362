"""What the trainer does for perl.algorithms: KL in loss and reward, advantages of tokens, resumed runs."""

import json
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from transformers import TrainerCallback
from trl import GRPOTrainer

from perl.adapters import ADAPTERS
from perl.algorithms import ALGORITHMS
from perl.algorithms.algorithm import Algorithm, Scored
from perl.algorithms.grpo import group_relative
from perl.algorithms.kl import KLCoefficient
from perl.algorithms.rloo import leave_one_out
from perl.config.schema import AlgorithmConfig, NoiseConfig, PeftConfig
from perl.training.metrics import Metrics
from perl.training.step import Step
from perl.training.trainer import PerlGRPOTrainer
from tests.tiny import END, tiny_model
from tests.trainers import kept_batches, make_trainer, move_adapter, reward_tokens
from tests.training.injected import inject, learn

ONE_ROW = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}


pytestmark = pytest.mark.usefixtures("quick_collections")


def assert_same(one, other, places=1e-6):
    assert one.losses == pytest.approx(other.losses, rel=places, abs=places)
    assert one.grad_norms == pytest.approx(other.grad_norms, rel=1e-4)
    assert max(one.grad_norms) > 0
    for name, tensor in one.adapter.items():
        assert (other.adapter[name] - tensor).abs().max() <= places, name


# KL in the loss


@pytest.mark.parametrize(
    ("loss_type", "level", "corrected"),  # one of each way to add up
    [
        ("grpo", "token", False),
        ("bnpo", "token", True),
        ("dr_grpo", "token", True),
        ("dapo", "token", True),
        ("luspo", "sequence", True),
    ],
)
def test_kl_is_added_up_as_in_trls_loss(tmp_path, loss_type, level, corrected):
    settings = {"loss_type": loss_type, "beta": 0.5, "mask_truncated_completions": True, "max_completion_length": 12}
    settings |= {"importance_sampling_level": level, "use_bias_correction_kl": corrected}
    settings |= {} if loss_type == "bnpo" else {"max_tokens_per_microbatch": 100, **ONE_ROW, "steps_per_generation": 16}
    logs = []
    for kind in (PerlGRPOTrainer, GRPOTrainer):
        trainer = make_trainer(tmp_path, kind=kind, rewards=[reward_tokens], **settings)
        inject(trainer)
        move_adapter(trainer.model, 0.2)
        trainer.train()
        logs.append(trainer.state.log_history[0])
    ours, trls = logs
    assert trls["kl"] > 1e-3
    assert ours["kl"] > 1e-3  # a mean over all tokens; TRL's is one over micro-batches
    for metric in ("loss", "grad_norm"):
        assert ours[metric] == pytest.approx(trls[metric], rel=1e-5), metric


def one_log(folder, estimator):
    """Of a step whose rewards are all equal: nothing but the KL divergence is in its loss."""
    trainer = make_trainer(
        folder,
        rewards=[lambda completions, **kwargs: [1.0] * len(completions)],
        algorithm={"kl_estimator": estimator},
        beta=0.25,
        max_steps=1,
        gradient_accumulation_steps=1,
    )
    move_adapter(trainer.model, 0.05)
    trainer.train()
    return next(row for row in trainer.state.log_history if "kl" in row)


def test_every_estimator_is_in_the_loss_and_logged(tmp_path):
    logs = {name: one_log(tmp_path / name, name) for name in ("low_var_kl", "k1", "abs", "mse")}
    for name, row in logs.items():
        assert row["loss"] == pytest.approx(0.25 * row["kl"], rel=1e-3), name
        assert row["grad_norm"] > 0, name
    kl = {name: row["kl"] for name, row in logs.items()}
    assert kl["low_var_kl"] > 0 < kl["mse"]
    assert kl["abs"] > abs(kl["k1"])
    assert len({round(value, 6) for value in kl.values()}) == 4


# KL in the reward


class Look(TrainerCallback):
    """Log-probabilities of the first batch by the policy before its update, and by the reference."""

    def __init__(self, trainer, batches):
        self.trainer, self.batches = trainer, batches
        self.policy = self.reference = None

    def on_pre_optimizer_step(self, *args, **kwargs):
        if self.policy is None:
            score, batch = self.trainer.step.passes.logps, self.batches[0]
            self.policy = score(self.trainer.model, batch.rows, batch.width)
            with self.trainer.model.disable_adapter():
                self.reference = score(self.trainer.model, batch.rows, batch.width)


def recorded(folder, **settings):
    """A trainer that has made a step, its batch, and the log-probabilities of policy and reference on it."""
    trainer = make_trainer(folder, rewards=[reward_tokens], max_steps=1, **settings)
    batches = kept_batches(trainer)
    look = Look(trainer, batches)
    trainer.add_callback(look)
    move_adapter(trainer.model, 0.05)
    trainer.train()
    return trainer, batches[0], look.policy, look.reference


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_kl_is_taken_from_the_reward(tmp_path, name, beta):
    trainer, batch, policy, reference = recorded(tmp_path, beta=beta, algorithm={"name": name, "kl_in_reward": 0.5})
    rewards, mask = torch.tensor([row.rewards[0] for row in batch.rows]), batch.mask
    kl = ((policy - reference) * mask).float()
    assert kl.abs().max() > 1e-3
    totals = rewards - 0.5 * kl.sum(dim=1)
    tokens = -0.5 * kl
    tokens[torch.arange(len(tokens)), mask.sum(dim=1) - 1] += rewards
    scored = Scored(rewards=totals, token_rewards=tokens, mask=mask, group_size=4, gather=lambda x: x, first=0)
    expected = (ALGORITHMS[name].advantages or group_relative)(scored)
    assert torch.allclose(batch.advantages, expected if expected.ndim == 2 else expected[:, None], atol=1e-4)
    row = trainer.state.log_history[0]
    assert row["kl_in_reward"] == pytest.approx((kl.sum(dim=1) / mask.sum(dim=1)).mean().item(), abs=1e-5)
    assert row["advantages/max"] == pytest.approx(
        expected.masked_fill(~mask, -9).max().item() if expected.ndim == 2 else expected.max().item(), abs=1e-4
    )


def test_the_reference_of_a_continued_adapter_is_that_adapter(tmp_path):
    config = PeftConfig(r=4, lora_alpha=8)
    model = get_peft_model(tiny_model(scale=4.0), ADAPTERS["lora"].build(config))  # type: ignore[arg-type]
    move_adapter(model, 0.05)
    trainer = make_trainer(
        tmp_path, model=model, peft=config, algorithm={"kl_in_reward": 0.5}, max_steps=1, learning_rate=1e-2
    )
    trainer.train()
    assert trainer.state.log_history[0]["kl_in_reward"] == pytest.approx(0.0, abs=1e-6)
    assert not (tmp_path / "ref").exists()


@pytest.mark.parametrize("steps_per_generation", [2, 4])
def test_an_adapted_coefficient_goes_on_where_it_was(tmp_path, steps_per_generation):
    def run(folder, **settings):
        trainer = make_trainer(
            tmp_path / folder,
            rewards=[reward_tokens],
            algorithm={
                "name": "reinforce_plus_plus",
                "kl_in_reward": 0.2,
                "kl_in_reward_target": 1e-4,
                "kl_in_reward_horizon": 16,
            },
            max_steps=6,
            save_strategy="steps",
            save_steps=3,
            steps_per_generation=steps_per_generation,
        )
        trainer.train(**settings)
        rows = [row for row in trainer.state.log_history if "loss" in row]
        shown = ("loss", "kl_in_reward", "kl_in_reward/coefficient")
        return [[row.get(name) for name in shown] for row in rows], trainer

    whole, first = run("whole")
    again, second = run("again", resume_from_checkpoint=str(tmp_path / "whole/checkpoint-3"))
    assert len({row[2] for row in whole if row[2]}) > 2
    assert again[3:] == whole[3:]
    assert first.step.kl_coefficient.value == second.step.kl_coefficient.value != 0.2
    for (name, one), (_, other) in zip(first.model.named_parameters(), second.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name


# Advantages of tokens


OF_TOKENS = Algorithm(paper="", advantages=lambda scored: leave_one_out(scored)[:, None] * scored.mask)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo"},
        {"loss_type": "dapo", "max_tokens_per_microbatch": 100, **ONE_ROW},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 1e-4},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "mask_truncated_completions": True},
        {"loss_type": "sapo", "num_iterations": 2},
        {"loss_type": "vespo", "num_iterations": 2},
        {"loss_type": "dapo", "off_policy_mask_threshold": 1e-6, "num_iterations": 2},
    ],
    ids=json.dumps,
)
def test_advantages_of_tokens_that_are_those_of_their_rows_learn_the_same(monkeypatch, settings):
    monkeypatch.setitem(ALGORITHMS, "rloo_of_tokens", OF_TOKENS)
    settings = {"rewards": "ties", "max_steps": 3, **settings}
    of_rows = learn(PerlGRPOTrainer, algorithm={"name": "rloo"}, **settings)
    of_tokens = learn(PerlGRPOTrainer, algorithm={"name": "rloo_of_tokens"}, **settings)
    assert_same(of_tokens, of_rows)


def test_importance_ratios_weigh_advantages_of_tokens(monkeypatch, tmp_path):
    monkeypatch.setitem(ALGORITHMS, "rloo_of_tokens", OF_TOKENS)
    losses = []
    for name in ("rloo", "rloo_of_tokens"):
        trainer = make_trainer(
            tmp_path / name,
            rewards=[reward_tokens],
            engine="fast",
            algorithm={"name": name},
            rollout={"importance_correction": "token"},
            num_iterations=2,
        )
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert any(abs(loss) > 1e-4 for loss in losses[0])


def test_one_completion_of_each_prompt_is_compared_with_the_batch(tmp_path):
    trainer = make_trainer(
        tmp_path, rewards=[reward_tokens], algorithm={"name": "reinforce_plus_plus"}, num_generations=1, max_steps=1
    )
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["advantages/min"] < 0 < log["advantages/max"]
    assert log["grad_norm"] > 0


def test_a_group_of_one_is_not_counted_as_one_of_equal_rewards(tmp_path):
    trainer = make_trainer(
        tmp_path, rewards=[reward_tokens], algorithm={"name": "reinforce_plus_plus"}, num_generations=1, max_steps=1
    )
    trainer.train()
    assert "frac_reward_zero_std" not in trainer.state.log_history[0]


def greedy_by_hand(model, prompt: tuple[int, ...], length: int) -> list[int]:
    """Up to `length` tokens, each the likeliest behind those before it, to the first END."""
    ids = list(prompt)
    while len(ids) < len(prompt) + length and (len(ids) == len(prompt) or ids[-1] != END):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_rows_without_a_trained_token_are_not_in_the_measured_kl():
    """They counted as 0, so that the coefficient fell where it had to rise."""
    metrics = Metrics(SimpleNamespace(rows=lambda rows: rows), defaultdict(list))
    coefficient = KLCoefficient(0.1, target=0.05, horizon=100)
    step = SimpleNamespace(
        kl_coefficient=coefficient,
        config=SimpleNamespace(algorithm=AlgorithmConfig()),
        processes=metrics.processes,
        metrics=metrics,
    )
    mask = torch.tensor([[True, True], [False, False], [False, False]])
    batch = SimpleNamespace(reference=torch.zeros(3, 2), mask=mask)
    policy = torch.tensor([[0.1, 0.06], [5.0, 5.0], [5.0, 5.0]])
    penalty = Step._kl_penalty(step, batch, policy)
    torch.testing.assert_close(penalty, torch.tensor([[0.01, 0.006], [0.0, 0.0], [0.0, 0.0]]))
    assert metrics.logged["kl_in_reward"] == pytest.approx([0.08])
    assert coefficient.value == pytest.approx(0.1 * (1 + 0.2 * 3 / 100))
    Step._kl_penalty(step, SimpleNamespace(reference=torch.zeros(3, 2), mask=torch.zeros_like(mask)), policy)
    assert len(metrics.logged["kl_in_reward"]) == 1  # of nothing
    assert coefficient.value == pytest.approx(0.1 * (1 + 0.2 * 3 / 100))


@pytest.mark.parametrize(("engine", "generations"), [("fast", 1), ("fast", 4), ("generate", 4)])
def test_remax_compares_with_the_greedy_completion_of_the_prompt(tmp_path, engine, generations):
    """Drawn by the same policy, its noise included, scored by the same rewards, and not trained on."""
    noise = NoiseConfig(
        enabled=True, sigma_start=0.5, sigma_end=0.5, schedule="linear", target_modules=["norm"], seed=3
    )
    calls: list[int] = []

    def reward(completion_ids, log_metric, **kwargs):
        calls.append(len(completion_ids))
        log_metric("seen", float(len(completion_ids)))
        return reward_tokens(completion_ids)

    settings = {"num_generations": generations, "max_steps": 1, "learning_rate": 0.0}
    trainer = make_trainer(
        tmp_path, rewards=[reward], engine=engine, algorithm={"name": "remax"}, noise=noise, **settings
    )
    kept = kept_batches(trainer)
    trainer.train()
    (batch,) = kept
    prompts = 8 // generations
    assert calls == [8, prompts]  # a greedy one of each prompt, which the batch has not
    assert len(batch.rows) == 8
    weights = batch.rows[0].weights
    with torch.no_grad(), trainer.step.samplers.policy(weights) as policy:
        for row in batch.rows:
            assert row.baseline == pytest.approx(reward_tokens([greedy_by_hand(policy, row.prompt_ids, 8)]))
    advantages = batch.advantages.masked_fill(~batch.mask, 0.0)
    for row, found in zip(batch.rows, advantages, strict=True):
        wanted = row.rewards[0] - row.baseline[0]
        assert found[: len(row.token_ids)].tolist() == pytest.approx([wanted] * len(row.token_ids), abs=1e-6)
    log = trainer.state.log_history[0]
    assert log["reward"] == pytest.approx(sum(row.rewards[0] for row in batch.rows) / 8)
    assert log["seen"] == 8
    assert log["grad_norm"] > 0


def test_an_infinite_reward_of_a_greedy_completion_is_no_baseline(tmp_path, caplog):
    def reward(completion_ids, **kwargs):
        return [math.inf] if len(completion_ids) == 1 else reward_tokens(completion_ids)

    settings = {"num_generations": 8, "max_steps": 1, "learning_rate": 0.0}
    trainer = make_trainer(tmp_path, rewards=[reward], algorithm={"name": "remax"}, **settings)
    kept = kept_batches(trainer)
    trainer.train()
    assert not kept[0].advantages.masked_fill(~kept[0].mask, 0.0).any()
    assert "a reward of a greedy completion is not finite, and no baseline: reward" in caplog.text


def test_equal_rewards_leave_no_advantage_where_each_function_is_normalized(tmp_path):
    """0.7 * 8 / 8 is not 0.7 in float32: a group's mean is a little off, and so were its advantages."""

    def seven_tenths(completions, **kwargs):
        return [0.7] * len(completions)

    def first_group(completion_ids, **kwargs):
        tokens = reward_tokens(completion_ids)
        return [r if row < 8 else 0.1 for row, r in enumerate(tokens)]

    trainer = make_trainer(
        tmp_path,
        rewards=[seven_tenths, first_group],
        num_generations=8,
        multi_objective_aggregation="normalize_then_sum",
        algorithm={"name": "gdpo"},
        gradient_accumulation_steps=4,
        max_steps=1,
    )
    kept = kept_batches(trainer)
    trainer.train()
    assert kept[0].advantages.shape == (16, 1)
    assert kept[0].advantages[:8].all()
    assert not kept[0].advantages[8:].any()
