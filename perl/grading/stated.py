"""The answer that a completion states, and whether it is the gold, where answers need not be numbers.

1. Its place (`extract`): the last box, with the boxes that a comma or "and" joins to it; without a box what follows
   the last "answer is"; else the formula of a whole sentence that concludes, or a text that is nothing but an answer.
2. One notation (`tidy`): the table NOTATION, rule by rule.
3. Its parts (`read_answer`): of a chain of equalities the last member; lists, sets, intervals, points, matrices, words.
4. A number (`_number`): integer, decimal, n×10^k, repeating decimal, fraction that is no integer, mixed number; with a
   unit (`tidy_scalar`). What else can be computed is an expression, and no number's equal: work left standing.
5. A hedge (`5 or 6`, `x \\ne 5`, `any x = 5`, `26 = 25`) is several answers or an Unreadable one, never a number.
6. Equality (`equal`), part by part: numbers are exact, units count where both sides state one. Two plain expressions go
   to math-verify, words never do: it reads them as products of letters.

`extract` is linear in the completion. The rest looks at LONGEST_ANSWER characters.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction

from perl.grading.text import LONGEST_ANSWER, Box, find_boxes, last_match, plain

# ------------------------------------------------------------------------------------------ where the statement stands

_PHRASE = re.compile(
    r"(?:answers?|(?:correct|right) (?:option|choice))[*_\s]{0,4}"
    r"(?:(?:is|are|would be|must be)\b(?:\s(?:therefore|thus|then|hence|indeed))?[*_\s]{0,4}:?|:|=)"
    r"|answer[*_]{0,3}[ \t]*+(?=\n)|####[ \t]*+(?=[-$\\(\d])(?!\d+\.\s)",
    re.IGNORECASE,
)
_CONCLUSION = re.compile(
    r"(?:^|[.!?:]\s|\n)[*_\s]{0,4}(?:therefore|thus|hence|so|consequently|in conclusion)\b", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[.!。](?=[*_$]{0,3}(?:\s+[A-Z#]|\s*$))|\n")
_BETWEEN_BOXES = re.compile(
    r"[\s$\\()\[\]]*(?:,|;|\b(?:and|or)\b|\\text\{\s*(?:and|or)\s*\})[\s$\\()\[\],]*(?:(?:and|or)\b[\s$\\()\[\]]*)?"
)
_MATH = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)", re.DOTALL)
_DOLLAR = re.compile(r"(?<!\\)\$")
_ASIDE = re.compile(r",\s(?:as|which|since|because|so)\s")
_LONGEST_SENTENCE = 300


def extract(completion: str) -> str | None:
    """What the completion states behind its reasoning in <think></think>, or, where it states nothing there, as a
    whole."""
    behind = completion.rpartition("</think>")[2]
    return _extract(behind) or (_extract(completion) if len(behind) < len(completion) else None)


def _extract(completion: str) -> str | None:
    """What a text states at its end, as it is written: its last box, with the boxes listed before it; without
    a box, what follows the last "answer is" or "Answer:"; else the formula of a whole sentence that concludes it
    ("Therefore, $x = 5$."), or a completion that is nothing but an answer. None for a completion without any of these:
    one that was cut off states nothing, whatever number it ends with."""
    if boxes := find_boxes(completion):
        return _strip(listed(completion, boxes))
    if (phrase := last_match(_PHRASE, completion)) is not None:
        return _strip(_sentence(completion[phrase.end() : phrase.end() + LONGEST_ANSWER]))
    text = completion.strip()
    if (conclusion := last_match(_CONCLUSION, text[-_LONGEST_SENTENCE:])) is not None:
        return _strip(_concluded(text[-_LONGEST_SENTENCE:][conclusion.end() :]))
    return _strip(text) if len(text) <= 60 and "\n" not in text and "\\boxed" not in text else None


def listed(text: str, boxes: Sequence[Box]) -> str:
    """The content of the last box, after those of the boxes that "and" or a comma joins to it."""
    last = boxes[-1]
    contents = [text[last.begin : last.end]]
    for before, box in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        gap = text[before.end + 1 : box.start]
        if before.end >= box.start or len(gap) > 40 or not _BETWEEN_BOXES.fullmatch(gap):
            break
        contents.insert(0, text[before.begin : before.end])
    return ", ".join(contents)


def _sentence(text: str) -> str:
    """The rest of the sentence behind "answer is"; behind a heading, its first paragraph."""
    text = text.lstrip("*_: \t\n")
    if (display := _MATH.match(text)) and (display[1] or display[2]):
        return display[0]
    ends = (end.start() for end in _SENTENCE_END.finditer(text))
    sentence = text[: next((end for end in ends if len(_DOLLAR.findall(text, 0, end)) % 2 == 0), None)]
    sentence = _ASIDE.split(sentence)[0]
    return "" if re.match(r"(?i)not\b", sentence) else sentence


def _concluded(text: str) -> str:
    """The only formula of a whole sentence."""
    text = text.strip()
    formulas = list(_MATH.finditer(text))
    end = _SENTENCE_END.search(text.replace("\n", " "))
    whole = text.endswith((".", "!", "$", "\\]", "\\)")) and (end is None or end.end() >= len(text.rstrip("*_$\\]) ")))
    if not whole or len(formulas) != 1 or not re.fullmatch(r"[.!]?|[^$\\]*[.!]", text[formulas[0].end() :].strip()):
        return ""
    return next(filter(None, formulas[0].groups()))


def _strip(answer: str) -> str | None:
    return answer[:LONGEST_ANSWER].strip().strip("*` ").removesuffix(".").removesuffix("。").strip("*` ") or None


# ------------------------------------------------------------------------------------------------------- the notation

_SIGNS = str.maketrans({
    "π": "\\pi ", "∞": "\\infty ", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "\\div ", "°": "^\\circ ",
    "∪": "\\cup ", "∩": "\\cap ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "≈": "\\approx ",
    "∈": "\\in ", "⟨": "\\langle ", "⟩": "\\rangle ", "¢": " cents ", "θ": "\\theta ",
    "λ": "\\lambda ", "“": "", "”": "", '"': "", "`": "", "\u00a0": " ", "‘": "", "’": "'",
})  # fmt: skip
FRACTIONS = "½¼¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_SIGNS |= {
    ord(sign): f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    for sign in FRACTIONS
    for value in [Fraction(unicodedata.numeric(sign)).limit_denominator(10)]
}

# Applied in this order: (what is written, what is meant).
NOTATION: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(written), meant)
    for written, meant in (
        (r"\\\\(?:\[[^\]]*\])?", r" \\cr "),  # a new row, before `\\ ` is taken for a space
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits|,|!|;|:|quad|qquad)(?![A-Za-z])\.?", " "),
        (r"\{([,:])\}", r"\1"),
        (r"\\(?:hat|vec)\s*\{\s*\\mathbf\s*\{\s*([ijk])\s*\}\s*\}", r"\\unit\1 "),
        (r"\\(?:mathbf|bold|boldsymbol|hat|vec)\s*\{\s*\\?([ijk])(?:math)?\s*\}", r"\\unit\1 "),
        (r"\*\*|~|\\ |''", " "),
        (r"\\\$|€|£", " dollars! "),  # a currency stands before its number
        (r"(?:\\[()\[\]]|\$)", " "),
        (r"√\s*(\d+(?:\.\d+)?|[a-zA-Z])", r"\\sqrt{\1}"),
        (r"√\s*(?=\{)", r"\\sqrt"),
        *[(r"(?:√|\\sqrt|(?<![\\a-z])sqrt)\s*\(((?:[^()]++|\([^()]*+\))*+)\)", r"\\sqrt{\1}")] * 2,  # one in another
        (r"(?<=[\d}])\s*\\(?:text|mbox|textrm|mathrm)\s*\{\s*([mghs])\s*\}", r" \1! "),  # a unit, not a variable
        (
            r"\\(?:mathbf|mathrm|textbf|text|bold|boldsymbol|mathit|textit)\s*\{\s*([A-Za-z]|\([A-Za-z]\)|[-\d.,:]+)\s*\}",
            r"\1",
        ),
        (r"\\(?:text|mbox|mathrm|textbf|textrm|textit|operatorname|mathbf|hbox|bf|emph)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:textbf|mathbf|boldsymbol|bm)\s*\{((?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+)\}", r" \1 "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\{\s*(-?\d+)\s*\\over\s*(-?\d+)\s*\}", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\frac\s*\{", r"\\frac{"),
        (r"\}\s+\{", "}{"),
        (r"\\sqrt\s*(\d|[a-z])", r"\\sqrt{\1}"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])|\\textdegree", " degrees "),
        (r"\\?%", " percent "),
        (r"\\(?:leqslant|leq|le)(?![a-z])", r"\\le "),
        (r"\\(?:geqslant|geq|ge)(?![a-z])", r"\\ge "),
        (r"\\(?:neq|ne)(?![a-z])", r"\\ne "),
        (r"\\(?:lt)(?![a-z])", "<"),
        (r"\\(?:gt)(?![a-z])", ">"),
        (r"\\(?:approx|simeq|doteq)(?![a-z])", r"\\approx "),
        (r"\\(?:mid|vert)(?![a-z])", "|"),
        (r"\+\s*\\infty", r"\\infty"),
        (r"\\(?:lbrace)(?![a-z])", r"\\{"),
        (r"\\(?:rbrace)(?![a-z])", r"\\}"),
        (r"\^\s*\{\s*\\?(?:top|T|intercal|prime)\s*\}|\^\s*\\top|\^\s*T(?![a-z])", r"^T"),
        (r"(?<=\d)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*(-?\d{1,3})\s*\}?", r"e\1"),
        (r"(?<=[\d)])\s*(?:\\cdot\s*)?i(?![A-Za-z])", r" \\cdot i"),  # math-verify sees a number in a lone i only
        (r"\\varnothing|\\\{\s*\\\}", r"\\emptyset"),
        (r"\s+", " "),
    )
)


_ESCAPED = re.compile(r"\\\\[A-Za-z{}%$,!;:()\[\]]")
_SINGLE_BACKSLASH = re.compile(r"(?<!\\)(?:\\\\)*\\(?!\\)")
"""LaTeX as JSON escapes it, `\\\\frac{1}{2}`, has doubled backslashes only; a matrix has others beside its rows'."""


