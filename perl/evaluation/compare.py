"""Two evaluations side by side, problem by problem."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perl.base.errors import UserError
from perl.base.files import read_json
from perl.evaluation.store import differences, excerpt
from perl.scoring.comparison import Comparison, Difference, Paired, Scorer, Setting, samples_hash
from perl.scoring.results import (
    AGAIN,
    MODEL,
    RUN,
    SAMPLES,
    SUMMARY,
    SWEEP,
    Identity,
    SampleRecord,
    Summary,
    Sweep,
    read_samples,
)
from perl.scoring.samples import cluster_of
from perl.scoring.statistics import paired_difference
from perl.scoring.summary import logged, problem_scores, shown

CONDITIONS = (
    "tasks", "styles", "chat_template_hash", "chat_template_kwargs", "sampling", "dtype", "quantization",
    "max_model_len", "adapter_mode", "engines", "environment", "grading", "grading_hash",
)  # fmt: skip
"""Fields of a summary that may move a score, the model apart."""
WORDING = ("styles", "chat_template_hash", "chat_template_kwargs", "environment")
"""Those that word the prompts."""


@dataclass(frozen=True, slots=True)
class Results:
    """What lies in one dataset's folder."""

    samples: dict[str, dict[int, SampleRecord]]
    """Record by key and sample."""
    summary: dict[str, Any]
    """summary.json, or run.json as long as there is none."""


def read_results(folder: Path, flag: str) -> dict[str, Results]:
    """Every dataset in the result folder of a single evaluation, finished or not. UserErrors name `flag`."""
    if not folder.is_dir():
        raise UserError(f"{flag} {folder}: no such folder; write the --result_dir of an evaluation")
    if (folder / SWEEP).is_file():
        names = [entry["name"] for entry in read_json(folder / SWEEP, flag, kind=Sweep)["candidates"]]
        raise UserError(f"{flag} {folder}: holds a sweep; write the folder of one of {', '.join(names)} in it")
    files = {path.parent.name: path for path in sorted(folder.glob(f"*/{SAMPLES}"))}
    if not files:
        hint = f"; did you mean {folder.parent}?" if (folder / SAMPLES).is_file() else ""
        raise UserError(f"{flag} {folder}: holds no results (no DATASET/samples.jsonl){hint}")
    return {name: _read(path, flag) for name, path in files.items()}


def _read(file: Path, flag: str) -> Results:
    samples: dict[str, dict[int, SampleRecord]] = defaultdict(dict)
    for (key, sample), record in read_samples(file).items():
        samples[key][sample] = record
    for name, kind in ((SUMMARY, Summary), (RUN, Identity)):
        if (file.parent / name).is_file():
            return Results(samples, dict(read_json(file.parent / name, flag, AGAIN, kind)))
    return Results(samples, {})


def require_common(other: Path, this: Path, keys: Mapping[str, Collection[str]], flags: tuple[str, str]) -> None:
    """Raise a UserError unless `other` can be compared with what is to be written to `this`: it is another folder, with
    results, and some problem is in both.

    Args:
        keys: those of the problems to be scored, by dataset.
    """
    _require_two(other, this, flags)
    before = {name: results.samples.keys() for name, results in read_results(other, flags[0]).items()}
    if not any(not before.get(name, set()).isdisjoint(new) for name, new in keys.items()):
        raise _nothing_common(flags[0], {other: before, this: keys})


def _require_two(other: Path, this: Path, flags: tuple[str, str]) -> None:
    if other.resolve() == this.resolve():
        raise UserError(f"{flags[0]} {other}: is the folder of {flags[1]} itself; write that of another evaluation")


def _nothing_common(flag: str, keys: Mapping[Path, Mapping[str, Collection[str]]]) -> UserError:
    has = [
        f"{folder} has {', '.join(f'{name} ({len(problems)} problems)' for name, problems in datasets.items())}"
        for folder, datasets in keys.items()
    ]
    return UserError(f"{flag}: no problem is in both: {'; '.join(has)}")


def compare(other: Path, this: Path, flags: tuple[str, str] = ("--compare", "--result_dir")) -> Comparison:
    """Differences of `this` from `other`. A UserError when they have nothing in common, or
    are one."""
    _require_two(other, this, flags)
    before, now = read_results(other, flags[0]), read_results(this, flags[1])
    pairs = {name: _compare(before[name], now[name]) for name in now if name in before}
    datasets = {name: paired for name, paired in pairs.items() if paired}
    if not datasets:
        folders = {other: before, this: now}
        keys = {folder: {n: r.samples.keys() for n, r in results.items()} for folder, results in folders.items()}
        raise _nothing_common(flags[0], keys)
    first = next(iter(datasets))
    return Comparison(
        this=Scorer(folder=str(this), **_fields(now[first], MODEL)),
        other=Scorer(folder=str(other), **_fields(before[first], MODEL)),
        differs=_differing({name: (before[name], now[name]) for name in datasets}),
        datasets=datasets,
    )


def _differing(pairs: Mapping[str, tuple[Results, Results]]) -> list[Setting]:
    """Conditions that the datasets were scored under, and models other than those of the first dataset."""
    first = _models(next(iter(pairs.values())))
    found: list[tuple[tuple[str, Any, Any], list[str]]] = []
    for dataset, pair in pairs.items():
        generations = [results.summary.get("generation") or {} for results in pair]
        told = [name for name in ("dtype", "device") if all(name in generation for generation in generations)]
        other, this = (_conditions(results, told) for results in pair)
        others = [(name, *models) for name, models in _models(pair).items() if models != first[name]]
        for change in [*differences(other, this), *others, *_prompts(pair)]:
            known = next((datasets for other, datasets in found if other == change), None)
            if known is None:
                found.append((change, [dataset]))
            else:
                known.append(dataset)
    return [
        {"name": name if len(datasets) == len(pairs) else f"{name} ({', '.join(datasets)})", "other": old, "this": new}
        for (name, old, new), datasets in found
        if name != "adapter_mode" or None not in (old, new)  # a base has no adapter to serve
    ]


