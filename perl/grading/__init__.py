"""Grading: one truth for rewards and evaluation.

Cheap rules (rules.py) run in this process on every completion and are scored side by side. math-verify, which can
take any time it likes, runs in a killable worker (verifier.py), where the task asks for it or where no cheap rule
reads an answer that it can settle.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from perl.base.errors import UserError, lookup
from perl.base.provenance import text_hash
from perl.grading.entries import require_scoring
from perl.grading.rules import RULES, Rule, is_number, normalize_answer
from perl.grading.stated import equal_as_written
from perl.grading.verifier import MathVerifier, Question, Verdict
from perl.records import Grade

__all__ = ["MATH_VERIFY", "RULES", "Grader", "Rubric", "Rule", "rules_hash"]

MATH_VERIFY = "math_verify"
"""Name of math-verify's score alongside those of RULES."""
_LONGEST_EXTRACT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """How a task's completions are graded."""

    rules: tuple[str, ...]
    """Keys of RULES, scored side by side."""
    primary: str
    """The rule whose score is the reward and the accuracy."""
    math_verify: Literal["parts", "fallback", "never", "own"]
    """Who decides where the primary rule settles nothing, that is, reads no answer, or reads an expression rather than
    a number and one that differs from the gold. fallback: math-verify, on the answer, or on the whole completion where
    none was read. parts: the parts of the answer are compared with those of the gold, math-verify comparing plain
    expressions (stated.equal); a completion without an answer is wrong. never: it is wrong. own: not math-verify, but
    reasoning-gym's own scoring, in the same worker; the gold is an entry (entries.py)."""
    form: str
    """The rule whose form the prompt asks for; the format reward looks for it."""

    def __post_init__(self):
        for name in (*self.rules, self.form):
            lookup(RULES, name, "grading rule")
        if self.primary not in self.rules:
            raise UserError(
                f"rubric: the primary rule {self.primary!r} is not scored; name one of {', '.join(self.rules)}"
            )


def rules_hash() -> str:
    """Hash of the code that grades: two verdicts made under the same one were made by the same rules."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return text_hash("".join(file.read_text(encoding="utf-8") for file in files))


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the cheap rules make of one completion."""

    scores: dict[str, float]
    written: str | None = None
    """The primary rule's answer as the completion writes it."""
    normalized: str | None = None
    settled: bool = False
    """Whether the primary rule's verdict stands without algebra."""
    number: str | None = None
    """The gold, where only a number can be right: an expression that equals it is work left standing."""


class Grader:
    """Scores completions. A context manager: `close()` ends the worker, which otherwise ends with this process.

    Args:
        deadline_s: seconds that math-verify may take for one completion before it counts as a timeout.
    """

    def __init__(self, deadline_s: float = 5.0):
        self._verifier = MathVerifier(deadline_s)

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._verifier.close()

    def start(self, rubric: Rubric, completion: str, gold: str) -> Future[Any] | None:
        """Begin to grade a completion that `grade` will be asked for: what needs math-verify is judged by its worker
        while this process does something else. Done when `grade` need not wait for it; None where it never must."""
        reading = _read(rubric, completion, gold)
        if not _needs_algebra(rubric, reading):
            return None
        return self._verifier.start(_question(rubric, reading, completion, gold))

    def grade(self, rubric: Rubric, completions: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        """One Grade per completion, in order.

        Args:
            rubric: the task's rules.
            completions: generated texts.
            golds: the reference answer of each completion, as in `Problem.gold`.
        """
        readings = [_read(rubric, text, gold) for text, gold in zip(completions, golds, strict=True)]
        asked = [i for i, reading in enumerate(readings) if _needs_algebra(rubric, reading)]
        rows = [_question(rubric, readings[i], completions[i], golds[i]) for i in asked]
        verdicts = dict(zip(asked, self._verifier.verify(rows), strict=True))
        return [_verdict(rubric, reading, verdicts.get(i)) for i, reading in enumerate(readings)]


def _read(rubric: Rubric, completion: str, gold: str) -> _Reading:
    scores: dict[str, float] = {}
    reference = RULES[rubric.primary].normalize(gold)
    number = reference if rubric.math_verify in ("fallback", "never") and is_number(reference) else None
    written = normalized = None
    settled = False
    for name in rubric.rules:
        rule = RULES[name]
        answer = rule.extract(completion)
        form = rule.normalize(answer) if answer is not None else ""
        same = form == rule.normalize(gold) if form else False
        if form and name == rubric.primary:
            written, normalized = answer, form
            settled = (same or number is not None) and rubric.math_verify != "own"
            if not same and rubric.math_verify == "parts":
                as_written = equal_as_written(gold, written or "")
                same, settled = bool(as_written), as_written is not None
        scores[name] = float(same)
    return _Reading(scores, written, normalized, settled, number)


def _needs_algebra(rubric: Rubric, reading: _Reading) -> bool:
    if rubric.math_verify in ("parts", "own"):
        return not reading.settled and reading.written is not None
    return rubric.math_verify == "fallback" and not reading.settled


def _question(rubric: Rubric, reading: _Reading, completion: str, gold: str) -> Question:
    """What the worker is asked: about the stated answer where there is one, so that no other number of the completion
    can score in its place, else about the whole completion."""
    if rubric.math_verify == "own":
        require_scoring(gold)
        return Question(reading.written or "", gold, "entry")
    if rubric.math_verify == "parts":
        return Question(reading.written or "", gold, "parts")
    text = completion if reading.written is None else f"\\boxed{{{reading.written}}}"
    return Question(text, gold, "text")


def _verdict(rubric: Rubric, reading: _Reading, algebra: Verdict | None) -> Grade:
    scores = dict(reading.scores)
    if algebra is not None:
        extracted, score, reason = algebra.extracted or reading.normalized, algebra.score, algebra.reason
        left_standing = score and reading.number not in (None, normalize_answer(algebra.extracted or ""))
        if left_standing or (reason == "unextracted" and extracted is not None):
            score, reason = 0.0, "wrong"
        scores[rubric.primary if rubric.math_verify == "own" else MATH_VERIFY] = score
        return Grade(score=score, scores=scores, extracted=_clip(extracted), reason=reason)
    score = scores[rubric.primary]
    reason = "correct" if score else "unextracted" if reading.normalized is None else "wrong"
    return Grade(score=score, scores=scores, extracted=_clip(reading.normalized), reason=reason)


def _clip(text: str | None) -> str | None:
    return text if text is None or len(text) <= _LONGEST_EXTRACT else text[:_LONGEST_EXTRACT] + "…"