def tidy(answer: str) -> str:
    """The answer in one notation: no markup, no spacing commands, words bare, ASCII or LaTeX for every sign."""
    text = answer[:LONGEST_ANSWER]
    if _ESCAPED.search(text) and not _SINGLE_BACKSLASH.search(text):
        text = text.replace("\\\\", "\\")
    text = plain(text).translate(_SIGNS)
    for written, meant in NOTATION:
        text = written.sub(meant, text)
    return text.strip().strip(",;").strip()


# ----------------------------------------------------------------------------------------------------------- the parts


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number or an expression, with its unit where one is stated that is known."""

    text: str
    """A number in lowest terms ("-7/2"), or the expression as it is written."""
    unit: str = ""

    @property
    def number(self) -> Fraction | None:
        if not re.fullmatch(r"-?\d+(?:/[1-9]\d*)?", self.text):
            return None
        number = Fraction(self.text)
        return number if str(number) == self.text else None


@dataclass(frozen=True, slots=True)
class Words:
    text: str
    """Lower-case words, or one upper-case letter that names a choice."""
    meaning: Answer | None = None
    """What stands behind the letter: (C) 12."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """A point, a vector, an interval: ordered."""

    ends: str
    """"()", "(]", ...; "<>" for what can only be a vector; "=" for values given by name (p = 6, q = 31)."""
    items: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Many:
    """Several answers, in any order; a union of intervals when `union`."""

    items: tuple[Answer, ...]
    union: bool = False


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Scalar, ...], ...]


@dataclass(frozen=True, slots=True)
class Equation:
    left: Scalar
    right: Scalar


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A statement that is no value: an inequality that is no interval, an intersection, a hedge."""

    text: str


