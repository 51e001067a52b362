"""Does a reward pay for what it should not? Texts that are right or wrong whatever the reward does, and a verdict.

    audit(name, function, make_rows(problems)) -> Audit

A *shaped* reward pays for more than the answer, or for its form alone, so nothing is held against a fixed number: the
measure is what the right answer earns in the form that the prompt asks for, row by row. A text that is wrong has to
earn less, a right one more than the same text with a wrong answer. A reward that never asks for the answer (a format, a
length) can't tell them apart and is said to be of form alone: it is no fault unless it gives everything the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from perl.rewards.files import RewardFunction
from perl.scoring.statistics import Estimate, clustered_bootstrap
from perl.tools.audit.payer import SHOWN, Case, Payer, cases_of, other_gold, shown
from perl.tools.audit.probes import HOSTILE_ROWS, PROBES, RIGHT, mark
from perl.tools.audit.rows import FORMS, Row

EQUAL = 1e-9
"""Pays that differ by less are one."""


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
    told: Callable[[str], None] | None = None,
) -> Audit:
    """Pay for every probe of every row, three times: twice alike, and once with other answers to the same texts.

    Args:
        name: of the reward, for messages.
        function: what TRL calls (`build_rewards`).
        rows: at least one, of `make_rows`.
        told: is told before each call which text it is of.
    """
    payer = Payer(name, function, told=told)
    batches = list(cases_of(rows, tuple(PROBES)))
    cases = [case for batch in batches for case in batch]
    pays = [pay for batch in batches for pay in payer.pay(rows, batch)]
    again = [pay for batch in batches for pay in payer.pay(rows, batch)]
    swapped = other_gold(rows)
    others = [pay for batch in batches for pay in payer.pay(swapped, batch)]
    faults = [f"raises on {probe}: {said:.200}" for probe, said in list(payer.raised.items())[:3]]
    faults += [f"no finite number on {probe} ({text!r:.{SHOWN}})" for probe, text in list(payer.infinite.items())[:3]]
    if mark().exists():
        mark().unlink()
        faults.append("runs code that stands in an answer: whoever is trained may do anything that the training may")
    notes: list[str] = []
    unlike = next((case for case, one, two in zip(cases, pays, again, strict=True) if not same_pay(one, two)), None)
    if unlike is not None:
        faults.append(f"not the same twice, as on {shown(rows, unlike)}; make it depend on its arguments alone")
    judged = judge(rows, cases, pays)
    finite = [pay for pay in pays if not math.isnan(pay)]
    blind = all(same_pay(one, two) for one, two in zip(pays, others, strict=True))
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


def same_pay(one: float, two: float) -> bool:
    return abs(one - two) <= EQUAL or (math.isnan(one) and math.isnan(two))


@dataclass(frozen=True, slots=True)
class Judged:
    probes: Mapping[str, Share]
    false_passes: Share
    refusals: Share


def judge(rows: Sequence[Row], cases: Sequence[Case], pays: Sequence[float]) -> Judged:
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
    return Judged(probes, _share(rows, passed), _share(rows, refused))


def _share(rows: Sequence[Row], values: Sequence[tuple[Case, float]]) -> Share:
    numbers = [value for _, value in values]
    example = next((shown(rows, case) for case, value in values if value), "")
    return Share(
        int(sum(numbers)), len(numbers), clustered_bootstrap(numbers, [case.row for case, _ in values]), example
    )


def _faults(judged: Judged) -> list[str]:
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


def _paid_form(payer: Payer, rows: Sequence[Row], pays: Sequence[float]) -> str | None:
    """The first of FORMS in which a right answer earns more than a wrong one, or than all that was paid (`pays`)."""
    most = max((pay for pay in pays if not math.isnan(pay)), default=math.nan)
    for form in FORMS:
        earned = payer.right_and_wrong([replace(row, form=form) for row in rows[:HOSTILE_ROWS]])
        if all(right > wrong + EQUAL for right, wrong in earned) or all(right > most + EQUAL for right, _ in earned):
            return form
    return None
