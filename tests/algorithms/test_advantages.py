"""Advantages of two groups of three completions with up to three tokens, by hand and by verl.

VERLS: what verl 0.9.1's compute_…_advantage functions (verl/trainer/ppo/core_algos.py) returned for the same rewards;
verl needs ray and more than a test can install.
"""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from perl.algorithms import ALGORITHMS
from perl.algorithms.algorithm import Scored
from perl.algorithms.grpo import best_of_group, group_relative
from perl.algorithms.kl import token_rewards
from perl.algorithms.reinforce_plus_plus import whitened_baseline, whitened_returns
from perl.algorithms.remax import beyond_greedy
from perl.algorithms.rloo import by_share_rewarded, leave_one_out, length_weighted

pytestmark = pytest.mark.numeric

NAN = math.nan
REWARDS = [1.0, 0.0, 0.5, 2.0, 2.0, -1.0]
LENGTHS = torch.tensor([3, 2, 1, 3, 2, 3])
MASK = torch.arange(3) < LENGTHS[:, None]
PENALTY = 0.5 * torch.tensor(
    [[0.1, 0.2, 0.3], [0.0, 0.1, 9.0], [0.4, 9.0, 9.0], [-0.1, 0.2, 0.0], [0.5, 0.1, 9.0], [0.1, 0.1, 0.1]]
)
VERLS = {  # 9.0 lies behind the completion
    ("grpo", 1.0): ([1, -1, 0, 0.57735, 0.57735, -1.1547], [1.02146, -0.97705, -0.04441, 0.64841, 0.50324, -1.15165]),
    ("grpo_passk", 1.0): ([1, 0, 0, 0, 0, 0], [1.06587, 0, 0, 0.14517, 0, 0]),
    ("rloo", 1.0): ([0.75, -0.75, 0, 1.5, 1.5, -3], [0.575, -0.55, -0.025, 1.675, 1.3, -2.975]),
    ("opo", 1.0): (
        [0.41667, -0.58333, -0.08333, 1.125, 1.125, -1.875],
        [0.31667, -0.43333, -0.08333, 1.225, 0.975, -1.875],
    ),
    ("gpg", 1.0): ([0.6, -0.6, 0, 1.2, 1.2, -2.4], [0.38333, -0.36667, -0.01667, 1.11667, 0.86667, -1.98333]),
    ("reinforce_plus_plus_baseline", 1.0): (
        [0.45236, -0.39205, 0.03016, 0.87457, 0.87457, -1.65866],
        [0.3567, -0.28536, 0.01427, 0.98449, 0.77047, -1.66936],
    ),
    ("reinforce_plus_plus", 1.0): (
        [0.21028, -0.63084, -0.21028, 1.0514, 1.0514, -1.47196],
        [
            [0.0664, 0.10865, 0.19316],
            [-0.56741, -0.56741, 0.0],
            [-0.27163, 0.0, 0.0],
            [1.12274, 1.08048, 1.16499],
            [0.91147, 1.12274, 0.0],
            [-1.49698, -1.45473, -1.41248],
        ],
    ),
    ("reinforce_plus_plus", 0.5): (
        [
            [-0.29054, 0.0, 0.58109],
            [-0.58109, -0.58109, 0.0],
            [0.0, 0.0, 0.0],
            [0.0, 0.58109, 1.74326],
            [0.58109, 1.74326, 0.0],
            [-0.87163, -1.16217, -1.74326],
        ],
        [
            [-0.33648, -0.08931, 0.52134],
            [-0.49641, -0.52549, 0.0],
            [-0.11839, 0.0, 0.0],
            [0.11424, 0.57949, 1.85895],
            [0.37594, 1.80079, 0.0],
            [-0.85989, -1.13614, -1.68863],
        ],
    ),
}
"""By name and gamma: without and with PENALTY, of each row, or of each token."""


def scored(
    rewards=REWARDS, group_size=3, mask=MASK, penalty=None, mine=slice(None), gather=lambda tensor: tensor, **fields
):
    """Of the process that holds the rows `mine`; the only one where it holds all."""
    mask = mask[: len(rewards)]
    totals = torch.tensor(rewards) - (0 if penalty is None else (penalty * mask).sum(dim=1))
    return Scored(
        rewards=totals[mine],
        token_rewards=token_rewards(torch.tensor(rewards), mask, penalty)[mine],
        mask=mask[mine],
        group_size=group_size,
        gather=gather,
        first=mine.start or 0,
        **fields,
    )


