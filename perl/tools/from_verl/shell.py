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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from tree_sitter import Node

from perl.base.errors import UserError, nearest
from perl.tools.from_verl.expressions import Undecided, condition, integer, names_set, value_of
from perl.tools.from_verl.grammar import grouped, nodes_in, raw, tree_of, with_gaps
from perl.tools.from_verl.state import (
    ARGUMENTS,
    STEP,
    UNKNOWN,
    WHOLE,
    End,
    Frame,
    Kept,
    Launch,
    Script,
    Unknown,
    as_list,
)

TRAINERS = ("main_ppo", "main_ppo_sync", "main_dapo")
"""Last parts of the modules (or files) that train: verl.trainer.main_ppo, recipe.dapo.main_dapo."""
OTHER_PROGRAMS = re.compile(r"^(verl|recipe)[./].*(trainer|main_)")
LOOKS_LIKE_KEY = re.compile(r"^[+~]{0,2}[A-Za-z_]\w*(\.\w+)+=")
NAME_AND_VALUE = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
PYTHON = re.compile(r"^(.*/)?python[\d.]*$")
SEPARATORS = " \t\n"
"""IFS, at first."""
PRINTS = ("echo", "printf", ":")
LOCAL = ("local", "declare", "typeset")
SHELLS_OWN = ("?", "$", "!", "-", "_", "BASHPID", "BASH_VERSION", "EUID", "HOSTNAME", "HOSTTYPE", "LINENO", "MACHTYPE",
              "OSTYPE", "PPID", "RANDOM", "SECONDS", "SHLVL", "UID")  # fmt: skip
"""Variables that are set in each shell."""
SHELLS_ARRAYS = ("PIPESTATUS", "FUNCNAME", "DIRSTACK", "GROUPS", "BASH_LINENO", "BASH_ARGV", "BASH_REMATCH")
ALL_IN_ONE = re.compile(r"\$\{?(\w+\[)?\*")
"""$*, ${*…} and ${NAME[*]…}, which are one word where they are quoted."""
MOST_TURNS = 1000
LONGEST_PATTERN = 1000
"""And arithmetic expression."""
MOST_BYTES = 1 << 18
"""Of a script."""
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
    own = {"IFS": SEPARATORS, "0": str(path), "BASH_SOURCE": str(path), "PWD": os.getcwd()}
    script = Script(str(path), {**environment, **settings, **own}, environment.keys(), settings=settings)
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
        follow(script, tree_of(source, script.place))
    except RecursionError:
        raise UserError(
            f"{script.place}: brackets, commands or conditions nest too deep; give a script with the one command"
        ) from None
    except End as end:
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
    if node.type == "list" or (node.children and node.children[0].type == "(("):
        with contextlib.suppress(Undecided):
            holds(script, node)
    elif (kind := STATEMENTS.get(node.type)) is not None:
        kind(script, node)


