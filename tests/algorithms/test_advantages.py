"""Advantages by hand, on two groups of three."""

import math

import pytest
import torch

from perl.algorithms.algorithm import Scored
from perl.algorithms.kl import token_rewards
from perl.algorithms.rloo import leave_one_out


def scored(rewards, first=0, rows=None):
    everywhere = torch.tensor(rewards)
    own = everywhere[first : first + (rows or len(rewards))]
    mask = torch.ones(len(own), 4, dtype=torch.bool)
    return Scored(
        rewards=own,
        token_rewards=token_rewards(own, mask),
        mask=mask,
        group_size=3,
        gather=lambda mine: everywhere,
        first=first,
    )


def test_leave_one_out():
    found = leave_one_out(scored([1.0, 0.0, 0.5, 2.0, 2.0, -1.0]))
    # 1 - (0 + 0.5) / 2, 0 - 1.5 / 2, 0.5 - 1 / 2; 2 - (2 - 1) / 2 twice, -1 - 4 / 2
    assert found.tolist() == pytest.approx([0.75, -0.75, 0.0, 1.5, 1.5, -3.0])


def test_leave_one_out_of_a_group_that_two_processes_share():
    assert leave_one_out(scored([1.0, 0.0, 0.5, 2.0, 2.0, -1.0], first=2, rows=2)).tolist() == pytest.approx([0.0, 1.5])


def test_leave_one_out_counts_no_row_without_a_reward():
    nan = math.nan
    found = leave_one_out(scored([1.0, nan, 0.5, nan, 2.0, nan]))
    assert found.tolist() == pytest.approx([0.5, 0.0, -0.5, 0.0, 0.0, 0.0])


def test_leave_one_out_of_equal_rewards_is_exactly_zero():
    assert leave_one_out(scored([1.2, 1.2, 1.2, 0.1, 0.1, 0.1])).tolist() == [0.0] * 6
