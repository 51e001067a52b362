"""Estimates from graded samples, each with its confidence interval. Pure functions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A mean over problems and its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """In percent."""
        return f"{100 * self.value:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


class PairedDifference(NamedTuple):
    """A mean of paired differences over problems, what it tells, and what could have been told."""

    value: float
    low: float
    high: float
    detectable: float
    """The true difference that this many problems would show four times out of five."""
    verdict: Literal["better", "worse", "none"]
    """none: no difference that this many problems could show."""


class Change(NamedTuple):
    """A mean of paired differences over seeds and problems."""

    value: float
    low: float
    high: float
    verdict: Literal["better", "worse", "none"]
    """none: no difference that so many seeds and problems could show."""


CONFIDENCE = 0.95
"""Coverage of all intervals."""
RESAMPLES = 2000
"""Of a bootstrap."""
FEWEST = 6
"""Clusters that have to differ before anything is shown: if signs were coins, five of five equal ones would still come
up in 2 / 2^5 = 6 % of all cases, six of six in 3 %."""


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, … up to n, and n itself: the k that pass@k and maj@k are reported for."""
    return sorted({1 << i for i in range(n.bit_length())} | {n}) if n else []


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of the n samples, drawn without replacement, hold a correct one: 1 - C(n-c, k) / C(n, k), the
    unbiased estimator of Chen et al. 2021 (arXiv 2107.03374)."""
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {correct} correct among {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Mean of the largest of k of the scores, drawn with replacement: the i-th smallest of n is the largest with
    probability (i / n)^k - ((i - 1) / n)^k."""
    n = len(scores)
    return sum(score * ((i / n) ** k - ((i - 1) / n) ** k) for i, score in enumerate(sorted(scores), start=1))


def majority_at_k(votes: Sequence[tuple[str | None, float]], k: int) -> float:
    """Score of the majority's answer among k samples, averaged over the disjoint groups of k consecutive samples.

    Args:
        votes: (extracted answer, score) of each sample of one problem, in the order of their indices. Answers are
            equal when their text is; None (no rule found an answer) does not vote.
        k: voters, at most len(votes).

    Returns:
        Mean over the groups. A tie counts as the mean of the tied answers' scores, an answer's score as the mean over
        its samples, and a group in which nobody votes as 0.
    """
    if not 1 <= k <= len(votes):
        raise ValueError(f"maj@{k} of {len(votes)} samples")
    groups = [votes[start : start + k] for start in range(0, len(votes) - k + 1, k)]
    return sum(map(_majority, groups)) / len(groups)


def _majority(votes: Sequence[tuple[str | None, float]]) -> float:
    scores: dict[str, list[float]] = defaultdict(list)
    for answer, score in votes:
        if answer is not None:
            scores[answer].append(score)
    if not scores:
        return 0.0
    most = max(map(len, scores.values()))
    tied = [sum(s) / len(s) for s in scores.values() if len(s) == most]
    return sum(tied) / len(tied)


def clustered_bootstrap(values: Sequence[float], clusters: Sequence[Hashable], least: float = 0.0) -> Estimate:
    """Mean of `values` with a percentile interval from resampling whole clusters; the same samples give the same one.

    Values of one cluster are not independent (a problem that occurs twice), so clusters are drawn, with replacement,
    and the mean is taken over all values in those drawn. Where all clusters have the same mean there is nothing to
    resample and the bootstrap would claim certainty. The exact binomial bound (Clopper-Pearson) over the clusters
    stands in its place: at most a share of 1 - 0.025^(1/m) of all problems has another value, which may be `least` or
    1.

    Args:
        values: one number a problem.
        clusters: the cluster of each value.
        least: what a number may be, up to 1; one that lies beyond is its own bound.
    """
    if not values:
        return Estimate(math.nan, math.nan, math.nan)
    numbers = np.asarray(values, dtype=np.float64)
    value = float(numbers.mean())
    number_of = {cluster: i for i, cluster in enumerate(dict.fromkeys(clusters))}
    index, count = np.asarray([number_of[cluster] for cluster in clusters]), len(number_of)
    tail = (1.0 - CONFIDENCE) / 2.0
    sums, sizes = np.bincount(index, weights=numbers), np.bincount(index)
    if np.allclose(sums / sizes, value):
        value = float(numbers[0]) if (numbers == numbers[0]).all() else value
        others = 1.0 - tail ** (1.0 / count)
        return Estimate(value, value - max(0.0, value - least) * others, value + max(0.0, 1.0 - value) * others)
    generator = np.random.default_rng(0)
    means = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        drawn = generator.integers(count, size=count)
        means[i] = sums[drawn].sum() / sizes[drawn].sum()
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Estimate(value, float(low), float(high))


