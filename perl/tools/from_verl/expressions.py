"""Arithmetic and conditions of bash: what ((…)), [ … ] and [[ … ]] come to, of their words.

Words, and texts in which expansions are put in: the grammar's tree groups them otherwise than bash does (it takes 8
for a variable in 8%3, -A+1 for -(A+1), and ! a = b for !(a) = b).
"""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

COMPARISONS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")}
TESTS = ("=", "==", "!=", "<", ">", "=~", "-nt", "-ot", "-ef", *COMPARISONS)
"""Signs between two words of a condition."""
JOINS = (("||", "-o", True), ("&&", "-a", False))
"""Signs between conditions, the loosest first, and what decides."""

OPERATORS = (
    {"||": lambda left, right: bool(left or right)},
    {"&&": lambda left, right: bool(left and right)},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge},
    {"+": operator.add, "-": operator.sub},
    {
        "*": operator.mul,
        "/": lambda left, right: abs(left) // abs(right) * (1 if left * right >= 0 else -1),  # bash rounds towards zero
        "%": lambda left, right: abs(left) % abs(right) * (1 if left >= 0 else -1),
    },
)
"""Those with two sides, the loosest first."""
TOKEN = re.compile(r"\*\*|&&|\|\||<<|>>|[<>=!]=|\w+|\S", re.ASCII)
SETS = re.compile(
    r"(?<!\w)([A-Za-z_]\w*+)(?:\[[^]]{0,1000}\])?\s*(?:\+\+|--|(?:<<|>>|\*\*|[-+*/%&|^])?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)


@dataclass
class Undecided(Exception):
    """A condition or a number that only a run of the script would show."""

    name: str = ""
    """The variable that it depends on, "" where there is none (a file, a command)."""
    values: tuple[str, ...] = ()
    """What the variable is compared to."""


def names_set(text: str) -> list[str]:
    """The variables that an expression sets."""
    return [match[1] or match[2] for match in SETS.finditer(text)]


def value_of(text: str, read: Callable[[str], int]) -> int:
    """The value of an expression that sets nothing; it wraps at 64 bits.

    Args:
        text: the expression.
        read: the value of a variable.

    Raises:
        ValueError: it is no expression, or has a sign that is not read here.
    """
    tokens = ["", *reversed(TOKEN.findall(text))]

    def choice() -> int:
        value = level(0)
        if tokens[-1] == "?":
            tokens.pop()
            left, colon = choice(), tokens.pop()
            right = choice() if colon == ":" else integer("?")
            return left if value else right
        return value

    def level(at: int) -> int:
        if at == len(OPERATORS):
            return leaf()
        value = level(at + 1)
        while (sign := tokens[-1]) in OPERATORS[at]:
            tokens.pop()
            try:
                value = int(OPERATORS[at][sign](value, level(at + 1)))
            except ArithmeticError as error:
                raise ValueError(text) from error
            value = (value + 2**63) % 2**64 - 2**63
        return value

    def leaf() -> int:
        if (token := tokens.pop()) in ("-", "+", "!"):
            value = leaf()
            return {"-": -value, "+": value, "!": int(not value)}[token]
        if token == "(":
            value = choice()
            return value if tokens.pop() == ")" else integer("?")
        return read(token) if re.match("[A-Za-z_]", token) else integer(token or "?")

    value = choice()
    return value if tokens == [""] else integer("?")


def integer(text: str) -> int:
    """A whole number; "" is 0.

    Raises:
        ValueError: it is none, or one that bash reads to another base.
    """
    if not re.fullmatch(r"\s*([-+]?(0|[1-9][0-9]{0,17})\s*)?", text, re.ASCII):
        raise ValueError(text)
    return int(text.strip() or 0)


def condition(
    words: Sequence[str], text: Callable[[int, tuple[str, ...]], str], alike: Callable[[int, str], bool] | None
) -> bool:
    """Whether a condition holds.

    Args:
        words: those of [ after expansion, those of [[ as they are written.
        text: what a word is, given its place and what it is compared to.
        alike: whether a pattern, given its place, is that of a text; None in [, which compares texts.

    Raises:
        Undecided: only a run of the script would show it.
        ValueError: an error.
    """
    at = 0

    def joined(level: int) -> bool:
        nonlocal at
        if level == len(JOINS):
            return term()
        *signs, decides = JOINS[level]
        found: list[bool | Undecided] = []
        while not found or (words[at:] and words[at] in signs):
            at += bool(found)
            try:
                found.append(joined(level + 1))
            except Undecided as undecided:
                found.append(undecided)
        if decides not in found and (first := next((it for it in found if isinstance(it, Undecided)), None)):
            raise first
        return (decides in found) == decides

    def term() -> bool:
        nonlocal at
        start, second, more = at, "".join(words[at + 1 : at + 2]), len(words) - at
        if more > 2 and second in TESTS and (words[start] not in ("!", "(") or len(words) == 3):
            at += 3
            return compared(start, second)
        if more > 1 and re.fullmatch("-[a-zA-Z]", words[start]):
            at += 2
            if words[start] in ("-z", "-n") and second not in ("-a", "-o"):
                return (words[start] == "-n") == bool(text(start + 1, ()))
            raise Undecided(second if words[start] == "-v" else "")
        at += 1
        if words[start] == "!" and more > 1:
            return not term()
        if words[start] == "(" and more > 1:
            value = joined(0)
            at += 1
            return value
        return bool(text(start, ()))

    def compared(start: int, sign: str) -> bool:
        plain = words[start + 2].strip("\"'")
        value = text(start, (plain,) * bool(re.fullmatch(r"[\w.-]+", plain)))
        if sign in COMPARISONS:
            return COMPARISONS[sign](*map(integer if alike else _decimal, (value, text(start + 2, ()))))
        if sign not in ("=", "==", "!="):
            raise Undecided
        return (alike(start + 2, value) if alike else value == text(start + 2, ())) == (sign != "!=")

    value = bool(words) and joined(0)
    if at < len(words):
        raise ValueError(words)
    return value


def _decimal(text: str) -> int:
    """A number in [, which reads all in base 10."""
    if not re.fullmatch(r"\s*[-+]?\d{1,18}\s*", text, re.ASCII):
        raise ValueError(text)
    return int(text)
