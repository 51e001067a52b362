"""Every expected number here is worked out by hand."""

import math

import numpy as np
import pytest

from perl.scoring.statistics import (
    Estimate,
    best_at_k,
    clustered_bootstrap,
    majority_at_k,
    over_seeds,
    paired_difference,
    paired_over_seeds,
    pass_at_k,
    powers_of_two,
    seeds_reach,
    t_quantile,
)


def test_pass_at_k_is_chens_estimator():
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)  # 1 - C(3,3)/C(5,3) = 1 - 1/10
    assert pass_at_k(4, 2, 3) == 1.0  # only two are wrong
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(1, 1, 1) == 1.0


def test_pass_at_k_is_unbiased():
    """Over all outcomes of 3 samples with p = 0.3, the mean of pass@2 is 1 - 0.7²."""
    expected = sum(math.comb(3, c) * 0.3**c * 0.7 ** (3 - c) * pass_at_k(3, c, 2) for c in range(4))
    assert expected == pytest.approx(1 - 0.7**2)


def test_pass_at_k_refuses_more_than_there_are():
    with pytest.raises(ValueError):
        pass_at_k(2, 1, 3)


def test_the_k_that_are_reported():
    assert powers_of_two(1) == [1]
    assert powers_of_two(8) == [1, 2, 4, 8]
    assert powers_of_two(6) == [1, 2, 4, 6]


def test_the_best_of_k_drawn_with_replacement():
    """Of 0, 0.5 and 1 two draws have the largest 0 in 1 of 9 cases, 0.5 in 3, 1 in 5."""
    assert best_at_k([1.0, 0.0, 0.5], 2) == pytest.approx((3 * 0.5 + 5) / 9)
    assert best_at_k([0.5] * 8, 8) == pytest.approx(0.5)
    assert best_at_k([1.0, 0.0, 0.0, 1.0], 3) == pytest.approx(1 - 0.5**3)


def test_majority_takes_the_commonest_answer():
    votes = [("18", 1.0), ("17", 0.0), ("18", 1.0), (None, 0.0)]
    assert majority_at_k(votes, 4) == 1.0
    assert majority_at_k(votes, 1) == 0.5  # the mean of the four
    assert majority_at_k(votes, 2) == 0.75  # (18, 17): a tie, 0.5; (18, none): 1
    assert majority_at_k([("17", 0.0), ("17", 0.0), ("18", 1.0)], 3) == 0.0


def test_majority_averages_over_disjoint_groups_and_drops_the_rest():
    votes = [("1", 1.0), ("1", 1.0), ("2", 0.0), ("2", 0.0), ("1", 1.0)]
    assert majority_at_k(votes, 2) == 0.5


def test_nobody_voting_scores_nothing():
    assert majority_at_k([(None, 0.0), (None, 0.0)], 2) == 0.0


def test_bootstrap_of_independent_problems_is_near_the_normal_interval():
    values = [1.0] * 60 + [0.0] * 40
    estimate = clustered_bootstrap(values, range(100))
    spread = 1.96 * math.sqrt(0.6 * 0.4 / 100)  # 0.096
    assert estimate.value == 0.6
    assert estimate.low == pytest.approx(0.6 - spread, abs=0.015)
    assert estimate.high == pytest.approx(0.6 + spread, abs=0.015)


def test_copies_of_a_problem_do_not_narrow_the_interval():
    values = [1.0] * 60 + [0.0] * 40
    once = clustered_bootstrap(values, range(100))
    four_times = clustered_bootstrap(values * 4, [*range(100)] * 4)
    assert four_times == once
    unclustered = clustered_bootstrap(values * 4, range(400))
    assert unclustered.high - unclustered.low < 0.6 * (once.high - once.low)


def test_clusters_are_drawn_whole():
    """Two clusters, means 0 and 1: a draw gives 0, 1/2 (weighted by size) or 1, so 95 % covers everything."""
    assert clustered_bootstrap([0.0, 1.0, 1.0], ["a", "b", "b"]) == Estimate(pytest.approx(2 / 3), 0.0, 1.0)


def test_all_right_and_all_wrong_keep_an_interval():
    # Clopper-Pearson for 0 of 10: 1 - 0.025^(1/10) = 0.3085
    assert clustered_bootstrap([0.0] * 10, range(10)) == Estimate(0.0, 0.0, pytest.approx(0.30850, abs=1e-5))
    assert clustered_bootstrap([1.0] * 10, range(10)) == Estimate(1.0, pytest.approx(0.69150, abs=1e-5), 1.0)
    assert clustered_bootstrap([1.0], [0]).low == pytest.approx(0.025)


