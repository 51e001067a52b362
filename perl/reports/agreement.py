"""Whether two trainings' curves agree: mean absolute errors as verl's Ascend guide asks for them, and a test on seeds.

A is the reference. Each side may be several runs that differ in their seed alone; its curve is then their mean. Curves
are compared where all runs of both sides have them, over intervals whose ends all of them share: one rollout each where
every step was logged.

    absolute MAE   mean of |B - A|, in the metric's unit
    relative MAE   absolute MAE over the mean of |A|

The guide asks for a "mean absolute error" of at most 4 % (rewards of RL) and 2 % (loss), and gives its formula as an
image. The limit is held against the relative one: of a reward within 0 and 1 that is the stricter one of the two
readings. Where the relative one has no meaning (NEAR_ZERO), the absolute one is held against it.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, Literal

from perl.base.errors import UserError
from perl.reports.curves import NAMES, Curves, spacing
from perl.scoring.statistics import CONFIDENCE, t_quantile, t_tails

LIMITS = {"reward": 0.04, "loss": 0.02}
"""Of the relative MAE, as the guide has them; metrics without one are shown for information."""
THROUGHPUT = "perf/throughput"
THROUGHPUT_STEPS = 4
"""Rollouts whose mean throughput the guide compares: verl's first four steps."""
NEAR_ZERO = 0.01
"""Mean of |A| below which, and in a curve that changes its sign at all, a relative error says nothing."""
SAMPLING_NOTE = (
    "one run a side: with another sampling seed the same run differs by up to 6 % in means of ten rollouts, and by more"
    " from rollout to rollout (docs/evaluation.md), so that 4 % decides nothing for sampled curves; write several seeds"
    " a side (A1,A2,A3 B1,B2,B3)"
)

Side = Literal["A", "B"]
Runs = Mapping[Side, Sequence[Curves]]


@dataclass(frozen=True, slots=True)
class Axis:
    """What the curves are aligned by."""

    name: Literal["rollout", "prompt", "step"]
    why: str
    steps: list[Fraction]
    """Logged steps per rollout of each run, those of A first; 1 where the axis is the step itself."""
    units: list[int]
    """Units of the axis per rollout of each run: prompts, else 1."""


@dataclass(frozen=True, slots=True)
class Span:
    """A value over the part of the axis after `start` up to `end`."""

    start: int
    end: int
    value: float


@dataclass(frozen=True, slots=True)
class SeedTest:
    """Welch's t test on the means of the single runs over the compared part of the curve."""

    a: list[float]
    b: list[float]
    difference: float
    """Mean of `b` minus mean of `a`, with its confidence interval."""
    low: float
    high: float
    p: float
    between: float
    """MAE of two runs of one side, mean over all such pairs: what the seed alone makes."""
    verdict: Literal["equal", "different", "undecided"]
    """equal: the interval lies within the limit; different: it holds no zero."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """One metric of both sides."""

    name: str
    logged_as: tuple[str, str]
    """In the first file of A and of B."""
    spans: int
    """Intervals that were compared."""
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
    seeds: SeedTest | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that is said of two sides."""

    axis: Axis
    start: int
    """The compared part of the axis: after `start` up to `end`."""
    end: int
    metrics: list[Agreement]
    throughput: dict[str, Any] | None
    """{"a", "b", "ratio" (B over A), "start", "end"} over THROUGHPUT_STEPS; None where a side did not log it."""
    notes: list[str]
    within: bool
    """Whether every metric with a limit is within it."""

    def as_json(self) -> dict[str, Any]:
        """NaN becomes null."""
        return _json(asdict(self) | {"axis": {"name": self.axis.name, "why": self.axis.why}})


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare_runs(
    runs: Runs,
    limits: Mapping[str, float] = LIMITS,
    error: Literal["relative", "absolute"] = "relative",
    align: Literal["auto", "rollouts", "prompts", "steps"] = "auto",
    window: int = 1,
) -> Comparison:
    """Compare the runs of B with those of A.

    Args:
        limits: by metric, as fractions.
        error: which MAE is held against the limits where both have a meaning.
        align: what by; "auto": rollouts, or prompts where the runs are known to draw different numbers of them.
        window: rollouts whose mean is one value of a curve.

    Raises:
        UserError: neither reward nor loss is in all runs, the curves share no part of the axis, or nothing tells how
            they are aligned.
    """
    every = [*runs["A"], *runs["B"]]
    axis = choose_axis(runs, align)
    names = [name for name in NAMES if all(name in run.metrics for run in every)]
    if axis.name == "prompt":  # seconds a rollout do not compare where the rollouts are of another size
        names = [name for name in names if not name.startswith("timing/")]
    if not any(name in limits for name in names):
        raise UserError(f"A, B: no common metric: {'; '.join(f'{run.source} has {_main(run)}' for run in every)}")
    size = window * max(axis.units)
    values = {name: common(name, every, axis, size) for name in names}
    compared = {name: found for name, found in values.items() if found[0]}
    if not any(name in limits for name in compared):
        reach = "; ".join(f"{run.source} {_reach(run, axis, i)}" for i, run in enumerate(every))
        shorter = f"; --window {window} may be longer than what they share: write less" if window > 1 else ""
        raise UserError(f"A, B: the curves share no {axis.name}s to compare: {reach}{shorter}")
    metrics = [agreement(name, runs, spans, rows, limits.get(name), error) for name, (spans, rows) in compared.items()]
    shared = [name for name in every[0].scores if all(name in run.scores for run in every)]
    scored = {name: found for name in shared if (found := shared_scores(name, every, axis))[0]}
    metrics += [agreement(n, runs, [(at, at + 1) for at in p], rows, None, error) for n, (p, rows) in scored.items()]
    main = next(name for name in limits if name in compared)
    spans = compared[main][0]
    notes = [*left_out(limits, compared, every, axis), *of_two_kinds(runs), *lengths(every, axis, main, spans)]
    notes += [validated(places, axis, names) for places, names in by_places(scored).items()]
    if all(found.absolute == 0 for found in metrics if found.limit is not None):
        notes.append("reward and loss are the same to the last digit: is this one run twice?")
    fewest, most = sorted(map(len, runs.values()))
    if fewest == 1:
        notes.append(SAMPLING_NOTE if most == 1 else "a test on seeds needs at least two runs on each side")
    return Comparison(
        axis=axis,
        start=spans[0][0],
        end=spans[-1][1],
        metrics=metrics,
        throughput=throughput(every, len(runs["A"]), axis),
        notes=notes,
        within=all(found.verdict != "outside" for found in metrics),
    )