def _apart(script: Script, kind: Callable[..., None], *nodes: Node) -> None:
    """Follow what a shell of its own does, whose variables end with it; its trainings stay."""
    script.spend(len(script.variables) + len(script.functions) + len(script.exported))
    own = {"variables": dict(script.variables), "functions": dict(script.functions), "exported": dict(script.exported)}
    inner = replace(script, **own, frames=[replace(frame, kept=dict(frame.kept)) for frame in script.frames])
    with contextlib.suppress(End):  # of the shell within, alone
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
        why = f"{script.at(node)}: it depends on {' '.join(raw(node, 400).split())[:60]!r}, {why}"
        name, values = (undecided.name, undecided.values or ("VALUE",)) if undecided else ("", ())
        frame.doubt = Unknown(why, name, values if name else ())
    script.frames.append(frame)
    try:
        yield frame
    except End as end:
        if (ended := ENDED_BY[end.word]) != kind:
            if frame.doubt is None:
                raise
            for outer in [it for it in script.frames if it.kind == ended][-1:]:
                outer.doubt = frame.doubt
        frame.status = end.status
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
    if set(options) & set("nilu"):
        why = "another name of a variable, or one that changes what is assigned to it, is not followed"
        raise UserError(f"{script.at(node)}: {raw(node)}: {why}; write it out")
    for child in node.named_children:
        if child.type in ("variable_assignment", "variable_name"):
            name, value = raw(child).partition("=")[0].partition("[")[0].removesuffix("+"), None
        elif child.type == "comment" or (text := text_of(script, child)).startswith("-"):
            continue
        elif found := NAME_AND_VALUE.match(text):
            name, value = found.groups()
        else:
            _not_read(script, node, raw(node))
            continue
        if is_local and frame is not None:
            _make_local(script, frame, name)
        follow(script, child)
        if value is not None:
            script.store(name, value)
        if exports and (script.doubt is None or name not in script.exported):
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
    target, value, behind = node.children[0], node.children[2] if len(node.children) > 2 else None, node.next_sibling
    is_torn = behind is not None and behind.is_named and behind.start_byte == node.end_byte
    if is_torn or any(gap.replace("\\\n", "") for gap, _ in with_gaps(node)):
        raise UserError(f"{script.at(node)}: {raw(node)}: where its value ends is not understood; put it in quotes")
    name, first = raw(target).partition("[")[0], len(script.unknowns)
    is_by_index = target.type == "subscript"
    if value is not None and value.type == "array":
        groups = grouped(value)
        is_by_index = is_by_index or any(re.match(r"\[[^]]*\]\+?=", raw(nodes[0])) for nodes in groups)
        result = [] if is_by_index else [word for nodes in groups for word in words_of(script, *nodes)]
    else:
        result = "" if value is None else text_of(script, value)
        script.name_unknowns(first, name)
    now = script.value(name)
    before = now if node.children[1].type == "+=" else None
    if is_by_index:
        result = script.unknown(node, f"single elements of the array {name} are assigned")
    elif isinstance(result, list):
        result = [*([before] if isinstance(before, str) else before or []), *result]
    elif before:
        result = before + result if isinstance(before, str) else script.unknown(node, name=name)
    elif isinstance(now, list) and now[1:]:
        result = [result, *now[1:]]
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
        raise UserError(f"{script.at(bad)}: {raw(bad)} is not followed; end each part of the case in ;;")
    split = [next(at for at, child in enumerate(item.children) if child.type == ")") for item in items]
    patterns = [[it for it in item.children[:at] if it.is_named] for item, at in zip(items, split, strict=True)]
    plain = tuple(raw(it) for among in patterns for it in among if re.fullmatch(r"[\w.-]+", raw(it)))

    def matches(among: Sequence[Node]) -> bool:
        value = _tested(script, word, compared=plain)
        return any(_matches(script, value, pattern_of(script, pattern)) for pattern in among)

    clauses: list[Clause] = []
    for among, item, at in zip(patterns, items, split, strict=True):
        is_taken = None if "*" in map(raw, among) else partial(matches, among)
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
    return _last_command(nodes) == "exit" and not any(
        re.search(r"\b(return|break|continue)\b", raw(it)) for it in nodes
    )


def _last_command(nodes: Sequence[Node]) -> str:
    last = next((node for node in reversed(nodes) if node.type != "comment"), None)
    if last is not None and last.type == "compound_statement":
        return _last_command(last.named_children)
    return raw(last.children[0]) if last is not None and last.type == "command" else ""


def _leave_out(script: Script, node: Node, undecided: Undecided, body: Sequence[Node]) -> None:
    """Pass over statements that end the script, if only a run reaches them; a training among them is refused."""
    with _within(script, "branch", node, undecided):
        _apart(script, follow, *body)


def _for(script: Script, node: Node) -> None:
    (name,), *items, (body,) = grouped(node)
    words = [word for nodes in items for word in words_of(script, *nodes)]
    if not any(child.type == "in" for child in node.children):
        words = as_list(script.value(ARGUMENTS))
    may_be_more = any(map(script.reasons_in, words))
    if len(words) > MOST_TURNS or may_be_more or node.children[0].type == "select":
        return _repeat(script, node)
    if words:
        _refuse_training(script, node)
    with _within(script, "loop"):
        for word in words:
            with _within(script, "turn"):
                script.store(raw(name), word)
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
    names = [raw(it) for it in head if it.type == "variable_name"]
    if node.type == "c_style_for_statement":
        names = [name for it in head for name in names_set(raw(it))]
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


def _function(script: Script, node: Node) -> None:
    name, body = raw(node.named_children[0]), node.child_by_field_name("body") or node.named_children[-1]
    if script.functions.get(name) != body:
        script.functions[name] = script.doubt or body


def _unset(script: Script, node: Node) -> None:
    texts = ["".join(text_of(script, it) for it in nodes) for nodes in grouped(node)]
    if "-f" in texts:
        raise UserError(f"{script.at(node)}: {raw(node)}: not followed; take the line out of the script")
    for name, bracket, _ in (text.partition("[") for text in texts if not text.startswith("-")):
        if script.reasons_in(name):
            _not_read(script, node, raw(node))
            continue
        why = f"single elements of the array {name} are removed"
        script.store(name, script.unknown(node, why, name) if bracket else None)
        if not bracket and script.doubt is None:
            script.exported.pop(name, None)


def _command(script: Script, node: Node) -> None:
    prefix = _prefix(script, node)
    words = _words_of_command(script, node)
    if words:
        only_read = _is_function(script, node, words) or words[0] in (*PRINTS, "eval")
        if only_read or not _note_launch(script, node, prefix, words):
            _builtin(script, node, prefix, words)


