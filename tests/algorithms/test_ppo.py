"""Generalized advantage estimation and whitening, by hand and against loops."""

import pytest
import torch

from perl.algorithms.ppo import gae
from perl.algorithms.whitening import whiten

pytestmark = pytest.mark.numeric


def test_gae_by_hand():
    """Two completions of three tokens, gamma 0.5 and lambda 0.5: each step counts a quarter of the next one's."""
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 0.0]])
    values = torch.tensor([[0.5, 0.25, 0.75], [1.0, 0.5, 9.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    # first row, from its end: 1 - 0.75 = 0.25; 0.5 * 0.75 - 0.25 + 0.25 / 4; 0.5 * 0.25 - 0.5 + 0.1875 / 4
    # second: 2 - 0.5 = 1.5; 0.5 * 0.5 - 1 + 1.5 / 4
    assert advantages.tolist() == [[-0.328125, 0.1875, 0.25], [-0.375, 1.5, 0.0]]
    assert returns.tolist() == [[0.171875, 0.4375, 1.0], [0.625, 2.0, 0.0]]


def by_loop(rewards, values, mask, gamma, lam):
    """The sum of equation 16 of arXiv 1506.02438, over a row's own tokens."""
    found = torch.zeros_like(values)
    for row in range(len(values)):
        places = [t for t in range(values.shape[1]) if mask[row, t]]
        v = [values[row, t].item() for t in places] + [0.0]
        deltas = [rewards[row, t].item() + gamma * v[i + 1] - v[i] for i, t in enumerate(places)]
        for i, t in enumerate(places):
            found[row, t] = sum((gamma * lam) ** (k - i) * deltas[k] for k in range(i, len(deltas)))
    return found


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 0.0)])
def test_gae_is_the_sum_of_its_definition_also_around_a_tools_output(gamma, lam):
    generator = torch.Generator().manual_seed(1)
    rewards, values = (torch.randn(4, 9, generator=generator) for _ in range(2))
    mask = torch.rand(4, 9, generator=generator) > 0.3
    rewards = rewards.masked_fill(~mask, 0.0)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    assert not mask.all()
    torch.testing.assert_close(advantages, by_loop(rewards, values, mask, gamma, lam), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, (advantages + values) * mask)
    if gamma == lam == 1.0:  # the reward that is still to come, whatever the values
        to_come = rewards.flip(1).cumsum(dim=1).flip(1) * mask
        torch.testing.assert_close(returns, to_come, rtol=1e-5, atol=1e-5)


def test_whitening_by_hand():
    advantages = torch.tensor([[1.0, 2.0, 0.0], [3.0, 6.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    found = whiten(advantages, mask, gather=lambda numbers: numbers)
    # mean 3; squares 4 + 1 + 0 + 9 = 14 over 3
    root = (14 / 3) ** 0.5
    assert found.flatten().tolist() == pytest.approx([-2 / root, -1 / root, 0.0, 0.0, 3 / root, 0.0])


def test_whitening_is_over_the_tokens_of_all_processes():
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    passes = []

    def of_both(mine):
        """What the other process, with the second row, gives: sums and ends, then its squares around the mean 3."""
        passes.append(mine)
        other = torch.tensor([[2.0, 9.0, 6.0, -3.0]]) if len(passes) == 1 else torch.tensor([[9.0]])
        return torch.cat([mine, other])

    found = whiten(rows[:1], mask, of_both)
    assert found.tolist()[0] == pytest.approx([-2 / (14 / 3) ** 0.5, -1 / (14 / 3) ** 0.5])


def test_equal_advantages_whiten_to_zero_and_one_token_too():
    mask = torch.ones(2, 2, dtype=torch.bool)
    assert whiten(torch.full((2, 2), 0.5), mask, lambda numbers: numbers).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    many = torch.full((5, 7), 0.9)
    assert many.sum() / 35 != 0.9  # what is left over what is left would be 6e-4
    assert not whiten(many, torch.ones(5, 7, dtype=torch.bool), lambda numbers: numbers).any()
    assert whiten(torch.tensor([[0.5]]), mask[:1, :1], lambda numbers: numbers).tolist() == [[0.0]]