def choose_axis(runs: Runs, align: str) -> Axis:
    """How the runs' steps are placed on one axis, and why so."""
    every = [(side, run) for side in ("A", "B") for run in runs[side]]
    steps = [run.steps_per_rollout for _, run in every]
    prompts = [run.prompts_per_rollout for _, run in every]
    ones = [1] * len(every)
    unknown = next((f"{side} {run.source}" for side, run in every if run.steps_per_rollout is None), None)
    if align == "steps":
        return Axis("step", "as asked for by --align steps", [Fraction(1)] * len(every), ones)
    if unknown and align == "auto" and not any(steps) and len({run.format for _, run in every}) == 1:
        why = "no run tells how many of them a rollout has, so that this holds for equal batch settings only"
        return Axis("step", f"{why}; else write --steps_per_rollout", [Fraction(1)] * len(every), ones)
    if unknown:
        raise UserError(
            f"{unknown}: nothing there tells how many optimizer steps are made from one rollout (verl:"
            " train_batch_size / ppo_mini_batch_size; TRL: steps_per_generation * num_iterations /"
            " gradient_accumulation_steps); write --steps_per_rollout, one number for A and B or one for each (4,1), or"
            " --align steps where a step is the same in both"
        )
    known = [step for step in steps if step is not None]
    said = _sides(prompts, len(runs["A"]))
    if None in prompts:
        if align == "prompts":
            raise UserError(f"--align prompts: prompts per rollout are not known of all runs ({said});"
                            " write --prompts_per_rollout, one number for A and B or one for each")  # fmt: skip
        return Axis("rollout", f"prompts per rollout: {said}; they are taken to be equal", known, ones)
    if align == "prompts" or (align == "auto" and len(set(prompts)) > 1):
        return Axis("prompt", f"prompts per rollout: {said}", known, [p for p in prompts if p])
    return Axis("rollout", f"prompts per rollout: {said}", known, ones)


def of_two_kinds(runs: Runs) -> list[str]:
    """One line where runs that log rewards meet runs that do not."""
    kinds = {side: {"reward" in run.metrics for run in runs[side]} for side in ("A", "B")}
    if all(len(found) == 1 for found in kinds.values()) and kinds["A"] != kinds["B"]:
        rewarded = "A" if True in kinds["A"] else "B"
        return [
            f"the sides are of two kinds: {rewarded} was trained by rewards (GRPO, PPO), {'AB'.strip(rewarded)} logs"
            " none (supervised fine-tuning); their losses are different quantities, and the verdict says nothing"
        ]
    return []