def _prefix(script: Script, node: Node) -> dict[str, str]:
    """What a command's assignments set for it alone."""
    assignments = [child for child in node.named_children if child.type == "variable_assignment"]
    names = [raw(child.children[0]).partition("[")[0] for child in assignments]
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
    words = [word for nodes in grouped(node) for word in words_of(script, *nodes)]
    while words[0:1] in (["command"], ["builtin"], ["time"]) and words[1:] and not words[1].startswith("-"):
        words = words[1:]
    return words


def _is_function(script: Script, node: Node, words: Sequence[str]) -> bool:
    """Whether a command calls one."""
    name = node.child_by_field_name("name")
    return words[0] in script.functions and (name is None or raw(name) not in ("command", "builtin"))


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
    if _is_function(script, node, words):
        _call(script, node, follow, prefix, words)
    elif name in ("break", "continue") and arguments not in ([], ["1"]):
        raise UserError(f"{script.at(node)}: {' '.join(words)}: only {name} alone is followed; write the command out")
    elif name in ENDED_BY:
        _end(script, node, name, integer(arguments[0]) if arguments and WHOLE.fullmatch(arguments[0]) else None)
    elif name in ("cd", "pushd", "popd"):
        _go_to(script, node, arguments if name == "cd" else ["-"])
    elif name == "set":
        _set(script, arguments)
    elif name == "shopt" and "nocasematch" in arguments:
        raise UserError(f"{script.at(node)}: {' '.join(words)}: not followed; write each pattern out")
    elif name == "shift" and isinstance(now := script.value(ARGUMENTS), list) and now:
        count = arguments[0] if arguments else "1"
        why = f"{script.at(node)}: how many arguments are left is only known to a run"
        rest = now[int(count) :] if WHOLE.fullmatch(count) else script.mark(Unknown(why, is_array=True))
        script.store(ARGUMENTS, now if WHOLE.fullmatch(count) and int(count) > len(now) else rest)
    elif trains and (name == "eval" or any(re.fullmatch(r"-[a-z]*c", word) for word in arguments)):
        raise UserError(
            f"{script.at(node)}: {name}: the command stands in a text; write it out, as a line of the script"
        )
    elif name in ("source", ".", "eval"):
        _not_read(script, node, " ".join(words if name == "eval" else arguments[:1]))
    elif name in ("read", "mapfile", "readarray", "getopts", "let") or words[:2] == ["printf", "-v"]:
        text = " ".join(arguments)
        named = names_set(text) if name == "let" else re.findall(r"(?<!\S)[A-Za-z_]\w*(?=[\[\s]|$)", text)
        for variable in (*named, "REPLY", "MAPFILE", "OPTARG", "OPTIND"):
            script.store(variable, script.unknown(node, f"{name} sets {variable}", variable))


def _set(script: Script, arguments: list[str]) -> None:
    """set: options, and after them the arguments."""
    at = 0
    while at < len(arguments) and re.match(r"[-+]\w", arguments[at]):
        takes_name = arguments[at].endswith("o")
        if "a" in arguments[at] or (takes_name and arguments[at + 1 : at + 2] == ["allexport"]):
            script.exports_all = arguments[at].startswith("-")
        at += 1 + takes_name
    if (rest := arguments[at:]) not in ([], ["-"]):
        script.store(ARGUMENTS, rest[1:] if rest[0] in ("--", "-") else rest)


def _not_read(script: Script, node: Node, text: str) -> None:
    """Note what may set any variable."""
    line = UNKNOWN.sub("?", " ".join(text.split()))
    script.notes[f"{script.at(node)}: {line}: not read; what it sets is written as --set NAME=VALUE"] = None
    script.variables |= script.settings
    script.sources = True


def _end(script: Script, node: Node, word: str, status: int | None) -> NoReturn:
    """exit, return, break or continue."""
    kinds = [frame.kind for frame in script.frames]
    if word in ("break", "continue"):
        kinds = list(itertools.takewhile(lambda kind: kind != "function", reversed(kinds)))
    if word != "exit" and ENDED_BY[word] not in kinds:
        where = "function" if word == "return" else "loop"
        raise UserError(f"{script.at(node)}: {word} stands in no {where}; take the line out of the script")
    raise End(script.at(node), word, status)


def _go_to(script: Script, node: Node, arguments: list[str]) -> None:
    """cd: the folder that $PWD and relative paths mean from then on; "-" is another."""
    words = [word for word in arguments if word not in ("--", "-L", "-P")] or as_list(script.variables.get("HOME"))
    known = len(words) == 1 and re.match(r"(?![-+]|.*[*?\[]).", words[0]) and not script.reasons_in(words[0])
    script.store("PWD", _joined(script, words[0]) if known else script.unknown(node, name="PWD"))