Answer = Scalar | Words | Bracket | Many | Matrix | Equation | Unreadable

_NAME = r"\\?[A-Za-z]+(?:_\{?[A-Za-z0-9]+\}?)?(?:\s?\([^()]*\))?"
_IS_NAME = re.compile(
    rf"(?:[A-Za-z ]*\s)?{_NAME}'?|\\(?:mathbf|vec|overrightarrow|mathbb|mathcal)\s?\{{[A-Za-z]+\}}"
    r"|\\(?:sin|cos|tan|angle)\s?[A-Z]+"
)
_CONSTANT = re.compile(r"\\?(?:pi|phi|varphi|infty)|e")
_APPROXIMATELY = re.compile(r"\\approx|(?:^|,?\s)(?:which is )?(?:approximately|about|roughly)\s")
_QUANTIFIER = re.compile(r"\b(?:any|every|either|not|all of(?= \d))\s")
_OPEN, _CLOSE = re.compile(r"\\\{|\\langle|\\begin|[(\[{]"), re.compile(r"\\\}|\\rangle|\\end|[)\]}]")
_TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|.", re.DOTALL)
_ORDER = re.compile(r"\\le(?![a-z])|\\ge(?![a-z])|\\ne(?![a-z])|<|>")
_MATRIX = re.compile(
    r"(?P<factor>[^&]*?)[\[(]?\s*\\begin\s?\{(?P<kind>[pbB]?matrix|smallmatrix|array)\}(?:\{[lcr| ]*\})?(?P<body>.*?)"
    r"\\end\s?\{(?:[pbB]?matrix|smallmatrix|array)\}\s*[\])]?\s*(?P<transposed>\^T)?"
)
_UNIT_VECTORS = re.compile(r"(.*?)\\unit([ijk])\s?")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-z])\s?")
_DEEPEST = 20
"""Brackets in brackets that are read; an answer has three or four."""
_MOST_NODES = 500
"""Parts of an answer that are read, those of parts included; the golds of MATH-500 have at most 20."""
_nodes = threading.local()


class _TooManyParts(Exception):
    pass


_NEGATIVE_WORDS = frozenset(
    ["not", "no", "none", "neither", "never", "except", "wrong", "incorrect", "but", "unless", "if"]
)


def read_answer(text: str) -> Answer:
    """The parts of a tidied answer. Raises _TooManyParts."""
    text = _without_approximation(text).strip().rstrip(". ")
    if (members := _split(text, ("=",)))[1:]:
        return _chain([member.strip() for member in members])
    return _value(text)


def _chain(members: list[str]) -> Answer:
    """`x = ... = 3y + 4`: the last member, unless the equation itself is the answer, or names stand on the right."""
    text = " = ".join(members)
    if len(items := _elements(text)) > 1:
        return _several(items)
    if (
        len(members) == 2
        and _IS_NAME.fullmatch(members[1])
        and not _IS_NAME.fullmatch(members[0])
        and re.search(r"\d", members[0])
    ):
        members = members[::-1]
    value, left, before = _value(members[-1]), tidy_scalar(members[0]), tidy_scalar(members[-2])
    if not isinstance(value, Scalar):
        return value
    if value.unit == "percent" and before.number is not None:  # 1/2 = 50%
        value = before
    if _QUANTIFIER.search(members[0]) or (_is_integer(value) and _is_integer(before) and value != before):
        return Unreadable(text)
    is_equation = len(members) == 2 and (_has_letters(left.text) or _has_letters(value.text))
    return Equation(left, value) if is_equation or _IS_NAME.fullmatch(members[0]) else value


