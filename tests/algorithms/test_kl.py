"""KL by hand, on two completions of three tokens."""

import math

import torch

from perl.algorithms.kl import token_rewards

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
