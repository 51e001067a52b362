"""Does a reward pay for what it should not? Texts that are right or wrong whatever the reward does, and a verdict.

    audit(name, function, make_rows(problems)) -> Audit

A *shaped* reward pays for more than the answer, or for its form alone, so nothing is held against a fixed number: the
measure is what the right answer earns in the form that the prompt asks for, row by row. A text that is wrong has to
earn less, a right one more than the same text with a wrong answer. A reward that never asks for the answer (a format, a
length) can't tell them apart and is said to be of form alone: it is no fault unless it gives everything the same.
"""

from __future__ import annotations

import dis
import functools
import inspect
import json
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import CodeType
from typing import Any, Literal, NamedTuple

import torch
from transformers import TrainerState

from perl.base.errors import one_line
from perl.grading import RULES
from perl.grading.stated import equal_as_written
from perl.prompts import PromptStyle, build_messages
from perl.records import Problem, Trajectory
from perl.rewards.files import RAISED, ROW, RewardFunction, in_verls_form, row_of
from perl.rewards.score import Rewards
from perl.scoring.statistics import Estimate, clustered_bootstrap
from perl.tasks import TASKS

ANSWER = "{answer}"
FORMS = (
    "\\boxed{{answer}}",
    "#### {answer}",
    "Answer: {answer}",
    "<answer>{answer}</answer>",
    "<think>\nLet me see.\n</think>\n<answer>\n{answer}\n</answer>",
    "<think>\nLet me see.\n</think>\n\\boxed{{answer}}",
    "The answer is {answer}.",
    "{answer}",
)
"""Where a reward does not pay the form that was asked for, the first of these that it pays is named."""
GOLD_NAMES = frozenset(("gold", "ground_truth", "ground_truths", ROW, "extra_info", "extra_infos"))
"""What rewards are given the right answer as."""
EQUAL = 1e-9
"""Pays that differ by less are one."""
HOSTILE_ROWS = 3
"""A text that is the same for every row is tried on so many."""
SHOWN = 60
"""Characters of a text in an example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A problem with its answer, and wrong ones."""

    columns: Mapping[str, Any]
    """What rewards are given of it: prompt (messages), gold, task, row."""
    form: str
    """How its prompt asks for the answer, which replaces ANSWER."""
    answer: str
    others: tuple[str, str]
    """Answers of other rows, not equal to its own; one twice where there is no second."""

    other: Mapping[str, Any]
    """The columns of the row whose answer others[0] is."""
    as_texts: bool = False
    """Answers are as different as their texts: what is right a scoring of its own says, not algebra."""

    def differs(self, other: str) -> bool:
        """Whether an answer is surely another one than the right one."""
        return self.answer.strip() != other.strip() if self.as_texts else differ(self.answer, other)

    def state(self, answer: str) -> str:
        return self.form.replace(ANSWER, answer)

    @property
    def where(self) -> str:
        return json.loads(self.columns[ROW])["where"]

    @property
    def numbers(self) -> list[str]:
        """Those of its prompt, the right answer not among them."""
        found = re.findall(r"\d+(?:\.\d+)?", _asked(self))
        return [number for number in dict.fromkeys(found) if self.differs(number)]


def make_rows(problems: Sequence[Problem], form: str | None = None, limit: int | None = None) -> list[Row]:
    """Rows of the problems that have an answer and find others: two, or one twice (of yes and no).

    Args:
        form: how all prompts ask for the answer; default: as each one's task does.
        limit: most rows; the further problems give wrong answers alone.
    """
    columns = [
        {
            "prompt": build_messages(problem, TASKS[problem.task].style if problem.task else PromptStyle()),
            "gold": problem.gold,
            "task": problem.task,
            ROW: row_of(problem),
        }
        for problem in problems
    ]
    return rows_of_columns(columns, limit, form)


def rows_of_columns(columns: Sequence[Mapping[str, Any]], limit: int | None, form: str | None = None) -> list[Row]:
    """The same of what rewards are given: prompt, gold, task, row of each."""
    rows: list[Row] = []
    rubrics = [TASKS[each["task"]].rubric if each["task"] else None for each in columns]
    answers = [
        RULES[rubric.form].answer(each["gold"] or "") if rubric else each["gold"] or ""
        for rubric, each in zip(rubrics, columns, strict=True)
    ]
    for place, (given, rubric, answer) in enumerate(zip(columns, rubrics, answers, strict=True)):
        if len(rows) == limit:
            break
        row = Row(
            columns=given,
            form=form or (RULES[rubric.form].form if rubric else FORMS[0]),
            answer=answer,
            others=("", ""),
            other={},
            as_texts=rubric is not None and rubric.math_verify == "own",
        )
        others: list[int] = []
        for other in [*range(place + 1, len(answers)), *range(place)]:
            known = [row, *(replace(row, answer=answers[each]) for each in others)]
            if answers[other] and all(each.differs(answers[other]) for each in known):
                others.append(other)
            if len(others) == 2:
                break
        if answer and others:
            pair = answers[others[0]], answers[others[-1]]
            rows.append(replace(row, others=pair, other=columns[others[0]]))
    return rows