def _joined(script: Script, path: str) -> str:
    """A path from the folder in which the script stands."""
    here = str(script.value("PWD") or os.getcwd())
    whole = path if UNKNOWN.match(path) else here if path == "." else os.path.join(here, path)
    return whole if UNKNOWN.search(whole) else os.path.normpath(whole)


def _call(
    script: Script, node: Node, kind: Callable[[Script, Node], bool | None], prefix: dict[str, str], words: list[str]
) -> bool | None:
    """`follow` a function, or see whether it `holds`; None where it returns what only a run shows, or may."""
    name, *arguments = words
    if any(frame.function == name for frame in script.frames):
        raise UserError(f"{script.at(node)}: the function {name} calls itself")
    body, succeeds = script.functions[name], None
    if isinstance(body, Unknown):
        raise UserError(f"{body}; whether {script.at(node)} calls a function depends on it")
    script.spend(STEP + body.end_byte - body.start_byte)
    with _kept(script, {ARGUMENTS, *prefix}) as kept, _within(script, "function", function=name) as frame:
        frame.kept = kept
        script.variables |= {**prefix, ARGUMENTS: script.counted(arguments)}
        script.exported |= dict.fromkeys(prefix)
        succeeds = kind(script, body)
    if frame.status is not None:
        succeeds = frame.status == 0
    return succeeds if frame.doubt is None else None


def _refuse_training(script: Script, loop: Node) -> None:
    for it in nodes_in(loop):
        if _is_training(it):
            raise UserError(f"{script.at(it)}: a loop around the training; give a script with the one command")


def _is_training(node: Node) -> bool:
    return node.type == "command" and any(trainer in raw(node) for trainer in TRAINERS)


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
    if kind in ("declaration_command", "function_definition") or any(map(_is_training, nodes_in(node))):
        return True
    if kind == "variable_assignment":
        name = raw(node.children[0]).partition("[")[0]
        if not any(map(UNKNOWN.search, as_list(script.variables.get(name)))):
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
    left, sign, right = node.children[0], raw(node.children[1]), node.children[-1]
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
        elif sign == "&&" and _is_step(left) and any(map(_is_training, nodes_in(right))):
            return holds(script, right)  # it trains only where what goes before succeeds
        else:
            with _within(script, "branch", node, undecided):
                follow(script, right)
            if decides and right.type == "command" and raw(right.children[0]) in SUCCEED:
                return True
        raise
    if first and decides and _is_assumed(left):
        if _last_command([right]) in ENDED_BY:
            _leave_out(script, node, Undecided(), [right])
        else:
            with _within(script, "branch", node, Undecided()):
                follow(script, right)
    return first if first == decides else holds(script, right)


def _is_assumed(node: Node) -> bool:
    """Whether it is only taken to succeed."""
    command = node.named_children[0] if node.type == "redirected_statement" else node
    name = raw(command.children[0]) if command.type == "command" else ""
    return name in SUCCEED and name not in ("true", ":", *PRINTS)


def _is_step(node: Node) -> bool:
    """Whether it is a program, or several one after the other, and no test."""
    if node.type == "list":
        return node.children[1].type == "&&" and all(map(_is_step, (node.children[0], node.children[2])))
    return node.type in ("command", "pipeline", "redirected_statement", "variable_assignment", "subshell")


def _succeeds(script: Script, node: Node) -> bool:
    """Whether a command does: what only prepares the shell is taken to."""
    if raw(node.children[0]) == "test":
        return _test(script, [(it,) for it in node.named_children[1:] if not it.type.endswith("redirect")], False)
    words = _words_of_command(script, node) or [""]
    if _is_function(script, node, words):
        if (status := _call(script, node, holds, _prefix(script, node), words)) is None:
            raise Undecided
        return status
    follow(script, node)
    if words[0] == "getopts" and len(words) == 3 and script.value(ARGUMENTS) == []:
        return False
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
        words = ["".join(map(raw, operand)) for operand in operands]
    else:
        with _testing(script):
            words = [word for operand in operands for word in words_of(script, *operand, splits=False)]

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
        return "".join(glob.escape(gap) + pattern_of(script, child) for gap, child in with_gaps(node))
    if node.type in ("word", "extglob_pattern", "regex", "number"):
        if re.search(r"[@+!?*]\(", raw(node)):
            raise Undecided
        return re.sub(r'\\(.)|"([^"]*)"', lambda match: glob.escape(match[1] or match[2]), raw(node))
    return _tested(script, node)