def shared_scores(name: str, runs: Sequence[Curves], axis: Axis) -> tuple[list[int], list[list[float]]]:
    """The places of the axis after which all runs were validated, and each run's score there."""
    found = [{span.end: span.value for span in placed(run, name, axis, index)} for index, run in enumerate(runs)]
    places = sorted(set.intersection(*map(set, found)))
    return places, [[scores[place] for place in places] for scores in found]


def by_places(scored: Mapping[str, tuple[list[int], list[list[float]]]]) -> dict[tuple[int, ...], list[str]]:
    """The names of scores that are compared at the same places."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name, (places, _) in scored.items():
        found.setdefault(tuple(places), []).append(name)
    return found


def validated(places: Sequence[int], axis: Axis, names: Sequence[str]) -> str:
    shown = [*map(str, places[:6]), *(["…", str(places[-1])] if len(places) > 6 else [])]
    what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more scores"
    return (
        f"{what}: compared where all runs were validated, after {axis.name}s {', '.join(shown)} (0: before the first)"
    )


def left_out(limits: Mapping[str, float], compared: Collection[str], runs: Sequence[Curves], axis: Axis) -> list[str]:
    """Which metrics with a limit are not compared, and why."""
    notes = []
    for name in limits:
        if name not in compared:
            lacking = dict.fromkeys(str(run.source) for run in runs if name not in run.metrics)
            why = f"{', '.join(lacking)} did not log it" if lacking else f"the logs share no {axis.name}s of it"
            notes.append(f"{name} is not compared: {why}")
    return notes


def _sides(values: Sequence[int | None], count: int) -> str:
    """`A 128, B unknown` for values of which the first `count` are A's."""
    each = (("A", values[:count]), ("B", values[count:]))
    return ", ".join(f"{side} {'/'.join(str(v or 'unknown') for v in dict.fromkeys(own))}" for side, own in each)


def _main(run: Curves) -> str:
    return ", ".join(list(run.metrics)[:6]) + (", …" if len(run.metrics) > 6 else "")


def _reach(run: Curves, axis: Axis, index: int) -> str:
    found = placed(run, "reward" if "reward" in run.metrics else "loss", axis, index)
    return f"has {found[0].start + 1} to {found[-1].end}" if found else "has none whole"


