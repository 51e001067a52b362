"""Cheap rules: read the stated answer out of a completion and compare it with the gold, without any algebra.

They run in the caller's process, so every step is linear in the completion: quantifiers are possessive or bounded,
and no two of them compete for the same characters. Numbers are compared as exact decimals, never as floats.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from perl.grading.stated import extract as extract_stated
from perl.grading.stated import normalize as normalize_stated
from perl.grading.text import ASCII, LONGEST_ANSWER, last_box, last_match, plain


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to state an answer."""

    extract: Callable[[str], str | None]
    """The answer as the completion wrote it, or None when it states none in this form."""
    normalize: Callable[[str], str]
    """The form in which an extracted answer and a gold are equal as strings."""
    form: str
    """How an answer is stated for this rule; `{answer}` is replaced."""
    evaluated: bool = False
    """Whether an answer has to be worked out (see `is_unevaluated`)."""

    def state(self, answer: str) -> str:
        return self.form.replace("{answer}", answer)

    def accepts(self, completion: str, gold: str) -> bool:
        """Whether the completion states the gold, as texts."""
        written = self.extract(completion)
        return written is not None and self.normalize(written) == self.normalize(gold)


# ---------------------------------------------------------------------------------------------------------- numbers

_CURRENCY = r"(?:\\?[$€£¥])?"
_UNSIGNED = r"(?:\d{1,3}(?:,\d{2,3}){0,12},\d{3}(?!\d)|\d++)(?:\.\d++)?|(?<!\.)\.\d++"
_WHOLE_NUMBER = re.compile(rf"(?:-?{_CURRENCY}|{_CURRENCY}-?)(?:{_UNSIGNED})")
_NUMBER = re.compile(
    r"(?<![\w^])(?<!\^[-{])(?<!\d[./])"  # not inside a word, an exponent or a fraction
    rf"((?:(?<![)\]}}])-{_CURRENCY}|\\?[$€£¥]-?|)(?:{_UNSIGNED}))"
    r"(?!\s*\^|\s*/\s*\d|\d|\.\d|,\d{3})"  # a power or a fraction is more than the number it begins with
)
_PLAIN_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_OPERATION = (
    r"[\s)\]}]*+\\(?:[dtc]?frac|sqrt|times|cdot|div|d?binom|pi\b)"
    r"|(?<=\d)[\s)\]}]*+(?:[-+*/^×÷]\s*+[({\[$]*+-?[\d.\\]|[eE][-+]?\d)"  # 20 + 5, 7e4; not 20 - the rest
)
_EXPRESSION = re.compile(rf"[(\[{{\s]*+-?{_CURRENCY}(?:{_UNSIGNED})?(?:{_OPERATION})")
_ANY_OPERATION = re.compile(_OPERATION)
_SCIENTIFIC = re.compile(r"(?<=\d)[eE]([-+]?\d++)")  # to TeX, e is Euler's number
_POWER_OF_TEN = re.compile(r"\s*+(?:[*×]|\\times|\\cdot)\s*+10\s*+\^")
_LEFT_STANDING = re.compile(r"(?<=[\d)\]}])\s*+(?:[-+*×÷]|\\(?:times|cdot|div))\s*+[({\[]*+-?[\d.\\]")
_WORDS_BEHIND = re.compile(r"(?<=[\d)}\]])\s++(?!x\s*+\d)[A-Za-z].*+$")  # the dollars of 20 + 5 dollars


def normalize_number(text: str) -> str:
    """The exact decimal that `text` writes: "$1,234.50" gives "1234.5", "-018.00" gives "-18". What is no number
    comes back unchanged."""
    text = plain(text).strip()
    if not _WHOLE_NUMBER.fullmatch(text):
        return text
    number = format(Decimal(re.sub(r"[^\d.-]", "", text)), "f")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return "0" if number in ("-0", "-", "") else number


def is_unevaluated(text: str) -> bool:
    """Whether a sum, difference, product or quotient is left standing, other than a fraction or a power of ten. As a
    right answer it would teach a policy to leave the arithmetic out."""
    return _LEFT_STANDING.search(_POWER_OF_TEN.sub("", text)) is not None


def is_number(text: str) -> bool:
    """Whether a normalized answer is a decimal number, so that comparing strings settles equality."""
    return _PLAIN_NUMBER.fullmatch(text) is not None


# ------------------------------------------------------------------------------------------------ where answers stand

_STRICT = re.compile(r"#### (-?[0-9.,]++)")
_MARKER = re.compile(r"####\s*+([^\n]*+)")
_ANSWER_LINE = re.compile(r"answer[*_\s]*+:[*_\s]*+([^\n]++)", re.IGNORECASE)


# ------------------------------------------------------------------------------------------------------ GSM8K's rules


def _extract_strict(completion: str) -> str | None:
    """verl's strict rule and lm-evaluation-harness's strict-match, last match: what stands behind `#### `."""
    match = last_match(_STRICT, completion)
    answer = match[1].rstrip(".,") if match else ""
    return answer or None