def _prompts(pair: tuple[Results, Results]) -> list[tuple[str, str, str]]:
    """What the first problem is asked by, where nothing that is known of explains that they are asked otherwise: a chat
    template can write the date."""
    other, this = pair
    if _fields(other, WORDING) != _fields(this, WORDING):
        return []
    before, now = (
        {key: samples[0]["prompt"] for key, samples in each.samples.items() if 0 in samples and not _talked(samples[0])}
        for each in pair
    )
    apart = [(before[key], now[key]) for key in now if key in before and now[key] != before[key]]
    if not apart:
        return []
    old, new = apart[0]
    same = next((place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    at = max(0, same - 20)
    return [(f"prompts of {len(apart)} problems", old[at : at + 60], new[at : at + 60])]


def _talked(record: SampleRecord) -> bool:
    """Its prompt has the turns that were drawn."""
    return "conversation" in record


def _models(pair: tuple[Results, Results]) -> dict[str, tuple[Any, Any]]:
    """Of the other and of this, by the field's name."""
    other, this = (_fields(results, MODEL) for results in pair)
    return {name: (other[name], this[name]) for name in MODEL}


def _compare(other: Results, this: Results) -> Paired | None:
    """None where they have no problem in common."""
    n = min(_samples_of_each(results) for results in (other, this))
    keys = [
        key
        for key, samples in this.samples.items()
        if len(common := samples.keys() & other.samples.get(key, {}).keys()) >= n > 0 and set(range(n)) <= common
    ]
    if not keys:
        return None
    before, now = (
        problem_scores({key: [results.samples[key][sample] for sample in range(n)] for key in keys})
        for results in (other, this)
    )
    clusters = [cluster_of(key) for key in keys]
    metrics = {}
    for name in logged(now):
        if name not in {*shown(before), *shown(now)} & before.keys():
            continue
        pairs = list(zip(before[name], now[name], strict=True))
        difference = paired_difference([b - a for a, b in pairs], clusters)
        means = {"other": sum(before[name]) / len(keys), "this": sum(now[name]) / len(keys)}
        metrics[name] = Difference(**means, **difference._asdict())
    both = zip(keys, before["accuracy"], now["accuracy"], strict=True)
    return Paired(
        problems=len(keys),
        n=n,
        left_out=len(other.samples.keys() | this.samples.keys()) - len(keys),
        samples_hash=samples_hash(record for samples in this.samples.values() for record in samples.values()),
        metrics=metrics,
        changed={key: (a, b) for key, a, b in both if a != b},
    )


def _samples_of_each(results: Results) -> int:
    """As its summary says; without one the most that any problem has, as the evaluation is not finished."""
    return results.summary.get("n") or max(map(len, results.samples.values()), default=0)


def _conditions(results: Results, told: Collection[str]) -> dict[str, Any]:
    """
    Args:
        told: by the `generation` of both: on what, and in what, they were drawn.
    """
    made = results.summary.get("provenance", {})
    conditions = _fields(results, CONDITIONS) | {"versions": made.get("versions"), "git_commit": made.get("git_commit")}
    return conditions | {name: results.summary["generation"][name] for name in told}


def _fields(results: Results, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: results.summary.get(name) for name in names}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """A line a metric, in percent, a verdict a dataset, and what besides the model differs. 80 columns are enough."""
    folders = f"{comparison.this['folder']} against {comparison.other['folder']}"
    console.print(folders, highlight=False, soft_wrap=True, markup=False)
    table = Table()
    table.add_column("dataset", overflow="fold")
    table.add_column("metric", no_wrap=True)
    for column in ("other", "this", "change", "95 % interval"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name, paired in comparison.datasets.items():
        for place, (metric, m) in enumerate(paired.metrics.items()):
            points = f"{100 * m.other:.2f}", f"{100 * m.this:.2f}", f"{100 * m.value:+.2f}"
            interval = f"{100 * m.low:+.2f} – {100 * m.high:+.2f}"
            table.add_row("" if place else name, metric, *points, interval, m.verdict)
        table.add_section()
    console.print(table)
    for name, paired in comparison.datasets.items():
        left_out = f"; {paired.left_out} left out, which only one of the two has whole" if paired.left_out else ""
        metric, difference = next(iter(paired.metrics.items()))
        console.print(
            f"{name}: {verdict(difference, paired.problems)} ({metric}; {paired.problems} problems × {paired.n} in"
            f" both, {paired.better} better, {paired.worse} worse{left_out})",
            highlight=False, soft_wrap=True, markup=False,
        )  # fmt: skip
    if comparison.differs:
        named = "; ".join(f"{d['name']} {excerpt(d['other'])} | {excerpt(d['this'])}" for d in comparison.differs)
        console.print(
            f"warning: besides the model these differ (other | this): {named}",
            highlight=False, soft_wrap=True, markup=False,
        )  # fmt: skip
    if comparison.same_model:
        console.print("both are the same model", highlight=False)


def verdict(found: Difference, problems: int) -> str:
    """In words: better, worse, or what could have been seen."""
    if found.verdict != "none":
        return found.verdict
    if found.detectable >= 1:
        return f"no difference that {problems} problems could show"
    return f"no difference that {problems} problems could show: they would show {100 * found.detectable:.1f} points"
