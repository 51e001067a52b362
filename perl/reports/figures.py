"""From summaries and records to the charts of the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from perl.reports import charts
from perl.reports.charts import Bar, Bars, Line
from perl.reports.results import Run
from perl.reports.training_run import TrainingRun
from perl.scoring.results import ScoredSet

BINS = 10
"""Of completion lengths, at most."""


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    note: str
    chart: Markup
    legend: Sequence[tuple[str, str]] = ()
    """(class of the swatch, name)."""


@dataclass(frozen=True, slots=True)
class OverSteps:
    """A chart over the optimizer steps."""

    title: str
    note: str
    unit: str
    lines: dict[str, str]
    """Metrics of docs/training.md and docs/performance.md, with their names in the legend."""
    span: tuple[float, ...] = ()
    """Values that the vertical axis shows in any case."""
    smooth: bool = True


REWARD = OverSteps(
    "Reward", "Mean over a step's completions, and its running mean.", "reward", {"reward": "reward"}, (0.0, 1.0)
)
LOSS = OverSteps(
    "Loss", "Of the learned tokens, and of the evaluation's rows.", "nats a token",
    {"loss": "training", "eval_loss": "evaluation"},
)  # fmt: skip
OVER_STEPS = (
    OverSteps(
        "Completion length", "Mean over a step's completions.", "tokens", {"completions/mean_length": "length"},
    ),
    OverSteps(
        "Entropy", "Of the next token, mean over the completions' tokens.", "nats a token", {"entropy": "entropy"},
        (0.0,),
    ),
    OverSteps(
        "KL divergence",
        "From the reference policy: in the loss (training.beta), and taken from the rewards (algorithm.kl_in_reward).",
        "nats a token", {"kl": "in the loss", "kl_in_reward": "in the reward"}, (0.0,),
    ),
    OverSteps(
        "Explained variance of the critic", "0 is a constant, 1 is perfect.", "share",
        {"critic/explained_variance": "explained variance"}, (0.0,),
    ),
    OverSteps(
        "Value loss of the critic", "Mean over the tokens of an update.", "squared reward",
        {"critic/vf_loss": "value loss"}, (0.0,),
    ),
    OverSteps(
        "Dynamic sampling", "Tokens of all completions over those of the batch: 1 is none for nothing.", "ratio",
        {"dapo/rollout_tokens_per_used_token": "tokens drawn for a token used"}, (1.0,), smooth=False,
    ),
    OverSteps(
        "Noise of the rollouts (AQN)",
        "σ of the schedule, the root mean square of what the weights really changed by, and σ over that of the weights,"
        " mean over the layers.",
        "standard deviation",
        {"aqn/sigma": "σ", "aqn/sigma_realized": "realized", "aqn/sigma_relative": "σ / RMS"}, (0.0,), smooth=False,
    ),
    OverSteps(
        "Noisy and clean policy", "KL divergence on the sampled tokens, and the target of the schedule target_kl.",
        "nats a token", {"aqn/kl": "KL", "aqn/target_kl": "target"}, (0.0,), smooth=False,
    ),
    OverSteps(
        "Step time", "A whole step, and the two largest parts of it.", "seconds",
        {"timing/step": "step", "timing/rollout": "rollout", "timing/update": "update"}, (0.0,),
    ),
    OverSteps(
        "Waiting", "Share of the time that the trainer waited for completions, and its workers for work.", "share",
        {"pool/trainer_waited": "trainer", "pool/workers_idle": "workers"}, (0.0, 1.0),
    ),
    OverSteps(
        "Age of the policy that drew", "Optimizer steps that it is behind the one that is trained.", "steps",
        {"pool/staleness": "mean", "pool/staleness_max": "largest"}, (0.0,), smooth=False,
    ),
    OverSteps(
        "Queue", "Pieces that no worker has begun when a batch is whole.", "pieces", {"pool/queue": "pieces"}, (0.0,),
        smooth=False,
    ),
    OverSteps(
        "Speed of the workers", "Tokens a second of all, and of the slowest and the fastest while it draws.",
        "tokens a second",
        {"pool/tokens_per_s": "all", "pool/tokens_per_s_min": "slowest", "pool/tokens_per_s_max": "fastest"}, (0.0,),
    ),
    OverSteps(
        "Sampler and trainer",
        "Mean absolute difference of their log-probabilities of the sampled tokens; the engine's alone is by the"
        " weights that drew.",
        "nats", {"rollout/logp_mismatch": "difference", "rollout/engine_mismatch": "the engine's alone"}, (0.0,),
    ),
    OverSteps(
        "Drift", "KL(sampler, trainer) on the sampled tokens.", "nats a token",
        {"rollout/logp_kl": "KL"}, (0.0,),
    ),
    OverSteps("Gradient norm", "Before clipping.", "L2 norm", {"grad_norm": "gradient norm"}, (0.0,)),
)  # fmt: skip


def of_reward(run: TrainingRun) -> Figure | None:
    return over_training(run, REWARD)


def of_training(run: TrainingRun) -> list[Figure]:
    """The charts besides the reward's, of what was logged."""
    return [figure for wanted in charts_of(run) if (figure := over_training(run, wanted))]