def _extract_verl_strict(completion: str) -> str | None:
    """verl's gsm8k.py, method strict: the last `#### n` among the last 300 characters, a full stop behind it being part
    of n."""
    match = last_match(_STRICT, completion[-300:])
    return match[1] if match else None


def _extract_flexible(completion: str) -> str | None:
    """The number that the last `####` or `\\boxed{}` states, whichever comes later; without one, the last number.

    `#### Step 2` is a heading: behind the marker the number comes first. An expression in either place (`20+5`,
    `\\boxed{\\frac{36}{2}}`) is no number: it comes whole; algebra has to decide, or it is wrong (`is_unevaluated`).
    """
    text = plain(completion)
    marker, box = last_match(_MARKER, text), last_box(text)
    if marker and (box is None or marker.start() > box[0]):
        stated, expression, number = marker[1], _EXPRESSION.match, _NUMBER.match
    elif box:
        stated, expression, number = box[1], _ANY_OPERATION.search, _NUMBER.search
    else:
        stated, expression, number = "", _EXPRESSION.match, _NUMBER.match
    stated = stated[:LONGEST_ANSWER].rsplit("=", 1)[-1].strip(" \t$*`")
    if expression(stated):
        written = _WORDS_BEHIND.sub("", stated.replace("\\$", "").replace("$", "")).rstrip(" .")
        return _SCIENTIFIC.sub(r" \\times 10^{\1}", written)
    match = number(stated.lstrip("(")) or last_match(_NUMBER, text)
    return match[1] if match else None


# ------------------------------------------------------------------------------- answers that need not be numbers

_WRAPPERS = re.compile(r"\\[()\[\]]|\\(?:left|right)(?![A-Za-z])|\\(?=\$)|[$`\"“”]|\*\*")
_SPACES = re.compile(r"\\[!,; ]|~|\s+")
_UNIT = re.compile(
    r"(?<=[\d.}])\s*(?:\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\{?\d\}?)?|\^\{?\\circ\}?|\\?%|\\degree|°)"
    r"|(?<=[\d.])\s++(?:[A-Za-z]{3,}+|cm|mm|km|kg|ft|mi)(?:\s++[A-Za-z]++)*+(?=\s*\.?\s*$)"
)
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf)\{([^{}]*)\}")


def _clean(answer: str) -> str | None:
    """An answer without the markup around it (`**$34$.**` gives `34`), or None when nothing is left."""
    box = last_box(answer)
    answer = (box[1] if box else answer)[:LONGEST_ANSWER]
    return answer.strip().strip('$*`"“” ').removesuffix(".").removesuffix("。").strip('$*`"“” ') or None


def _extract_answer_line(completion: str) -> str | None:
    """DAPO's rule (math_dapo): what stands behind the last `Answer:`, to the end of its line."""
    match = last_match(_ANSWER_LINE, completion if completion.isascii() else completion.translate(ASCII))
    return _clean(match[1]) if match else None


def _extract_boxed(completion: str) -> str | None:
    box = last_box(completion)
    return _clean(box[1]) if box else None


def _extract_answer(completion: str) -> str | None:
    """The last `Answer:` line; a box where there is none, or where the line is prose and a box follows it."""
    line, box = _extract_answer_line(completion), last_box(completion)
    if box is None:
        return line
    if line is not None and not is_number(normalize_answer(line)):
        begin = last_match(_ANSWER_LINE, completion)
        line = None if begin is not None and box[0] > begin.end() else line
    return line or _clean(box[1])


@functools.lru_cache(maxsize=8192)
def normalize_answer(answer: str) -> str:
    """Two answers written alike become equal: TeX markup, spacing, units and grouping of digits are dropped, the
    right side of the last `=` counts, numbers become exact decimals. No algebra: 1/2 stays different from 0.5."""
    text = _WRAPPERS.sub("", plain(answer[:LONGEST_ANSWER]))
    text = _UNIT.sub("", _SPACES.sub(" ", text)).strip().removesuffix(".")
    text = _TEXT.sub(r"\1", text).rsplit("=", 1)[-1]
    text = re.sub(r"(?<!\d) +| +(?!\d)", "", text)  # "3 4" is not 34
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\d)\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text)
    return normalize_number(text)


RULES: dict[str, Rule] = {
    "strict": Rule(_extract_strict, lambda answer: plain(answer).replace(",", "").strip(), "#### {answer}"),
    "verl_strict": Rule(_extract_verl_strict, lambda answer: answer.replace(",", ""), "#### {answer}"),
    "flexible": Rule(_extract_flexible, normalize_number, "The answer is {answer}.", evaluated=True),
    "answer_line": Rule(_extract_answer_line, normalize_answer, "Answer: {answer}"),
    "boxed": Rule(_extract_boxed, normalize_answer, "\\boxed{{answer}}"),
    "answer": Rule(_extract_answer, normalize_answer, "Answer: {answer}"),
    "stated": Rule(extract_stated, normalize_stated, "\\boxed{{answer}}"),
}
