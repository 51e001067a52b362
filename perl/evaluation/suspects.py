"""Which row kills its worker? Rows that a dead worker held are tried again in groups that get smaller.

A device that is lost takes innocent rows with it, and a row that crashes the engine takes its neighbours with it. So
the rows that a worker held when it died are split in two, and each half goes to a worker that has nothing else. A half
that kills its worker is split again, down to a row alone; one that has killed its worker twice alone is guilty. Samples
of one prompt stay together until no other prompt is left: when two of them are guilty, so are all rows of the prompt.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ALONE = "the row killed its worker twice, alone"
SIBLING = "two other completions of this prompt killed their workers; not tried"


@dataclass(eq=False, slots=True)
class Case:
    """One death that began a search."""

    worker: int
    """Index of the worker that died."""
    solved: bool = False


@dataclass(eq=False, slots=True)
class Trial:
    """Rows that one worker gets with no others beside them."""

    case: Case
    tags: list[int]
    killed: int | None = None
    """Index of the worker that a row alone has killed already."""


class Suspects:
    """The trials that wait, and the rows that were found guilty."""

    def __init__(self, prompts: Sequence[Hashable]):
        """`prompts[tag]`: what rows of one prompt have in common. May grow."""
        self._prompts = prompts
        self._trials: deque[Trial] = deque()
        self._killers: Counter[Hashable] = Counter()
        self.guilty: dict[int, str] = {}
        """Why, by tag."""

    def accuse(self, worker: int, tags: Sequence[int]) -> None:
        """`worker` died in the midst of ordinary work, holding `tags`."""
        self._split(Case(worker), sorted(tags))

    def convict(self, trial: Trial, worker: int, tags: Sequence[int]) -> Case | None:
        """`worker` died in a trial of which `tags` were left. Returns the case when this solves it."""
        if len(tags) > 1:
            self._split(trial.case, sorted(tags))
        elif tags and trial.killed is None:
            self._trials.append(Trial(trial.case, list(tags), worker))
        elif tags:
            self._find_guilty(tags[0])
            if not trial.case.solved:
                trial.case.solved = True
                return trial.case
        return None

    def next_trial(self, worker: int, alone: bool) -> Trial | None:
        """The next trial for `worker`. A row that has killed this very worker waits for another one, unless it is
        `alone`: one bad device is then not enough to find a row guilty."""
        for _ in range(len(self._trials)):
            trial = self._trials.popleft()
            trial.tags = [tag for tag in trial.tags if tag not in self.guilty]
            if trial.tags and (alone or trial.killed != worker):
                return trial
            if trial.tags:
                self._trials.append(trial)
        return None

    def _split(self, case: Case, tags: list[int]) -> None:
        """Two trials of half the prompts each; of one prompt's rows, the first alone and the others."""
        prompts = list(dict.fromkeys(self._prompts[tag] for tag in tags))
        if len(prompts) == 1:
            parts = [tags[:1], tags[1:]]
        else:
            first = set(prompts[: len(prompts) // 2])
            parts = [[t for t in tags if self._prompts[t] in first], [t for t in tags if self._prompts[t] not in first]]
        self._trials.extend(Trial(case, part) for part in parts if part)

    def _find_guilty(self, tag: int) -> None:
        self.guilty[tag] = ALONE
        prompt = self._prompts[tag]
        self._killers[prompt] += 1
        if self._killers[prompt] == 2:
            for other, its_prompt in enumerate(self._prompts):
                if its_prompt == prompt:
                    self.guilty.setdefault(other, SIBLING)