def on_two_processes(estimate, rows, **inputs):
    """What a process with the first `rows` rows and one with as many others make of them, one after the other."""
    meet, sent = threading.Barrier(2), {}

    def process(rank):
        def gather(tensor):
            sent[rank] = tensor
            meet.wait(timeout=30)
            both = torch.cat([sent[0], sent[1]])
            meet.wait(timeout=30)
            return both

        return estimate(scored(mine=slice(rank * rows, (rank + 1) * rows), gather=gather, **inputs))

    with ThreadPoolExecutor(2) as pool:
        return torch.cat(list(pool.map(process, range(2))))


def of_tokens(advantages, mask=MASK):
    """[rows, tokens] of either form, 0 where nothing is trained."""
    advantages = torch.as_tensor(advantages, dtype=torch.float32)
    return (advantages if advantages.ndim == 2 else advantages[:, None]) * mask


@pytest.mark.parametrize("penalty", [None, PENALTY], ids=["", "with KL in the reward"])
@pytest.mark.parametrize(("name", "gamma"), VERLS)
def test_advantages_are_verls(name, gamma, penalty):
    estimate = ALGORITHMS[name].advantages or group_relative
    expected = of_tokens(VERLS[name, gamma][penalty is not None])
    found = of_tokens(estimate(scored(penalty=penalty, gamma=gamma)))
    assert torch.allclose(found, expected, atol=5e-4)  # TRL's GRPO divides by the deviation + 1e-4, verl's by + 1e-6


@pytest.mark.parametrize(("name", "gamma"), VERLS)
def test_two_processes_that_share_a_group_have_those_of_one(name, gamma):
    estimate = ALGORITHMS[name].advantages or group_relative
    inputs = {"group_size": 2, "penalty": PENALTY, "gamma": gamma}  # the second group is half of each process's
    one, two = estimate(scored(**inputs)), on_two_processes(estimate, 3, **inputs)
    assert one.any()
    assert torch.allclose(two, one, atol=1e-6)


def test_leave_one_out():
    # 1 - (0 + 0.5) / 2, 0 - 1.5 / 2, 0.5 - 1 / 2; 2 - (2 - 1) / 2 twice, -1 - 4 / 2
    assert leave_one_out(scored()).tolist() == pytest.approx([0.75, -0.75, 0.0, 1.5, 1.5, -3.0])


def test_relative_to_the_group_by_what_it_is_scaled():
    # deviations from the means 0.5 and 1; of the groups 0.5 and 3 ** 0.5, of all six 1.17260 (mean 0.75)
    apart = [0.5, -0.5, 0.0, 1.0, 1.0, -2.0]
    assert group_relative(scored(scale="none")).tolist() == pytest.approx(apart)
    by_group = [a / (d + 1e-4) for a, d in zip(apart, [0.5] * 3 + [3**0.5] * 3, strict=True)]
    assert group_relative(scored(scale="group")).tolist() == pytest.approx(by_group)
    of_all = (sum((r - 0.75) ** 2 for r in REWARDS) / 5) ** 0.5
    assert group_relative(scored(scale="batch")).tolist() == pytest.approx([a / (of_all + 1e-4) for a in apart])


def test_length_weighted():
    # baselines (3 * 1 + 0 + 1 * 0.5) / 6 and (3 * 2 + 2 * 2 - 3) / 8
    found = length_weighted(scored()).tolist()
    assert found == pytest.approx([1 - 3.5 / 6, -3.5 / 6, 0.5 - 3.5 / 6, 2 - 7 / 8, 2 - 7 / 8, -1 - 7 / 8])


def test_by_share_rewarded():
    # five of six rewards are not 0
    assert by_share_rewarded(scored()).tolist() == pytest.approx([0.6, -0.6, 0.0, 1.2, 1.2, -2.4])


def test_best_of_group():
    # 1 - 0.5 over a deviation of 0.5; the second group has two best
    assert best_of_group(scored()).tolist() == pytest.approx([0.5 / (0.5 + 1e-6), 0, 0, 0, 0, 0])
    assert best_of_group(scored(scale="none")).tolist() == pytest.approx([0.5, 0, 0, 0, 0, 0])