def _matches(script: Script, text: str, pattern: str) -> bool:
    script.spend(len(text) + 20 * len(pattern))  # a pattern is compiled
    if len(pattern) > LONGEST_PATTERN or re.search(r"\[[^]]*\[[:.=]", pattern):
        raise Undecided
    return fnmatch.fnmatchcase(text, pattern.replace("[^", "[!"))


def _computed(script: Script, node: Node) -> int:
    """The value of ((…)) or $((…)). What it sets is unknown.

    Raises:
        Undecided: it is unknown, or no number.
    """
    whole = "".join(gap + _filled(script, child) for gap, child in with_gaps(node)).strip()
    text = re.sub(r"^\$?(\(\(|\[)|(\)\)|\])$", "", whole)
    script.spend(STEP + len(text))

    def read(name: str) -> int:
        value = "".join(_value(script, node, name))
        if unknowns := script.unknowns_in(value):
            raise Undecided(unknowns[0].name)
        return integer(value)

    try:
        if len(text) > LONGEST_PATTERN or names_set(text):
            raise Undecided
        if unknowns := script.unknowns_in(text):
            raise Undecided(unknowns[0].name)
        return value_of(text, read)
    except (ValueError, Undecided) as error:
        for name in names_set(text):
            script.store(name, script.unknown(node, f"{raw(node)}: what arithmetic sets is not followed", name))
        raise Undecided(error.name if isinstance(error, Undecided) else "") from error


def _sum(script: Script, node: Node) -> str:
    """What $((…)) becomes."""
    try:
        return str(_computed(script, node))
    except Undecided:
        return script.unknown(node, f"{raw(node)} cannot be computed")


def _filled(script: Script, node: Node) -> str:
    """A text in which expansions are put in."""
    if node.type.endswith(("expansion", "substitution")) or node.type == "string":
        return text_of(script, node)
    return "".join(gap + _filled(script, child) for gap, child in with_gaps(node)) if node.children else raw(node)


# Words


def words_of(script: Script, *nodes: Node, splits: bool = True) -> list[str]:
    """The words that nodes without a gap become: quotes removed, variables put in, unquoted values split.

    An unknown that is not quoted stands for any number of words, unless KEY= stands before it. `splits`: whether {a,b}
    and * do so, too.
    """
    words: list[tuple[list[str], list[str]]] = []
    is_open = False
    for texts, kind in (part for node in nodes for part in _parts(script, node, "words")):
        for index, text in enumerate(_split(script, nodes[0], texts) if kind == SPLIT else texts):
            is_open = is_open and index == 0
            if text or is_open or kind != SPLIT:
                shape = "\0" * len(text) if kind in (QUOTED, ARRAY) else text
                if not is_open:
                    words.append(([], []))
                    is_open = True
                words[-1][0].append(text)
                words[-1][1].append(re.sub("[{},]", "\0", shape) if kind == SPLIT else shape)
    return [_word(script, nodes[0], "".join(texts), "".join(shapes), splits) for texts, shapes in words]


def _split(script: Script, node: Node, texts: list[str]) -> list[str]:
    """What becomes of an unquoted value; "" at either end parts it from what stands next to it."""
    value, separators = " ".join(texts), script.variables.get("IFS", SEPARATORS)
    if separators == SEPARATORS:
        return re.split("[ \t\n]+", value)
    is_whole = isinstance(separators, str) and not UNKNOWN.search(separators) and not set(value) & set(separators)
    if is_whole and len(texts) < 2:
        return texts
    why = f"{script.at(node)}: the script sets IFS, at which {raw(node)} is split"
    return [script.mark(Unknown(why, is_array=True))]


def _word(script: Script, node: Node, text: str, shape: str, splits: bool) -> str:
    """A word, or an unknown where bash makes any number of words of it; `shape`: the word, without what is quoted."""
    key = text.find("=")
    if (found := UNKNOWN.search(shape)) and not 0 <= key < found.start():
        mark = script.mark(replace(script.unknowns_in(found[0])[0], is_array=True))
        return text[: found.start()] + mark + text[found.end() :]
    plain = shape[:key] if key >= 0 else shape
    names_files = "*" in plain or "?" in plain or ("[" in plain and "]" in plain[plain.index("[") :])
    if splits and (names_files or _has_choices(script, shape)):
        why = "which files that names is only known to a run" if names_files else "bash makes several words of it"
        why = f"{script.at(node)}: {UNKNOWN.sub('?', text)}: {why}; quote it, or write them out"
        return script.mark(Unknown(why, is_array=True))
    return text


def _has_choices(script: Script, shape: str) -> bool:
    """Whether {a,b} or {1..3} stands in a word."""
    while found := re.search(r"\{[^{}]*\}", shape):
        script.spend(len(shape))
        if re.search(r",|^\{(-?\d+|[a-zA-Z])\.\.", found[0]):
            return True
        shape = shape[: found.start()] + "\0" + shape[found.end() :]
    return False


