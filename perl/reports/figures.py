"""From summaries and records to the charts of the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from perl.reports import charts
from perl.reports.charts import Bars, Curve, Line, Point
from perl.reports.results import Record, Run, Scored
from perl.reports.training_run import TrainingRun


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    note: str
    chart: Markup
    legend: Sequence[tuple[str, str]] = ()
    """(class of the swatch, name)."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    title="Reward",
    note="Mean over a step's completions, and its running mean.",
    unit="reward",
    lines={"reward": "reward"},
    span=(0.0, 1.0),
)
LOSS = OverSteps(
    title="Loss",
    note="Of the learned tokens, and of the evaluation's rows.",
    unit="nats a token",
    lines={"loss": "training", "eval_loss": "evaluation"},
)
OVER_STEPS = (
    OverSteps(
        title="Completion length",
        note="Mean over a step's completions.",
        unit="tokens",
        lines={"completions/mean_length": "length"},
    ),
    OverSteps(
        title="Entropy",
        note="Of the next token, mean over the completions' tokens.",
        unit="nats a token",
        lines={"entropy": "entropy"},
        span=(0.0,),
    ),
    OverSteps(
        title="KL divergence",
        note="From the reference policy: in the loss (training.beta), and taken from the rewards"
        " (algorithm.kl_in_reward).",
        unit="nats a token",
        lines={"kl": "in the loss", "kl_in_reward": "in the reward"},
        span=(0.0,),
    ),
    OverSteps(
        title="Explained variance of the critic",
        note="0 is a constant, 1 is perfect.",
        unit="share",
        lines={"critic/explained_variance": "explained variance"},
        span=(0.0,),
    ),
    OverSteps(
        title="Value loss of the critic",
        note="Mean over the tokens of an update.",
        unit="squared reward",
        lines={"critic/vf_loss": "value loss"},
        span=(0.0,),
    ),
    OverSteps(
        title="Dynamic sampling",
        note="Tokens of all completions over those of the batch: 1 is none for nothing.",
        unit="ratio",
        lines={"dapo/rollout_tokens_per_used_token": "tokens drawn for a token used"},
        span=(1.0,),
        smooth=False,
    ),
    OverSteps(
        title="Noise of the rollouts (AQN)",
        note="σ of the schedule, the root mean square of what the weights really changed by, and σ over that of the"
        " weights, mean over the layers.",
        unit="standard deviation",
        lines={"aqn/sigma": "σ", "aqn/sigma_realized": "realized", "aqn/sigma_relative": "σ / RMS"},
        span=(0.0,),
        smooth=False,
    ),
    OverSteps(
        title="Noisy and clean policy",
        note="KL divergence on the sampled tokens, and the target of the schedule target_kl.",
        unit="nats a token",
        lines={"aqn/kl": "KL", "aqn/target_kl": "target"},
        span=(0.0,),
        smooth=False,
    ),
    OverSteps(
        title="Step time",
        note="A whole step, and the two largest parts of it.",
        unit="seconds",
        lines={"timing/step": "step", "timing/rollout": "rollout", "timing/update": "update"},
        span=(0.0,),
    ),
    OverSteps(
        title="Sampler and trainer",
        note="Mean absolute difference of their log-probabilities of the sampled tokens.",
        unit="nats",
        lines={"rollout/logp_mismatch": "difference"},
        span=(0.0,),
    ),
    OverSteps(
        title="Gradient norm",
        note="Before clipping.",
        unit="L2 norm",
        lines={"grad_norm": "gradient norm"},
        span=(0.0,),
    ),
)


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


def shown_metrics(run: TrainingRun) -> list[str]:
    """Names of the logged metrics that are drawn."""
    return [name for wanted in (REWARD, *charts_of(run)) for name in wanted.lines if run.points(name)]


def over_training(run: TrainingRun, wanted: OverSteps) -> Figure | None:
    lines = [Line(metric, name, points) for metric, name in wanted.lines.items() if (points := run.points(metric))]
    if not lines:
        return None
    chart = charts.trend(lines, wanted.title, unit=wanted.unit, span=wanted.span, smooth=wanted.smooth)
    legend = [(f"s{number}", line.name) for number, line in enumerate(lines)] if len(lines) > 1 else ()
    return Figure(wanted.title, wanted.note, chart, legend)


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
    made = []
    for (before, name), afters in groups.items():
        names = ["before", *(["after"] if len(afters) == 1 else [runs[after].label for after in afters])]
        found = [scored for i in (before, *afters) for scored in runs[i].scored if scored.dataset == name]
        rows = [(said, accuracy(scored)) for said, scored in zip(names, found, strict=True)]
        made.append(Bars(f"{name}, {sampled(found[0])}", rows))
    if not made:
        return None
    return Figure("Before and after training", "Accuracy with its 95 % interval.", charts.before_after(made))


def sampled(scored: Scored) -> str:
    """How the completions were sampled, in a few words."""
    summary = scored.summary
    temperature, n = summary["sampling"]["temperature"], summary["n"]
    each = "" if n == 1 else f", {n} samples each"
    return f"{summary['problems']:,} problems{each}, " + (f"temperature {temperature:g}" if temperature else "greedy")


OUTCOMES = {
    "correct": "correct",
    "wrong": "wrong answer",
    "unextracted": "no answer found",
    "truncated": "truncated",
    "failed": "timeout or error",
}