def paired_difference(differences: Sequence[float], clusters: Sequence[Hashable]) -> PairedDifference:
    """Mean of per-problem differences between two evaluations of the same problems, with a verdict.

    Pairing takes the problems' own difficulty out of the comparison. The interval is that of `clustered_bootstrap`; the
    detectable difference is (z_0.975 + z_0.8) standard errors, 80 % power at a two-sided level of 5 % (Miller 2024,
    arXiv 2411.00640, section 5), with the cluster-robust standard error sqrt(m / (m - 1) sum_c (sum_{i in c} (d_i -
    mean))^2) / N over m clusters and N problems. Where no cluster differs from the others it is FEWEST / m: so many
    would have to turn, all the same way.

    Args:
        differences: score now minus score before, one a problem, each within [-1, 1].
        clusters: the cluster of each.
    """
    numbers = np.asarray(differences, dtype=np.float64)
    index = np.unique(np.asarray([str(cluster) for cluster in clusters]), return_inverse=True)[1]
    count = int(index.max()) + 1
    value, low, high = clustered_bootstrap(numbers.tolist(), clusters, least=-1.0)
    sums, apart = (np.bincount(index, weights=weights) for weights in (numbers, numbers - value))
    apart[np.isclose(apart, 0)] = 0  # but for rounding
    error = math.sqrt(count / (count - 1) * float(np.square(apart).sum())) / len(numbers) if count > 1 else math.inf
    changed = int((~np.isclose(sums, 0)).sum())  # better once and worse once is no change of the cluster's
    shown = changed >= FEWEST and not low <= 0 <= high
    detectable = min(1.0, max((1.959964 + 0.841621) * error, FEWEST / count if error == 0 else 0.0))
    return PairedDifference(value, low, high, detectable, ("better" if value > 0 else "worse") if shown else "none")


def over_seeds(scores: Sequence[Sequence[float]], clusters: Sequence[Hashable]) -> Estimate:
    """Mean score of trainings that differ in their seed alone, all scored on the same problems, with a 95 % interval.

    A new seed and other problems would both move the mean: the reach of Student's t over the seeds' means and that of
    `clustered_bootstrap` over the problems' are added as squares (the MOVER of Zou and Donner 2008, Statistics in
    Medicine 27, for a sum of independent parts). One seed tells nothing of others: the interval is then the problems'.

    Args:
        scores: of each seed, one number a problem, in one order, each within [0, 1].
        clusters: the cluster of each problem.
    """
    problems = clustered_bootstrap(np.mean(scores, axis=0).tolist(), clusters)
    low, high = _widened(problems, seeds_reach([float(np.mean(seed)) for seed in scores]))
    return Estimate(problems.value, max(low, 0.0), min(high, 1.0))


def paired_over_seeds(differences: Sequence[Sequence[float]], clusters: Sequence[Hashable]) -> Change:
    """Mean difference of two methods that were trained with the same seeds and scored on the same problems, with a
    95 % interval as that of `over_seeds`. A difference is shown where the interval leaves out 0 and at least FEWEST
    clusters differ.

    Args:
        differences: of each seed, score of the one minus score of the other, one number a problem, within [-1, 1].
        clusters: the cluster of each problem.
    """
    problems = paired_difference(np.mean(differences, axis=0).tolist(), clusters)
    low, high = _widened(problems, seeds_reach([float(np.mean(seed)) for seed in differences]))
    shown = problems.verdict != "none" and not low <= 0 <= high
    return Change(problems.value, max(low, -1.0), min(high, 1.0), problems.verdict if shown else "none")


def _widened(interval: Estimate | PairedDifference, reach: float) -> tuple[float, float]:
    value = interval.value
    return value - math.hypot(value - interval.low, reach), value + math.hypot(interval.high - value, reach)


def seeds_reach(means: Sequence[float]) -> float:
    """Half of Student's t interval of the mean of `means`; 0 of a single one, which tells nothing."""
    if len(means) < 2:
        return 0.0
    error = float(np.std(means, ddof=1)) / math.sqrt(len(means))
    return t_quantile(len(means) - 1) * error


def t_tails(t: float, degrees: float) -> float:
    """Probability that Student's t with `degrees` of freedom lies beyond -|t| or |t|."""
    import mpmath

    return float(mpmath.betainc(degrees / 2, 0.5, 0, degrees / (degrees + t * t), regularized=True))


def t_quantile(degrees: float) -> float:
    """The t beyond which lie 1 - CONFIDENCE of both tails."""
    import mpmath

    return float(mpmath.findroot(lambda t: t_tails(t, degrees) - (1 - CONFIDENCE), (1, 20), solver="anderson"))
