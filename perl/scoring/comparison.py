"""compare.json, a Comparison: read, and trusted only as far as it fits the samples."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from perl.base.errors import one_line
from perl.base.files import typed
from perl.scoring.results import COMPARE, MODEL, Count, SampleRecord, Share, same_model

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
    """Of `this` one's samples: after a change of them the comparison is another's."""
    metrics: Annotated[dict[str, Difference], Meta(min_length=1)]
    """The first is the mean score's; those that say the same as another are left out."""
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
    """With the datasets where it is not all."""
    other: Any
    this: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One run compared with another evaluation."""

    this: Scorer
    """On the first dataset, as is `other`."""
    other: Scorer
    differs: list[Setting]
    """What besides the model differs."""
    datasets: dict[str, Paired]

    @property
    def same_model(self) -> bool:
        """On each of the datasets."""
        named = {each["name"].partition(" (")[0] for each in self.differs}
        return same_model(self.other, self.this) and named.isdisjoint(MODEL)

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """(name, there, here) of each of `differs`, as JSON."""
        return [(each["name"], short(each["other"]), short(each["this"])) for each in self.differs]


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def samples_hash(records: Iterable[SampleRecord]) -> str:
    """16 hexadecimal digits of what a comparison reads of samples.jsonl (key, sample, score, extracted answer), in
    whatever order the records stand. Of two records of one sample the first counts, as everywhere."""
    read: dict[tuple[str, int], Any] = {}
    for record in records:
        read.setdefault((record["key"], record["sample"]), [record["score"], record["extracted"]])
    return hashlib.blake2b(json.dumps(sorted(read.items())).encode(), digest_size=8).hexdigest()


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