@functools.lru_cache(maxsize=4096)
def _value(text: str) -> Answer:
    """A value without `=`. Some forms are tried one after the other on the same parts, so what was read is remembered,
    and the nodes of an answer are counted."""
    _nodes.left -= 1
    if _nodes.left < 0:
        raise _TooManyParts
    text = text.strip()
    if match := re.fullmatch(r"(.*\S)\s*\(\s*or\s(.*)\)", text):
        return Many((_value(match[1]), _value(match[2])))
    if re.fullmatch(r"\\mathbb\s?\{?\s?R\s?\}?|(?i:all real numbers)", text):
        return Bracket("()", (Scalar("-\\infty"), Scalar("\\infty")))
    if "\\cap" in text or "\\ne " in text or "\\setminus" in text:
        return Unreadable(text)
    if len(parts := _split(text, ("\\cup", " or "))) > 1:
        unions = tuple(_value(part) for part in parts)
        if all(_is_interval(part) for part in unions) and (
            "\\cup" in text or _ORDER.search(text) or "(" in text or "[" in text
        ):
            return Many(unions, union=True)
        if "\\cup" in text:
            return Unreadable(text)
    if match := re.fullmatch(r"(?:\\?[A-Za-z]+(?:\s?\([A-Za-z]\))?)\s?\\in(?![a-z])(.*)", text):
        return _value(match[1])
    if match := re.fullmatch(r"\\\{\s*\\?[A-Za-z]+\s?(?::|\|)(.*)\\\}", text):
        return _value(match[1])
    if _ORDER.search(text):
        return _interval_of_inequality(text) if len(_elements(text)) == 1 else Unreadable(text)
    if ("\\begin" in text or "\\unit" in text) and (matrix := _matrix(text)) is not None:
        return matrix
    if match := re.fullmatch(r"\\\{(.*)\\\}", text):
        return _several(_elements(match[1]), braces=True)
    if len(items := _elements(text)) > 1:
        return _several(items)
    if (bracket := _bracket(text)) is not None:
        return bracket
    if len(both := _plus_minus(text)) == 2:
        return Many(tuple(_value(one) for one in both))
    return _word_or_scalar(text)


def _several(items: list[str], braces: bool = False) -> Answer:
    read = [read_answer(item) for item in items]
    flat: list[Answer] = []
    for one in read:
        flat += one.items if isinstance(one, Many) and not one.union else (one,)
    if len(flat) == 1 and not braces:
        return flat[0]
    names = [item.partition("=")[0].strip() for item in items]
    if (
        len(flat) == len(items) > 1
        and all(isinstance(one, Equation) for one in flat)
        and len(set(names)) == len(names)
        and not braces
    ):
        in_order = names == sorted(names) and not any("_" in name for name in names)
        if in_order or names in (["m", "b"], ["r", "\\theta"]):
            return Bracket("=", tuple(one.right for one in flat if isinstance(one, Equation)))
        if not all("_" in name for name in names):
            return Unreadable(", ".join(items))
    return Many(
        tuple(one.right if isinstance(one, Equation) and _IS_NAME.fullmatch(one.left.text) else one for one in flat)
    )


def _word_or_scalar(text: str) -> Answer:
    bare = text.strip(" '").rstrip(".'")
    if match := re.fullmatch(
        r"(?:(?:option|choice|answer|letter)\s)?(?:\(([A-Z])\)|([A-Z])(?:[.):])?)", bare, re.IGNORECASE
    ):
        letter = match[1] or match[2]
        if letter.isupper():
            return Words(letter)
    described = re.fullmatch(r"(?:\(([A-Z])\)|([A-Z])[.):])\s?([^()]\S*.*)", bare)
    if described and not re.search(r"\b(?:or|and|not)\b|\b[A-Z]\b", described[3]) and "=" not in described[3]:
        return Words(described[1] or described[2], _value(described[3]))
    scalar = tidy_scalar(bare)
    if re.fullmatch(r"[A-Za-z][A-Za-z' -]*[A-Za-z]", scalar.text) and (
        len(scalar.text) > 3 or " " in scalar.text or scalar.text.lower() in ("yes", "no", "odd")
    ):
        return Words(_said(scalar.text.lower()))
    return scalar


def _said(sentence: str) -> str:
    """What a sentence says of its subject: "the function is even" gives "even"."""
    words = [word for word in sentence.split() if word not in ("a", "an", "the")]
    if not _NEGATIVE_WORDS & set(words) and "is" in words[1:-1]:
        words = words[len(words) - words[::-1].index("is") :]
    return " ".join(words)


# ------------------------------------------------------------------------------------------------- brackets and lists


def _bracket(text: str) -> Bracket | Matrix | None:
    match = re.fullmatch(
        r"(?:(?:[Tt]he )?(?:ordered )?(?:point|vector|interval|pair|triple) )?"
        r"(\(|\[|\\langle)(.*)(\)|\]|\\rangle)\s*(?:\^T)?",
        text,
    )
    if match is None or len(items := _split(match[2], (",", ";"))) < 2 or min(_depths(match[2])) < 0:  # (1,2) and (3,4)
        return None
    parts = tuple(_value(item) for item in items)
    if match[1] == "[" and match[3] == "]" and all(isinstance(part, Bracket) and part.ends == "[]" for part in parts):
        rows = tuple(
            tuple(entry for entry in part.items if isinstance(entry, Scalar))
            for part in parts
            if isinstance(part, Bracket)
        )
        if len({len(row) for row in rows}) == 1:
            return Matrix(rows)
    if match[1] == "\\langle" or match[3] == "\\rangle":
        return Bracket("<>", parts)
    return _closed(match[1], parts, match[3])


def _closed(left: str, parts: tuple[Answer, ...], right: str) -> Bracket:
    """Infinity is never part of an interval, however it is written."""
    if len(parts) == 2:
        left = "(" if parts[0] == Scalar("-\\infty") else left
        right = ")" if parts[1] == Scalar("\\infty") else right
    return Bracket(left + right, parts)


