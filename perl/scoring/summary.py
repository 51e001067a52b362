"""summary.json of one dataset, its numbers from the records."""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from perl.base.provenance import Provenance, provenance
from perl.scoring.results import Made, MetricRecord, RuleRecord, SampleRecord, Statistics, Summary
from perl.scoring.samples import cluster_of
from perl.scoring.statistics import (
    Estimate,
    clustered_bootstrap,
    majority_at_k,
    pass_at_k,
    powers_of_two,
)
from perl.tasks import TASKS

if TYPE_CHECKING:
    from perl.scoring.problem_sets import ProblemSet

SAYS_THE_SAME = ("accuracy", "pass@1", "maj@1")
"""As avg@n."""
_NAMED = re.compile(r"[A-Za-z]{1,3}(?: ?[+-] ?[A-Za-z]{1,3})* = (?P<value>-?\d.*)")
_WITH_UNIT = re.compile(r"(?P<value>-?[\d./]+) \[(?!base )[^\[\]]+\]")
"""What perl.grading.stated.show writes of a number that is given a name, and of one with a unit."""


def summary_of(records: Sequence[SampleRecord], problem_set: ProblemSet, made: Made) -> Summary:
    """What stands in summary.json, of an evaluation or a validation.

    Args:
        records: `problem_set.sampling.n` of each problem.
    """
    return {
        **summarize(records, problem_set.sampling.n),
        **made,
        "tasks": list(problem_set.tasks),
        "grading": grading_of(problem_set.tasks),
        "provenance": _provenance(),
    }


@functools.cache
def _provenance() -> Provenance:
    return provenance()  # asks git


def summarize(records: Sequence[SampleRecord], n: int) -> Statistics:
    """Everything that is computed from the records: metrics with intervals, shares, lengths.

    Args:
        records: `n` of each problem.
    """
    by_problem: dict[str, list[SampleRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record["sample"]):
        by_problem[record["key"]].append(record)
    count = len(records)
    reasons = Counter(record["reason"] for record in records)
    return {
        "problems": len(by_problem),
        "samples": count,
        "n": n,
        "metrics": {name: MetricRecord(**estimate._asdict()) for name, estimate in metrics(by_problem).items()},
        "rules": rule_means(records),
        "truncated": sum(record["finish_reason"] == "length" for record in records) / count,
        "unextracted": sum(record["extracted"] is None for record in records) / count if graded(records) else None,
        "timeouts": reasons["timeout"],
        "grading_errors": reasons["error"],
        "not_generated": sum(record["error"] is not None for record in records),
        "mean_tokens": sum(record["tokens"] for record in records) / count,
        "max_tokens": max(record["tokens"] for record in records),
        "mean_prompt_tokens": sum(record["prompt_tokens"] for record in records) / count,
        "tokens": sum(record["tokens"] for record in records),
        "engines": sorted({record["engine"] for record in records}),
    }


def metrics(by_problem: Mapping[str, Sequence[SampleRecord]]) -> dict[str, Estimate]:
    """accuracy (the mean score of all samples), avg@n (the same under its usual name), pass@k and maj@k, each a mean
    over problems with a 95 % interval by bootstrap over problems (equal problems are one cluster)."""
    clusters = [cluster_of(key) for key in by_problem]
    return {name: clustered_bootstrap(values, clusters) for name, values in problem_scores(by_problem).items()}


def problem_scores(by_problem: Mapping[str, Sequence[SampleRecord]]) -> dict[str, list[float]]:
    """Each metric's value for each problem, in their order."""
    groups = list(by_problem.values())
    n = min(map(len, groups))
    per_problem: dict[str, list[float]] = {"accuracy": [sum(r["score"] for r in g) / len(g) for g in groups]}
    per_problem[f"avg@{n}"] = per_problem["accuracy"]
    for k in powers_of_two(n):
        per_problem[f"pass@{k}"] = [pass_at_k(len(g), sum(r["score"] == 1.0 for r in g), k) for g in groups]
    if graded([r for g in groups for r in g]):
        votes = [list(zip(_votes(g), (r["score"] for r in g), strict=True)) for g in groups]
        per_problem |= {f"maj@{k}": [majority_at_k(each, k) for each in votes] for k in powers_of_two(n)}
    return per_problem


def _votes(records: Sequence[SampleRecord]) -> list[str | None]:
    """What the samples of a problem vote for: `m+n = 204`, `204`, and where that is there `204 [min]`, are one."""
    answers = [record["extracted"] for record in records]
    values = [named["value"] if (named := _NAMED.fullmatch(each or "")) else each for each in answers]
    united = [_WITH_UNIT.fullmatch(each or "") for each in values]
    return [
        unit["value"] if unit and unit["value"] in values else each for unit, each in zip(united, values, strict=True)
    ]


def graded(records: Iterable[SampleRecord]) -> bool:
    """Whether a task grades any of them. Where an environment alone scores, no answer is read, and none votes."""
    return any(record["gold"] and record["task"] for record in records)


def rule_means(records: Sequence[SampleRecord]) -> dict[str, RuleRecord]:
    """Each rule's mean score and how many samples it was asked about (a fallback is not asked about all)."""
    scores: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for rule, score in record["scores"].items():
            scores[rule].append(score)
    return {rule: {"mean": sum(values) / len(values), "scored": len(values)} for rule, values in scores.items()}


def logged(metrics: Mapping[str, Any]) -> list[str]:
    """Names of metrics but for those that always say the same as another: a curve has them all at each step."""
    return [name for name in metrics if name not in SAYS_THE_SAME]


def shown(metrics: Mapping[str, Any]) -> list[str]:
    """Names of metrics but for those that say the same as another here: maj@2 too, where n is even and every sample has
    an answer, as a tie counts as its mean."""
    return [name for name in logged(metrics) if name != "maj@2" or not _equal(metrics[name], metrics["accuracy"])]


def _equal(one: Any, other: Any) -> bool:
    """Of two MetricRecords, or of two metrics' values for each problem."""
    first, second = (list(each.values()) if isinstance(each, Mapping) else each for each in (one, other))
    return np.allclose(first, second)


def grading_of(tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The rubric of each task, as JSON reads it back; "", of rows that an environment alone scores, has none."""
    rubrics = {task: TASKS[task].rubric for task in tasks if task}
    return {task: asdict(rubric) | {"rules": list(rubric.rules)} for task, rubric in rubrics.items()}
