"""Whether two trainings' curves agree: mean absolute errors as verl's Ascend guide asks for them.

A is the reference. Each side may be several runs that differ in their seed alone; its curve is then their mean. A step
is a rollout with all the updates that are made from it, as verl counts: of a run that makes several optimizer steps
from one rollout, these are averaged. Where a run logged every tenth step only, means of ten steps are compared.

    absolute MAE   mean of |B - A|, in the metric's unit
    relative MAE   absolute MAE over the mean of |A|

The guide asks for a "mean absolute error" of at most 4 % (rewards of RL) and 2 % (loss), and gives its formula as an
image. The limit is held against the relative one: of a reward within 0 and 1 that is the stricter one of the two
readings. Where the relative one has no meaning (NEAR_ZERO), the absolute one is held against it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from perl.base.errors import UserError
from perl.reports.curves import NAMES, Curves, spacing

LIMITS = {"reward": 0.04, "loss": 0.02}
"""Of the relative MAE, as the guide has them; metrics without one are shown for information."""
NEAR_ZERO = 0.01
"""Mean of |A| below which, and in a curve that changes its sign at all, a relative error says nothing."""
SAMPLING_NOTE = (
    "one run a side: with another sampling seed the same run differs by up to 6 % in means of ten steps, and by more"
    " from step to step (docs/evaluation.md), so that 4 % decides nothing for sampled curves; write several seeds"
    " a side (A1,A2,A3 B1,B2,B3)"
)

Side = Literal["A", "B"]
Runs = Mapping[Side, Sequence[Curves]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One metric of both sides."""

    name: str
    steps: list[int]
    """The steps that were compared; of means over several steps the last step of each."""
    curve_a: list[float]
    """Value at each of `steps`, mean over the runs of the side."""
    curve_b: list[float]
    mean_a: float
    mean_b: float
    absolute: float
    relative: float | None
    """None where A is zero."""
    judged_by: Literal["relative", "absolute"] | None
    """Which of the two is held against the limit; None without a limit."""
    limit: float | None
    verdict: Literal["within", "outside"] | None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All metrics that both sides logged."""

    metrics: list[Agreement]
    notes: list[str]

    @property
    def within(self) -> bool:
        """Whether every metric with a limit is within it."""
        return all(metric.verdict != "outside" for metric in self.metrics)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        judged = [metric for metric in self.metrics if metric.limit is not None]
        names = " and ".join(metric.name for metric in judged if self.within or metric.verdict == "outside")
        return f"{'Within' if self.within else 'Outside'} the limits: {names}"

    @property
    def remarks(self) -> list[str]:
        """Everything that the table does not say, a line each."""
        return [note for metric in self.metrics for note in metric.notes] + self.notes

    def as_json(self) -> dict[str, Any]:
        """NaN becomes null."""
        content = {"within": self.within, "verdict": self.verdict, "metrics": self.metrics, "notes": self.notes}
        return msgspec.json.decode(msgspec.json.encode(content))


def compare_runs(runs: Runs, limits: Mapping[str, float] = LIMITS, window: int = 1) -> Comparison:
    """Compare the runs of B with those of A.

    Args:
        limits: by metric, as fractions.
        window: steps whose mean is one value of a curve.

    Raises:
        UserError: neither reward nor loss is in all runs, or the curves share no steps.
    """
    both = [*runs["A"], *runs["B"]]
    scores = list(dict.fromkeys(name for run in both for name in run.scores))
    common = [name for name in (*NAMES, *scores) if all(name in run.metrics or name in run.scores for run in both)]
    if not any(name in limits for name in common):
        logged = "; ".join(f"{run.source} has {', '.join([*run.metrics][:6]) or 'none'}" for run in both)
        raise UserError(f"A, B: no common metric: {logged}")
    metrics = [agreement(name, runs, limits.get(name), window) for name in common]
    compared = [metric for metric in metrics if metric.steps]
    if not any(metric.limit for metric in compared):
        reach = "; ".join(f"{run.source} has {reach_of(run)}" for run in both)
        shorter = f"; --window {window} may be longer than what they share: write less" if window > 1 else ""
        raise UserError(f"A, B: the curves share no steps to compare: {reach}{shorter}")
    notes = [missing(name, both) for name in limits if name not in {metric.name for metric in compared}]
    main = next(metric for metric in compared if metric.limit)
    part = f"{len(main.steps)} values up to step {main.steps[-1]} are compared"
    notes += [
        f"{run.source} has {reach_of(run)}, of which {part}"
        for run in both
        if reach_of(run) != f"steps 1 to {len(main.steps)}"
    ]
    notes += [
        f"{run.source}: nothing there tells how many optimizer steps are made from one rollout; one is assumed"
        for run in both
        if run.updates is None
    ]
    if len({"reward" in run.metrics for run in both}) > 1:
        notes.append("the sides are of two kinds: one was trained by rewards (GRPO, PPO), the other one logs none"
                     " (supervised fine-tuning); their losses are different quantities, and the verdict says nothing"
                     )  # fmt: skip
    if all(metric.absolute == 0 for metric in compared if metric.limit):
        notes.append("reward and loss are the same to the last digit: is this one run twice?")
    if max(map(len, runs.values())) == 1:
        notes.append(SAMPLING_NOTE)
    return Comparison(metrics=compared, notes=notes)


def missing(name: str, runs: Sequence[Curves]) -> str:
    """Why a metric with a limit is not compared."""
    lacking = dict.fromkeys(str(run.source) for run in runs if name not in run.metrics)
    return f"{name} is not compared: " + (
        f"{', '.join(lacking)} did not log it" if lacking else "the logs share no steps of it"
    )


def reach_of(run: Curves) -> str:
    steps = list(run.metrics["reward" if "reward" in run.metrics else "loss"])
    first, last = (math.ceil(step / (run.updates or 1)) for step in (steps[0], steps[-1]))
    return f"steps {first} to {last}"


def agreement(name: str, runs: Runs, limit: float | None, window: int) -> Agreement:
    """One metric; without steps where the runs share none."""
    both = [*runs["A"], *runs["B"]]
    if name in both[0].scores:
        placed = [
            {step // (run.updates or 1): v for step, v in run.scores[name].items() if step % (run.updates or 1) == 0}
            for run in both
        ]
    else:
        placed = aligned(name, both, window)
    steps = sorted(set.intersection(*map(set, placed)))
    rows = [[values[step] for step in steps] for values in placed]
    count = len(runs["A"])
    a, b = ([statistics.fmean(column) for column in zip(*side, strict=True)] for side in (rows[:count], rows[count:]))
    absolute = mae(a, b)
    size = statistics.fmean(map(abs, a)) if a else 0.0
    relative = absolute / size if size else None
    notes: list[str] = []
    judged_by = None if limit is None else "relative"
    if limit is not None and steps and (reason := meaningless(a, size)):
        judged_by = "absolute"
        width = max(*a, *b) - min(*a, *b)
        hardly = f"; both curves span only {width:.2g}, so that this can hardly fail: look at them"
        notes.append(f"{name}: A's curve {reason}, where a relative error says nothing: the absolute MAE is held"
                     f" against {limit:g}{hardly if width < limit else ''}")  # fmt: skip
    if unknown := sum(not math.isfinite(x + y) for x, y in zip(a, b, strict=True)):
        notes.append(f"{name}: {unknown} of {len(a)} values are NaN, infinite or null, which is outside any limit")
    pairs = [mae(x, y) for side in (rows[:count], rows[count:]) for i, x in enumerate(side) for y in side[:i]]
    if limit is not None and pairs:
        between = statistics.fmean(pairs)
        share = f"{100 * between / size:.2f} %" if judged_by == "relative" else f"{between:.3g}"
        notes.append(f"{name}: two runs of one side have an MAE of {share}: a smaller limit needs more seeds")
    judged = relative if judged_by == "relative" else absolute
    within = judged is not None and judged <= limit if limit is not None else None
    return Agreement(
        name=name, steps=steps, curve_a=a, curve_b=b, mean_a=statistics.fmean(a) if a else math.nan,
        mean_b=statistics.fmean(b) if b else math.nan, absolute=absolute, relative=relative, judged_by=judged_by,
        limit=limit, verdict=None if within is None else "within" if within else "outside",
        notes=notes,
    )  # fmt: skip


def aligned(name: str, runs: Sequence[Curves], window: int) -> list[dict[int, float]]:
    """A metric of each run by step, as means over as many steps as all of them logged whole, at least `window`. A mean
    stands at its last step; one of which a log is missing is left out."""
    intervals = [spacing(run.metrics[name]) or 1 for run in runs]
    updates = [run.updates or 1 for run in runs]
    shared = math.lcm(*(math.lcm(every, k) // k for every, k in zip(intervals, updates, strict=True)))
    size = shared * math.ceil(window / shared)
    placed = []
    for run, every, k in zip(runs, intervals, updates, strict=True):
        groups: dict[int, list[float]] = {}
        for step, value in run.metrics[name].items():
            groups.setdefault(math.ceil(step / (size * k)) * size, []).append(value)
        scale = k if name.startswith("timing/") else 1  # seconds of a rollout with all its updates
        placed.append({step: scale * statistics.fmean(v) for step, v in groups.items() if len(v) * every == size * k})
    return placed


def mae(a: Sequence[float], b: Sequence[float]) -> float:
    """Mean absolute error; NaN of nothing."""
    return statistics.fmean(abs(y - x) for x, y in zip(a, b, strict=True)) if a else math.nan


def meaningless(a: Sequence[float], size: float) -> str | None:
    """Why a relative error to curve `a`, whose mean |value| is `size`, has no meaning; None where it has one."""
    if min(a) < 0 < max(a):
        return "changes its sign"
    return f"is near zero (its mean size is {size:.2g})" if size < NEAR_ZERO else None


def limit_in_words(metric: Agreement) -> str:
    """`4 %`, or `0.04 abs.` where the absolute MAE is judged."""
    assert metric.limit is not None
    return f"{100 * metric.limit:g} %" if metric.judged_by == "relative" else f"{metric.limit:g} abs."
