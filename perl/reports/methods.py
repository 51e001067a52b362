"""Trainings that differ in some settings and in their seeds, compared: the folder of a sweep, and what is made of it.

DIR/settings.json                  what all runs have in common (perl.tools.sweep)
DIR/base/MODEL/sampled, greedy     result folders of a base without an adapter
DIR/runs/VALUES/seed_N/            a Run: train/ is the training's folder, sampled/ and greedy/ are result folders of
                                   the evaluator, state.json is how far it has come
DIR/comparison.json                as_json(Comparison)
DIR/comparison.html                the page (perl.reports.methods_page)
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from perl.base.errors import UserError
from perl.base.files import read_json, write_json
from perl.reports.charts import running_mean, window
from perl.reports.training_run import is_training_run, read_training_run
from perl.scoring.results import read_scored
from perl.scoring.samples import cluster_of
from perl.scoring.statistics import Change, Estimate, clustered_bootstrap, over_seeds, paired_over_seeds

STATE, SETTINGS, COMPARISON, PAGE = "state.json", "settings.json", "comparison.json", "comparison.html"
SAMPLED, GREEDY = "sampled", "greedy"
LAST = 10
"""The reward of a run is the mean of the last of so many equal parts of its logs."""

Scores = dict[str, float]
"""Mean score of each problem, by its key."""


class Place(NamedTuple):
    """Which score: on which dataset, and how it was sampled (SAMPLED or GREEDY)."""

    dataset: str
    kind: str


@dataclass(frozen=True, slots=True)
class State:
    """How far a run has come."""

    trained: bool = False
    finished: bool = False
    """Trained and scored."""
    error: str | None = None
    """Why the last attempt failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training of a sweep."""

    values: Mapping[str, str]
    """What varies: value by field, as the user wrote both."""
    seed: int
    model: str
    """Its base, as the configuration names it."""
    folder: Path

    @property
    def train(self) -> Path:
        return self.folder / "train"

    @property
    def name(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.values.items()), f"seed {self.seed}"])

    @property
    def state(self) -> State:
        file = self.folder / STATE
        return read_json(file, hint="delete it, and the run is done again", kind=State) if file.is_file() else State()

    def note(self, **state: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / STATE, state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A metric of several seeds, as far as all of them logged it, as running means of `smoothed` logs."""

    metric: str
    points: Sequence[tuple[int, float]]
    """(step, mean over the seeds)."""
    band: Sequence[tuple[int, float, float]]
    """(step, lowest seed, highest seed)."""
    smoothed: int
    last: float
    """Mean over the seeds of the last LASTth of the logs themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The runs with one set of values, one of each seed, as far as they are finished."""

    values: Mapping[str, str]
    model: str
    runs: Sequence[Run]
    """All of them."""
    finished: Sequence[int]
    """Seeds."""
    scores: Mapping[Place, Estimate]
    changes: Mapping[Place, Change]
    """Against the first setting, over the seeds that both have finished."""
    curve: Curve | None
    step_time: float | None
    """Median of a step's seconds."""

    @property
    def name(self) -> str:
        return ", ".join(self.values.values()) or "the recipe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    recipe: str
    fields: Sequence[str]
    """What varies."""
    n: int
    """Completions of each problem where they are sampled."""
    places: Sequence[Place]
    """Those that are scored."""
    bases: Mapping[str, Mapping[Place, Estimate]]
    """By model."""
    settings: Sequence[Setting]
    runs: Mapping[str, Mapping[Place, float]] = field(default_factory=dict)
    """Mean score of each finished run, by Run.name."""

    def title(self, place: Place) -> str:
        return f"avg@{self.n}, temperature 1" if place.kind == SAMPLED else "greedy"


def compare(
    runs: Sequence[Run], bases: Mapping[str, Path], datasets: Sequence[str], recipe: str, fields: Sequence[str], n: int
) -> Comparison:
    """Everything that the comparison shows, from what has been finished so far.

    Args:
        runs: the first one's values are what the others are compared with.
        bases: folder with the scores of each base, by model.
        datasets: names of the folders of their results.
    """
    places = [Place(dataset, kind) for dataset in datasets for kind in (SAMPLED, GREEDY)]
    scores = {run.name: {p: read_scores(run.folder, p) for p in places} for run in runs if run.state.finished}
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run.values.values()), []).append(run)
    first, *_ = groups.values()
    return Comparison(
        recipe=recipe,
        fields=fields,
        n=n,
        places=places,
        bases={
            model: {p: base_score(read_scores(folder, p)) for p in places}
            for model, folder in bases.items()
            if all((folder / p.kind / p.dataset / "summary.json").is_file() for p in places)
        },
        settings=[setting(group, first, places, scores) for group in groups.values()],
        runs={name: {p: statistics.fmean(by_place[p].values()) for p in places} for name, by_place in scores.items()},
    )


