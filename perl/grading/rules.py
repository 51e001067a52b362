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

from perl.grading.entries import answer_of
from perl.grading.stated import FRACTIONS, Equation, Scalar, listed, parse_answer, show, tidy
from perl.grading.stated import extract as extract_stated
from perl.grading.stated import normalize as normalize_stated
from perl.grading.text import ASCII, LONGEST_ANSWER, find_boxes, last_box, last_match, plain


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to state an answer."""

    extract: Callable[[str], str | None]
    """The answer as the completion wrote it, or None when it states none in this form."""
    normalize: Callable[[str], str]
    """The form in which an extracted answer and a gold are equal as strings."""
    form: str
    """How an answer is stated for this rule; `{answer}` is replaced."""
    answer: Callable[[str], str] = str
    """What of a gold is the answer."""

    def state(self, gold: str) -> str:
        return self.form.replace("{answer}", self.answer(gold))

    def accepts(self, completion: str, gold: str) -> bool:
        """Whether the completion states the gold, as texts."""
        written = self.extract(completion)
        return written is not None and self.normalize(written) == self.normalize(gold)


# ---------------------------------------------------------------------------------------------------------- numbers

_CURRENCY = r"(?:\\?[$€£¥])?"
_UNSIGNED = r"(?:\d{1,3}(?:,\d{2,3}){0,12},\d{3}(?!\d)|\d++)(?:\.\d++)?|(?<!\.)\.\d++"
_WHOLE_NUMBER = re.compile(rf"(?:-?{_CURRENCY}|{_CURRENCY}-?)(?:{_UNSIGNED})")
_GROUP = r"[^{}]*+(?:\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\}[^{}]*+)*+"  # what braces hold, two further pairs deep
_TEX_FRACTION = rf"(?:\\[dtc]?frac(?:\s*+(?:\d|\{{{_GROUP}\}})){{2}}|\{{[^{{}}\\]*+\\over(?![A-Za-z])[^{{}}]*+\}})"
_BLANK = r"(?:[ \t~]|\\[,;:!])"
_NUMERAL = rf"(?:-{_CURRENCY}|\\?[$€£¥]-?|)(?:{_UNSIGNED})(?:[eE]-?\d{{1,3}}(?!\w))?+(?!\d|\.\d|,\d{{3}})"
_MIXED = rf"(?:{_BLANK}?{_TEX_FRACTION}|[ ]\d++[ ]?/[ ]?\d++|[{FRACTIONS}])"
_FUNCTION = r"(?:\\(?:sqrt|log|ln|exp|sin|cos|tan|lfloor|lceil|binom)(?![A-Za-z])(?:_\{?\d\}?)?+|√)[\s{(]*+"
_OPERATOR = r"(?:[-+*×·⋅÷/±x]|\*\*)"
# A number, a function of one or a fraction, with the arithmetic behind it.
_EXPRESSION = re.compile(
    rf"""(?:(?<![\w^])(?<![\^_][-{{])(?<!\^\{{-)(?<!\d\.)(?<![)\]}}](?=-))(?P<number>{_NUMERAL})|{_FUNCTION}{_NUMERAL}[)}}]?+|{_TEX_FRACTION})
    (?P<more>(?:{_MIXED}|(?:\\?[)\]}}$%])*+(?:
        [ ]?\^[ ]?[{{(]?-?\d*+[)}}]?+
        # An operator has blanks on both sides or on none: `18** 3` ends bold text, `18 -3` are two numbers.
        |(?:{_BLANK}++{_OPERATOR}{_BLANK}++|{_OPERATOR}|:|(?<=[\d)}}])(?=[({{√]|\\sqrt)
          |{_BLANK}*+\\(?:times|cdot|div|pm|[bp]?mod)(?![A-Za-z]){_BLANK}*+)
         (?:\\?[(\[{{$])*+(?:{_FUNCTION})?+(?:{_NUMERAL}|{_TEX_FRACTION})
    ))*+)""",
    re.VERBOSE,
)
_ONE_NUMBER = re.compile(
    rf"-?(?:\d+{_MIXED}|(?:(?:{_UNSIGNED}){_BLANK}?(?:\\times|\\cdot|[×·⋅*]){_BLANK}?)?10[ ]?\^[ ]?\{{?-?\d{{1,3}}\}}?)"
)
_PLAIN_NUMBER = re.compile(r"-?\d+(?:\.\d+|/\d+)?")
_HEADING = re.compile(r"[*_\s]*+(?:step|part|case|method|question|solution|explanation|note)\b", re.IGNORECASE)
_CONTRADICTION = re.compile(r"\b(?:or|not|any|every|either|all of(?= \d))\b|\\(?:neq?|text\{\s*or)\b|[<>≤≥≠]")
# What a statement may hold around its number, in the notation of stated.tidy: words, a percent sign, an aside.
_STATED_NUMBER = re.compile(
    rf"(?P<before>(?:[A-Za-z']++[:,.]?\s++)*+)(?:dollars!\s)?[(\[]?(?P<number>-?\s?(?:{_UNSIGNED})(?:\s\d{{3}}\b)*+)[)\]]?"
    r"(?P<after>k?[.,:]?|\s?[元个人天年岁米]|-[A-Za-z].*|\s-\s[a-z].*|/(?:h|[A-Za-z]{2,})\b.*"
    r"|(?:k?[,.:]?\s|(?=[A-Za-z]{2}))(?:[(\[].*|[A-Za-z][A-Za-z'^]*+(?![!_]).*))"
)
_CHANGING_WORDS = re.compile(
    r"\b(?:or|and|to|not|no|million|billion|trillion|hundred|dozen|half|over|plus|minus|than|least|most"
    r"|between|under|maybe|possibly|divided|choose|base|percent of|squared|cubed|factorial|tenths|hundredths"
    r"|at (?:least|most)|(?:less|more|fewer) than(?=.*\d)|times(?!\s(?:as|more|larger|longer|older|per|a)\b|$))\b",
    re.IGNORECASE,
)
_TAG = re.compile(r"</?(?:s|[a-z_]{2,20})>|<\|[a-z_]{1,40}\|>")
# What makes another number of one: `5 or 6`, `2 hours 30 minutes`, `18 eggs, 20 eggs`, `12, no wait, 15`.
_SECOND_NUMBER = re.compile(
    r"\b(?:or|and|to|but|degrees|plus|wait|actually|sorry)\b\D{0,12}\d"
    r"|^k?[,.:]?\s*[A-Za-z]+\s\d+(?:\.\d+)?\s[A-Za-z]|^k?\s*([A-Za-z]+),\s\d+(?:\.\d+)?\s\1\b",
    re.IGNORECASE,
)


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


def is_number(text: str) -> bool:
    """Whether a normalized answer is a number, a decimal or a fraction, so that comparing strings settles equality."""
    return _PLAIN_NUMBER.fullmatch(text) is not None


# ------------------------------------------------------------------------------------------------ where answers stand

_STRICT = re.compile(r"#### (-?[0-9.,]++)")
_MARKER = re.compile(r"####\s*+((?:(?!####)[^\n])*+)")
_DIGIT = re.compile(r"\d")
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
    """The number that the last `####` or `\\boxed{}` states, whichever comes later; without one, the last number of
    the text (_last_number). What stands behind the reasoning in <think></think> is looked at alone where it has a
    digit.

    `#### Step 2` is a heading. What is no form of a number (`20+5`, `5 or 6`) comes whole, and is no number's equal.
    """
    behind = completion.rpartition("</think>")[2]
    text = plain(behind if _DIGIT.search(behind) else completion)
    markers = [m for m in _MARKER.finditer(text) if _DIGIT.search(m[1]) and not _HEADING.match(m[1])]
    box = last_box(text)
    if markers and (box is None or markers[-1].start() > box[0]):
        return _stated_number(markers[-1][1])
    if box and _DIGIT.search(box[1]):
        return _stated_number(box[1])
    return _last_number(text)


def _last_number(text: str) -> str | None:
    """The last number of a text that is no operand. `3 1/2` is one number, so are `1e5`, `7 × 10^4`, `$3.50` and `5%`.
    `4 / 2`, `2^3`, `\\sqrt{2}`, `1/0`, `3-4`, `10-20` and `7:30` are none, but work left standing, a range, a time: a
    number before them counts. Where no number stands alone the last expression comes whole; 3/4 is a number then."""
    expressions = list(_EXPRESSION.finditer(text))
    for expression in reversed(expressions):
        if expression["number"] and (not expression["more"] or _ONE_NUMBER.fullmatch(expression[0].lstrip("$"))):
            return expression[0]
    return expressions[-1][0] if expressions else None


def _stated_number(statement: str) -> str:
    """The number in a statement with words around it ("18 dollars for 3 days"), else the whole statement."""
    statement = _TAG.sub(" ", statement[:LONGEST_ANSWER]).strip(" \t$*`_#✓✔✅。")
    if _WHOLE_NUMBER.fullmatch(statement) or is_number(normalize_answer(statement)):
        return statement
    before, _, value = statement.rpartition("=")
    before = before.rpartition("=")[2].strip()
    if _CONTRADICTION.search(statement.removesuffix(value)) or _WHOLE_NUMBER.fullmatch(before):
        return statement
    match = _STATED_NUMBER.fullmatch(tidy(value).rstrip(". *"))
    if match is None or _SECOND_NUMBER.search(match["after"]):
        return statement
    if any(words.search(match["before"]) for words in (_CHANGING_WORDS, _CONTRADICTION)):
        return statement
    if _CHANGING_WORDS.match(match["after"].lstrip("k,.: ")):
        return statement
    return match["number"] + (" thousand" if re.match(r"k\b| thousand\b", match["after"]) else "")


@functools.lru_cache(maxsize=8192)
def normalize_flexible(answer: str) -> str:
    return normalize_number(answer) if _WHOLE_NUMBER.fullmatch(plain(answer).strip()) else normalize_answer(answer)


# ------------------------------------------------------------------------------- answers that need not be numbers


def _clean(answer: str) -> str | None:
    """An answer without the markup around it (`**$34$.**` gives `34`), or None when nothing is left."""
    boxes = find_boxes(answer)
    answer = (listed(answer, boxes) if boxes else answer)[:LONGEST_ANSWER]
    return answer.strip().strip('$*`"“” ').removesuffix(".").removesuffix("。").strip('$*`"“” ') or None


def _extract_answer_line(completion: str) -> str | None:
    """DAPO's rule (math_dapo): what stands behind the last `Answer:`, to the end of its line."""
    match = _answer_line(completion)
    return _clean(match[1]) if match else None


def _answer_line(completion: str) -> re.Match[str] | None:
    """ASCII is character for character, so that positions are those in `completion`."""
    return last_match(_ANSWER_LINE, completion if completion.isascii() else completion.translate(ASCII))


def _extract_answer_tag(completion: str) -> str | None:
    """What stands in the last `<answer>…</answer>`, as reasoning-gym reads it."""
    before, closed, _ = completion.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    return answer.strip() or None if closed and opened else None


def _extract_boxed(completion: str) -> str | None:
    box = last_box(completion)
    return _clean(box[1]) if box else None


def _extract_answer(completion: str) -> str | None:
    """What the completion states behind its reasoning in <think></think>, or, where it states nothing there, as a
    whole."""
    behind = completion.rpartition("</think>")[2]
    return _last_answer(behind) or (_last_answer(completion) if len(behind) < len(completion) else None)


def _last_answer(completion: str) -> str | None:
    """The last `Answer:` line; a box where there is none, or where the line is prose and a box follows it."""
    line, box = _extract_answer_line(completion), last_box(completion)
    if box is None:
        return line
    if line is not None and not is_number(normalize_answer(line)):
        begin = _answer_line(completion)
        line = None if begin is not None and box[0] > begin.end() else line
    return line or _clean(box[1])


@functools.lru_cache(maxsize=8192)
def normalize_answer(answer: str) -> str:
    """Two answers that differ in notation only become equal: stated.normalize, but that units are dropped, a percent
    sign among them, and that the right side of an equation counts."""
    value = parse_answer(answer)
    if isinstance(value, Equation):
        value = value.right
    if isinstance(value, Scalar) and (not value.unit.startswith("base") or value.unit == "base 10"):
        value = Scalar(value.text)
    return show(value)


RULES: dict[str, Rule] = {
    "strict": Rule(_extract_strict, lambda answer: plain(answer).replace(",", "").strip(), "#### {answer}"),
    "verl_strict": Rule(_extract_verl_strict, lambda answer: answer.replace(",", ""), "#### {answer}"),
    "flexible": Rule(_extract_flexible, normalize_flexible, "The answer is {answer}."),
    "answer_line": Rule(_extract_answer_line, normalize_answer, "Answer: {answer}"),
    "boxed": Rule(_extract_boxed, normalize_answer, "\\boxed{{answer}}"),
    "answer": Rule(_extract_answer, normalize_answer, "Answer: {answer}"),
    "answer_tag": Rule(
        _extract_answer_tag, lambda text: answer_of(text).strip(), "<answer>{answer}</answer>", answer_of
    ),
    "stated": Rule(extract_stated, normalize_stated, "\\boxed{{answer}}"),
}