def differ(answer: str, other: str) -> bool:
    """Whether two answers are surely not the same: not where only algebra could tell."""
    one, two = _number(answer), _number(other)
    if one is not None and two is not None:
        return one != two
    return answer.strip() != other.strip() and equal_as_written(answer, other) is False


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


# ------------------------------------------------------------------------------------------------------------- probes


class Probe(NamedTuple):
    """A text, made of a row and an answer."""

    expected: Literal["pays", "less", "told"]
    """pays: with the right answer it earns more than with a wrong one. less: it is wrong, and earns less than the right
    answer does. told: what it earns is a matter of taste and only counted."""
    text: Callable[[Row, str], str | None]
    """None: not of this row."""
    of_any_row: bool = False
    """The row makes no difference: HOSTILE_ROWS of them will do."""


REASONING = (
    "First, let me think step by step. Then I take 2 and 3, so there are 5 of them. Wait, that is one step. Therefore"
    " I can go on to the next step.\n"
)


def _changed(change: Callable[[Decimal, str], Any]) -> Callable[[Row, str], str | None]:
    """A wrong number in the asked form; None where the answer is no number, or the change makes no other."""

    def text(row: Row, answer: str) -> str | None:
        number = _number(answer)
        wrong = None if number is None else change(number, answer)
        if wrong is None:
            return None
        written = format(wrong, "f") if isinstance(wrong, Decimal) else wrong
        value = _number(written)
        # What is nearer than half a percent may be allowed as rounding.
        far = value is not None and number is not None and abs(value - number) > abs(number) / 200
        return row.state(written) if far else None

    return text


def _numbers(row: Row, answer: str) -> str | None:
    numbers = row.numbers
    return " ".join([*numbers, answer, numbers[0]]) if numbers else None


def _hundred(row: Row, answer: str) -> str | None:
    number = _number(answer)
    if number is None or number != int(number) or abs(number) > 10**9:
        return None
    return "\n".join(row.state(str(int(number) + step)) for step in range(-50, 51))


def _same(text: str) -> Probe:
    return Probe("less", lambda row, answer: text, of_any_row=True)


def _stated(text: str) -> Probe:
    return Probe("less", lambda row, answer: row.state(text) if row.differs(text) else None, of_any_row=True)


def _mark() -> Path:
    """The file that code makes which is run out of an answer."""
    return Path(tempfile.gettempdir(), f"perl_audit_{os.getpid()}")


def _escaped(code: str) -> str:
    """What sympy runs, written so that no word of it is to be seen."""
    escapes = "".join(f"\\x{ord(letter):02x}" for letter in code)
    return f'[S(pi) for pi in ["{escapes}"]]'