def _is_interval(answer: Answer) -> bool:
    return isinstance(answer, Bracket) and len(answer.items) == 2 and answer.ends in ("()", "(]", "[)", "[]")


def _interval_of_inequality(text: str) -> Answer:
    """`a < x \\le b`, `x > a` and `|x| < a` as intervals."""
    signs, parts = _ORDER.findall(text), [part.strip() for part in _ORDER.split(text)]
    if any(sign in ("\\ge", ">") for sign in signs):
        if not all(sign in ("\\ge", ">") for sign in signs):
            return Unreadable(text)
        signs = [{"\\ge": "\\le", ">": "<"}[sign] for sign in signs[::-1]]
        parts = parts[::-1]
    ends = [_value(part) for part in parts]
    if len(parts) == 3 and _IS_NAME.fullmatch(parts[1]):
        return _closed("[("[signs[0] == "<"], (ends[0], ends[2]), "])"[signs[1] == "<"])
    if len(parts) == 2 and re.fullmatch(r"\|\s*(\\?[a-z]+)\s*\|", parts[0]):
        below = _value(f"-{parts[1]}")
        return _closed("[("[signs[0] == "<"], (below, ends[1]), "])"[signs[0] == "<"])
    if len(parts) == 2 and _IS_NAME.fullmatch(parts[0]) and not _IS_NAME.fullmatch(parts[1]):
        return _closed("(", (Scalar("-\\infty"), ends[1]), "])"[signs[0] == "<"])
    if len(parts) == 2 and _IS_NAME.fullmatch(parts[1]) and not _IS_NAME.fullmatch(parts[0]):
        return _closed("[("[signs[0] == "<"], (ends[0], Scalar("\\infty")), ")")
    return Unreadable(text)


def _matrix(text: str) -> Matrix | Bracket | None:
    if match := _MATRIX.fullmatch(text):
        factor = match["factor"].strip().removesuffix("\\cdot").strip()
        rows = [row.split("&") for row in re.split(r"\\cr(?![a-z])", match["body"].strip().removesuffix("\\cr"))]
        if any(len(row) != len(rows[0]) for row in rows) or "\\begin" in factor:
            return None
        if match["transposed"]:
            rows = [list(column) for column in zip(*rows, strict=True)]
        return Matrix(tuple(tuple(_scaled(factor, entry) for entry in row) for row in rows))
    parts = {}
    end = 0
    for match in _UNIT_VECTORS.finditer(text):
        coefficient, axis, end = match[1].replace(" ", "").strip("+"), match[2], match.end()
        if (match.start() != 0 and match[1].strip()[:1] not in ("+", "-")) or axis in parts:
            return None
        parts[axis] = tidy_scalar({"": "1", "-": "-1"}.get(coefficient, coefficient))
    if not parts or text[end:].strip():
        return None
    axes = "ijk" if "k" in parts else "ij"
    return Bracket("<>", tuple(parts.get(axis, Scalar("0")) for axis in axes))


def _scaled(factor: str, entry: str) -> Scalar:
    scalar = tidy_scalar(entry)
    if not factor:
        return scalar
    by = tidy_scalar({"-": "-1"}.get(factor, factor))
    if by.number is not None and scalar.number is not None:
        return Scalar(str(by.number * scalar.number))
    return Scalar(f"({by.text}) \\cdot ({scalar.text})")


def _elements(text: str) -> list[str]:
    """The members of a list that commas, "and" or "or" separate, outside of brackets. 58,500 is one number."""
    text = re.sub(r"(?<![\d,.(\[{])(-?\d{1,3}(?:,\d{3})+)(?![\d,])", lambda match: match[1].replace(",", ""), text)
    items = [item.strip() for part in _split(text, (",", ";")) for item in _split(f" {part} ", (" and ", " or "))]
    return [item for item in items if item]


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """Split at separators outside of all brackets. `=` is none in `\\ne`, `\\le`, `>=` and the like."""
    parts, depth, begin = [], 0, 0
    position = 0
    while position < len(text):
        found = next((s for s in separators if depth == 0 and text.startswith(s, position)), None)
        if found:
            parts.append(text[begin:position])
            begin = position = position + len(found) - (found[-1] == " ")
            continue
        token = _TOKEN.match(text, position)
        assert token is not None
        depth += bool(_OPEN.fullmatch(token[0])) - (depth > 0 and bool(_CLOSE.fullmatch(token[0])))
        position = token.end()
    return [*parts, text[begin:]]


def _depths(text: str) -> list[int]:
    """How many brackets are open behind each token."""
    tokens = _TOKEN.findall(text)
    return list(itertools.accumulate(bool(_OPEN.fullmatch(token)) - bool(_CLOSE.fullmatch(token)) for token in tokens))


def _plus_minus(text: str) -> list[str]:
    """The two values of an expression with one sign \\pm; else the expression."""
    if len(_PLUS_MINUS.findall(text)) != 1:
        return [text]
    return [_PLUS_MINUS.sub(sign, text).strip().removeprefix("+").strip() for sign in ("+", "-")]


def _without_approximation(text: str) -> str:
    """The exact value where one stands before the sign or word; behind nothing, or a name alone, what follows."""
    exact, *others = _APPROXIMATELY.split(text)
    named = _IS_NAME.fullmatch(exact.strip()) and not _CONSTANT.fullmatch(exact.strip())
    return others[-1] if others and (named or not exact.strip()) else exact