def placed(run: Curves, name: str, axis: Axis, index: int) -> list[Span]:
    """A metric of one run on the axis, ascending. Logs of one rollout become one value.

    Times become seconds a rollout, and throughput is weighted by the time of its steps; other metrics are the mean of
    their logs. A log holds the steps since the one before it; where one is missing, so is its part of the axis.

    Args:
        index: of the run in the axis.

    Scores of validations stand at the end of a rollout, those in between are left out.
    """
    k, unit = axis.steps[index], axis.units[index]
    if name in run.scores:  # a score is of a moment: between two rollouts, or, where k is larger, in one
        return [Span(int(s * unit / k), int(s * unit / k), v) for s, v in run.scores[name].items() if s % k == 0]
    points = run.metrics[name]
    every = spacing(points) or math.ceil(k)
    groups: dict[int, list[int]] = {}
    for step in points:
        groups.setdefault(math.ceil(step / k), []).append(step)
    spans: list[Span] = []
    for end, steps in groups.items():
        if every < k and steps[-1] <= end * k - every:
            continue  # the run ended before all updates of this rollout
        start = max(math.ceil((steps[0] - every) / k), spans[-1].end // unit if spans else 0)
        spans.append(Span(start * unit, end * unit, combined(run, name, steps, k)))
    return spans


def combined(run: Curves, name: str, steps: Sequence[int], k: Fraction) -> float:
    """The value of one rollout from the logs of its `steps`."""
    values = [run.metrics[name][step] for step in steps]
    if name.startswith("timing/"):
        return float(statistics.fmean(values) * k)
    seconds = run.metrics.get("timing/step", {})
    if name == THROUGHPUT and all(step in seconds for step in steps):  # tokens over time: long steps count more
        weights = [seconds[step] for step in steps]
        return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    return statistics.fmean(values)


def common(name: str, runs: Sequence[Curves], axis: Axis, size: int) -> tuple[list[tuple[int, int]], list[list[float]]]:
    """The intervals (start, end) of the axis that all runs cover whole and at whose ends all have a boundary, each at
    least `size` long, and each run's value in each of them."""
    found = [placed(run, name, axis, index) for index, run in enumerate(runs)]
    shared = sorted(set.intersection(*({s.start for s in spans} | {s.end for s in spans} for spans in found)))
    intervals: list[tuple[int, int]] = []
    rows: list[list[float]] = [[] for _ in runs]
    for low in shared:
        place = bisect_left(shared, low + size)
        if place == len(shared) or (intervals and low < intervals[-1][1]):
            continue
        means = [mean_over(spans, low, shared[place]) for spans in found]
        if None not in means:
            intervals.append((low, shared[place]))
            for row, mean in zip(rows, means, strict=True):
                row.append(mean)  # type: ignore[arg-type]
    return intervals, rows


def mean_over(spans: Sequence[Span], low: int, high: int) -> float | None:
    """Mean of what is logged after `low` up to `high`; None where that is not all of it."""
    first = bisect_left(spans, low, key=lambda span: span.start)
    inside = spans[first : bisect_right(spans, high, key=lambda span: span.end)]
    widths = [span.end - span.start for span in inside]
    if sum(widths) != high - low:
        return None
    return sum(span.value * width for span, width in zip(inside, widths, strict=True)) / sum(widths)


def weighted(values: Sequence[float], spans: Sequence[tuple[int, int]]) -> float:
    """Mean over the axis."""
    widths = [end - start for start, end in spans]
    return sum(v * w for v, w in zip(values, widths, strict=True)) / sum(widths)


def mae(a: Sequence[float], b: Sequence[float], spans: Sequence[tuple[int, int]]) -> float:
    return weighted([abs(y - x) for x, y in zip(a, b, strict=True)], spans)


def agreement(
    name: str,
    runs: Runs,
    spans: list[tuple[int, int]],
    rows: list[list[float]],
    limit: float | None,
    error: Literal["relative", "absolute"],
) -> Agreement:
    """One metric.

    Args:
        rows: value of each run in each of `spans`, those of A first.
    """
    count = len(runs["A"])
    a, b = ([statistics.fmean(column) for column in zip(*own, strict=True)] for own in (rows[:count], rows[count:]))
    absolute, size = mae(a, b, spans), weighted([abs(value) for value in a], spans)
    relative = absolute / size if size else None
    logged_as = (runs["A"][0].logged_as.get(name, name), runs["B"][0].logged_as.get(name, name))
    notes: list[str] = []
    judged_by = None if limit is None else error
    if limit is not None and error == "relative" and (why := meaningless(a, size)):
        judged_by = "absolute"
        width = max(*a, *b) - min(*a, *b)
        notes.append(
            f"{name}: A's curve {why}, where a relative error says nothing: the absolute MAE is held against {limit:g}"
            + (
                f"; both curves span only {width:.2g}, so that this can hardly fail: look at them"
                if width < limit
                else ""
            )
        )
    held = relative if judged_by == "relative" else absolute
    if not math.isfinite(absolute):
        missing = sum(not (math.isfinite(x) and math.isfinite(y)) for x, y in zip(a, b, strict=True))
        notes.append(f"{name}: {missing} of {len(a)} values are NaN, infinite or null, which is outside any limit")
    verdict = None if limit is None else "within" if held is not None and held <= limit else "outside"
    seeds = None
    if limit is not None and min(count, len(rows) - count) > 1 and math.isfinite(absolute):
        room = limit * size if judged_by == "relative" else limit
        seeds = seed_test(rows[:count], rows[count:], spans, room)
    return Agreement(
        name, logged_as, len(spans), weighted(a, spans), weighted(b, spans), absolute, relative, judged_by, limit,
        verdict, notes, seeds,
    )  # fmt: skip


def meaningless(a: Sequence[float], size: float) -> str | None:
    """Why a relative error to curve `a` has no meaning; None where it has one."""
    if min(a) < 0 < max(a):
        return "changes its sign"
    return f"is near zero (its mean size is {size:.2g})" if size < NEAR_ZERO else None


def seed_test(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], spans: Sequence[tuple[int, int]], room: float
) -> SeedTest:
    """Compare the runs' means.

    Args:
        a, b: each run's values in `spans`.
        room: a difference that is small enough, in the metric's unit.
    """
    own = [[weighted(run, spans) for run in side] for side in (a, b)]
    difference, low, high, p = welch(*own)
    pairs = [mae(x, y, spans) for side in (a, b) for i, x in enumerate(side) for y in side[:i]]
    verdict = "equal" if -room <= low and high <= room else "different" if low > 0 or high < 0 else "undecided"
    return SeedTest(own[0], own[1], difference, low, high, p, statistics.fmean(pairs), verdict)


def welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float, float]:
    """Difference of the means of `b` and `a` with its confidence interval, and the two-sided p, by Welch's t test: the
    variances may differ (Welch 1947; degrees of freedom by Satterthwaite). At least two values each."""
    difference = statistics.fmean(b) - statistics.fmean(a)
    parts = [statistics.variance(side) / len(side) for side in (a, b)]
    error = math.sqrt(sum(parts))
    if not error:
        return difference, difference, difference, float(difference == 0)
    degrees = sum(parts) ** 2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (a, b), strict=True))
    reach = t_quantile(degrees) * error
    return difference, difference - reach, difference + reach, t_tails(difference / error, degrees)


def throughput(runs: Sequence[Curves], count: int, axis: Axis) -> dict[str, Any] | None:
    """Mean of each side over the first four rollouts that all runs have, or as many as the first logs hold where these
    hold more. The first `count` runs are A's."""
    if not all(THROUGHPUT in run.metrics for run in runs):
        return None
    spans, rows = common(THROUGHPUT, runs, axis, 1)
    if not spans:
        return None
    first = spans[0][0]
    reach = first + THROUGHPUT_STEPS * max(axis.units)
    taken = [place for place, span in enumerate(spans) if span[1] <= reach] or [0]
    means = [statistics.fmean(row[place] for place in taken) for row in rows]
    a, b = statistics.fmean(means[:count]), statistics.fmean(means[count:])
    return {"a": a, "b": b, "ratio": b / a if a else None, "start": first, "end": spans[taken[-1]][1]}


def lengths(runs: Sequence[Curves], axis: Axis, name: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    """What of the curves was not compared."""
    reaches = [placed(run, name, axis, index) for index, run in enumerate(runs)]
    start, end = spans[0][0], spans[-1][1]
    notes = [
        f"{run.source} has {axis.name}s {own[0].start + 1} to {own[-1].end}, of which {start + 1} to {end} are compared"
        for run, own in zip(runs, reaches, strict=True)
        if (own[0].start, own[-1].end) != (start, end)
    ]
    if gap := end - start - sum(high - low for low, high in spans):
        notes.append(f"{gap} {axis.name}s between {start + 1} and {end} are not in all logs, and left out")
    widths = sorted({high - low for low, high in spans})
    if widths[-1] > max(axis.units):
        each = f"{widths[0]}" if len(widths) == 1 else f"{widths[0]} to {widths[-1]}"
        notes.append(f"each value is the mean of {each} {axis.name}s, which the logs have in common")
    return notes


def verdict(comparison: Comparison) -> str:
    """One line."""
    judged = [found for found in comparison.metrics if found.limit is not None]
    outside = [found.name for found in judged if found.verdict == "outside"]
    if not outside:
        return f"Within the limits: {' and '.join(found.name for found in judged)}"
    return f"Outside the limits: {' and '.join(outside)}"


def limit_in_words(found: Agreement) -> str:
    """`4 %`, or `0.04 abs.` where the absolute MAE is judged."""
    assert found.limit is not None
    return f"{100 * found.limit:g} %" if found.judged_by == "relative" else f"{found.limit:g} abs."


def remarks(comparison: Comparison) -> list[str]:
    """Everything that the table does not say, a line each."""
    lines = []
    if rate := comparison.throughput:
        part = f"{comparison.axis.name}s {rate['start'] + 1} to {rate['end']}"
        ratio = "" if rate["ratio"] is None else f", ratio B / A {rate['ratio']:.3f}"
        lines.append(
            f"throughput, mean over {part}: A {rate['a']:,.1f}, B {rate['b']:,.1f} tokens/s a device{ratio} (the guide"
            f" takes verl's first {THROUGHPUT_STEPS} steps and gives no limit)"
        )
    for found in comparison.metrics:
        lines += found.notes
        if found.seeds:
            lines.append(seeds_in_words(found, found.seeds))
    return lines + comparison.notes


def seeds_in_words(found: Agreement, test: SeedTest) -> str:
    share = found.judged_by == "relative"
    whole = abs(found.mean_a) if share else 1.0

    def said(value: float, sign: str = "+") -> str:
        return f"{100 * value / whole:{sign}.2f} %" if share else f"{value:{sign}.3g}"

    meaning = {
        "equal": f"the sides are equal within {limit_in_words(found)}",
        "different": "the sides differ by more than their seeds",
        "undecided": "these seeds show no difference, and too few of them to show that there is none within the limit",
    }[test.verdict]
    return (
        f"{found.name}, test on seeds (Welch's t on the means of {len(test.a)} and {len(test.b)} runs):"
        f" B - A {said(test.difference)}, {100 * CONFIDENCE:.0f} % interval {said(test.low)} to {said(test.high)},"
        f" p {test.p:.2g}: {meaning}; two runs of one side have an MAE of {said(test.between, '')}"
    )