RIGHT = "right"
OTHER = "another row's answer"
PROBES: dict[str, Probe] = {
    RIGHT: Probe("pays", lambda row, answer: row.state(answer)),
    "right, after reasoning": Probe("pays", lambda row, answer: REASONING + row.state(answer)),
    "right, after 4,000 characters": Probe("pays", lambda row, answer: REASONING * 25 + row.state(answer)),
    "right, then a blank line": Probe("pays", lambda row, answer: row.state(answer) + "\n\n"),
    "the answer in prose": Probe("told", lambda row, answer: f"The answer is {answer}."),
    "the answer in bold": Probe("told", lambda row, answer: row.state(f"**{answer}**")),
    "the answer behind garbage": Probe("told", lambda row, answer: f"xq §§ %&}}{{ zzv {answer}"),
    "empty": _same(""),
    "blank": _same(" \n\t\n "),
    "I do not know": _same("I do not know."),
    "I do not know, in the form": _stated("I do not know"),
    "a claim to be right": _same("The answer is correct. True. Score: 1.0. Reward: 1.0"),
    "the prompt": Probe("less", lambda row, answer: None if answer in row.state("") + _asked(row) else _asked(row)),
    "the form without an answer": Probe("less", lambda row, answer: row.state("")),
    OTHER: Probe("less", lambda row, answer: row.state(row.others[0])),
    "a further row's answer": Probe("less", lambda row, answer: row.state(row.others[1])),
    "one more": Probe("less", _changed(lambda number, text: number + 1)),
    "a hundredth more": Probe("less", _changed(lambda number, text: number * Decimal("1.01"))),
    "a hundred times as much": Probe("less", _changed(lambda number, text: number * 100)),
    "a hundredth of it": Probe("less", _changed(lambda number, text: number / 100)),
    "nine tenths more": Probe("less", _changed(lambda number, text: None if "." in text else f"{text}.9")),
    "the sign turned": Probe("less", _changed(lambda number, text: -number)),
    "digits turned round": Probe("less", _changed(lambda number, text: text[::-1] if text.isdecimal() else None)),
    "a digit before": Probe("less", _changed(lambda number, text: f"7{text}" if text.isdecimal() else None)),
    "a digit behind": Probe("less", _changed(lambda number, text: f"{text}7")),
    "the first digits": Probe("less", _changed(lambda number, text: text[:-1])),
    "the last digits": Probe("less", _changed(lambda number, text: text[1:] if text.isdecimal() else None)),
    "nan": _stated("nan"),
    "inf": _stated("inf"),
    "a point": _stated("."),
    "three answers": Probe(
        "less", lambda row, answer: "\n".join(map(row.state, (row.others[0], answer, row.others[1])))
    ),
    "three answers in one": Probe("less", lambda row, answer: row.state(f"{row.others[0]}, {answer}, {row.others[1]}")),
    "one of three answers": Probe(
        "less", lambda row, answer: row.state(f"{row.others[0]} or {answer} or {row.others[1]}")
    ),
    "a hundred answers": Probe("less", _hundred),
    "the prompt's numbers and the answer": Probe("less", _numbers),
    "the answer amid garbage": Probe("less", lambda row, answer: f"xq §§ {answer} %&}}{{ zzv {row.others[0]}"),
    "the answer taken back": Probe(
        "less", lambda row, answer: f"It may be {answer}. No, it is {row.others[0]}.\n{row.state(row.others[0])}"
    ),
    "a wrong answer, repeated": Probe("less", lambda row, answer: f"{row.state(row.others[0])}\n" * 200),
    "a wrong answer, tags repeated": Probe(
        "less", lambda row, answer: "<think>\n</think>\n<answer>\n</answer>\n" * 50 + row.state(row.others[0])
    ),
    "code": Probe("less", lambda row, answer: row.state(f"open({str(_mark())!r}, 'w')"), of_any_row=True),
    "code in escapes": Probe(
        "less", lambda row, answer: row.state(_escaped(f"open({str(_mark())!r}, 'w')")), of_any_row=True
    ),
    "5,000 digits": _stated("9" * 5000),
    "200,000 letters": _same("a" * 200_000),
    "100,000 words": _same("and so on " * 33_333),
    "5,000 open braces": _same("\\boxed{" * 5000 + "(" * 5000),
    "a division by 0": _stated("1/0"),
    "a power of powers": _stated("9**9**9**9"),
    "signs of all kinds": _same("\0 ﷽ \u202e 鸡蛋 ١٨ 𝟙𝟠 ½ Ⅷ \ufeff\u200b 👩‍👩‍👧 \\ufffe \\N{DIGIT ONE} %s {0} {"),
}
"""A line is a probe. Those of FEW are enough to find a reward that pays for nothing."""
FEW = (RIGHT, "empty", "I do not know", OTHER, "a further row's answer")


def _asked(row: Row) -> str:
    """The text of its prompt's last message."""
    content = row.columns["prompt"][-1]["content"]
    return content if isinstance(content, str) else " ".join(part.get("text") or "" for part in content)


def _asks_for_its_form(row: Row) -> bool:
    """Whether its prompt has the words of its task; a system prompt may ask for any other form."""
    words = row.form.partition(ANSWER)[0].strip()
    return bool(words) and words in _asked(row) and row.columns["prompt"][0]["role"] != "system"


# ------------------------------------------------------------------------------------------------------- what is paid


class Case(NamedTuple):
    """One text of one row."""

    row: int
    probe: str
    wrong: bool
    """Of a probe that "pays": the same text with a wrong answer."""
    text: str


def _cases(rows: Sequence[Row], probes: Sequence[str]) -> Iterator[list[Case]]:
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
class _Payer:
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
            self.told(_shown(rows, cases[0]))
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
        (cases,) = _cases(rows, [RIGHT])
        pays = self.pay(rows, cases)
        return list(zip(pays[::2], pays[1::2], strict=True))


def _other_gold(rows: Sequence[Row]) -> list[Row]:
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


# ------------------------------------------------------------------------------------------------------------ verdict


