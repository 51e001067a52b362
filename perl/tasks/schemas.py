"""The schemas that data come in: which columns hold the question, the ready-made prompt and the gold answer."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from perl.base.errors import UserError
from perl.grading.rules import normalize_number
from perl.models.images import read_images
from perl.records import Message
from perl.tasks.files import Row, structure, text_or_turns

SCHEMAS = {
    "verl": "prompt (messages), reward_model.ground_truth, data_source",
    "dapo": "prompt, solution (its answer)",
    "gsm8k": "question, answer",
    "bench": "problem, answer",
    "guide": "prompt, answer",
    "prompt": "prompt, question or problem alone",
}
READ = {"prompt", "question", "problem", "answer", "solution"}
READ |= {"reward_model", "data_source", "source", "extra_info", "images"}
"""Columns that Fields is made of."""
CALLS = "tool_calls"
"""Of a message, which chat templates word besides the content. It is refused, and not kept: Arrow would make one type
of all calls' arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What a row holds, whatever its columns are called."""

    schema: str
    """Key of SCHEMAS."""
    question: str = ""
    messages: tuple[Message, ...] | None = None
    gold: Any = None
    """As stored: a number, an answer, or GSM8K's derivation. None: the row has none."""
    data_source: str | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    """verl's column of that name."""
    images: tuple[bytes, ...] = ()
    """As in Problem."""


def read_fields(row: Row, where: str) -> Fields:
    """The fields of `row`, by the first schema whose columns it has; a UserError names the columns when none fits."""
    extra_info = structure(row.get("extra_info"), where)
    found = replace(_by_schema(row, where), images=read_images(row, where))
    return replace(found, extra_info=extra_info) if isinstance(extra_info, dict) else found


def _by_schema(row: Row, where: str) -> Fields:
    prompt = text_or_turns(row.get("prompt"), where)
    reward_model = structure(row.get("reward_model"), where)
    source = row.get("data_source") or row.get("source")
    source = source if isinstance(source, str) else None
    if isinstance(prompt, str) and row.get("solution") is not None and row.get("answer") is None:
        return Fields(schema="dapo", question=prompt.strip(), gold=row["solution"], data_source=source)
    if prompt is not None and isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None:
        return _prompted("verl", prompt, reward_model["ground_truth"], source, where)
    for schema, column in (("gsm8k", "question"), ("bench", "problem")):
        if isinstance(row.get(column), str) and row.get("answer") is not None:
            return Fields(schema=schema, question=row[column].strip(), gold=row["answer"], data_source=source)
    if prompt is not None and row.get("answer") is not None:
        return _prompted("guide", prompt, row["answer"], source, where)
    alone = (prompt, row.get("question"), row.get("problem"))
    if (asked := next((text for text in alone if text is not None), None)) is not None:
        return _prompted("prompt", asked, None, source, where)
    filled = [name for name, value in row.items() if value is not None and value != ""]
    raise UserError(
        f"{where}: no known schema has the columns {', '.join(filled) or '(none)'};"
        f" known: {'; '.join(f'{name}: {columns}' for name, columns in SCHEMAS.items())}"
    )


def _prompted(schema: str, prompt: Any, gold: Any, source: str | None, where: str) -> Fields:
    """A row whose prompt is a list of messages, or a text: ready-made when it already says how to state the answer,
    else the bare question."""
    if isinstance(prompt, str):
        if asked_form(prompt) is None:
            return Fields(schema=schema, question=prompt.strip(), gold=gold, data_source=source)
        prompt = [{"role": "user", "content": prompt}]
    messages = []
    for place, message in enumerate(prompt if isinstance(prompt, list) else [None]):
        has = message if isinstance(message, dict) else {}
        role, content = has.get("role"), has.get("content")
        if _holds(has.get(CALLS)):
            raise UserError(
                f"{where}: message {place} of prompt has {CALLS}, which would be lost; write calls and their answers as"
                " text, in the messages' content"
            )
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(f"{where}: prompt must be a text or a list of {{role, content}} messages")
        messages.append({"role": role, "content": content})
    if not messages:
        raise UserError(f"{where}: prompt is an empty list of messages")
    return Fields(schema=schema, messages=tuple(messages), gold=gold, data_source=source)


def _holds(value: Any) -> bool:
    """Parquet has all fields of all messages, null or empty where one has none."""
    return value is not None and not (isinstance(value, Sized) and len(value) == 0)


def asked_form(prompt: str) -> str | None:
    """The form in which a ready-made prompt asks for the answer: "####", "Answer:", "\\boxed", or None."""
    return next((form for form in ("####", "Answer:", "\\boxed") if form in prompt), None)


def worked_answer(row: Row, where: str) -> str | None:
    """The longest text that the row has of its answer: the worked one where it has one, which verl keeps in extra_info,
    else the bare answer; None where it has neither."""
    extra = structure(row.get("extra_info"), where)
    columns = row.get("solution"), row.get("answer"), extra.get("answer") if isinstance(extra, dict) else None
    texts = (str(value).strip() for value in columns if isinstance(value, str | int | float | Decimal))
    return max(texts, key=len, default="") or None


# -------------------------------------------------------------------------------------------------------------- golds


def gsm8k_gold(value: Any) -> str:
    """The number behind the derivation's last `####` ("... #### 1,234" gives "1234"), or the number itself."""
    return normalize_number(gold_text(value).rsplit("####", 1)[-1].strip())


def integer_gold(value: Any) -> str:
    """DAPO's golds: integers of up to 23 digits, kept exact."""
    return normalize_number(gold_text(value))


def math_gold(value: Any) -> str:
    """A LaTeX answer as it is written; whole numbers lose what AIME and AMC files add to them ("025", "27.0")."""
    text = gold_text(value)
    number = normalize_number(text)
    return number if number.lstrip("-").isdecimal() and "," not in text and "$" not in text else text


def gold_text(value: Any) -> str:
    """The gold as text. Raises ValueError for what cannot be one, a float too large to be exact among them."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError(f"the gold answer must be a text or a number, not {value!r:.60}")
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        raise ValueError(f"the gold answer is {value}, which no completion can state")
    if isinstance(value, float):
        if abs(value) >= 2**53:
            raise ValueError(f"the gold answer {value!r} is a float that has lost digits; store it as text")
        value = int(value) if value.is_integer() else value
    text = str(value).strip()
    if not text:
        raise ValueError("the gold answer is empty")
    return text
