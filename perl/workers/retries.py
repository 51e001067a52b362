"""Samples that a worker held when it died are tried again, in groups that get smaller.

A lost device takes innocent samples with it, and a sample that crashes the engine takes its neighbours with it. So the
samples are halved, and each half goes to a worker that has nothing else; a half that kills its worker is halved again.
A sample that kills twice, alone, has failed. Samples of one prompt stay together until no other prompt is left: when
two of them have failed, so have the others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from perl.records import Sample, SampleId

TWICE_ALONE = "the row killed its worker twice, alone"
SIBLINGS = "two other completions of this prompt killed their workers; not tried"


class Retries:
    """The groups that wait, and the samples that have failed."""

    def __init__(self):
        self.failed: dict[SampleId, str] = {}
        """Why, in the words of the record's `error`."""
        self._groups: deque[list[Sample]] = deque()
        self._killed: dict[SampleId, int] = {}
        """Index of the worker that a sample alone has killed."""
        self._failures: Counter[tuple[str, str]] = Counter()
        """Samples that have failed, by prompt."""

    def bisect(self, worker: int, samples: Sequence[Sample]) -> None:
        """`worker` died holding `samples`."""
        if len(samples) > 1:
            self._groups.extend(halves(samples))
        elif samples and samples[0].id not in self._killed:
            self._killed[samples[0].id] = worker
            self._groups.append(list(samples))
        elif samples:
            self.failed[samples[0].id] = TWICE_ALONE
            self._failures[samples[0].prompt_id] += 1

    def take(self, worker: int, only: bool) -> list[Sample]:
        """A group for `worker` to try; empty: none waits. A sample that has killed this very worker waits for another
        one, unless it is the `only` worker: one bad device is not enough to fail a sample."""
        for _ in range(len(self._groups)):
            group = self.without_failed(self._groups.popleft())
            if group and (only or len(group) > 1 or self._killed.get(group[0].id) != worker):
                return group
            if group:
                self._groups.append(group)
        return []

    def without_failed(self, samples: Sequence[Sample]) -> list[Sample]:
        """Those to be tried; the others have failed with their prompt."""
        hopeless = [sample for sample in samples if self._failures[sample.prompt_id] >= 2]
        self.failed |= {sample.id: SIBLINGS for sample in hopeless}
        return [sample for sample in samples if sample.id not in self.failed]


def halves(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Half the prompts each; of one prompt's samples, the first alone and the others."""
    prompts = list(dict.fromkeys(sample.prompt_id for sample in samples))
    first = set(prompts[: len(prompts) // 2])
    if not first:
        return [samples[0]], list(samples[1:])
    return [s for s in samples if s.prompt_id in first], [s for s in samples if s.prompt_id not in first]