def charts_of(run: TrainingRun) -> list[OverSteps]:
    """OVER_STEPS, and before them one of the validations, and one of the reward functions where there are several;
    without a reward, of the loss, which says nothing next to one."""
    if not run.points("reward"):
        return [LOSS, *OVER_STEPS]
    scores = {m[0]: m[1] for name in run.metrics if (m := re.fullmatch(r"val-core/(.+)/acc/mean@\d+", name))}
    note = "Mean accuracy on each data source, by the evaluator's rules."
    validated = OverSteps(title="Validation", note=note, unit="accuracy", lines=scores, span=(0.0, 1.0), smooth=False)
    return [*([validated] if scores else []), *of_rewards(run), *OVER_STEPS]


def of_rewards(run: TrainingRun) -> list[OverSteps]:
    functions = [name for name in run.metrics if re.fullmatch(r"rewards/.+/mean", name) and run.points(name)]
    if len(functions) < 2:
        return []
    names = {name: name.removeprefix("rewards/").removesuffix("/mean") for name in functions}
    note = "Mean of each function, before its weight."
    return [OverSteps(title="Reward by function", note=note, unit="reward", lines=names, span=(0.0, 1.0))]


def shown_lines(run: TrainingRun) -> list[Line]:
    """Every line that is drawn."""
    return [line for wanted in (REWARD, *charts_of(run)) for line in lines_of(run, wanted)]


def lines_of(run: TrainingRun, wanted: OverSteps) -> list[Line]:
    return [Line(metric, name, points) for metric, name in wanted.lines.items() if (points := run.points(metric))]


def over_training(run: TrainingRun, wanted: OverSteps) -> Figure | None:
    lines = lines_of(run, wanted)
    if not lines:
        return None
    chart = charts.trend(lines, wanted.title, unit=wanted.unit, span=wanted.span, smooth=wanted.smooth)
    return Figure(wanted.title, wanted.note, chart, legend_of(lines))


