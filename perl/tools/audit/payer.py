"""What a reward pays for texts, called as a training calls it; whether it uses the right answer."""

from __future__ import annotations

import dis
import functools
import inspect
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, NamedTuple

import torch
from transformers import TrainerState

from perl.base.errors import one_line
from perl.records import Trajectory
from perl.rewards.files import RAISED, ROW, RewardFunction, in_verls_form
from perl.rewards.score import Rewards
from perl.tools.audit.probes import HOSTILE_ROWS, PROBES, RIGHT
from perl.tools.audit.rows import Row

GOLD_NAMES = frozenset(("gold", "ground_truth", "ground_truths", ROW, "extra_info", "extra_infos"))
"""What rewards are given the right answer as."""
SHOWN = 60
"""Characters of a text in an example."""


class Case(NamedTuple):
    """One text of one row."""

    row: int
    probe: str
    wrong: bool
    """Of a probe that "pays": the same text with a wrong answer."""
    text: str


def shown(rows: Sequence[Row], case: Case) -> str:
    probe = f"a wrong answer for: {case.probe}" if case.wrong else case.probe
    return f"{rows[case.row].where}, {probe} ({case.text!r:.{SHOWN}})"


def cases_of(rows: Sequence[Row], probes: Sequence[str]) -> Iterator[list[Case]]:
    """The cases of each probe, which are graded as one batch."""
    for name in probes:
        probe, cases = PROBES[name], []
        for place, row in enumerate(rows[:HOSTILE_ROWS] if probe.of_any_row else rows):
            for wrong in (False, True)[: 1 + (probe.expected == "pays")]:
                text = probe.text(row, row.others[0] if wrong else row.answer)
                if text is not None:
                    cases.append(Case(place, name, wrong, text))
        yield cases


@dataclass(slots=True)
class Payer:
    """A reward function, called as a training calls it."""

    name: str
    function: RewardFunction
    ms: list[float] = field(default_factory=list)
    """Milliseconds a completion, of each batch."""
    raised: dict[str, str] = field(default_factory=dict)
    """By probe: what the function raised, once."""
    infinite: dict[str, str] = field(default_factory=dict)
    """By probe: the text that it gave no finite number."""
    in_verls_form: bool = False
    told: Callable[[str], None] | None = None
    """Is told the first text of each call before it is made."""
    reads_gold: bool = False
    """The function has used what it is given the right answer as."""

    def __post_init__(self) -> None:
        own = inspect.unwrap(self.function)
        self.in_verls_form = in_verls_form(own)
        self.reads_gold = self.in_verls_form and _loads_gold(own)

    def pay(self, rows: Sequence[Row], cases: Sequence[Case]) -> list[float]:
        """Of each case; NaN where the function gave none, raised, or gave no finite number."""
        if not cases:
            return []
        if self.told is not None:
            self.told(shown(rows, cases[0]))
        started = time.perf_counter()
        try:
            pays = self._scores(rows, cases)
        except RAISED as error:
            if len(cases) > 1:
                return [self.pay(rows, [case])[0] for case in cases]
            self.raised.setdefault(cases[0].probe, one_line(str(error) or type(error).__name__))
            pays = [math.nan]
        self.ms.append((time.perf_counter() - started) * 1000 / len(cases))
        for case, pay in zip(cases, pays, strict=True):
            if math.isinf(pay):
                self.infinite.setdefault(case.probe, case.text)
        return [math.nan if math.isinf(pay) else pay for pay in pays]

    def _scores(self, rows: Sequence[Row], cases: Sequence[Case]) -> list[float]:
        trajectories = []
        for case in cases:
            words = re.findall(r"\w+|[^\w\s]", case.text)  # no tokenizer is at hand: a token each
            completion = [{"role": "assistant", "content": case.text}]
            row = dict(rows[case.row].columns)
            trajectories.append(
                Trajectory(
                    row=row, position=case.row, sample=0, prompt_ids=(0,), token_ids=[0] * len(words),
                    sampled=[True] * len(words), completion=completion,
                )
            )  # fmt: skip
        rewards = Rewards([self._asked], [self.name], torch.ones(1))
        rewards.score(trajectories, TrainerState(max_steps=1), log_metrics=False)
        return [each.rewards[0] for each in trajectories]

    def _asked(self, **columns: Any) -> Any:
        if not self.in_verls_form:
            columns |= {name: _Noted(columns[name], self._note) for name in GOLD_NAMES & columns.keys()}
        return self.function(**columns)

    def _note(self) -> None:
        self.reads_gold = True

    def right_and_wrong(self, rows: Sequence[Row]) -> list[tuple[float, float]]:
        """What the right answer and a wrong one earn in the rows' form."""
        (cases,) = cases_of(rows, [RIGHT])
        pays = self.pay(rows, cases)
        return list(zip(pays[::2], pays[1::2], strict=True))


def other_gold(rows: Sequence[Row]) -> list[Row]:
    """The same prompts, each with another row's answer."""
    swapped = []
    for row in rows:
        facts, theirs = json.loads(row.columns[ROW]), json.loads(row.other[ROW])
        facts |= {name: theirs[name] for name in ("ground_truth", "extra_info")}
        columns = {**row.columns, "gold": row.other["gold"], ROW: json.dumps(facts, ensure_ascii=False)}
        swapped.append(replace(row, columns=columns))
    return swapped


class _Noted(list):
    """A column that notes when its values are asked for."""

    def __init__(self, values: Iterable[Any], note: Callable[[], None]):
        super().__init__(values)
        self.note = note

    def __iter__(self) -> Iterator[Any]:
        self.note()
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        self.note()
        return super().__getitem__(place)


def _loads_gold(function: Any) -> bool:
    """Whether the code of a function, or of one that it holds (a decorator's), uses what the right answer is given
    as."""
    waiting, seen = [function], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, functools.partial):
            waiting.append(each.func)
        elif isinstance(code := getattr(each, "__code__", None), CodeType):
            if _loads(code):
                return True
            waiting += [cell.cell_contents for cell in each.__closure__ or () if callable(cell.cell_contents)]
        elif not isinstance(each, type) and hasattr(type(each), "__call__"):  # noqa: B004  # its code is wanted
            waiting.append(type(each).__call__)
    return False


def _loads(code: CodeType) -> bool:
    named = any(
        step.opname.startswith(("LOAD_FAST", "LOAD_CLOSURE", "LOAD_DEREF", "LOAD_CONST")) and step.argval in GOLD_NAMES
        for step in dis.get_instructions(code)
        if isinstance(step.argval, str)
    )
    return named or any(_loads(inner) for inner in code.co_consts if isinstance(inner, CodeType))
