"""The training command that a shell script would run, found without running anything.

tree-sitter's grammar of bash makes a tree of the script, and `Script` follows it: assignments, arrays, arithmetic,
conditions, functions. What only a run could tell (the output of a command, a variable that nobody has set) becomes an
*unknown*: a mark inside the text that says where it comes from. It does no harm until something that matters is made
of it (`reasons_in`). So does a construct that is not read here.

What only a run decides to run (a branch whose condition depends on an unknown, a loop that goes round any number of
times, what stands behind a `return` that may be reached) is in *doubt*: what it sets is unknown from then on, and a
training in it is refused.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from perl.base.errors import UserError, nearest
from perl.tools.from_verl.expressions import Undecided, assigned, condition, integer, names_set, value_of

TRAINERS = ("main_ppo", "main_ppo_sync", "main_dapo")
"""Last parts of the modules (or files) that train: verl.trainer.main_ppo, recipe.dapo.main_dapo."""
OTHER_PROGRAMS = re.compile(r"^(verl|recipe)[./].*(trainer|main_)")
LOOKS_LIKE_KEY = re.compile(r"^[+~]{0,2}[A-Za-z_]\w*(\.\w+)+=")
NAME_AND_VALUE = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
PYTHON = re.compile(r"^(.*/)?python[\d.]*$")
MARK = secrets.token_hex(8)
UNKNOWN = re.compile(f"\ue000{MARK}:(\\d+)\ue001")
"""What stands in a text for an unknown; no script can hold it, as each process draws its own."""
SETS_VARIABLES = ("read", "mapfile", "readarray", "getopts", "let", "printf")
PRINTS = ("echo", "printf", ":")
LOCAL = ("local", "declare", "typeset")
SHELLS_OWN = ("?", "$", "!", "-", "_", "BASHPID", "BASH_VERSION", "EUID", "HOSTNAME", "HOSTTYPE", "LINENO", "MACHTYPE",
              "OSTYPE", "PPID", "RANDOM", "SECONDS", "SHLVL", "UID")  # fmt: skip
"""Variables that are set in each shell."""
ARGUMENTS = "@"
"""The variable that holds $1, $2, … of the script, or of the function that is followed."""
PLACEHOLDER = re.compile(rb"(?<=\s)([+]{0,2}[A-Za-z_][\w.]*=)(<[A-Za-z][\w -]*>[\w./-]*)(?=[\s\\;]|$)")
"""KEY=<path>, which a shell would take for redirections."""
LIST = re.compile(rb"(?<==\[)\$([A-Za-z_]\w*)")
"""KEY=[$NAME, of which the grammar makes two words."""
ALL_IN_ONE = re.compile(r"\$\{?(\w+\[)?\*")
"""$*, ${*…} and ${NAME[*]…}, which are one word where they are quoted."""
WHOLE = re.compile(r"\d{1,18}", re.ASCII)
MOST_TURNS = 1000
LONGEST_PATTERN = 1000
MOST_BYTES = 1 << 18
"""Of a script."""
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
    kept: dict[str, Kept] = field(default_factory=dict)
    """Of a function: what its local variables are outside."""


@dataclass
class Script:
    """What is known while a script is followed."""

    place: str
    variables: dict[str, str | list[str]]
    """ARGUMENTS too."""
    exported: dict[str, Unknown | None] = field(default_factory=dict)
    """Names of variables that programs see, and why only a run decides whether they do."""
    functions: dict[str, Node] = field(default_factory=dict)
    unknowns: list[Unknown] = field(default_factory=list)
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables that the user sets (--set): as if they were inherited, and in place of what only a run shows."""
    used: set[str] = field(default_factory=set)
    """Names of the settings that the script has read."""
    inherited: set[str] = field(default_factory=set)
    """Names that the script reads before it sets them."""
    changing: dict[str, Unknown] = field(default_factory=dict)
    """Variables that change what is assigned to them (declare -i, -l, -u)."""
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
        return self.mark(Unknown(f"{self.at(node)}: {why or f'{_text(node)} is only known to a run'}", name))

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
        self.spend(sum(len(word) + 1 for word in _as_list(value)))
        return value

    def counted(self, words: list[str]) -> str | list[str]:
        """Words, or the first of them that stands for any number of words, as it is unknown then which is which."""
        return next((word for word in words if any(it.is_array for it in self.unknowns_in(word))), words)

    def store(self, name: str, value: str | list[str] | None) -> None:
        """Set a variable, or unset it. In doubt, another value than it has is unknown; what is unknown gives way to
        what the user has set."""
        value = self.counted(value) if isinstance(value, list) else value
        if name in self.changing and value and not (isinstance(value, str) and WHOLE.fullmatch(value)):
            value = self.mark(self.changing[name])
        now, doubt = self.variables.get(name), self.doubt
        if doubt is not None and value != now:
            own = "" if name == ARGUMENTS else name
            is_array = any(isinstance(it, list) and it != [] for it in (value, now))
            is_unknown = isinstance(now, str) and UNKNOWN.fullmatch(now)
            value = now if is_unknown else self.mark(replace(doubt, name=doubt.name or own, is_array=is_array))
        if name in self.settings and any(map(UNKNOWN.search, _as_list(value))):
            value = self.settings[name]
            self.used.add(name)
        self.put(name, value)

    def put(self, name: str, value: str | list[str] | None) -> None:
        if value is None:
            self.variables.pop(name, None)
        else:
            self.variables[name] = value


@dataclass
class _End(Exception):
    """exit, return out of a function, break and continue in a loop."""

    place: str
    word: str


ENDED_BY = {"return": "function", "break": "loop", "continue": "turn", "exit": "script"}
"""Which kind of frame each of them ends."""


def read_script(
    path: Path, environment: Mapping[str, str], settings: Mapping[str, str] | None = None
) -> tuple[Launch, Script]:
    """The one training command in a script, and the script, which says why a part is unknown.

    Args:
        path: the script.
        environment: variables that the script would inherit.
        settings: variables that override those, and stand in for what only a run of the script would show.

    Raises:
        UserError: no command or several, no bash, a command that only a run of the script would show, or a setting
            that the script does not read.
    """
    try:
        source = path.read_bytes()
        source.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else error
        raise UserError(f"{path}: cannot be read as a script: {why}") from error
    if len(source) > MOST_BYTES:
        raise UserError(f"{path}: more than {MOST_BYTES >> 10} KiB; give a script with the one command")
    settings = settings or {}
    own = {"0": str(path), "BASH_SOURCE": str(path), "PWD": os.getcwd()}
    script = Script(place=str(path), variables={**environment, **settings, **own}, settings=settings)
    script.variables[ARGUMENTS] = _arguments(settings)
    source = source.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    found = read_source(script, re.sub(rb"\\\s*\Z", b"", source))
    for name in settings.keys() - script.used:
        guess = nearest(name, script.inherited)
        hint = f"; did you mean {guess}?" if guess else ""
        raise UserError(f"--set {name}: {path} does not read {name} before it sets it{hint}")
    return found


def _arguments(settings: Mapping[str, str]) -> list[str]:
    """--set 1=VALUE --set 2=VALUE …: what the script is started with."""
    given = {int(name): value for name, value in settings.items() if WHOLE.fullmatch(name)}
    for number in given:
        if number > 1 and number - 1 not in given:
            raise UserError(f"--set {number}: an argument of the script; give --set {number - 1}=VALUE too")
    return [given[number] for number in sorted(given)]


def read_source(script: Script, source: bytes) -> tuple[Launch, Script]:
    try:
        follow(script, _tree(script, source))
    except RecursionError:
        raise UserError(
            f"{script.place}: brackets, commands or conditions nest too deep; give a script with the one command"
        ) from None
    except _End as end:
        if not script.launches:
            raise UserError(f"{end.place}: the script ends here, before it trains; what it checks is not met") from None
    if len(script.launches) > 1:
        places = ", ".join(launch.place for launch in script.launches)
        raise UserError(f"{script.place}: several trainings ({places}); give a script with one")
    if not script.launches and script.others:
        raise UserError(f"{script.others[0]}; only {', '.join(TRAINERS)} are translated")
    if not script.launches:
        raise UserError(f"{script.place}: no command of verl in it, such as python3 -m verl.trainer.main_ppo KEY=VALUE")
    return script.launches[0], script


def _tree(script: Script, source: bytes) -> Node:
    source = LIST.sub(rb"${\1}", PLACEHOLDER.sub(rb"\1'\2'", source))
    root = Parser(Language(tree_sitter_bash.language())).parse(source).root_node
    if bad := next((node for node in _all(root) if node.type == "ERROR" or node.is_missing), None):
        text = _text(bad).strip().splitlines() or ["something is missing"]
        raise UserError(f"{script.at(bad)}: not bash: {text[0]:.60}")
    if edits := [edit for node in _all(root) for edit in _edits(node)]:
        pieces, end = [], 0
        for start, stop, text in sorted(edits):
            if start >= end:
                pieces += [source[end:start], text]
                end = stop
        return _tree(script, b"".join([*pieces, source[end:]]))
    return root


def _edits(node: Node) -> Iterator[tuple[int, int, bytes]]:
    """(from, to, what stands there instead) where the grammar groups otherwise than bash."""
    if node.type == "command":  # a line of several assignments, taken for the beginning of the command on the next
        for (_, child), (gap, _) in itertools.pairwise(_with_gaps(node)):
            if child.type == "variable_assignment" and "\n" in gap.replace("\\\n", ""):
                yield child.end_byte, child.end_byte, b";"
    elif node.type == "file_redirect" and len(files := node.children_by_field_name("destination")) > 1:
        # The command's words behind a redirection, taken for files; which file does not matter here.
        text = (node.text or b"")[: files[0].end_byte - node.start_byte]
        yield node.start_byte, files[0].end_byte, re.sub(rb"(\\\n)|[^\n]", lambda m: m[1] or b" ", text)


# Statements


def follow(script: Script, *nodes: Node) -> None:
    """Do what statements do to the variables; note each training command."""
    for node in nodes:
        if node.next_sibling is not None and node.next_sibling.type == "&":
            _apart(script, _one, node)
        else:
            _one(script, node)


def _one(script: Script, node: Node) -> None:
    script.spend(STEP + node.end_byte - node.start_byte)
    if node.children and node.children[0].type == "((":
        with contextlib.suppress(Undecided):
            _computed(script, node)
    elif (kind := STATEMENTS.get(node.type)) is not None:
        kind(script, node)


def _apart(script: Script, kind: Callable[..., None], *nodes: Node) -> None:
    """Follow what a shell of its own does, whose variables end with it; its trainings stay."""
    script.spend(len(script.variables) + len(script.functions) + len(script.exported))
    own = {"variables": dict(script.variables), "functions": dict(script.functions), "exported": dict(script.exported)}
    inner = replace(script, **own, frames=[replace(frame, kept=dict(frame.kept)) for frame in script.frames])
    with contextlib.suppress(_End):  # of the shell within, alone
        kind(inner, *nodes)
    script.budget = inner.budget


@contextlib.contextmanager
def _within(
    script: Script, kind: str, node: Node | None = None, undecided: Undecided | None = None, function: str = ""
) -> Iterator[Frame]:
    """Follow a function, a loop, a turn or a branch, up to what ends it: in doubt where a `node` is the reason.

    Where only a run decides whether something is reached that ends more than this, the rest of that is in doubt. An
    `exit` that may be reached is left out: nothing is trained behind it.
    """
    frame = Frame(kind, function, script.doubt if node is not None else None)
    if node is not None and frame.doubt is None:
        why = "which only a run decides" if undecided else "which is not followed, or which only a run decides"
        why = f"{script.at(node)}: it depends on {' '.join(_text(node).split())[:60]!r}, {why}"
        name, values = (undecided.name, undecided.values or ("VALUE",)) if undecided else ("", ())
        frame.doubt = Unknown(why, name, values if name else ())
    script.frames.append(frame)
    try:
        yield frame
    except _End as end:
        if (ended := ENDED_BY[end.word]) != kind:
            if frame.doubt is None:
                raise
            for outer in [it for it in script.frames if it.kind == ended][-1:]:
                outer.doubt = frame.doubt
    finally:
        script.frames.pop()


def _pipeline(script: Script, node: Node) -> None:
    for child in node.named_children:
        _apart(script, follow, child)


def _each(script: Script, node: Node) -> None:
    follow(script, *(child for child in node.named_children if not child.type.endswith("redirect")))


def _declaration(script: Script, node: Node) -> None:
    """export, local, declare, typeset, readonly."""
    words = [child for child in node.named_children if child.type not in ("comment", "variable_assignment")]
    texts = [text_of(script, child) for child in words if child.type != "variable_name"]
    options = "".join(text for text in texts if text.startswith("-"))
    exports = node.children[0].type == "export" or "x" in options
    frame = next((frame for frame in reversed(script.frames) if frame.kind == "function"), None)
    is_local = node.children[0].type in LOCAL and frame is not None and "g" not in options
    if node.children[0].type in LOCAL and "n" in options:
        raise UserError(f"{script.at(node)}: {_text(node)}: another name of a variable is not followed; write it out")
    for child in node.named_children:
        if child.type in ("variable_assignment", "variable_name"):
            name, value = _text(child).partition("=")[0].partition("[")[0].removesuffix("+"), None
        elif child.type == "comment" or (text := text_of(script, child)).startswith("-"):
            continue
        elif found := NAME_AND_VALUE.match(text):
            name, value = found.groups()
        else:
            _not_read(script, node, _text(node))
            continue
        if is_local and frame is not None:
            _make_local(script, frame, name)
        if set(options) & set("ilu"):
            script.changing[name] = Unknown(f"{script.at(node)}: {_text(node)}: changes what is assigned", name)
        follow(script, child)
        if value is not None:
            script.store(name, value)
        if exports and "n" in options and script.doubt is None:
            script.exported.pop(name, None)
        elif exports and (script.doubt is None or name not in script.exported):
            script.exported[name] = script.doubt


def _make_local(script: Script, frame: Frame, name: str) -> None:
    """Keep what a variable is outside of a function, in which it is without a value at first."""
    if name in frame.kept:
        return
    inner = script.frames[script.frames.index(frame) + 1 :]
    doubt = next((it.doubt for it in inner if it.doubt is not None), None)
    value = script.variables.get(name) if doubt is None else script.mark(replace(doubt, name=doubt.name or name))
    frame.kept[name] = (value, {name: script.exported[name]} if name in script.exported else {})
    script.store(name, [])


def _assign(script: Script, node: Node) -> None:
    """NAME=value, NAME+=value, NAME=(words)."""
    target, value = node.children[0], node.children[2] if len(node.children) > 2 else None
    name, first = _text(target).partition("[")[0], len(script.unknowns)
    if value is not None and value.type == "array":
        result = [word for child in value.named_children if child.type != "comment" for word in words_of(script, child)]
    else:
        result = "" if value is None else text_of(script, value)
        script.name_unknowns(first, name)
    before = script.value(name) if node.children[1].type == "+=" else None
    if target.type == "subscript":
        result = script.unknown(node, f"single elements of the array {name} are assigned")
    elif isinstance(result, list):
        result = [*_as_list(before), *result]
    elif before:
        result = before + result if isinstance(before, str) else script.unknown(node, name=name)
    script.store(name, result)


Clause = tuple[Node, Callable[[], bool] | None, list[Node]]
"""What it is called in a line to the user, whether it is taken (None: it is), and its statements."""


def _if(script: Script, node: Node) -> None:
    clauses = [node, *(child for child in node.named_children if child.type in ("elif_clause", "else_clause"))]
    _first(script, [_clause(script, clause, clauses) for clause in clauses])


def _clause(script: Script, node: Node, others: list[Node]) -> Clause:
    """if, elif or else."""
    tokens = [child.type for child in node.children]
    at = tokens.index("then") if "then" in tokens else 0
    condition = [child for child in node.children[:at] if child.is_named]
    body = [child for child in node.children[at + 1 :] if child.is_named and child not in others]
    return node, partial(_last_holds, script, condition) if at else None, body


def _case(script: Script, node: Node) -> None:
    word, *items = [child for child in node.named_children if child.type != "comment"]
    if bad := next((it for item in items for it in item.children if it.type in (";&", ";;&")), None):
        raise UserError(f"{script.at(bad)}: {_text(bad)} is not followed; end each part of the case in ;;")
    split = [next(at for at, child in enumerate(item.children) if child.type == ")") for item in items]
    patterns = [[it for it in item.children[:at] if it.is_named] for item, at in zip(items, split, strict=True)]
    plain = tuple(_text(it) for among in patterns for it in among if re.fullmatch(r"[\w.-]+", _text(it)))

    def matches(among: Sequence[Node]) -> bool:
        value = _tested(script, word, compared=plain)
        return any(_matches(script, value, pattern_of(script, pattern)) for pattern in among)

    clauses: list[Clause] = []
    for among, item, at in zip(patterns, items, split, strict=True):
        is_taken = None if "*" in map(_text, among) else partial(matches, among)
        clauses.append((node, is_taken, [it for it in item.children[at + 1 :] if it.is_named]))
    _first(script, clauses)


def _first(script: Script, clauses: Sequence[Clause]) -> None:
    """Follow the first clause that is taken. Where only a run decides that, each one that may be."""
    for at, (node, is_taken, body) in enumerate(clauses):
        try:
            if is_taken is None or is_taken():
                return follow(script, *body)
        except Undecided as undecided:
            others = clauses[at + 1 :]
            if _exits(body):
                _leave_out(script, node, undecided, body)
                continue
            if others and others[-1][1] is None and all(_exits(body) for *_, body in others):
                for *_, other in others:
                    _leave_out(script, node, undecided, other)
                return follow(script, *body)
            for way in (partial(follow, script, *body), partial(_first, script, others)):
                with _within(script, "branch", node, undecided):
                    way()
            return None
    return None


def _exits(nodes: Sequence[Node]) -> bool:
    """Whether statements surely end the script: what they set reaches no training but their own."""
    last = next((node for node in reversed(nodes) if node.type != "comment"), None)
    if last is not None and last.type == "compound_statement":
        return _exits(last.named_children)
    ends = last is not None and last.type == "command" and _text(last.children[0]) == "exit"
    return ends and not any(re.search(r"\b(return|break|continue)\b", _text(node)) for node in nodes)


def _leave_out(script: Script, node: Node, undecided: Undecided, body: Sequence[Node]) -> None:
    """Pass over statements that end the script, if only a run reaches them; a training among them is refused."""
    with _within(script, "branch", node, undecided):
        _apart(script, follow, *body)


def _for(script: Script, node: Node) -> None:
    name, *items, body = node.named_children
    words = [word for child in items for word in words_of(script, child)]
    if not any(child.type == "in" for child in node.children):
        words = _as_list(script.value(ARGUMENTS))
    may_be_more = any(script.reasons_in(word) or "*" in word or "?" in word for word in words)
    if len(words) > MOST_TURNS or may_be_more or node.children[0].type == "select":
        return _repeat(script, node)
    if words:
        _refuse_training(script, node)
    with _within(script, "loop"):
        for word in words:
            with _within(script, "turn"):
                script.store(_text(name), word)
                follow(script, body)
    return None


def _while(script: Script, node: Node) -> None:
    """Only one that does not begin is followed."""
    with contextlib.suppress(Undecided):
        if _last_holds(script, node.named_children[:-1]) == (node.children[0].type == "until"):
            return
    _repeat(script, node)


def _repeat(script: Script, node: Node) -> None:
    """A loop of which only a run decides how often it goes round: turns, until one makes nothing more unknown."""
    *head, body = node.named_children
    names = [_text(it) for it in head if it.type == "variable_name"]
    if node.type == "c_style_for_statement":
        names = [name for it in head for name in names_set(_text(it))]
    _refuse_training(script, node)
    with _within(script, "loop", node):
        before = None
        while before != script.variables:
            before = dict(script.variables)
            script.spend(len(before))
            for name in names:
                script.store(name, script.unknown(node))
            with _within(script, "turn"):
                follow(script, body)
            follow(script, *head)


def _list(script: Script, node: Node) -> None:
    """`a && b`, `a || b`."""
    with contextlib.suppress(Undecided):
        holds(script, node)


def _function(script: Script, node: Node) -> None:
    name, body = _text(node.named_children[0]), node.child_by_field_name("body") or node.named_children[-1]
    if script.doubt is not None and script.functions.get(name) != body:
        raise UserError(f"{script.doubt}; which functions there are depends on it")
    script.functions[name] = body


def _unset(script: Script, node: Node) -> None:
    for name in map(_text, node.named_children):
        script.store(name, None)


def _command(script: Script, node: Node) -> None:
    prefix = _prefix(script, node)
    words = _words_of_command(script, node)
    if words in (["{"], ["}"]):
        script.notes[f"{script.at(node)}: a stray {words[0]} is left out"] = None
        script.variables |= prefix
    elif words:
        only_read = words[0] in script.functions or words[0] in PRINTS
        if only_read or not _note_launch(script, node, prefix, words):
            _builtin(script, node, prefix, words)


def _prefix(script: Script, node: Node) -> dict[str, str]:
    """What a command's assignments set for it alone."""
    assignments = [child for child in node.named_children if child.type == "variable_assignment"]
    names = [_text(child.children[0]).partition("[")[0] for child in assignments]
    with _kept(script, names):
        follow(script, *assignments)
        values = {name: script.variables.get(name, "") for name in names}
        return {name: it if isinstance(it, str) else script.unknown(node, name=name) for name, it in values.items()}


@contextlib.contextmanager
def _kept(script: Script, names: Iterable[str]) -> Iterator[dict[str, Kept]]:
    """Have variables that are afterwards what they were; more can be added."""
    exported = script.exported
    before = {name: (script.variables.get(name), {name: exported[name]} if name in exported else {}) for name in names}
    try:
        yield before
    finally:
        for name, (value, exports) in before.items():
            script.put(name, value)
            script.exported.pop(name, None)
            script.exported |= exports


def _words_of_command(script: Script, node: Node) -> list[str]:
    parts = [child for child in node.named_children if child.type != "variable_assignment"]
    return [word for part in parts if not part.type.endswith("redirect") for word in words_of(script, part)]


def _builtin(script: Script, node: Node, prefix: dict[str, str], words: list[str]) -> None:
    """What a command that is no training does to the variables. Other programs do nothing to them."""
    name, *arguments = words
    trains = any(trainer in word for trainer in TRAINERS for word in arguments)
    if LOOKS_LIKE_KEY.match(name):
        key = name.partition("=")[0]
        raise UserError(
            f"{script.at(node)}: {key} stands in a command of its own: the line before it ends without \\, with a space"
            " after it, or is a comment"
        )
    if name in script.functions:
        _call(script, node, follow, prefix, words)
    elif name in ("break", "continue") and arguments not in ([], ["1"]):
        raise UserError(f"{script.at(node)}: {' '.join(words)}: only {name} alone is followed; write the command out")
    elif name in ENDED_BY:
        _end(script, node, name)
    elif name in ("cd", "pushd", "popd"):
        _go_to(script, node, name, arguments)
    elif name == "set" and "--" in arguments:
        script.store(ARGUMENTS, arguments[arguments.index("--") + 1 :])
    elif name == "shift":
        count = int(arguments[0]) if arguments and WHOLE.fullmatch(arguments[0]) else 1
        if isinstance(now := script.value(ARGUMENTS), list):
            script.store(ARGUMENTS, now[count:])
    elif trains and (name == "eval" or any(re.fullmatch(r"-[a-z]*c", word) for word in arguments)):
        raise UserError(
            f"{script.at(node)}: {name}: the command stands in a text; write it out, as a line of the script"
        )
    elif name in ("source", ".", "eval"):
        _not_read(script, node, " ".join(words if name == "eval" else arguments[:1]))
    elif name in SETS_VARIABLES and (name != "printf" or "-v" in arguments):
        for variable in filter(None, map(re.compile(r"[A-Za-z_]\w*").match, arguments)):
            script.store(variable[0], script.unknown(node, f"{name} sets {variable[0]}", variable[0]))


def _not_read(script: Script, node: Node, text: str) -> None:
    """Note what may set any variable."""
    line = UNKNOWN.sub("?", " ".join(text.split()))
    script.notes[f"{script.at(node)}: {line}: not read; what it sets is written as --set NAME=VALUE"] = None


def _end(script: Script, node: Node, word: str) -> NoReturn:
    """exit, return, break or continue."""
    kinds = [frame.kind for frame in script.frames]
    if word in ("break", "continue"):
        kinds = list(itertools.takewhile(lambda kind: kind != "function", reversed(kinds)))
    if word != "exit" and ENDED_BY[word] not in kinds:
        where = "function" if word == "return" else "loop"
        raise UserError(f"{script.at(node)}: {word} stands in no {where}; take the line out of the script")
    raise _End(script.at(node), word)


def _go_to(script: Script, node: Node, name: str, arguments: list[str]) -> None:
    """cd: the folder that $PWD and relative paths mean from then on."""
    words = [word for word in arguments if word not in ("--", "-L", "-P")]
    home = script.variables.get("HOME", "")
    folder = words[0] if words else home if name == "cd" and isinstance(home, str) else ""
    known = (
        folder
        and not script.reasons_in(folder)
        and len(words) <= 1
        and name != "popd"
        and not re.match(r"[-+]|.*[*?\[]", folder)
    )
    script.store("PWD", _joined(script, folder) if known else script.unknown(node, name="PWD"))


def _joined(script: Script, path: str) -> str:
    """A path from the folder in which the script stands."""
    here = str(script.value("PWD") or os.getcwd())
    whole = path if UNKNOWN.match(path) else here if path == "." else os.path.join(here, path)
    return whole if UNKNOWN.search(whole) else os.path.normpath(whole)


def _call(
    script: Script, node: Node, kind: Callable[[Script, Node], bool | None], prefix: dict[str, str], words: list[str]
) -> bool | None:
    """`follow` a function, or see whether it `holds`; None where it returns early, or may."""
    name, *arguments = words
    if any(frame.function == name for frame in script.frames):
        raise UserError(f"{script.at(node)}: the function {name} calls itself")
    body, status = script.functions[name], None
    script.spend(STEP + body.end_byte - body.start_byte)
    with _kept(script, {ARGUMENTS, *prefix}) as kept, _within(script, "function", function=name) as frame:
        frame.kept = kept
        script.variables |= {**prefix, ARGUMENTS: script.counted(arguments)}
        script.exported |= dict.fromkeys(prefix)
        status = kind(script, body)
    return status if frame.doubt is None else None


def _refuse_training(script: Script, loop: Node) -> None:
    for it in _all(loop):
        if _is_training(it):
            raise UserError(f"{script.at(it)}: a loop around the training; give a script with the one command")


def _is_training(node: Node) -> bool:
    return node.type == "command" and any(trainer in _text(node) for trainer in TRAINERS)


def _note_launch(script: Script, node: Node, prefix: dict[str, str], words: list[str]) -> bool:
    """Note a training command, or another program of verl; whether it was one."""
    keys = [index for index, word in enumerate(words) if LOOKS_LIKE_KEY.match(word)]
    has_python = False
    for index, word in enumerate(words):
        is_module = index > 0 and words[index - 1] == "-m"
        is_file = word.endswith(".py") and not is_module and has_python
        has_python = has_python or PYTHON.match(word) is not None
        module = word.removesuffix(".py").replace("/", ".").strip(".")
        if (is_module or is_file) and module.rpartition(".")[2] in TRAINERS:
            if (doubt := script.doubt) is not None:
                why = f"{script.at(node)}: whether this training runs depends on what only a run decides"
                hint = f"{replace(doubt, why=why)}{'; or' if doubt.name else ';'}"
                raise UserError(f"{hint} give a script with the one command")
            before, inside = _split_before(words[: index - 1 if is_module else index])
            exported = {name: it for name in script.exported if isinstance(it := script.variables.get(name), str)}
            exported |= {name: script.mark(it) for name, it in script.exported.items() if it and name in exported}
            environment = exported | prefix | inside
            before = UNKNOWN.sub("?", before)
            script.launches.append(Launch(module, words[index + 1 :], environment, before, script.at(node)))
            return True
        if (is_module or is_file) and OTHER_PROGRAMS.match(word):
            script.others.append(f"{script.at(node)}: {word} does not train with rewards")
            return True
        if (is_module or is_file) and len(keys) > 1 and keys[-2] >= index:
            script.others.append(f"{script.at(node)}: {UNKNOWN.sub('?', word)} is a program of its own")
            return True
    return False


def _split_before(words: list[str]) -> tuple[str, dict[str, str]]:
    """The program that starts Python, and the variables set by `env` before it."""
    inside = {match[1]: match[2] for word in words if (match := NAME_AND_VALUE.match(word))}
    options = (word.startswith("-") or PYTHON.match(word) or NAME_AND_VALUE.match(word) for word in words)
    first = next((index for index, is_option in enumerate(options) if is_option), len(words))
    return " ".join(word for word in words[:first] if word not in ("env", "exec", "time")), inside


STATEMENTS = {
    **dict.fromkeys(("program", "compound_statement", "do_group", "negated_command"), _each),
    "subshell": lambda script, node: _apart(script, _each, node),
    "pipeline": _pipeline,
    **dict.fromkeys(("variable_assignments", "redirected_statement"), _each),
    "variable_assignment": _assign,
    "declaration_command": _declaration,
    "if_statement": _if,
    "case_statement": _case,
    "for_statement": _for,
    "c_style_for_statement": _repeat,
    "while_statement": _while,
    "list": _list,
    "function_definition": _function,
    "unset_command": _unset,
    "command": _command,
}
"""Node of the tree -> what it does; others (comments, tests) do nothing."""


# Conditions and numbers


def holds(script: Script, node: Node) -> bool:
    """Whether a condition holds, or a statement succeeds. What it does to the variables is done, in either case.

    Raises:
        Undecided: only a run decides.
    """
    kind, inside = node.type, [child for child in node.named_children if child.type != "comment"]
    if node.children and node.children[0].type == "((":
        return bool(_computed(script, node))
    if kind == "list":
        return _and_or(script, node)
    if kind == "negated_command":
        return not holds(script, inside[-1])
    if kind == "redirected_statement":
        return holds(script, inside[0])
    if kind == "test_command":
        return _test(script, _operands(node), node.children[0].type == "[[")
    if kind == "command":
        return _succeeds(script, node)
    if kind == "compound_statement":
        return _last_holds(script, inside)
    _one(script, node)
    if kind in ("declaration_command", "function_definition") or any(map(_is_training, _all(node))):
        return True
    if kind == "variable_assignment":
        name = _text(node.children[0]).partition("[")[0]
        if not any(map(UNKNOWN.search, _as_list(script.variables.get(name)))):
            return True
        raise Undecided(name)
    raise Undecided  # files, too: those of the machine that trains


def _last_holds(script: Script, nodes: Sequence[Node]) -> bool:
    """Whether the last of several statements succeeds."""
    if not (nodes := [node for node in nodes if node.type != "comment"]):
        raise Undecided
    *before, last = nodes
    follow(script, *before)
    if last.next_sibling is not None and last.next_sibling.type == "&":
        follow(script, last)
        return True
    return holds(script, last)


def _and_or(script: Script, node: Node) -> bool:
    """`a && b`, `a || b`."""
    left, sign, right = node.children[0], _text(node.children[1]), node.children[-1]
    decides = sign == "||"
    try:
        first = holds(script, left)
    except Undecided as undecided:
        if _exits([right]):
            _leave_out(script, node, undecided, [right])
            return decides
        if right.type == "test_command":
            if holds(script, right) == decides:
                return decides
        elif sign == "&&" and _is_step(left) and any(map(_is_training, _all(right))):
            return holds(script, right)  # it trains only where what goes before succeeds
        else:
            with _within(script, "branch", node, undecided):
                follow(script, right)
            if decides and right.type == "command" and _text(right.children[0]) in SUCCEED:
                return True
        raise
    return first if first == decides else holds(script, right)


def _is_step(node: Node) -> bool:
    """Whether it is a program, or several one after the other, and no test."""
    if node.type == "list":
        return node.children[1].type == "&&" and all(map(_is_step, (node.children[0], node.children[2])))
    return node.type in ("command", "pipeline", "redirected_statement", "variable_assignment", "subshell")


def _succeeds(script: Script, node: Node) -> bool:
    """Whether a command does: what only prepares the shell is taken to."""
    if _text(node.children[0]) == "test":
        return _test(script, [(it,) for it in node.named_children[1:] if not it.type.endswith("redirect")], False)
    words = _words_of_command(script, node) or [""]
    if words[0] in script.functions:
        if (status := _call(script, node, holds, _prefix(script, node), words)) is None:
            raise Undecided
        return status
    follow(script, node)
    if words[0] in SUCCEED or _is_training(node):
        return True
    if words[0] == "false":
        return False
    raise Undecided


SUCCEED = ("true", ":", "cd", "pushd", "popd", "echo", "printf", "set", "shopt", "ulimit", "source", ".", "mkdir",
           "sleep")  # fmt: skip


Word = tuple[Node, ...]
"""Nodes without a gap between them."""


def _operands(node: Node) -> list[Word]:
    """What stands between [ and ], word by word: the grammar groups a = b && c, ! a = b and *"b"* otherwise than bash
    does."""
    words: list[Word] = []
    for leaf in _leaves(node.children[1:-1]):
        is_apart = not words or leaf.start_byte > words[-1][-1].end_byte
        if is_apart or leaf.type in ("(", ")") or words[-1][-1].type in ("(", ")"):
            words.append((leaf,))
        else:
            words[-1] = (*words[-1], leaf)
    return words


def _leaves(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        groups = node.type in ("binary_expression", "unary_expression", "parenthesized_expression")
        if groups and node.children[0].type != "-":
            yield from _leaves(node.children)
        else:
            yield node


def _test(script: Script, operands: Sequence[Word], double: bool) -> bool:
    """What stands between [ and ], or behind `test`; between [[ and ]] where `double`.

    [ sees its words after they are split, of which an empty variable leaves none; what it takes for an error is false.
    """
    script.spend(STEP * len(operands))
    if double:
        words = ["".join(map(_text, operand)) for operand in operands]
    else:
        with _testing(script):
            words = [word for operand in operands for word in words_of(script, *operand)]

    def text(at: int, compared: tuple[str, ...]) -> str:
        return _tested(script, *(operands[at] if double else words[at : at + 1]), compared=compared)

    def alike(at: int, value: str) -> bool:
        return _matches(script, value, "".join(pattern_of(script, node) for node in operands[at]))

    try:
        return condition(words, text, alike if double else None)
    except ValueError as error:
        unknowns = script.unknowns_in("".join(words))
        if double or unknowns:
            raise Undecided(unknowns[0].name if unknowns else "") from error
        return False


@contextlib.contextmanager
def _testing(script: Script) -> Iterator[None]:
    script.in_test = True
    try:
        yield
    finally:
        script.in_test = False


def _tested(script: Script, *parts: Node | str, compared: tuple[str, ...] = ()) -> str:
    """The text of a word in a condition; `compared`: what it is compared to."""
    with _testing(script):
        text = "".join(part if isinstance(part, str) else text_of(script, part) for part in parts)
    if unknowns := script.unknowns_in(text):
        first = next((it for it in unknowns if it.name), unknowns[0])
        raise Undecided(first.name, first.values or (compared if UNKNOWN.fullmatch(text) else ()))
    return text


def pattern_of(script: Script, node: Node) -> str:
    """A pattern of case or [[ ]], in the terms of fnmatch: what stands in quotes stands for itself.

    Raises:
        Undecided: it depends on what only a run shows.
    """
    if node.type in ("string", "raw_string"):
        return glob.escape(_tested(script, node))
    if node.type == "concatenation":
        return "".join(glob.escape(gap) + pattern_of(script, child) for gap, child in _with_gaps(node))
    if node.type in ("word", "extglob_pattern", "regex", "number"):
        if re.search(r"[@+!?*]\(", _text(node)):
            raise Undecided
        return re.sub(r"\\(.)", lambda match: glob.escape(match[1]), _text(node).replace('"', ""))
    return _tested(script, node)


def _matches(script: Script, text: str, pattern: str) -> bool:
    script.spend(len(text) + 20 * len(pattern))  # a pattern is compiled
    if len(pattern) > LONGEST_PATTERN or re.search(r"\[[^]]*\[[:.=]", pattern):
        raise Undecided
    return fnmatch.fnmatchcase(text, pattern.replace("[^", "[!"))


def _computed(script: Script, node: Node) -> int:
    """The value of ((…)) or $((…)). What it sets is unknown, where it does more than that.

    Raises:
        Undecided: it is unknown, or no number.
    """
    whole = "".join(gap + _filled(script, child) for gap, child in _with_gaps(node)).strip()
    text = re.sub(r"^\$?(\(\(|\[)|(\)\)|\])$", "", whole)
    script.spend(STEP + len(text))

    def read(name: str) -> int:
        return _number(script, _value(script, node, name))

    try:
        if unknowns := script.unknowns_in(text):
            raise Undecided(unknowns[0].name)
        if not names_set(text):
            return value_of(text, read)
        name, after, value = assigned(text, read)
        script.store(name, str(after))
        return value
    except (ValueError, Undecided) as error:
        for name in names_set(text):
            script.store(name, script.unknown(node, f"{_text(node)}: what arithmetic sets is not followed", name))
        raise Undecided(error.name if isinstance(error, Undecided) else "") from error


def _number(script: Script, value: str | list[str]) -> int:
    """A value as a number in arithmetic."""
    if isinstance(value, list):
        raise Undecided
    if unknowns := script.unknowns_in(value):
        raise Undecided(unknowns[0].name)
    return integer(value)


def _sum(script: Script, node: Node) -> str:
    """What $((…)) becomes."""
    try:
        return str(_computed(script, node))
    except Undecided:
        return script.unknown(node, f"{_text(node)} cannot be computed")


def _filled(script: Script, node: Node) -> str:
    """A text in which expansions are put in."""
    if node.type.endswith(("expansion", "substitution")) or node.type == "string":
        return text_of(script, node)
    return "".join(gap + _filled(script, child) for gap, child in _with_gaps(node)) if node.children else _text(node)


# Words


def words_of(script: Script, *nodes: Node) -> list[str]:
    """The words that nodes without a gap become: quotes removed, variables put in, unquoted values split."""
    words: list[str] = []
    current: str | None = None
    for pieces, splits in (part for node in nodes for part in _parts(script, node, quoted=False)):
        for index, piece in enumerate(pieces):
            if index > 0 and current is not None:
                words.append(current)
                current = None
            if piece or current is not None or splits != "words":
                current = (current or "") + piece
    return [*words, current] if current is not None else words


def text_of(script: Script, node: Node) -> str:
    """The text that a node becomes where nothing is split: an assignment, a test."""
    return "".join(" ".join(pieces) for pieces, _ in _parts(script, node, quoted=True))


def _parts(script: Script, node: Node, quoted: bool) -> Iterator[tuple[list[str], str]]:
    """(pieces, how they split): "" is one text, "array" one word each, "words" split at white space."""
    kind, text = node.type, _text(node)
    if kind == "raw_string":
        yield [text[1:-1]], ""
    elif kind == "string":
        yield from _string_parts(script, node)
    elif kind in ("concatenation", "command_name"):
        for gap, child in _with_gaps(node):
            if gap:
                yield [gap], ""
            yield from _parts(script, child, quoted)
    elif kind in ("simple_expansion", "expansion"):
        if (lead := text[: text.index("$")]) and quoted:
            yield [lead], ""
        yield from _expanded(script, node, quoted)
    elif kind == "command_substitution":
        yield [_output_of(script, node)], ""
    elif kind == "arithmetic_expansion":
        yield [_sum(script, node)], ""
    elif kind in ("process_substitution", "brace_expression", "ansi_c_string", "translated_string"):
        yield [script.unknown(node)], ""
    else:
        is_home = re.match("~(/|$)", text) and _begins_a_word(node)
        if is_home and isinstance(home := script.value("HOME"), str):
            yield [home], ""
            text = text[1:]
        yield [re.sub(r"\\(\n|.)", lambda m: "" if m[1] == "\n" else m[1], text, flags=re.DOTALL)], ""


def _begins_a_word(node: Node) -> bool:
    """Whether ~ in front of it is the home folder."""
    parent = node.parent
    return parent is None or parent.type != "concatenation" or parent.start_byte == node.start_byte


def _string_parts(script: Script, node: Node) -> Iterator[tuple[list[str], str]]:
    parts: list[tuple[list[str], str]] = []
    for gap, child in _with_gaps(node):
        if gap:
            parts.append(([gap], ""))
        if child.type in ("string_content", "$"):
            parts.append(([re.sub(r'\\([\\$"`\n])', lambda m: m[1].strip("\n"), _text(child))], ""))
        elif child.type != '"':
            parts += _parts(script, child, quoted=True)
    array_alone = any(kind == "array" for _, kind in parts) and not any("".join(p) for p, kind in parts if not kind)
    if not array_alone:
        yield [""], ""  # "" is a word; "$@" without arguments is none
    yield from parts


def _with_gaps(node: Node) -> Iterator[tuple[str, Node]]:
    """Each child with the text between it and the one before, which the tree leaves out."""
    end, whole = node.start_byte, node.text or b""
    for child in node.children:
        yield whole[end - node.start_byte : child.start_byte - node.start_byte].decode(), child
        end = child.end_byte


def _expanded(script: Script, node: Node, quoted: bool) -> Iterator[tuple[list[str], str]]:
    """$NAME, ${NAME…}."""
    value = _value(script, node, _text(node).strip()[1:]) if node.type == "simple_expansion" else _braced(script, node)
    if isinstance(value, list) and quoted and ALL_IN_ONE.match(_text(node).strip()):
        why = f"the script sets IFS, which stands between the words of {_text(node).strip()}"
        yield [script.unknown(node, why) if "IFS" in script.variables else " ".join(value)], ""
    elif isinstance(value, list):
        yield value if quoted else [word for item in value for word in item.split()], "array"
    elif quoted:
        yield [value], ""
    else:
        # White space at either end separates from what stands next to it.
        yield re.split(r"\s+", value), "words"


def _value(script: Script, node: Node, name: str, default: bool = False) -> str | list[str]:
    if name in ("@", "*", "#") or WHOLE.fullmatch(name):
        script.used |= {it for it in script.settings if WHOLE.fullmatch(it)}
    if name in ("@", "*", "#") or (WHOLE.fullmatch(name) and name != "0"):
        words = script.value(ARGUMENTS) or []
        if name in ("@", "*") or isinstance(words, str):
            return words
        return str(len(words)) if name == "#" else "".join(words[int(name) - 1 : int(name)])
    value = script.value(name)
    if value is None or value is script.settings.get(name):
        script.inherited.add(name)
        script.used |= {name} & script.settings.keys()
    if value is None and name in SHELLS_OWN:
        return script.unknown(node, name="" if len(name) == 1 else name)
    if value is None and not default and not script.in_test:
        return script.unknown(node, f"the variable {name} is set neither in the script nor in the environment", name)
    return (_as_list(value) or [""])[0]


def _braced(script: Script, node: Node) -> str | list[str]:
    """${NAME}, ${NAME[@]}, ${NAME:-text} and its kin, ${#NAME}, ${NAME#pattern}, ${NAME/pattern/text}, ${NAME^^}."""
    children = node.children[1:-1]
    length = len(children) > 1 and children[0].type == "#"
    if length:
        children = children[1:]
    if not children or children[0].type in ("!", "#"):
        return script.unknown(node)
    target, rest = children[0], children[1:]
    name, sign = _text(target), rest[0].type if rest else ""
    first = len(script.unknowns)
    operand = "".join(text_of(script, child) for child in rest[1:] if child.is_named)
    absent = sign in (":-", "-", ":=", "=", ":+", "+", ":?", "?")
    if absent:
        script.name_unknowns(first, name)
    look_up = _element if target.type == "subscript" else _value
    value = look_up(script, target, name, absent)
    if length:
        return script.unknown(node) if any(map(UNKNOWN.search, _as_list(value))) else str(len(value))
    if absent:
        return _or_default(script, node, name, sign, value, operand)
    if isinstance(value, list) and sign == ":":
        return _slice(script, node, value, rest, first=int(name in ("@", "*")))
    if isinstance(value, list) or not sign:
        return script.unknown(node) if sign else value
    if script.reasons_in(value + operand):
        return value + operand
    try:
        changed = _changed(script, value, sign, operand, [_text(child) for child in rest])
    except Undecided:
        changed = None
    return script.unknown(node, f"{_text(node)} is not understood") if changed is None else changed


def _slice(script: Script, node: Node, value: list[str], rest: Sequence[Node], first: int) -> str | list[str]:
    """${NAME[@]:1} and ${NAME[@]:0:2}; `first` is the number of the first word."""
    numbers = [text_of(script, child) for child in rest if child.is_named]
    if not all(map(WHOLE.fullmatch, numbers)) or not first <= int(numbers[0]):
        return script.unknown(node, f"{_text(node)} is not understood")
    start = int(numbers[0]) - first
    return value[start:] if len(numbers) == 1 else value[start : start + int(numbers[1])]


def _element(script: Script, node: Node, text: str, absent: bool) -> str | list[str]:
    """${NAME[@]} or ${NAME[2]}."""
    name, index = _text(node.named_children[0]), text_of(script, node.named_children[1])
    if (value := script.value(name)) is None and not absent:
        return script.unknown(node, f"the array {name} is not set in the script")
    if isinstance(value, str) and UNKNOWN.fullmatch(value):
        return value
    values, why = _as_list(value), f"{text} is not followed; write its value out"
    if index in ("@", "*"):
        return values
    return values[int(index)] if WHOLE.fullmatch(index) and int(index) < len(values) else script.unknown(node, why)


def _or_default(script: Script, node: Node, name: str, sign: str, value: str | list[str], operand: str):
    is_set = bool(value) if sign.startswith(":") else script.variables.get(name) not in (None, []) or bool(value)
    if sign.endswith("+") and is_set and not UNKNOWN.sub("", "".join(value)) and script.unknowns_in("".join(value)):
        return script.unknown(node, name=name)
    if sign.endswith("+"):
        return operand if is_set else ""
    if sign.endswith("?") and not is_set:
        return script.unknown(node, f"the variable {name} is not set: {operand}", name)
    if sign.endswith("=") and not is_set:
        script.store(name, operand)
    return value if is_set else operand


def _changed(script: Script, value: str, sign: str, operand: str, words: list[str]) -> str | None:
    """A value after ${NAME,,}, ${NAME#pattern} or ${NAME/pattern/text}; None for what is not read."""
    if sign in ("^^", ",,"):
        return value.upper() if sign == "^^" else value.lower()
    places, raw = range(len(value) + 1), "".join(words[1:])
    if sign in ("#", "##", "%", "%%", "/", "//") and re.search(r"""["'`$]|\\[^/]""", raw):
        return None
    if sign in ("#", "##", "%", "%%"):
        if sign.startswith("#"):
            cuts = [value[i:] for i in places if _matches(script, value[:i], operand)]
        else:
            cuts = [value[:i] for i in reversed(places) if _matches(script, value[i:], operand)]
        return (cuts[0] if len(sign) == 1 else cuts[-1]) if cuts else value
    found = re.fullmatch(r"((?:\\/|[^/])+)(?:/(.*))?", raw, re.DOTALL)
    if sign in ("/", "//") and found and not set(raw) & set("*?[&"):
        pattern, text = (part.replace("\\/", "/") for part in (found[1], found[2] or ""))
        script.spend(len(value) * max(len(pattern), len(text)))
        return value.replace(pattern, text, -1 if sign == "//" else 1)
    return None


PURE = {
    "pwd": lambda script, words: _joined(script, "."),
    "basename": lambda script, words: os.path.basename(words[0].rstrip("/")).removesuffix("".join(words[1:2])),
    "dirname": lambda script, words: os.path.dirname(words[0]) or ".",
    "realpath": lambda script, words: os.path.realpath(_joined(script, words[-1])),
    "echo": lambda script, words: " ".join(words),
}
"""Commands whose output follows from their words alone, or is where this runs."""


def _output_of(script: Script, node: Node) -> str:
    if re.match(r"\$\(\(.*\)\)$", _text(node), re.DOTALL):
        return _sum(script, node)  # in ${NAME:-…} the grammar takes it for a subshell
    inside = [child for child in node.named_children if child.type != "comment"]
    commands = [_words_of_command(script, it) for it in _commands_in(inside[0])] if len(inside) == 1 else []
    known = not any(script.reasons_in(word) for words in commands for word in words)
    if known and len(commands) == 2 and commands[1] == ["pwd"] and commands[0][:1] == ["cd"]:
        *_, folder = commands[0]
        return _joined(script, folder)
    if known and len(commands) == 1 and inside[0].type == "command" and commands[0]:
        name, *words = commands[0]
        if name in PURE and not any(word.startswith("-") for word in words):
            with contextlib.suppress(IndexError):
                return PURE[name](script, words)
    return script.unknown(node, f"{' '.join(_text(node).split())} is only known to a run")


def _commands_in(node: Node) -> list[Node]:
    """The commands of `a`, `a && b` and `a 2> file && b`; none where it is something else."""
    if node.type == "command":
        return [node]
    if node.type == "redirected_statement":
        return _commands_in(node.named_children[0])
    if node.type == "list" and node.children[1].type == "&&":
        return [*_commands_in(node.children[0]), *_commands_in(node.children[2])]
    return []


def _as_list(value: str | list[str] | None) -> list[str]:
    return value if isinstance(value, list) else [value] if value else []


def _all(node: Node) -> Iterator[Node]:
    nodes = [node]
    while nodes:
        node = nodes.pop()
        yield node
        nodes += reversed(node.children)


def _text(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")
