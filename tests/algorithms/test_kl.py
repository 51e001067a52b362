"""KL by hand, on two completions of three tokens."""

import math

import pytest
import torch

from perl.algorithms.kl import KLCoefficient, kl_divergence, token_rewards

pytestmark = pytest.mark.numeric

MASK = torch.tensor([[True, True, False], [True, False, True]])


def test_the_reward_of_a_completion_is_at_its_last_trained_token():
    assert token_rewards(torch.tensor([2.0, -1.0]), MASK).tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, -1.0]]


def test_a_penalty_is_taken_at_every_trained_token():
    penalty = torch.tensor([[0.5, 0.25, 8.0], [1.0, 8.0, -1.0]])
    assert token_rewards(torch.tensor([2.0, -1.0]), MASK, penalty).tolist() == [[-0.5, 1.75, 0.0], [-1.0, 0.0, 0.0]]


def test_rows_without_a_reward_or_a_token_have_none():
    mask = torch.tensor([[True, True], [False, False]])
    found = token_rewards(torch.tensor([math.nan, 1.0]), mask, torch.ones(2, 2))
    assert found.tolist() == [[0.0, 0.0], [0.0, 0.0]]


POLICY = torch.tensor([[-1.0, -2.0, -0.5], [-0.25, -3.0, -1.5]])
REFERENCE = torch.tensor([[-1.5, -1.0, -0.5], [-0.5, -2.0, -2.5]])
VERLS = {
    "k1": [[0.5, -1.0, 0.0], [0.25, -1.0, 1.0]],
    "abs": [[0.5, 1.0, 0.0], [0.25, 1.0, 1.0]],
    "mse": [[0.125, 0.5, 0.0], [0.03125, 0.5, 0.5]],
    "low_var_kl": [[0.106531, 0.718282, 0.0], [0.028801, 0.718282, 0.367879]],
}
"""What verl 0.9.1's kl_penalty returned; by hand, of a token 0.5 apart: 0.5, 0.5, 0.5**2 / 2, e**-0.5 + 0.5 - 1."""


@pytest.mark.parametrize("estimator", VERLS)
def test_estimators_are_verls(estimator):
    assert kl_divergence(POLICY, REFERENCE, estimator).tolist() == [
        pytest.approx(r, abs=1e-6) for r in VERLS[estimator]
    ]


def test_low_var_kl_is_bit_for_bit_trls():
    policy, reference = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))
    trls = torch.exp(reference - policy) - (reference - policy) - 1
    assert torch.equal(kl_divergence(policy, reference, "low_var_kl"), trls)


def test_a_coefficient_follows_its_target():
    coefficient = KLCoefficient(0.2, target=0.1, horizon=100)
    values = []
    for kl in (0.3, 0.05, 0.105):  # errors 2 and -0.5 count as 0.2 and -0.2, 0.05 as it is
        coefficient.adapt(kl, completions=8)
        values.append(coefficient.value)
    assert values == pytest.approx([0.2 * 1.016, 0.2 * 1.016 * 0.984, 0.2 * 1.016 * 0.984 * 1.004])
    assert values == pytest.approx([0.2032, 0.1999488, 0.2007485952])  # of verl 0.9.1's AdaptiveKLController


def test_a_fixed_coefficient_stays():
    coefficient = KLCoefficient(0.2)
    coefficient.adapt(5.0, completions=8)
    assert coefficient.value == 0.2


def test_a_rollout_changes_the_coefficient_by_a_fifth_at_most():
    """With more completions than the horizon it became negative, or 0 for good."""
    coefficient = KLCoefficient(0.1, target=0.05, horizon=10)
    coefficient.adapt(0.0, completions=64)
    assert coefficient.value == pytest.approx(0.08)
    coefficient.adapt(1.0, completions=50)
    assert coefficient.value == pytest.approx(0.096)