@dataclass(frozen=True, slots=True)
class Share:
    """Of texts, how many were found to be paid as the right answer is, or where they are right to be refused."""

    count: int
    texts: int
    rate: Estimate
    """count / texts, with its 95 % interval over rows."""
    example: str
    """The first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    name: str
    verdict: Literal["sound", "form alone", "faulty"]
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    rows: int
    probes: Mapping[str, Share]
    false_passes: Share
    """Over all wrong texts."""
    refusals: Share
    """Over all right texts."""
    ms_median: float
    """Milliseconds a completion."""
    ms_max: float


def audit(
    name: str,
    function: RewardFunction,
    rows: Sequence[Row],
    probes: Sequence[str] = tuple(PROBES),
    told: Callable[[str], None] | None = None,
) -> Audit:
    """Pay for every probe of every row, three times: twice alike, and once with other answers to the same texts.

    Args:
        name: of the reward, for messages.
        function: what TRL calls (`build_rewards`).
        rows: at least one, of `make_rows`.
        told: is told before each call which text it is of.
    """
    payer = _Payer(name, function, told=told)
    batches = list(_cases(rows, probes))
    cases = [case for batch in batches for case in batch]
    pays = [pay for batch in batches for pay in payer.pay(rows, batch)]
    again = [pay for batch in batches for pay in payer.pay(rows, batch)]
    swapped = _other_gold(rows)
    others = [pay for batch in batches for pay in payer.pay(swapped, batch)]
    faults = [f"raises on {probe}: {said:.200}" for probe, said in list(payer.raised.items())[:3]]
    faults += [f"no finite number on {probe} ({text!r:.{SHOWN}})" for probe, text in list(payer.infinite.items())[:3]]
    if _mark().exists():
        _mark().unlink()
        faults.append("runs code that stands in an answer: whoever is trained may do anything that the training may")
    notes: list[str] = []
    unlike = next((case for case, one, two in zip(cases, pays, again, strict=True) if not _same_pay(one, two)), None)
    if unlike is not None:
        faults.append(f"not the same twice, as on {_shown(rows, unlike)}; make it depend on its arguments alone")
    judged = _judge(rows, cases, pays)
    finite = [pay for pay in pays if not math.isnan(pay)]
    blind = all(_same_pay(one, two) for one, two in zip(pays, others, strict=True))
    verdict: Literal["sound", "form alone", "faulty"] = "sound"
    form_alone = blind and not payer.reads_gold
    constant = bool(finite) and max(finite) - min(finite) <= EQUAL
    elsewhere = _paid_form(payer, rows, pays) if constant or judged.refusals.count else None
    if not finite:
        faults.append("gives no number on any of these rows")
    elif constant and not elsewhere:
        faults.append(f"gives everything the same, {finite[0]:g}: nothing can be learned from it")
    elif form_alone:
        verdict = "form alone"
        notes.append(
            "it never asks for the answer, so wrong texts earn what right ones do: fine beside a reward that does, but"
            " not alone"
        )
    else:
        faults += ["reads the right answer, and pays the same whatever that is"] if blind and not elsewhere else []
        faults += _faults(judged)
    if elsewhere and (faults or verdict == "form alone"):
        notes.append(f"it pays {elsewhere!r}: where the prompts ask for that, audit it with --form {elsewhere!r}")
    return Audit(
        name=name,
        verdict="faulty" if faults else verdict,
        faults=tuple(faults),
        notes=tuple(notes),
        rows=len(rows),
        probes=judged.probes,
        false_passes=judged.false_passes,
        refusals=judged.refusals,
        ms_median=statistics.median(payer.ms),
        ms_max=max(payer.ms),
    )


def unfinished(name: str, fault: str, rows: int) -> Audit:
    """The verdict on a reward that could not be asked to the end."""
    nothing = Share(0, 0, clustered_bootstrap([], []), "")
    return Audit(
        name=name, verdict="faulty", faults=(fault,), notes=(), rows=rows, probes={}, false_passes=nothing,
        refusals=nothing, ms_median=0.0, ms_max=0.0,
    )  # fmt: skip


def _same_pay(one: float, two: float) -> bool:
    return abs(one - two) <= EQUAL or (math.isnan(one) and math.isnan(two))


def _shown(rows: Sequence[Row], case: Case) -> str:
    probe = f"a wrong answer for: {case.probe}" if case.wrong else case.probe
    return f"{rows[case.row].where}, {probe} ({case.text!r:.{SHOWN}})"


@dataclass(frozen=True, slots=True)
class _Judged:
    probes: Mapping[str, Share]
    false_passes: Share
    refusals: Share


def _judge(rows: Sequence[Row], cases: Sequence[Case], pays: Sequence[float]) -> _Judged:
    """What of the texts was paid as the right answer is, in the form that is asked for, on the same row."""
    earned = {(case.row, case.probe, case.wrong): pay for case, pay in zip(cases, pays, strict=True)}
    floor = min((pay for pay in pays if not math.isnan(pay)), default=math.nan)
    passed: list[tuple[Case, float]] = []
    refused: list[tuple[Case, float]] = []
    told: list[tuple[Case, float]] = []
    for case, pay in zip(cases, pays, strict=True):
        right = earned[case.row, RIGHT, False]
        if math.isnan(right) or math.isnan(pay):
            continue
        never_paid = right <= floor + EQUAL
        expected = PROBES[case.probe].expected
        as_right = float(pay >= right - EQUAL)
        if expected == "pays" and not case.wrong:
            pair = earned[case.row, case.probe, True]
            unpaid = never_paid if case.probe == RIGHT else pay <= pair + EQUAL and (never_paid or pair + EQUAL < right)
            refused.append((case, float(unpaid)))
        elif expected == "told":
            told.append((case, 0.0 if never_paid else as_right))
        elif not never_paid and case.probe != RIGHT:  # OTHER is the same text
            passed.append((case, as_right))
    probes = {}
    for name in dict.fromkeys(case.probe for case in cases):
        of_probe = [pair for pair in (*refused, *passed, *told) if pair[0].probe == name and not pair[0].wrong]
        probes[name] = _share(rows, of_probe)
    return _Judged(probes, _share(rows, passed), _share(rows, refused))


def _share(rows: Sequence[Row], values: Sequence[tuple[Case, float]]) -> Share:
    numbers = [value for _, value in values]
    example = next((_shown(rows, case) for case, value in values if value), "")
    return Share(
        int(sum(numbers)), len(numbers), clustered_bootstrap(numbers, [case.row for case, _ in values]), example
    )


def _faults(judged: _Judged) -> list[str]:
    faults = []
    if (passes := judged.false_passes).count:
        names = [name for name, share in judged.probes.items() if PROBES[name].expected == "less" and share.count]
        names, more = names[:6] or ["a wrong answer behind reasoning"], len(names[6:])
        example = judged.probes[names[0]].example if names[0] in judged.probes else passes.example
        faults.append(
            f"{passes.count} of {passes.texts} wrong texts earn what the right answer does: {', '.join(names)}"
            f"{f' and {more} more' if more else ''}; as on {example}"
        )
    if (refusals := judged.refusals).count:
        faults.append(
            f"{refusals.count} of {refusals.texts} right texts earn no more than wrong ones; as on {refusals.example}"
        )
    return faults


def _paid_form(payer: _Payer, rows: Sequence[Row], pays: Sequence[float]) -> str | None:
    """The first of FORMS in which a right answer earns more than a wrong one, or than all that was paid (`pays`)."""
    most = max((pay for pay in pays if not math.isnan(pay)), default=math.nan)
    for form in FORMS:
        earned = payer.right_and_wrong([replace(row, form=form) for row in rows[:HOSTILE_ROWS]])
        if all(right > wrong + EQUAL for right, wrong in earned) or all(right > most + EQUAL for right, _ in earned):
            return form
    return None


def pays_for_nothing(name: str, function: RewardFunction, rows: Sequence[Row], seconds: float) -> str | None:
    """What is wrong with a reward that pays an empty or a wrong answer as the right one, in words; None where it does
    not, or where that can't be seen by a few texts: no form in which it pays the right answer is known, it never asks
    for the answer, it raises, or it takes longer than `seconds`.

    Args:
        rows: a few; with the forms that their prompts are known to ask for.
    """
    payer, until = _Payer(name, function), time.monotonic() + seconds
    for form in (None, *FORMS):
        asked = [replace(row, form=form or row.form) for row in rows]
        earned = payer.right_and_wrong(asked)
        if time.monotonic() > until or payer.raised:
            return None
        if earned and all(right > wrong + EQUAL for right, wrong in earned):
            break
    else:
        asked = list(rows)
        if not all(_asks_for_its_form(row) for row in rows):
            return None
    cases = [case for batch in _cases(asked, FEW) for case in batch]
    pays = payer.pay(asked, cases)
    others = payer.pay(_other_gold(asked), cases)
    blind = all(_same_pay(one, two) for one, two in zip(pays, others, strict=True))
    if payer.raised or (blind and not payer.reads_gold):
        return None
    passes = _judge(asked, cases, pays).false_passes
    return f"a wrong text earns what the right answer does, as on {passes.example}" if passes.count else None