def text_of(script: Script, node: Node) -> str:
    """The text that a node becomes where nothing is split: an assignment, a test."""
    return _joined_parts(_parts(script, node, "text"))


def _joined_parts(parts: Iterable[Piece]) -> str:
    return "".join(" ".join(texts) for texts, _ in parts)


QUOTED, ARRAY, LITERAL, SPLIT = "quoted", "array", "literal", "split"
Piece = tuple[list[str], str]
"""Texts, of which the first joins the word before them, and their kind: QUOTED; ARRAY, where none is no word; LITERAL,
what the script has outside of quotes; SPLIT, a value outside of quotes."""


def _parts(script: Script, node: Node, how: str) -> Iterator[Piece]:
    """What a node becomes in "words", which are split, in a "text", which is not, or in "quotes"."""
    kind, text = node.type, raw(node)
    if how != "words" and kind.endswith(("expansion", "substitution")):
        # The grammar takes white space before it as a part of it.
        yield [re.split("[$`]", text)[0].replace("\\\n", "")], QUOTED
    if kind == "raw_string" and how != "quotes":
        yield [text[1:-1]], QUOTED
    elif kind == "string":
        yield from _string_parts(script, node)
    elif kind in ("concatenation", "command_name"):
        for gap, child in with_gaps(node):
            yield from _literal(script, node, gap, how)
            yield from _parts(script, child, how)
    elif kind in ("simple_expansion", "expansion"):
        yield from _expanded(script, node, how)
    elif kind == "command_substitution":
        yield [_output_of(script, node).rstrip("\n")], SPLIT if how == "words" else QUOTED
    elif kind == "arithmetic_expansion":
        yield [_sum(script, node)], QUOTED
    elif kind == "ansi_c_string" and re.fullmatch(r"\$'([^\\]|\\[nt\\'])*'", text) and how != "quotes":
        yield [re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), text[2:-1])], QUOTED
    elif kind in ("process_substitution", "ansi_c_string", "translated_string"):
        yield [script.unknown(node)], QUOTED
    elif kind == "raw_string" and re.search(r'[$`"\\]', text):
        yield [script.unknown(node)], QUOTED  # in "${NAME:-'$A'}" its quotes do not quote
    else:
        before = re.match(r"([A-Za-z_]\w*=)?~(?=/|$)" if how == "words" else "()~(?=/|$)", text)
        if before and how != "quotes" and _begins_a_word(node) and isinstance(home := script.value("HOME"), str):
            yield [(before[1] or "") + home], QUOTED
            text = text[before.end() :]
        yield from _literal(script, node, text, how)


def _literal(script: Script, node: Node, text: str, how: str) -> Iterator[Piece]:
    """What the script has as it is; unknown where the grammar did not see an expansion or an escape in it."""
    escapes = '\\$"`' if node.type == "string" else '\\$"`}'
    for plain, escaped in re.findall(r"([^\\]+)|\\(.?)", text, re.DOTALL):
        if re.search(r"`|\$[\w{(@*#?!$-]", plain) or not (plain or escaped):
            yield [script.unknown(node)], LITERAL
        elif plain or escaped != "\n":
            kept = "\\" if how == "quotes" and not plain and escaped not in escapes else ""
            yield [plain or kept + escaped], LITERAL if plain and how != "quotes" else QUOTED


def _begins_a_word(node: Node) -> bool:
    """Whether ~ in front of it is the home folder."""
    parent = node.parent
    if parent is None or parent.type != "concatenation":
        return True
    return parent.start_byte == node.start_byte and (parent.end_byte == node.end_byte or not raw(node).endswith("~"))


def _string_parts(script: Script, node: Node) -> Iterator[Piece]:
    parts, text = list[Piece](), ""
    for gap, child in with_gaps(node):
        text += gap
        if child.type in ("string_content", "$", '"'):
            text += raw(child)[: -1 if child.type == '"' else None]  # white space before a quote is a part of it
        else:
            parts += [*_literal(script, node, text, "quotes"), *_parts(script, child, "quotes")]
            text = ""
    parts += _literal(script, node, text, "quotes")
    array_alone = any(kind == ARRAY for _, kind in parts) and not any("".join(p) for p, kind in parts if kind != ARRAY)
    if not array_alone:
        yield [""], QUOTED  # "" is a word; "$@" without arguments is none
    yield from (part for part in parts if part != ([""], QUOTED))