def test_equal_fractions_keep_an_interval():
    """So does one problem with 6 of 8 samples right: a share of 1 - 0.025^(1/m) of all problems may be another, all
    wrong or all right."""
    assert clustered_bootstrap([0.75], [0]) == pytest.approx((0.75, 0.75 - 0.75 * 0.975, 0.75 + 0.25 * 0.975))
    ten = clustered_bootstrap([0.5] * 20, [*range(10)] * 2)  # ten clusters: 1 - 0.025^(1/10) = 0.3085
    assert ten == pytest.approx((0.5, 0.5 - 0.5 * 0.30850, 0.5 + 0.5 * 0.30850), abs=1e-5)
    assert clustered_bootstrap([2.0] * 10, range(10)) == pytest.approx((2.0, 2.0 - 2 * 0.30850, 2.0), abs=1e-5)


def test_clusters_that_agree_keep_an_interval_whatever_is_within_them():
    """Right once and wrong once, each of ten problems: 1 - 0.025^(1/10) = 0.3085 of them may be another."""
    ten = clustered_bootstrap([1.0, 0.0] * 10, [i for i in range(10) for _ in range(2)])
    assert ten == pytest.approx((0.5, 0.5 - 0.5 * 0.30850, 0.5 + 0.5 * 0.30850), abs=1e-5)
    assert clustered_bootstrap([1.0, 0.0], "aa") == pytest.approx((0.5, 0.5 - 0.5 * 0.975, 0.5 + 0.5 * 0.975))
    thirds = clustered_bootstrap([0.1, 0.2, 0.3, 0.3, 0.2, 0.1, 0.2], "aaabbbc")  # equal but for rounding
    assert thirds == pytest.approx((0.2, 0.2 - 0.2 * 0.70760, 0.2 + 0.8 * 0.70760), abs=1e-5)  # 1 - 0.025^(1/3)


def test_a_cluster_that_is_better_once_and_worse_once_does_not_differ():
    keys = [i for i in range(20) for _ in range(2)]
    same = paired_difference([0.5, -0.5] * 20, keys)
    assert (same.value, same.detectable, same.verdict) == (0, 0.3, "none")  # 6 of 20 would have to turn
    assert -same.low == same.high == pytest.approx(1 - 0.025 ** (1 / 20))
    five = paired_difference([1.0, 1.0] * 5 + [1.0, -1.0] + [0.0] * 28, keys)
    assert (five.low > 0, five.verdict) == (True, "none")  # five differ, and six have to
    assert paired_difference([1.0, 1.0] * 6 + [0.0] * 28, keys).verdict == "better"
    alike = paired_difference([0.1, 0.2, 0.2, 0.1, 0.15], "aabbc")
    assert alike.detectable == 1  # of three clusters six can't turn; without rounding it would be none


def test_no_problems_give_nan():
    assert np.isnan(clustered_bootstrap([], []).value)


def test_students_t_by_the_tables():
    assert t_quantile(1) == pytest.approx(12.7062, abs=1e-4)
    assert t_quantile(2) == pytest.approx(4.30265, abs=1e-5)
    assert seeds_reach([0.4, 0.5, 0.6]) == pytest.approx(4.30265 * 0.1 / 3**0.5, abs=1e-5)
    assert seeds_reach([0.4]) == 0.0


def test_over_seeds_widens_the_problems_interval_by_that_of_the_seeds():
    problems = [str(i) for i in range(10)]
    flat = over_seeds([[0.4] * 10, [0.5] * 10, [0.6] * 10], problems)  # no problem differs from another: 0.5 * 0.30850
    reach = math.hypot(0.248414, 0.5 * 0.30850)
    assert flat == pytest.approx((0.5, 0.5 - reach, 0.5 + reach), abs=1e-5)
    one = [[1.0] * 4 + [0.0] * 6]
    assert over_seeds(one, problems) == pytest.approx(clustered_bootstrap(one[0], problems))
    equal = over_seeds(one * 3, problems)  # seeds that agree leave the problems' interval
    assert (equal.low, equal.high) == pytest.approx(clustered_bootstrap(one[0], problems)[1:])
    far = over_seeds([[1.0] * 10, [0.5] * 10], problems)
    assert (far.low, far.high) == (0.0, 1.0)


def test_a_change_is_shown_by_seeds_and_problems_together():
    problems = [str(i) for i in range(10)]

    def change(*means: float):
        return paired_over_seeds([[mean - 0.001, mean + 0.001] * 5 for mean in means], problems)

    shown = change(0.2, 0.3, 0.4)
    assert shown.value == pytest.approx(0.3)
    assert (shown.low, shown.verdict) == (pytest.approx(0.3 - 0.248414, abs=1e-4), "better")
    assert change(-0.2, -0.3, -0.4).verdict == "worse"
    assert change(0.1, 0.3, 0.5).verdict == "none"  # 0.3 - 0.497
    few = [[0.3] * 5 + [0.0] * 5] * 3  # five problems differ
    assert paired_over_seeds(few, problems).verdict == "none"
    one = [0.5] * 8 + [-0.5] * 2
    assert paired_over_seeds([one], problems)[:3] == pytest.approx(paired_difference(one, problems)[:3])