def overview(runs: Sequence[Run]) -> list[Figure]:
    """What runs and datasets are compared by: accuracy, in a sweep over its steps, and what became of the samples."""
    rows = [(label(run, scored), scored) for run in runs for scored in run.scored]
    made = []
    if len({run.step for run in runs} - {None}) > 1:
        made += [over_steps(runs, name) for name in dataset_names(runs)]
    if not made or any(run.step is None for run in runs):
        chart = charts.accuracies([(name, accuracy(scored)) for name, scored in rows])
        made.append(Figure("Accuracy", "With its 95 % interval (bootstrap over problems).", chart))
    legend = [(f"o-{kind}", name) for kind, name in OUTCOMES.items()]
    chart = charts.shares([(name, outcomes(scored)) for name, scored in rows])
    return [
        *made,
        Figure(
            "What became of the samples", "Each counted once; a truncated one may also lack an answer.", chart, legend
        ),
    ]


def label(run: Run, scored: Scored) -> str:
    return " · ".join(filter(None, (scored.dataset, run.label)))


def outcomes(scored: Scored) -> list[tuple[str, str, int]]:
    counts = Counter(outcome(record) for record in scored.records)
    return [(f"o-{kind}", name, counts[kind]) for kind, name in OUTCOMES.items()]


def outcome(record: Record) -> str:
    """The first of these that holds: correct, failed, truncated, unextracted, wrong."""
    if record["score"] == 1.0:
        return "correct"
    if record["error"] is not None or record["reason"] in ("timeout", "error"):
        return "failed"
    if record["finish_reason"] == "length":
        return "truncated"
    return "unextracted" if record["extracted"] is None else "wrong"


def over_steps(runs: Sequence[Run], dataset: str) -> Figure:
    """Accuracy over training steps; the base, which stands at step 0, is drawn across too."""
    found = [(run, scored) for run in runs for scored in run.scored if scored.dataset == dataset]
    known = [(run.step, scored) for run, scored in found if run.step is not None]
    points = [accuracy(scored, step) for step, scored in sorted(known, key=lambda pair: pair[0])]
    level = next((accuracy(scored) for _, scored in found if scored.summary["adapter"] is None), None)
    chart = charts.curves([Curve(dataset, points)], f"Accuracy on {dataset} by step", x_name="step", level=level)
    note = "Accuracy by training step; the band is the 95 % interval"
    return Figure(dataset, f"{note}, the dashed line the base." if level else f"{note}.", chart)


def of_dataset(scored: Scored) -> list[Figure]:
    """Lengths, rules, and what more samples would give."""
    made = [of_lengths(scored), of_rules(scored)]
    return [*made, of_samples(scored)] if scored.summary["n"] > 1 else made


def of_lengths(scored: Scored) -> Figure:
    truncated = [r["tokens"] for r in scored.records if r["finish_reason"] == "length"]
    finished = [r["tokens"] for r in scored.records if r["finish_reason"] != "length"]
    summary = scored.summary
    note = f"Mean {summary['mean_tokens']:,.0f}, longest {summary['max_tokens']:,}; {len(truncated):,} truncated."
    legend = [("bar", "finished"), ("cut", "truncated")]
    return Figure("Completion lengths", note, charts.lengths(finished, truncated), legend)


def of_rules(scored: Scored) -> Figure:
    summary = scored.summary
    rows = [("score", summary["metrics"]["accuracy"]["value"], "")]
    for rule, found in summary["rules"].items():
        note = "" if found["scored"] == summary["samples"] else f" of {found['scored']:,}"
        rows.append((rule, found["mean"], note))
    return Figure("Rules side by side", "The score that counts, and each rule's own verdict.", charts.bars(rows))


def of_samples(scored: Scored) -> Figure:
    metrics = scored.summary["metrics"]

    def curve(kind: str) -> Curve:
        found = {int(m[1]): e for name, e in metrics.items() if (m := re.fullmatch(rf"{kind}@(\d+)", name))}
        return Curve(f"{kind}@k", [Point(k, e["value"], e["low"], e["high"]) for k, e in sorted(found.items())])

    lines = [curve("pass"), curve("maj")]
    chart = charts.curves(lines, f"pass@k and maj@k on {scored.dataset}", x_name="k", logarithmic=True)
    note = "Probability that k samples hold a correct answer, and score of their majority; bands are 95 % intervals."
    return Figure("More samples", note, chart, [("s0", "pass@k"), ("s1", "maj@k")])


def of_comparisons(runs: Sequence[Run]) -> list[Figure]:
    """A figure a dataset: each metric's difference, in a sweep that of each checkpoint's mean score."""
    rows: dict[str, list[tuple[str, Point]]] = {}
    for run in runs:
        for dataset, paired in run.comparison.datasets.items() if run.comparison else ():
            shown = paired.differences[:1] if run.label else paired.differences
            rows.setdefault(dataset, []).extend(
                (run.label or found.metric, Point(0.0, found.value, found.low, found.high)) for found in shown
            )
    note = "Difference in percentage points, paired by problem, with its 95 % interval; to the right is better."
    return [Figure(dataset, note, charts.differences(found)) for dataset, found in rows.items()]


def accuracy(scored: Scored, x: float = 0.0) -> Point:
    found = scored.summary["metrics"]["accuracy"]
    return Point(x, found["value"], found["low"], found["high"])


def dataset_names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(scored.dataset for run in runs for scored in run.scored))