def _expanded(script: Script, node: Node, how: str) -> Iterator[Piece]:
    """$NAME, ${NAME…}."""
    name = raw(node).partition("$")[2]
    children = node.children[1:-1]
    if node.type == "simple_expansion" and name[:1].isspace():  # "5$ a"
        yield [script.unknown(node)], QUOTED
    elif node.type == "simple_expansion" and name[1:] and name[0].isdigit():  # $10 is ${1}0
        yield from _valued(script, node, _value(script, node, name[0]), how)
        yield [name[1:]], QUOTED
    elif node.type == "simple_expansion":
        yield from _valued(script, node, _value(script, node, name), how)
    elif len(children) > 1 and children[0].type not in ("!", "#") and children[1].type in DEFAULTS:
        yield from _or_default(script, node, children[0], children[1].type, children[2:], how)
    else:
        yield from _valued(script, node, _braced(script, node), how)


def _valued(script: Script, node: Node, value: str | list[str], how: str) -> Iterator[Piece]:
    text = raw(node).strip()
    if how == "words":
        yield value if isinstance(value, list) else [value], SPLIT
    elif isinstance(value, str):
        yield [value], QUOTED
    elif ALL_IN_ONE.match(text):
        why = f"the script sets IFS, which stands between the words of {text}"
        is_usual = script.variables.get("IFS", SEPARATORS) == SEPARATORS
        yield [" ".join(value) if is_usual else script.unknown(node, why)], QUOTED
    else:
        yield value, ARRAY


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
    return (as_list(value) or [""])[0]


def _braced(script: Script, node: Node) -> str | list[str]:
    """${NAME}, ${NAME[@]}, ${#NAME}, ${NAME#pattern}, ${NAME/pattern/text}, ${NAME^^}."""
    children = node.children[1:-1]
    length = len(children) > 1 and children[0].type == "#"
    if length:
        children = children[1:]
    if not children or children[0].type in ("!", "#"):
        return script.unknown(node)
    target, rest = children[0], children[1:]
    name, sign = raw(target), rest[0].type if rest else ""
    value = _looked_up(script, target, default=False)
    if length:
        return script.unknown(node) if any(map(UNKNOWN.search, as_list(value))) else str(len(value))
    if sign == ":" and not script.reasons_in("".join(value)):
        return _slice(script, node, value, rest, first=int(name in ("@", "*")))
    if isinstance(value, list) or not sign:
        return script.unknown(node) if sign else value
    operand = "".join(text_of(script, child) for child in rest[1:] if child.is_named and sign[0] in "#%")
    if script.reasons_in(value + operand):
        return value + operand
    try:
        changed = _changed(script, value, sign, operand, [raw(child) for child in rest])
    except Undecided:
        changed = None
    return script.unknown(node, f"{raw(node)} is not understood") if changed is None else changed


def _looked_up(script: Script, target: Node, default: bool) -> str | list[str]:
    """The variable or element of ${…}; `default`: whether something is given for where it is not set."""
    return (_element if target.type == "subscript" else _value)(script, target, raw(target), default)


def _slice(script: Script, node: Node, value: str | list[str], rest: Sequence[Node], first: int) -> str | list[str]:
    """${NAME:1}, ${NAME[@]:0:2}; `first` is the number of the first word."""
    numbers = [text_of(script, child) for child in rest if child.is_named]
    if not all(map(WHOLE.fullmatch, numbers)) or not first <= int(numbers[0]):
        return script.unknown(node, f"{raw(node)} is not understood")
    start = int(numbers[0]) - first
    return value[start:] if len(numbers) == 1 else value[start : start + int(numbers[1])]


def _element(script: Script, node: Node, text: str, absent: bool) -> str | list[str]:
    """${NAME[@]} or ${NAME[2]}."""
    name, index = raw(node.named_children[0]), text_of(script, node.named_children[1])
    value = script.value(name)
    if value is None and not absent and (index not in ("@", "*") or script.sources or name in SHELLS_ARRAYS):
        return script.unknown(node, f"the array {name} is not set in the script")
    if isinstance(value, str) and UNKNOWN.fullmatch(value):
        return value
    values, why = as_list(value), f"{text} is not followed; write its value out"
    if index in ("@", "*"):
        return values
    is_there = WHOLE.fullmatch(index.removeprefix("-")) and -len(values) <= int(index) < len(values)
    return values[int(index)] if is_there else script.unknown(node, why)


DEFAULTS = (":-", "-", ":=", "=", ":+", "+", ":?", "?")


