"""What is known while a script is followed, what is not, and why."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from tree_sitter import Node

from perl.base.errors import UserError
from perl.tools.from_verl.grammar import raw

MARK = secrets.token_hex(8)
UNKNOWN = re.compile(f"\ue000{MARK}:(\\d+)\ue001")
"""What stands in a text for an unknown; no script can hold it, as each process draws its own."""
ARGUMENTS = "@"
"""The variable that holds $1, $2, … of the script, or of the function that is followed."""
WHOLE = re.compile(r"\d{1,18}", re.ASCII)
BUDGET = 10_000_000
"""What following a script may cost: the characters of its statements each time that they are followed, those of its
variables each time that they are read, and STEP for each statement."""
STEP = 100


@dataclass(frozen=True)
class Unknown:
    """What only a run of the script shows."""

    why: str
    """With file and line."""
    name: str = ""
    """The variable that the user can set to decide it, "" where there is none."""
    values: tuple[str, ...] = ()
    """What the script compares it to."""
    is_array: bool = False
    """Whether it stands for any number of words."""

    def __str__(self) -> str:
        values = self.values or ("VALUE",)
        return self.why + (f"; write {' or '.join(f'--set {self.name}={v}' for v in values)}" if self.name else "")


@dataclass(frozen=True)
class Launch:
    """One command that starts a training with verl."""

    module: str
    words: list[str]
    """What follows the module; an unknown part is a mark, see `reasons_in`."""
    environment: dict[str, str]
    """Variables that the script exports or that stand before the command."""
    before: str
    """Program that starts Python, such as `ray job submit`; "" where there is none."""
    place: str
    """File and line."""


Kept = tuple[str | list[str] | None, dict[str, Unknown | None]]
"""A variable's value, and whether it is exported."""


@dataclass
class Frame:
    """A function, a loop, one of its turns, or a branch, while it is followed."""

    kind: str
    function: str
    """Its name, "" of others."""
    doubt: Unknown | None = None
    """Why only a run decides whether it runs, or its rest."""
    status: int | None = None
    """What a function returns."""
    kept: dict[str, Kept] = field(default_factory=dict)
    """Of a function: what its local variables are outside."""


@dataclass
class Script:
    """What is known while a script is followed."""

    place: str
    variables: dict[str, str | list[str]]
    """ARGUMENTS too."""
    environment: Set[str] = frozenset()
    """Names of the variables that come from the environment, which programs see."""
    sources: bool = False
    """After what may set any variable, and is not read."""
    exports_all: bool = False
    """After `set -a`."""
    exported: dict[str, Unknown | None] = field(default_factory=dict)
    """Names of variables that programs see, and why only a run decides whether they do."""
    functions: dict[str, Node | Unknown] = field(default_factory=dict)
    """The bodies; or why only a run decides whether there is one."""
    unknowns: list[Unknown] = field(default_factory=list)
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables that the user sets (--set): as if they were inherited, and in place of what only a run shows."""
    used: set[str] = field(default_factory=set)
    """Names of the settings that the script has read."""
    inherited: set[str] = field(default_factory=set)
    """Names that the script reads before it sets them."""
    launches: list[Launch] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    """What was put right, one line each."""
    others: list[str] = field(default_factory=list)
    """Programs of verl that do not train with rewards, each with its line."""
    frames: list[Frame] = field(default_factory=list)
    """What is followed now, the innermost last."""
    budget: int = BUDGET
    in_test: bool = False
    """In a test, as in bash; a setting made of an unset variable would silently lack a part."""

    def at(self, node: Node) -> str:
        return f"{self.place}:{node.start_point[0] + 1}"

    def spend(self, cost: int) -> None:
        """Raise a UserError once a script costs more than any that only starts a training."""
        self.budget -= cost
        if self.budget < 0:
            raise UserError(
                f"{self.place}: too long to follow (its loops and texts grow without end); give a script with the one"
                " command"
            )

    def unknown(self, node: Node, why: str = "", name: str = "") -> str:
        """A mark for what only a run of the script shows."""
        return self.mark(Unknown(f"{self.at(node)}: {why or f'{raw(node)} is only known to a run'}", name))

    def mark(self, unknown: Unknown) -> str:
        self.spend(STEP)
        self.unknowns.append(unknown)
        return f"\ue000{MARK}:{len(self.unknowns) - 1}\ue001"

    @property
    def doubt(self) -> Unknown | None:
        """Why only a run decides whether what is followed now runs; None where it does."""
        return next((frame.doubt for frame in self.frames if frame.doubt is not None), None)

    def unknowns_in(self, text: str) -> list[Unknown]:
        return [self.unknowns[int(number)] for number in UNKNOWN.findall(text)]

    def reasons_in(self, text: str) -> list[str]:
        """Why parts of a text are unknown, and what to write; empty where all of it is known."""
        return list(dict.fromkeys(map(str, dict.fromkeys(self.unknowns_in(text)))))

    def name_unknowns(self, first: int, name: str) -> None:
        """Say that setting the variable `name` decides the unknowns from number `first` on."""
        self.unknowns[first:] = [replace(it, name=it.name or name) for it in self.unknowns[first:]]

    def value(self, name: str) -> str | list[str] | None:
        """What a variable is set to, None where it is not."""
        value = self.variables.get(name)
        self.spend(sum(len(word) + 1 for word in as_list(value)))
        return value

    def counted(self, words: list[str]) -> str | list[str]:
        """Words, or the first of them that stands for any number of words, as it is unknown then which is which."""
        return next((word for word in words if any(it.is_array for it in self.unknowns_in(word))), words)

    def store(self, name: str, value: str | list[str] | None) -> None:
        """Set a variable, or unset it. In doubt, another value than it has is unknown; what is unknown gives way to
        what the user has set."""
        value = self.counted(value) if isinstance(value, list) else value
        now, doubt = self.variables.get(name), self.doubt
        if doubt is not None and value != now:
            own = "" if name == ARGUMENTS else name
            is_array = any(isinstance(it, list) and it != [] for it in (value, now))
            is_unknown = isinstance(now, str) and UNKNOWN.fullmatch(now)
            value = now if is_unknown else self.mark(replace(doubt, name=doubt.name or own, is_array=is_array))
        if name in self.settings and any(map(UNKNOWN.search, as_list(value))):
            value = self.settings[name]
            self.used.add(name)
        if value is not None and name not in (ARGUMENTS, "PWD") and (self.exports_all or name in self.environment):
            self.exported.setdefault(name, doubt)
        self.put(name, value)

    def put(self, name: str, value: str | list[str] | None) -> None:
        if value is None:
            self.variables.pop(name, None)
        else:
            self.variables[name] = value


@dataclass
class End(Exception):
    """exit, return out of a function, break and continue in a loop."""

    place: str
    word: str
    status: int | None = None
    """Of return and exit; None where only a run shows it."""


def as_list(value: str | list[str] | None) -> list[str]:
    return value if isinstance(value, list) else [value] if value else []