# -------------------------------------------------------------------------------------------------------------- scalars

# Units that are told apart; others are dropped. Name -> how it is written.
UNITS = {
    "degrees": "degrees degree deg", "radians": "radians radian rad", "percent": "percent percentage",
    "dollars": "dollars dollar usd dollars!", "cents": "cents cent",
    "mm": "mm millimeters millimeter", "cm": "cm centimeters centimeter centimetres", "m": "m! meters meter metres",
    "km": "km kilometers kilometer", "in": "in inches inch in.", "ft": "ft feet foot", "yd": "yd yards yard",
    "mi": "mi miles mile", "s": "s! sec seconds second", "min": "min minutes minute", "h": "h! hr hours hour",
    "days": "days day", "weeks": "weeks week", "g": "g! grams gram", "kg": "kg kilograms kilogram",
}  # fmt: skip
_UNIT_OF = {word: name for name, words in UNITS.items() for word in words.split()}
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_CHANGING = _NEGATIVE_WORDS | frozenset(
    ["half", "halves", "thirds", "tenths", "hundredths", "thousandths", "times", "squared", "cubed", "factorial",
     "base", "plus", "minus", "than", "least", "most", "maybe", "perhaps", "possibly"]
)  # fmt: skip
"""Words behind a number that make another number of it, or none."""
_FUNCTIONS = frozenset(
    ["sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh",
     "log", "ln", "exp", "mod", "gcd", "lcm", "det", "max", "min", "deg"]
)  # fmt: skip
_TRAILING_WORDS = re.compile(
    r"(.*?[\d})\]a-zA-Z.|])\s([A-Za-z][A-Za-z./!-]*(?:\s[A-Za-z./!-]+)*)\s?(?:\^\s?\{?\s?([23])\s?\}?)?\.?"
)
_SCALED = re.compile(rf"(\S+) ({'|'.join(_SCALES)})((?: .*)?)", re.IGNORECASE)
_IN_WORDS = re.compile(r"(?<=\d) \(([a-z]{3,})\)$")
_BASE = re.compile(
    r"\(?\s?((?=[A-F]*\d)[0-9A-F]+)\s?\)?\s?(?:_\s?\{?\s?|\(?\s?(?:in )?base[- ]?\{?)\s?([a-z]+|\d+)\s?\}?\s?\)?"
)
_NUMERALS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_BASES = {name: str(base) for base, name in enumerate(_NUMERALS, start=2)}
_TIME = re.compile(r"(\d{1,2}):(\d{2})(?:\s?([ap])\.?\s?m\.?)?", re.IGNORECASE)
_RATIO = re.compile(r"(\d+)\s?(?::|\sto\s)\s?(\d+)")


@functools.lru_cache(maxsize=4096)
def tidy_scalar(text: str) -> Scalar:
    """A number in lowest terms, a time, a ratio or an expression, without its unit."""
    text = text.strip()
    if match := _TIME.fullmatch(text.strip(".")):
        return Scalar(f"{int(match[1])}:{match[2]}", f"{match[3].lower()}m" if match[3] else "")
    if match := _RATIO.fullmatch(text):
        return Scalar(f"{match[1]}:{match[2]}", "ratio")
    if match := _BASE.fullmatch(text):
        base = _BASES.get(match[2].lower(), match[2])
        if base.isdecimal():
            return Scalar(match[1].lstrip("0").upper() or "0", f"base {base}")
    if (words := _IN_WORDS.search(text)) and words[1] not in _CHANGING:  # 5 (five)
        text = text[: words.start()]
    text, unit = _without_unit(text)
    text = re.sub(r"(?<![\d,.])(\d{1,3}(?:,\d{3})+)(?![\d,])", lambda match: match[1].replace(",", ""), text)
    number = _number(text)
    if number is not None:
        return Scalar(str(number), unit)
    return Scalar(_spaced(text), unit)


def _without_unit(text: str) -> tuple[str, str]:
    unit = ""
    if text.lstrip("-").strip().startswith("dollars! "):
        text, unit = text.replace("dollars! ", "", 1).replace("- ", "-"), "dollars"
    if (scaled := _SCALED.fullmatch(text)) and (number := _number(scaled[1].replace(",", ""))) is not None:
        text = f"{number * _SCALES[scaled[2].lower()]}{scaled[3]}"
    match = _TRAILING_WORDS.fullmatch(text)
    if match is None or not re.search(r"[\d\\]", match[1]):
        return text, unit
    words, power = match[2].lower().split(), match[3] or ""
    counted = words[0] == "times" and words[1:2] in ([], ["as"], ["more"])  # 5 times, 5 times as many
    if (_CHANGING | _FUNCTIONS) & set(words[counted:]):
        return text, unit
    if len(words[0]) == 1 and words[0] not in _UNIT_OF:
        return text, unit
    while words and words[0] in ("square", "sq", "sq.", "cubic"):
        power = "3" if words.pop(0) == "cubic" else "2"
    known = _UNIT_OF.get(words[0]) or _UNIT_OF.get(words[0].strip(".")) if words else None
    if known and len(words) > 2 and words[1] == "per":
        known = f"{known} per {_UNIT_OF.get(words[2], words[2])}"
    return match[1].strip(), known + (f"^{power}" if power else "") if known else unit


