"""The loss's own parts, by hand: equal rewards, importance ratio, the difference between sampler and trainer."""

import math

import pytest
import torch

from perl.base.errors import RankError
from perl.training.loss import (
    Difference,
    PolicyDrift,
    SamplerDifference,
    equal_rewards,
    importance_ratio,
    pad_right,
    require_same_policy,
    warn_of_difference,
    warn_of_ratio,
)
from tests.trainers import make_trainer


def test_equal_rewards_are_found_exactly():
    nan = float("nan")
    rewards = torch.tensor([[1.0, 1.0]] * 8 + [[1.0, 1.0]] * 7 + [[1.0, 0.0]] + [[nan, nan]] * 8)
    weights = torch.tensor([1.0, 0.2])
    assert equal_rewards(rewards, weights, 8).tolist() == [True] * 8 + [False] * 8 + [True] * 8
    # What it is for: in floating point the mean of eight 1.2 is not 1.2.
    total = (rewards[:8] * weights).sum(dim=1)
    assert ((total - total.mean()) / (total.std() + 1e-4)).abs().max() > 1e-3


def taken(difference):
    return difference.take(lambda sums: sums, torch.device("cpu"))


def test_difference_and_kl_by_hand():
    difference = SamplerDifference()
    difference.add(torch.tensor([[0.0, -1.0]]), torch.tensor([[-0.5, -1.0]]), torch.tensor([[1, 1]]))
    difference.add(torch.tensor([[-2.0, 7.0]]), torch.tensor([[-1.5, float("nan")]]), torch.tensor([[1, 1]]))
    difference.add(torch.tensor([[-2.0]]), torch.tensor([[-9.0]]), torch.tensor([[0]]))
    k3 = (math.exp(0.5) - 1 - 0.5) + (math.exp(-0.5) - 1 + 0.5)
    assert taken(difference) == pytest.approx(Difference(1 / 3, k3 / 3))
    assert taken(difference) is None


def test_a_difference_that_noise_is_part_of_says_so():
    """One clean rollout after noisy ones is no reason to compare all of them by rounding."""
    difference, one = SamplerDifference(), torch.ones(1, 1)
    for noisy in (True, False):
        difference.add(one, one, one)
        difference.noisy |= noisy
    assert taken(difference) == Difference(0.0, 0.0, noisy=True)
    difference.add(one, one, one)
    assert taken(difference) == Difference(0.0, 0.0, noisy=False)


def test_another_policy_is_refused_and_rounding_is_not():
    require_same_policy(None, 1e-3)
    require_same_policy(Difference(1e-3, 0.0), 1e-3)
    for absolute in (2e-3, math.nan):
        with pytest.raises(RankError, match="the sampler does not run the policy that is trained"):
            require_same_policy(Difference(absolute, 0.0), 1e-3)


def test_a_difference_that_grows_is_said_once(caplog):
    warn_of_difference(Difference(5.0, 1.0), None)  # nothing was compared at the start
    warn_of_difference(Difference(1e-4, 0.0), 1e-3)
    assert caplog.records == []
    for apart in (0.25, 0.5):
        warn_of_difference(Difference(apart, 0.0), 1e-3)
    assert [record.message.split(":")[0] for record in caplog.records] == ["rollout"]
    assert "more than 0.001 nats from the trainer's" in caplog.records[0].message


def test_the_drift_of_the_policy_is_verls_ppo_kl():
    """Tokens 1 and 2 of the first row, and the only one of the second: 0.5, -0.25 and 30, which is cut at 20."""
    drift = PolicyDrift()
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    policy = torch.tensor([[-1.5, -1.0, -9.0], [-31.0, 0.0, 0.0]])
    drift.add(torch.tensor([[-1.0, -1.25, 0.0], [-1.0, 5.0, 5.0]]), policy, mask)
    assert drift.take(lambda sums: sums, torch.device("cpu")) == pytest.approx((0.5 - 0.25 + 20) / 3)
    assert drift.take(lambda sums: sums, torch.device("cpu")) is None
    drift.add(torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.tensor([[1]]))
    others = torch.tensor([0.0, 3.0])  # another rank's: three tokens that have not moved
    assert drift.take(lambda sums: sums + others, torch.device("cpu")) == pytest.approx(1 / 4)


def test_lists_are_padded_and_a_missing_number_is_nan():
    """TRL writes None where vLLM has no number."""
    padded = pad_right([[-1.0], [-2.0, None]], torch.device("cpu"))
    assert padded.nan_to_num(nan=9.0).tolist() == [[-1.0, 0.0], [-2.0, 9.0]]


def test_importance_ratio_by_hand():
    trainer = torch.log(torch.tensor([[0.5, 0.2, 0.9]]))
    sampler = torch.log(torch.tensor([[0.25, 0.4, 0.1]]))
    mask = torch.tensor([[1, 1, 0]])
    assert importance_ratio(trainer, sampler, mask, "token", None, 3.0).tolist() == [pytest.approx([2.0, 0.5, 1.0])]
    assert importance_ratio(trainer, sampler, mask, "token", 0.8, 1.5).tolist() == [pytest.approx([1.5, 0.8, 1.0])]
    assert importance_ratio(trainer, sampler, mask, "sequence", None, 3.0).tolist() == [pytest.approx([1.0])]


def test_ratios_that_take_most_of_the_gradient_are_said_once(caplog):
    for mean in (1.0, 0.6, 0.4, 0.3):
        warn_of_ratio(mean, "sequence_mask")
    (line,) = caplog.messages
    assert "write --config.training.vllm_importance_sampling_mode token_truncate" in line
    warn_of_ratio(0.1, "token_truncate")
    assert "sampler and trainer are far apart" in caplog.messages[1]


def test_the_trainer_says_it_of_the_ratios_that_trl_logs(tmp_path, caplog):
    trainer = make_trainer(tmp_path, engine="fast", vllm_importance_sampling_mode="token_mask")
    trainer._metrics["train"]["sampling/importance_sampling_ratio/mean"] = [0.9, 0.04]
    trainer.log({})
    assert any("vllm_importance_sampling_mode token_mask" in message for message in caplog.messages)