def read_scores(folder: Path, place: Place) -> Scores:
    """What the evaluator left: the mean score of each problem."""
    problems: dict[str, list[float]] = {}
    for record in read_scored(folder / place.kind / place.dataset).records:
        problems.setdefault(record["key"], []).append(record["score"])
    return {key: statistics.fmean(each) for key, each in problems.items()}


def base_score(scores: Scores) -> Estimate:
    return clustered_bootstrap(list(scores.values()), list(map(cluster_of, scores)))


def setting(
    runs: Sequence[Run], first: Sequence[Run], places: Sequence[Place], scores: Mapping[str, Mapping[Place, Scores]]
) -> Setting:
    """What is known of `runs`, which differ in the seed alone; they are compared with the runs of `first`."""
    by_seed = {run.seed: scores[run.name] for run in runs if run.name in scores}
    reference = {run.seed: scores[run.name] for run in first if run.name in scores}
    common = [seed for seed in by_seed if seed in reference and runs is not first]
    trained = [read_training_run(run.train) for run in runs if run.name in scores and is_training_run(run.train)]
    times = [seconds for run in trained for _, seconds in run.points("timing/step")]
    return Setting(
        values=runs[0].values,
        model=runs[0].model,
        runs=runs,
        finished=list(by_seed),
        scores={place: mean_over_seeds([each[place] for each in by_seed.values()]) for place in places if by_seed},
        changes={
            place: change([(by_seed[seed][place], reference[seed][place]) for seed in common])
            for place in places
            if common
        },
        curve=curve_of([run.points("reward") for run in trained], "reward")
        or curve_of([run.points("loss") for run in trained], "loss"),
        step_time=statistics.median(times) if times else None,
    )


def mean_over_seeds(scores: Sequence[Scores]) -> Estimate:
    keys = common_keys(scores)
    return over_seeds([[each[key] for key in keys] for each in scores], list(map(cluster_of, keys)))


def change(pairs: Sequence[tuple[Scores, Scores]]) -> Change:
    """Of (this, other) of each seed."""
    keys = common_keys([scores for pair in pairs for scores in pair])
    differences = [[this[key] - other[key] for key in keys] for this, other in pairs]
    return paired_over_seeds(differences, list(map(cluster_of, keys)))


def common_keys(scores: Sequence[Scores]) -> list[str]:
    """The problems that all of them have: all, unless a data set has changed between two runs."""
    first, *others = scores
    keys = [key for key in first if all(key in each for each in others)]
    if not keys or any(len(each) != len(keys) for each in scores):
        raise UserError("runs of this folder were scored on other problems: the data has changed; write a new folder")
    return keys


def curve_of(logs: Sequence[Sequence[tuple[int, float]]], metric: str) -> Curve | None:
    """The curve of one metric from (step, value) of each seed; None where a seed did not log it."""
    if not logs or not all(logs):
        return None
    size = window(min(map(len, logs)))
    smooth = [
        dict(zip([step for step, _ in log], running_mean([v for _, v in log], size), strict=True)) for log in logs
    ]
    steps = sorted(set.intersection(*map(set, smooth)))
    if not steps:
        return None
    values = [[log[step] for log in smooth] for step in steps]
    logged = [dict(log) for log in logs]
    return Curve(
        metric=metric,
        points=[(step, statistics.fmean(at)) for step, at in zip(steps, values, strict=True)],
        band=[(step, min(at), max(at)) for step, at in zip(steps, values, strict=True)],
        smoothed=size,
        last=statistics.fmean(log[step] for step in steps[-max(1, len(steps) // LAST) :] for log in logged),
    )


# comparison.json


def as_json(comparison: Comparison) -> dict[str, Any]:
    def nested(values: Mapping[Place, Any]) -> dict[str, dict[str, Any]]:
        made: dict[str, dict[str, Any]] = {}
        for place, value in values.items():
            plain = value._asdict() if isinstance(value, Estimate | Change) else round(value, 6)
            made.setdefault(place.dataset, {})[place.kind] = plain
        return made

    return {
        "recipe": comparison.recipe,
        "fields": list(comparison.fields),
        "n": comparison.n,
        "base": {model: nested(scores) for model, scores in comparison.bases.items()},
        "settings": [
            {
                "values": dict(each.values),
                "seeds": list(each.finished),
                "scores": nested(each.scores),
                "change_from_first": nested(each.changes),
                "last_" + each.curve.metric if each.curve else "last_reward": (
                    round(each.curve.last, 6) if each.curve else None
                ),
                "step_time_s": each.step_time and round(each.step_time, 3),
            }
            for each in comparison.settings
        ],
        "runs": [
            {
                "values": dict(run.values),
                "seed": run.seed,
                "finished": run.state.finished,
                "error": run.state.error,
                "scores": nested(comparison.runs.get(run.name, {})),
                "folder": str(run.folder),
            }
            for each in comparison.settings
            for run in each.runs
        ],
    }