def _or_default(script: Script, node: Node, target: Node, sign: str, rest: list[Node], how: str) -> Iterator[Piece]:
    """${NAME:-text} and its kin; the quotes in the text are the script's."""
    name, value = raw(target), _looked_up(script, target, default=True)
    now = script.variables.get(name)
    if WHOLE.fullmatch(name) and name != "0":
        now = as_list(script.value(ARGUMENTS))[int(name) - 1 : int(name)]
    is_set = bool(value) or (not sign.startswith(":") and now not in (None, []))
    if sign.endswith("+") and is_set and not UNKNOWN.sub("", "".join(value)) and script.unknowns_in("".join(value)):
        yield from _valued(script, node, script.unknown(node, name=name), how)
    elif is_set != sign.endswith("+"):
        yield from _valued(script, node, value if is_set else value[:0], how)
    else:
        first = len(script.unknowns)
        words = [(gap, child) for gap, child in with_gaps(node) if child.is_named and child in rest]
        parts = [it for gap, child in words for it in (*_literal(script, node, gap, how), *_parts(script, child, how))]
        script.name_unknowns(first, name)
        if sign.endswith("?"):
            why = f"the variable {name} is not set: {_joined_parts(parts)}"
            parts = [*_valued(script, node, script.unknown(node, why, name), how)]
        elif sign.endswith("="):
            script.store(name, _joined_parts(parts))
            parts = [*_valued(script, node, script.variables[name], how)]
        yield from ((texts, SPLIT if kind == LITERAL else kind) for texts, kind in parts)


def _changed(script: Script, value: str, sign: str, operand: str, words: list[str]) -> str | None:
    """A value after ${NAME,,}, ${NAME#pattern} or ${NAME/pattern/text}; None for what is not read."""
    if sign in ("^^", ",,"):
        return value.upper() if sign == "^^" else value.lower()
    places, written = range(len(value) + 1), "".join(words[1:])
    if sign in ("#", "##", "%", "%%", "/", "//") and re.search(r"""["'`$]|\\[^/]""", written):
        return None
    if sign in ("#", "##", "%", "%%"):
        if sign.startswith("#"):
            cuts = [value[i:] for i in places if _matches(script, value[:i], operand)]
        else:
            cuts = [value[:i] for i in reversed(places) if _matches(script, value[i:], operand)]
        return (cuts[0] if len(sign) == 1 else cuts[-1]) if cuts else value
    found = re.fullmatch(r"((?:\\/|[^/])+)(?:/(.*))?", written, re.DOTALL)
    if sign in ("/", "//") and found and not set(written) & set("*?[&"):
        pattern, text = (part.replace("\\/", "/") for part in (found[1], found[2] or ""))
        script.spend(len(value) * max(len(pattern), len(text)))
        return value.replace(pattern, text, -1 if sign == "//" else 1)
    return None


def _name(path: str, ending: str = "") -> str:
    name = os.path.basename(path.rstrip("/")) or path[:1]
    return name if name == ending else name.removesuffix(ending)


PURE: dict[str, Callable[..., str]] = {
    "pwd": lambda script: _joined(script, "."),
    "basename": lambda script, path, *ending: _name(path, *ending),
    "dirname": lambda script, path: os.path.dirname(path.rstrip("/")) or ("/" if path.startswith("/") else "."),
    "realpath": lambda script, path: os.path.realpath(_joined(script, path)),
    "echo": lambda script, *words: " ".join(words),
}
"""Commands whose output follows from their words alone, or is where this runs."""


def _output_of(script: Script, node: Node) -> str:
    if re.fullmatch(r"\s*\$\(\(.*\)\)", raw(node), re.DOTALL):
        return _sum(script, node)  # in ${NAME:-…} the grammar takes it for a subshell
    inside = [child for child in node.named_children if child.type != "comment"]
    commands = [_words_of_command(script, it) for it in _commands_in(inside[0])] if len(inside) == 1 else []
    known = not any(script.reasons_in(word) for words in commands for word in words)
    commands = [[word for word in words if word != "--"] for words in commands if words]
    if known and len(commands) == 2 and commands[1] == ["pwd"] and commands[0][:1] == ["cd"] and len(commands[0]) < 3:
        return _joined(script, commands[0][1] if commands[0][1:] else str(script.value("HOME") or ""))
    if known and len(commands) == 1 and inside[0].type == "command":
        name, *words = ["realpath", *commands[0][2:]] if commands[0][:2] == ["readlink", "-f"] else commands[0]
        if name in PURE and name not in script.functions and not any(word.startswith("-") for word in words):
            with contextlib.suppress(TypeError):
                return PURE[name](script, *words)
    return script.unknown(node, f"{' '.join(raw(node).split())} is only known to a run")


def _commands_in(node: Node) -> list[Node]:
    """The commands of `a`, `a && b` and `a 2> file && b`; none where it is something else."""
    if node.type == "command":
        return [node]
    if node.type == "redirected_statement":
        return _commands_in(node.named_children[0])
    if node.type == "list" and node.children[1].type == "&&":
        return [*_commands_in(node.children[0]), *_commands_in(node.children[2])]
    return []