_SIGN = r"([-+]|(?:negative|minus)\s)?\s?"
_DECIMAL = re.compile(
    rf"{_SIGN}(\d{{1,3}}(?: \d{{3}})+|\d*\.?\d+|\d+\.)(?:[eE](-?\d{{1,3}}))?"
    rf"|{_SIGN}10\s?\^\s?\{{?\s?(-?\d{{1,3}})\s?\}}?"
)
_REPEATING = re.compile(rf"{_SIGN}(\d*)\.(\d*)\\(?:overline|bar)\s?\{{?(\d+)\}}?")
_FRACTION = re.compile(
    rf"{_SIGN}(?:(\d+)\s?(?=\\)|(\d+)\s)?(?:\\frac\{{\s?(-?\d+)\s?\}}\{{\s?(-?\d+)\s?\}}|(-?\d+)\s?/\s?(-?\d+))"
)


def _number(text: str) -> Fraction | None:
    """The exact value of a form of a number: 7, -3.50, .5, 1 000, 0.\\overline{3}, 2e-5, 10^6, 1/2, 1\\frac{4}{5}.
    Everything else is an expression, a fraction whose value is an integer too: 100/4 is a division left standing."""
    text = text.strip()
    while (inner := re.fullmatch(r"(-?)\s?(?:\(([^()]*)\)|\{([^{}]*)\})", text)) and not (
        inner[1] and (inner[2] or inner[3]).strip().startswith("-")
    ):
        text = inner[1] + (inner[2] or inner[3] or "").strip()
    if match := _DECIMAL.fullmatch(text):
        sign, digits, exponent = match[1] or match[4], (match[2] or "1").replace(" ", ""), match[3] or match[5] or "0"
        value = Fraction(Decimal(f"{digits}e{exponent}"))
    elif match := _REPEATING.fullmatch(text):
        sign, whole, fixed, repeated = match.groups()
        nines = 10 ** len(repeated) - 1
        value = Fraction(int(f"{whole}{fixed}{repeated}") - int(f"{whole}{fixed}" or 0), nines * 10 ** len(fixed))
    elif match := _FRACTION.fullmatch(text):
        sign, whole = match[1], int(match[2] or match[3] or 0)
        over, under = int(match[4] or match[6]), int(match[5] or match[7])
        if under == 0 or over % under == 0 or (whole and (over < 0 or under < 0)):
            return None
        value = whole + Fraction(over, under)
    else:
        return None
    return -value if sign and sign != "+" else value


def _spaced(text: str) -> str:
    """An expression without the spaces that mean nothing."""
    return re.sub(r"(?<![A-Za-z\d]) | (?![A-Za-z\d])", "", text)


def _is_integer(scalar: Scalar) -> bool:
    return not scalar.unit and scalar.number is not None and scalar.number.denominator == 1


def _has_letters(text: str) -> bool:
    return (
        re.search(r"[A-Za-z]", re.sub(r"\\(?:frac|sqrt|cdot|times|pi|left|right)(?![a-z])|degrees|percent", "", text))
        is not None
    )


def _is_prose(text: str) -> bool:
    """Whether words stand in an expression, which math-verify would read as products of letters: east is seat."""
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{3,}", text)
    return any(word.lower() not in _FUNCTIONS for word in words)


def _differ_in_case(one: str, other: str) -> bool:
    """Whether two expressions have the same letters, but for their case: math-verify takes r for R."""
    letters, others = (set(re.sub(r"\\[A-Za-z]+", "", text)) for text in (one, other))
    upper = [letter for letter in letters ^ others if letter.isalpha()]
    return any(letter.swapcase() in upper for letter in upper)


# ----------------------------------------------------------------------------------------------------------- comparison


@functools.lru_cache(maxsize=8192)
def parse_answer(answer: str) -> Answer:
    text = tidy(answer)
    _nodes.left = _MOST_NODES
    try:
        return read_answer(text) if max(_depths(text), default=0) <= _DEEPEST else Unreadable(text)
    except _TooManyParts:
        return Unreadable(text)


def normalize(answer: str) -> str:
    """A text that is the same for two answers that differ in notation only; a decimal for a number that is one."""
    return show(parse_answer(answer))


def equal(gold: str, answer: str, same: Callable[[str, str], bool]) -> bool:
    """Whether `answer` is `gold`. `same` decides for two plain expressions, in LaTeX."""
    return _equal(parse_answer(gold), parse_answer(answer), same)


class _Expressions(Exception):
    pass


def _undecided(gold: str, answer: str) -> bool:
    raise _Expressions


def equal_as_written(gold: str, answer: str) -> bool | None:
    """Whether `answer` is `gold`; None where that depends on expressions, which algebra has to compare."""
    try:
        return equal(gold, answer, _undecided)
    except _Expressions:
        return None


