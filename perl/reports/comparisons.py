"""compare.json, as perl.evaluation.compare describes it: read, and trusted only as far as it fits the samples."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perl.scoring.results import COMPARE, same_model, samples_hash

logger = logging.getLogger(__name__)

VERDICTS = {"better": "better", "worse": "worse", "none": "no difference"}
LONGEST = 200
"""Characters of a setting that differs, such as a prompt's template; beyond them it is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One metric, paired problem by problem. All numbers are fractions."""

    metric: str
    other: float
    this: float
    value: float
    """this − other, with its 95 % interval."""
    low: float
    high: float
    detectable: float
    """The true difference that so many problems would show four times out of five; 1 is more than there is."""
    verdict: str
    """A key of VERDICTS."""

    @classmethod
    def of(cls, metric: str, found: Mapping[str, Any]) -> Difference:
        parts = {name: float(found[name]) for name in ("other", "this", "value", "low", "high", "detectable")}
        if not all(-1 <= number <= 1 for number in parts.values()):
            raise ValueError(f"{metric} is no share")
        return cls(metric=metric, verdict=VERDICTS[found["verdict"]], **parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """One dataset in both evaluations."""

    problems: int
    n: int
    """Samples of each problem."""
    left_out: int
    """Problems that only one of the two has whole."""
    samples_hash: str
    differences: list[Difference]
    """The first is the mean score's."""
    changed: dict[str, tuple[float, float]]
    """(other, this) mean score of each problem in which they differ, by key."""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Paired:
        return cls(
            problems=int(entry["problems"]),
            n=int(entry["n"]),
            left_out=int(entry["left_out"]),
            samples_hash=entry["samples_hash"],
            differences=[Difference.of(name, found) for name, found in entry["metrics"].items()],
            changed={key: (float(other), float(this)) for key, (other, this) in entry["changed"].items()},
        )

    @property
    def better(self) -> int:
        return sum(this > other for other, this in self.changed.values())

    @property
    def worse(self) -> int:
        return len(self.changed) - self.better

    @property
    def equal(self) -> int:
        return self.problems - len(self.changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One run compared with another evaluation."""

    folder: str
    """Of the other evaluation."""
    model: str | None
    """The other's; None where its folder does not tell."""
    adapter: str | None
    same_model: bool
    differs: list[tuple[str, str, str]]
    """(name, there, here) of each setting besides the model that differs, as JSON."""
    datasets: dict[str, Paired]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Comparison:
        other, this = content["other"], content["this"]
        return cls(
            folder=str(other["folder"]),
            model=other["model"],
            adapter=other["adapter"],
            same_model=same_model(other, this),
            differs=[(str(d["name"]), short(d["other"]), short(d["this"])) for d in content["differs"]],
            datasets={name: Paired.of(entry) for name, entry in content["datasets"].items()},
        )


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def read_comparison(folder: Path, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> Comparison | None:
    """The comparison in `folder`, of those datasets of which it compared the very samples that lie there now; None if
    there is none such. What is not taken is told in one warning.

    Args:
        records: rows of samples.jsonl by dataset.
    """
    file = folder / COMPARE
    if not file.is_file():
        return None
    try:
        comparison = Comparison.of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        logger.warning("report: %s is left out: not readable (%s: %s)", file, type(error).__name__, error)
        return None
    datasets = comparison.datasets
    fitting = [name for name in datasets if datasets[name].samples_hash == samples_hash(records.get(name, ()))]
    if other := [name for name in datasets if name not in fitting]:
        logger.warning(
            "report: %s is left out for %s: made from other samples than lie there now; python -m perl compare makes it"
            " again", file, ", ".join(other),
        )  # fmt: skip
    if not fitting:
        return None
    return replace(comparison, datasets={name: datasets[name] for name in fitting})
