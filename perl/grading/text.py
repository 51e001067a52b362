"""What every rule needs of a text: its signs in ASCII, and its boxes."""

from __future__ import annotations

import re
from typing import NamedTuple

LONGEST_ANSWER = 1000
"""Characters of a stated answer that are looked at (the longest gold of MATH-500 has 159)."""

ASCII = str.maketrans(
    dict.fromkeys("−–‐‑‒﹣－", "-") | {"，": ",", "．": ".", "：": ":", "＄": "$", "％": "%", "＝": "="}
)
"""Look-alikes of the ASCII signs in numbers and answers."""
_RAISED = re.compile("[⁻⁰¹²³⁴-⁹]+")
_LOWERED = re.compile("[₀-₉]+")
_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉", "-01234567890123456789")
_GROUPING = re.compile("(?<=\\d)(?:\\{,\\}|,?\\\\[!,; ]\\s?|[\u2009\u202f])(?=\\d{3}(?!\\d))")
_BRACES = re.compile(
    r"\\(?:boxed|fbox)\s*+\{|\\boxed\s++(?P<bare>-?\d++(?:,\d++)*+(?:\.\d++)?+)|\\(?!\\(?:boxed|fbox)).|[{}]", re.DOTALL
)


class Box(NamedTuple):
    """A closed `\\boxed{}`: positions of its backslash, of its content, and of the brace that closes it; in
    `\\boxed 18`, which has no braces, of what follows the number."""

    start: int
    begin: int
    end: int


def plain(text: str) -> str:
    """`text` with ASCII signs in place of their Unicode look-alikes, `^2` and `^{-3}` for raised digits, `_{2}` for
    lowered ones, and digits grouped by commas."""
    if not text.isascii():
        text = _RAISED.sub(_raised, text.translate(ASCII))
        text = _LOWERED.sub(lambda digits: f"_{{{digits[0].translate(_DIGITS)}}}", text)
    elif "\\" not in text and "{,}" not in text:
        return text
    return _GROUPING.sub(",", text)


def _raised(digits: re.Match[str]) -> str:
    exponent = digits[0].translate(_DIGITS)
    return f"^{exponent}" if len(exponent) == 1 else f"^{{{exponent}}}"


def find_boxes(text: str) -> list[Box]:
    """The closed boxes of `text` that hold anything, in the order in which they begin. One pass, however deep the
    braces nest."""
    first = min((at for at in (text.find("\\boxed"), text.find("\\fbox")) if at >= 0), default=-1)
    if first < 0:
        return []
    boxes: list[Box] = []
    open_braces: list[tuple[int, int] | None] = []  # where a box and its content begin; None for an ordinary brace
    for token in _BRACES.finditer(text, first):
        if token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}":
            if open_braces and (opened := open_braces.pop()) is not None and text[opened[1] : token.start()].strip():
                boxes.append(Box(*opened, token.start()))
        elif token["bare"]:
            boxes.append(Box(token.start(), *token.span("bare")))
        elif token[0].endswith("{") and token[0] != "\\{":
            open_braces.append((token.start(), token.end()))
    return sorted(boxes)


def last_box(text: str) -> tuple[int, str] | None:
    """Position and content of the closed box that begins last."""
    boxes = find_boxes(text)
    return (boxes[-1].begin, text[boxes[-1].begin : boxes[-1].end]) if boxes else None


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    match = None
    for match in pattern.finditer(text):  # noqa: B007
        pass
    return match