def _equal(gold: Answer, answer: Answer, same: Callable[[str, str], bool]) -> bool:
    if isinstance(answer, Unreadable) or isinstance(gold, Unreadable):
        return answer == gold
    if isinstance(answer, Equation) and not isinstance(gold, Equation):
        homogeneous = answer.right.text == "0" and re.search(r"\d\s?[a-zA-Z]|\^", answer.left.text)
        return not homogeneous and _equal(gold, answer.right, same)
    if isinstance(gold, Equation):
        return _equal_equation(gold, answer, same)
    if isinstance(gold, Many) or isinstance(answer, Many):
        return _equal_sets(gold, answer, same)
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _equal_matrices(gold, answer, same)
    if isinstance(gold, Bracket) and isinstance(answer, Bracket):
        ends = gold.ends, answer.ends
        return (
            (gold.ends == answer.ends or ends in (("()", "<>"), ("()", "="), ("<>", "()")))
            and len(gold.items) == len(answer.items)
            and all(_equal(g, a, same) for g, a in zip(gold.items, answer.items, strict=True))
        )
    if isinstance(answer, Words) and answer.meaning is not None and answer.text != getattr(gold, "text", None):
        return _equal(gold, answer.meaning, same)
    if isinstance(gold, Words) and isinstance(answer, Words):
        return gold.text == answer.text
    if isinstance(gold, Scalar) and isinstance(answer, Scalar):
        return _equal_scalars(gold, answer, same)
    return False


def _equal_scalars(gold: Scalar, answer: Scalar, same: Callable[[str, str], bool]) -> bool:
    one, other = gold.number, answer.number
    if {gold.unit, answer.unit} == {"dollars", "cents"} and one is not None and other is not None:
        return one * (100 if gold.unit == "dollars" else 1) == other * (100 if answer.unit == "dollars" else 1)
    if gold.unit == "percent" and not answer.unit and one is not None:
        return other in (one, one / 100)
    if gold.unit != answer.unit and gold.unit and answer.unit:
        return False
    if answer.unit.startswith("base ") and answer.unit != "base 10" and not gold.unit:
        return False
    if gold.text == answer.text:
        return True
    if one is not None or ":" in gold.text + answer.text:
        return False  # another number, or work that is left standing
    if _is_prose(gold.text) or _is_prose(answer.text) or not answer.text:
        return False
    if ("dots" in answer.text) != ("dots" in gold.text) or _differ_in_case(gold.text, answer.text):
        return False
    return same(gold.text, answer.text)


def _equal_equation(gold: Equation, answer: Answer, same: Callable[[str, str], bool]) -> bool:
    """`x = 5` is 5, but neither `y = 5` nor `x > 5`; an equation in both members is only itself."""
    named = _IS_NAME.fullmatch(gold.left.text) is not None
    if not isinstance(answer, Equation):
        return named and _equal(gold.right, answer, same)
    if named:
        left = (
            answer.left.text == gold.left.text
            or not _has_letters(answer.left.text)
            or answer.left.text.endswith(f" {gold.left.text}")
        )
        if left or not _has_letters(gold.right.text):
            return left and _equal(gold.right, answer.right, same)
    left = re.sub(r"^[A-Za-z ]+ (?=\S)", "", answer.left.text)
    one = f"({gold.left.text})-({gold.right.text})"
    return any(same(one, f"{sign}(({left})-({answer.right.text}))") for sign in ("", "-"))


def _equal_sets(gold: Answer, answer: Answer, same: Callable[[str, str], bool]) -> bool:
    """Every member of the one is a member of the other."""
    if isinstance(gold, Many) and isinstance(answer, Many) and gold.union != answer.union:
        return False
    golds = gold.items if isinstance(gold, Many) else (gold,)
    if isinstance(answer, Bracket) and answer.ends == "()" and len(answer.items) > 2:  # no interval: a list
        answer = Many(answer.items)
    answers = answer.items if isinstance(answer, Many) else (answer,)
    if len(golds) > len(answers) or len(answers) > 2 * len(golds):
        return False
    return all(any(_equal(g, a, same) for a in answers) for g in golds) and all(
        any(_equal(g, a, same) for g in golds) for a in answers
    )


def _equal_matrices(gold: Answer, answer: Answer, same: Callable[[str, str], bool]) -> bool:
    """A vector may be written as a column, as a point, or in angle brackets."""
    one, other = _rows(gold), _rows(answer)
    if not one or not other or [len(row) for row in one] != [len(row) for row in other]:
        return False
    return all(_equal(g, a, same) for r, s in zip(one, other, strict=True) for g, a in zip(r, s, strict=True))


def _rows(answer: Answer) -> list[Sequence[Answer]]:
    if isinstance(answer, Matrix):
        return list(answer.rows)
    return (
        [(item,) for item in answer.items] if isinstance(answer, Bracket) and answer.ends in ("()", "<>", "[]") else []
    )


def show(answer: Answer) -> str:
    """An answer in one notation; a decimal for a number that is one."""
    match answer:
        case Scalar(text, unit):
            number = answer.number
            shown = text if number is None or not _terminates(number.denominator) else _decimal(number)
            return f"{shown} [{unit}]" if unit else shown
        case Words(text, meaning):
            return text if meaning is None else f"{text} [{show(meaning)}]"
        case Unreadable(text):
            return text
        case Bracket(ends, items):
            return f"{ends[0]}{', '.join(map(show, items))}{ends[-1]}"
        case Many(items, union):
            return (" \\cup " if union else ", ").join(sorted(map(show, items)))
        case Matrix(rows):
            return f"[{'; '.join(', '.join(map(show, row)) for row in rows)}]"
        case Equation(left, right):
            return f"{show(left)} = {show(right)}"


def _terminates(denominator: int) -> bool:
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _decimal(number: Fraction) -> str:
    with localcontext(prec=2 * LONGEST_ANSWER):
        shown = format(Decimal(number.numerator) / Decimal(number.denominator), "f")
    return shown.rstrip("0").rstrip(".") if "." in shown else shown
