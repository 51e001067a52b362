"""compare.json, as perl.evaluation.compare describes it: read, and trusted only as far as it fits the samples."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from perl.base.errors import one_line
from perl.base.files import typed
from perl.scoring.results import COMPARE, Count, SampleRecord, Share, same_models, samples_hash

logger = logging.getLogger(__name__)

LONGEST = 200
"""Characters of a setting that differs, such as a prompt's template; beyond them it is cut."""
Points = Annotated[float, Meta(ge=-1, le=1)]
"""A difference of two shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One metric, paired problem by problem. All numbers are fractions."""

    other: Share
    this: Share
    value: Points
    """this − other, with its 95 % interval."""
    low: Points
    high: Points
    detectable: Share
    """The true difference that so many problems would show four times out of five; 1 is more than there is."""
    verdict: Literal["better", "worse", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """One dataset in both evaluations."""

    problems: Count
    n: Count
    """Samples of each problem."""
    left_out: Count
    """Problems that only one of the two has whole."""
    samples_hash: str
    metrics: Annotated[dict[str, Difference], Meta(min_length=1)]
    """The first is the mean score's."""
    changed: dict[str, tuple[Share, Share]]
    """(other, this) mean score of each problem in which they differ, by key."""

    @property
    def better(self) -> int:
        return sum(this > other for other, this in self.changed.values())

    @property
    def worse(self) -> int:
        return len(self.changed) - self.better

    @property
    def equal(self) -> int:
        return self.problems - len(self.changed)


class Scorer(TypedDict):
    """Which model an evaluation scored; None for what its folder does not tell."""

    folder: str
    model: str | None
    adapter: str | None
    base_hash: str | None
    adapter_hash: str | None


class Setting(TypedDict):
    """One that differs."""

    name: str
    other: Any
    this: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One run compared with another evaluation."""

    other: Scorer
    this: Scorer
    differs: list[Setting]
    """What besides the model differs."""
    datasets: dict[str, Paired]

    @property
    def same_model(self) -> bool:
        return same_models(self.other, self.this, self.differs)

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """(name, there, here) of each of `differs`, as JSON."""
        return [(each["name"], short(each["other"]), short(each["this"])) for each in self.differs]


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def read_comparison(folder: Path, records: Mapping[str, Sequence[SampleRecord]]) -> Comparison | None:
    """The comparison in `folder`, of those datasets of which it compared the very samples that lie there now; None if
    there is none such. What is not taken is told in one warning.

    Args:
        records: rows of samples.jsonl by dataset.
    """
    file = folder / COMPARE
    if not file.is_file():
        return None
    try:
        comparison = typed(json.loads(file.read_text(encoding="utf-8")), Comparison)
        _ = comparison.rows, Path(comparison.other["folder"]).resolve()  # what no page holds, and no path
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("report: %s is left out: not readable (%s)", file, one_line(str(error)))
        return None
    datasets = comparison.datasets
    fitting = [name for name in datasets if datasets[name].samples_hash == samples_hash(records.get(name, ()))]
    if other := [name for name in datasets if name not in fitting]:
        logger.warning(
            "report: %s is left out for %s: made from other samples than lie there now; python -m perl compare makes it"
            " again", file, one_line(", ".join(other)),
        )  # fmt: skip
    if not fitting:
        return None
    return replace(comparison, datasets={name: datasets[name] for name in fitting})