def test_whitened_returns_by_hand():
    # gamma 0.5 from the last token back: row 0 has 0.25, 0.5, 1; the mask's gap in row 1 discounts nothing
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 0]]).bool()
    returns = [0.25, 0.5, 1.0, 1.0, 2.0, -1.0]
    mean = sum(returns) / 6
    deviation = (sum((r - mean) ** 2 for r in returns) / 5) ** 0.5
    w = [(r - mean) / deviation for r in returns]
    found = whitened_returns(scored([1.0, 2.0, -1.0], mask=mask, gamma=0.5))
    assert torch.allclose(found, torch.tensor([w[:3], [w[3], 0, w[4]], [w[5], 0, 0]]), atol=1e-6)


def test_beyond_the_greedy_completion_by_hand_and_by_verl():
    """verl's compute_remax_outcome_advantage: each token has the rewards from it to the last, KL taken from them, less
    the reward of the greedy completion, from which none is."""
    baselines = torch.tensor([0.5, 0.5, 0.5, 2.0, 2.0, 2.0])
    found = of_tokens(beyond_greedy(scored(baselines=baselines)))
    assert torch.allclose(found, of_tokens([0.5, -0.5, 0.0, 0.0, 0.0, -3.0]))
    assert not found[2:5].any()  # exactly 0: such a row need not be computed
    with_kl = beyond_greedy(scored(baselines=baselines, penalty=PENALTY))
    # from the last token back, 1 less 0.15, 0.25 and 0.3 in row 0
    assert with_kl[0].tolist() == pytest.approx([1 - 0.3 - 0.5, 1 - 0.25 - 0.5, 1 - 0.15 - 0.5])
    assert with_kl[1].tolist() == pytest.approx([-0.05 - 0.5, -0.05 - 0.5, 0])
    tokens = token_rewards(torch.tensor(REWARDS), MASK, PENALTY)
    verls = (tokens * MASK).flip(dims=[1]).cumsum(dim=1).flip(dims=[1]) - baselines[:, None] * MASK
    assert torch.allclose(with_kl, verls * MASK, atol=1e-6)


def test_a_row_has_no_advantage_where_it_or_the_greedy_completion_has_no_reward():
    rewards, baselines = [1.0, NAN, 0.5, 2.0], torch.tensor([0.0, 0.0, NAN, 1.0])
    found = of_tokens(beyond_greedy(scored(rewards, group_size=1, baselines=baselines)), MASK[:4])
    assert found.amax(dim=1).tolist() == [1.0, 0.0, 0.0, 1.0]
    assert not found[1:3].any()


ESTIMATORS = [
    group_relative,
    leave_one_out,
    length_weighted,
    by_share_rewarded,
    best_of_group,
    whitened_returns,
    whitened_baseline,
]


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_a_row_without_a_reward_has_no_advantage_and_counts_for_no_other(estimate):
    found = of_tokens(estimate(scored([1.0, NAN, 0.5, NAN, 2.0, 1.0])))
    assert not found.isnan().any()
    assert not found[[1, 3]].any()
    assert found[[0, 2, 4, 5]].any()
    # the same as if the missing rows were not there: their lengths and tokens count nowhere
    longer = torch.tensor([3, 3, 1, 1, 2, 3])[:, None] > torch.arange(3)
    again = of_tokens(estimate(scored([1.0, NAN, 0.5, NAN, 2.0, 1.0], mask=longer)), longer)
    assert torch.equal(found[[0, 2, 4, 5]], again[[0, 2, 4, 5]])


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_the_only_reward_of_a_group_has_no_advantage(estimate):
    found = of_tokens(estimate(scored([NAN, 2.0, NAN, 1.0, 1.0, 1.0])))
    if estimate is whitened_returns:  # which compares with all
        assert found[1].sum() > 0 > found[3].sum()
    else:
        assert found.tolist() == [[0.0] * 3] * 6


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_equal_rewards_have_exactly_none(estimate):
    """In floating point the mean of three 1.2 need not be 1.2, and rounding over rounding is a large number."""
    assert not of_tokens(estimate(scored([1.2] * 6))).any()
