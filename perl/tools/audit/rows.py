"""The problems that a reward is tried on: each with its answer, wrong ones, and the form that its prompt asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from perl.grading import RULES
from perl.grading.stated import equal_as_written
from perl.prompts import PromptStyle, build_messages
from perl.records import Problem
from perl.rewards.files import ROW, row_of
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
    def asked(self) -> str:
        """The text of its prompt's last message."""
        content = self.columns["prompt"][-1]["content"]
        return content if isinstance(content, str) else " ".join(part.get("text") or "" for part in content)

    @property
    def where(self) -> str:
        return json.loads(self.columns[ROW])["where"]

    @property
    def numbers(self) -> list[str]:
        """Those of its prompt, the right answer not among them."""
        found = re.findall(r"\d+(?:\.\d+)?", self.asked)
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
    one, two = number_of(answer), number_of(other)
    if one is not None and two is not None:
        return one != two
    return answer.strip() != other.strip() and equal_as_written(answer, other) is False


def number_of(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