def before_and_after(runs: Sequence[Run], pairs: Mapping[int, int]) -> Figure | None:
    """Scores without training and with it, dataset by dataset; None without a pair.

    Args:
        pairs: index of a run -> index of the one that it is compared with.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    for after, before in pairs.items():
        for name in dataset_names([runs[after]]):
            if name in dataset_names([runs[before]]):
                groups.setdefault((before, name), []).append(after)
    shown = []
    for (before, name), afters in groups.items():
        names = ["before", *(["after"] if len(afters) == 1 else [runs[after].label for after in afters])]
        results = [scored for i in (before, *afters) for scored in runs[i].scored if scored.dataset == name]
        rows = [
            charts.estimate(label, accuracy(scored), "bar before" if scored is results[0] else "bar first")
            for label, scored in zip(names, results, strict=True)
        ]
        shown.append(Bars(f"{name}, {sampled(results[0])}", rows))
    if not shown:
        return None
    chart = charts.bars(shown, "Scores with 95 % intervals")
    return Figure("Before and after training", "Accuracy with its 95 % interval.", chart)


def sampled(scored: ScoredSet) -> str:
    """How the completions were sampled, in a few words."""
    summary = scored.summary
    temperature, n = summary["sampling"]["temperature"], summary["n"]
    each = "" if n == 1 else f", {n} samples each"
    return f"{summary['problems']:,} problems{each}, " + (f"temperature {temperature:g}" if temperature else "greedy")


def overview(runs: Sequence[Run]) -> list[Figure]:
    """What runs and datasets are compared by: accuracy, in a sweep over its steps."""
    figures = []
    if len({run.step for run in runs} - {None}) > 1:
        figures += [over_steps(runs, name) for name in dataset_names([run for run in runs if run.step is not None])]
    if not figures or any(run.step is None for run in runs):
        if len(runs) == 1:
            rows = [Bars("", [charts.estimate(each.dataset, accuracy(each)) for each in runs[0].scored])]
        else:
            rows = [Bars(name, bars_of(runs, name)) for name in dataset_names(runs)]
        chart = charts.bars(rows, "Accuracy with 95 % intervals")
        figures.append(Figure("Accuracy", "With its 95 % interval (bootstrap over problems).", chart))
    return figures


def bars_of(runs: Sequence[Run], dataset: str) -> list[Bar]:
    return [
        charts.estimate(run.label, accuracy(scored))
        for run in runs
        for scored in run.scored
        if scored.dataset == dataset
    ]


def over_steps(runs: Sequence[Run], dataset: str) -> Figure:
    """Accuracy over training steps, a line for each training; the base, which stands at step 0 of a single one, is
    drawn across too."""
    results = [(run.step, scored) for run in runs for scored in run.scored if scored.dataset == dataset]
    base = next((accuracy(scored) for _, scored in results if scored.summary["adapter"] is None), None)
    trainings: dict[Path, dict[int, Mapping[str, Any]]] = {}
    for step, scored in results:
        if step is not None and (adapter := scored.summary["adapter"]) is not None:
            trainings.setdefault(Path(adapter).parent, {})[step] = accuracy(scored)
    names = [folder.name for folder in trainings]
    if len(trainings) < 2:
        (scores,) = trainings.values() or [{}]
        lines = [with_band(dataset, scores | ({0: base} if base else {}))]
    else:
        labels = [folder.name if names.count(folder.name) == 1 else str(folder) for folder in trainings]
        lines = [with_band(label, scores) for label, scores in zip(labels, trainings.values(), strict=True)]
    level = 100 * base["value"] if base else None
    chart = charts.trend(
        lines, f"Accuracy on {dataset} by step", unit="%", x_name="step", level=level, smooth=False, pointer=False
    )
    note = "Accuracy by training step; the band is the 95 % interval"
    return Figure(dataset, f"{note}, the dashed line the base." if base else f"{note}.", chart, legend_of(lines))


def legend_of(lines: Sequence[Line]) -> Sequence[tuple[str, str]]:
    """Of more than one line."""
    return [(f"s{number % charts.COLOURS}", line.name) for number, line in enumerate(lines)] if len(lines) > 1 else ()


def with_band(name: str, scores: Mapping[int, Mapping[str, Any]]) -> Line:
    """Scores by their place, in percent, with the interval of each."""
    points = [(place, 100 * score["value"]) for place, score in sorted(scores.items())]
    return Line(name, name, points, [(i, 100 * s["low"], 100 * s["high"]) for i, s in sorted(scores.items())])


def of_dataset(scored: ScoredSet) -> list[Figure]:
    """Lengths, and what more samples would give."""
    samples = of_samples(scored) if scored.summary["n"] > 1 else None
    return [of_lengths(scored), *([samples] if samples else [])]


def of_lengths(scored: ScoredSet) -> Figure:
    """Completions by their length in tokens, in bins of equal width; those that were cut off in their own colour."""
    summary, longest = scored.summary, max(record["tokens"] for record in scored.records)
    width = max(-(-(longest + 1) // BINS), 1)
    counts = Counter((r["tokens"] // width, r["finish_reason"] == "length") for r in scored.records)
    most = max(counts[i, False] + counts[i, True] for i, _ in counts)
    rows = []
    for i in range(longest // width + 1):
        name = f"{i * width:,}" if width == 1 else f"{i * width:,} to {(i + 1) * width - 1:,}"
        kinds = (("bar", counts[i, False], "finished"), ("bar cut", counts[i, True], "truncated"))
        parts = [(kind, count / most, f"{name} tokens: {count:,} {words}") for kind, count, words in kinds if count]
        rows.append(Bar(name, parts, f"{counts[i, False] + counts[i, True]:,}"))
    truncated = sum(count for (_, cut), count in counts.items() if cut)
    note = f"Tokens. Mean {summary['mean_tokens']:,.0f}, longest {summary['max_tokens']:,}; {truncated:,} truncated."
    chart = charts.bars([Bars("", rows)], "Completions by their length", [(0.0, "0"), (1.0, f"{most:,}")])
    return Figure("Completion lengths", note, chart, [("bar", "finished"), ("cut", "truncated")])


def of_samples(scored: ScoredSet) -> Figure | None:
    def line(kind: str) -> Line:
        places = [(re.match(rf"{kind}@(\d{{1,9}})$", name), score) for name, score in scored.summary["metrics"].items()]
        return with_band(f"{kind}@k", {int(place[1]): score for place, score in places if place})

    lines = [drawn for kind in ("pass", "maj") if (drawn := line(kind)).points]
    if not lines:
        return None
    names = " and ".join(drawn.name for drawn in lines)
    chart = charts.trend(lines, f"{names} on {scored.dataset}", unit="%", x_name="k", smooth=False, pointer=False)
    majority = ", and score of their majority" if len(lines) > 1 else ""
    note = f"Probability that k samples hold a correct answer{majority}; bands are 95 % intervals."
    return Figure("More samples", note, chart, [(f"s{i}", drawn.name) for i, drawn in enumerate(lines)])


def of_comparisons(runs: Sequence[Run]) -> list[Figure]:
    """A figure a dataset: each metric's difference, in a sweep that of each checkpoint's mean score."""
    rows: dict[str, list[Bar]] = {}
    for run in runs:
        for dataset, paired in run.comparison.datasets.items() if run.comparison else ():
            shown = [*paired.metrics.items()][: 1 if run.label else None]
            bars = [charts.estimate(run.label or metric, asdict(d), difference=True) for metric, d in shown]
            rows.setdefault(dataset, []).extend(bars)
    note = "Difference in percentage points, paired by problem, with its 95 % interval; to the right is better."
    what = "Differences in percentage points with 95 % intervals"
    return [Figure(dataset, note, charts.differences(what, bars)) for dataset, bars in rows.items()]


def accuracy(scored: ScoredSet) -> Mapping[str, Any]:
    """The score that counts: value, low, high."""
    return scored.summary["metrics"]["accuracy"]


def dataset_names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(scored.dataset for run in runs for scored in run.scored))
