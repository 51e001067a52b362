"""The training command that a shell script would run, found without running anything.

tree-sitter's grammar of bash makes a tree of the script, and `Script` follows it: assignments, arrays, arithmetic,
conditions that are decided by what is known, functions. What only a run could tell (the output of a command, a
variable that nobody has set) becomes an *unknown*: a mark inside the text that says where it comes from. It does no
harm until something that matters is made of it (`reasons_in`).
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from perl.base.errors import UserError

TRAINERS = ("main_ppo", "main_dapo")
"""Last parts of the modules (or files) that train: verl.trainer.main_ppo, recipe.dapo.main_dapo."""
OTHER_PROGRAMS = re.compile(r"^(verl|recipe)[./].*(trainer|main_)")
LOOKS_LIKE_KEY = re.compile(r"^[+~]{0,2}[A-Za-z_]\w*(\.\w+)+=")
NAME_AND_VALUE = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
PYTHON = re.compile(r"^(.*/)?python[\d.]*$")
UNKNOWN = re.compile("\ue000(\\d+)\ue001")
SETS_VARIABLES = ("read", "mapfile", "readarray", "getopts", "let")
MOST_TURNS = 1000


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


@dataclass
class Script:
    """What is known while a script is followed."""

    place: str
    variables: dict[str, str | list[str]]
    arguments: list[str] = field(default_factory=list)
    exported: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Node] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Programs of verl that do not train with rewards, each with its line."""
    first_line: int = 1
    depth: int = 0
    unset_is_empty: bool = False
    """In a test, as in bash; a setting made of an unset variable would silently lack a part."""

    def at(self, node: Node) -> str:
        return f"{self.place}:{node.start_point[0] + self.first_line}"

    def unknown(self, node: Node, why: str) -> str:
        self.reasons.append(f"{self.at(node)}: {why}")
        return f"\ue000{len(self.reasons) - 1}\ue001"

    def reasons_in(self, text: str) -> list[str]:
        """Why parts of a text are unknown; empty where all of it is known."""
        return list(dict.fromkeys(self.reasons[int(number)] for number in UNKNOWN.findall(text)))


def read_script(path: Path, environment: Mapping[str, str]) -> tuple[Launch, Script]:
    """The one training command in a script, and the script, which says why a part is unknown.

    Args:
        path: the script.
        environment: variables that the script would inherit.

    Raises:
        UserError: no command or several, no bash, or a command that only a run of the script would show.
    """
    try:
        source = path.read_bytes()
        source.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else error
        raise UserError(f"{path}: cannot be read as a script: {why}") from error
    script = Script(place=str(path), variables={**environment, "0": str(path)})
    script.variables["PWD"] = os.getcwd()
    return read_source(script, source.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n"))


def read_source(script: Script, source: bytes) -> tuple[Launch, Script]:
    try:
        follow_source(script, source)
    except _End as end:
        if not script.launches:
            raise UserError(f"{end.place}: the script ends here, before it trains; what it checks is not met") from None
    if len(script.launches) > 1:
        places = ", ".join(launch.place for launch in script.launches)
        raise UserError(f"{script.place}: several trainings ({places}); give a script with one")
    if not script.launches and script.others:
        raise UserError(f"{script.others[0]} does not train with rewards; only {' and '.join(TRAINERS)} are translated")
    if not script.launches:
        raise UserError(f"{script.place}: no command of verl in it, such as python3 -m verl.trainer.main_ppo KEY=VALUE")
    return script.launches[0], script


class _End(Exception):
    """exit, or return out of a function."""

    def __init__(self, place: str):
        super().__init__(place)
        self.place = place


# Statements


def follow_source(script: Script, source: bytes) -> None:
    root = Parser(Language(tree_sitter_bash.language())).parse(source).root_node
    if (bad := _first_error(root)) is not None:
        text = (bad.text or b"").decode(errors="replace").strip().splitlines()
        raise UserError(f"{script.at(bad)}: not bash: {(text or ['something is missing'])[0]:.60}")
    follow(script, root)


def _first_error(node: Node) -> Node | None:
    if node.type == "ERROR" or node.is_missing:
        return node
    if not node.has_error:
        return None
    return next((found for child in node.children if (found := _first_error(child)) is not None), None)


def follow(script: Script, node: Node) -> None:
    """Do what a statement does to the variables; note each training command."""
    if (kind := STATEMENTS.get(node.type)) is not None:
        kind(script, node)


def _each(script: Script, node: Node) -> None:
    for child in node.named_children:
        follow(script, child)


def _redirected(script: Script, node: Node) -> None:
    for child in node.named_children:
        if not child.type.endswith("redirect"):
            follow(script, child)


def _declaration(script: Script, node: Node) -> None:
    exports = node.children[0].type == "export" or any(_text(child) == "-x" for child in node.named_children)
    for child in node.named_children:
        name = _text(child)
        if child.type == "variable_assignment":
            name = _assign(script, child)
        if exports and isinstance(value := script.variables.get(name), str):
            script.exported[name] = value


def _assign(script: Script, node: Node) -> str:
    """Carry out NAME=value; return the name."""
    target, value = node.children[0], node.children[2] if len(node.children) > 2 else None
    append = node.children[1].type == "+="
    if target.type == "subscript":
        name = _text(target.named_children[0])
        script.variables[name] = script.unknown(node, f"single elements of the array {name} are assigned")
        return name
    name = _text(target)
    before = script.variables.get(name)
    if value is not None and value.type == "array":
        words = [word for child in value.named_children if child.type != "comment" for word in words_of(script, child)]
        script.variables[name] = [*(_as_list(before) if append else []), *words]
    else:
        text = "" if value is None else text_of(script, value)
        script.variables[name] = (before if isinstance(before, str) else "") + text if append else text
    if name in script.exported:
        script.exported[name] = str(script.variables[name])
    return name


def _if(script: Script, node: Node) -> None:
    """Follow the branch that is taken; where that is unknown, forget what the branches would have set."""
    branches = _branches(node)
    for index, (condition, body) in enumerate(branches):
        met = True if condition is None else truth(script, condition)
        if met is None:
            _forget(script, [n for c, part in branches[index:] for n in ([c] if c else []) + part], node)
            return
        if met:
            for child in body:
                follow(script, child)
            return


def _branches(node: Node) -> list[tuple[Node | None, list[Node]]]:
    """(condition, statements) of if and each elif, and of else, which has no condition."""
    clauses = [child for child in node.named_children if child.type in ("elif_clause", "else_clause")]
    found: list[tuple[Node | None, list[Node]]] = []
    for part in [node, *clauses]:
        inside = [child for child in part.named_children if child not in clauses and child.type != "comment"]
        if part.type == "else_clause":
            found.append((None, inside))
        elif inside:
            found.append((inside[0], inside[1:]))
    return found


def _case(script: Script, node: Node) -> None:
    value = _tested(script, node.named_children[0])
    items = [child for child in node.named_children[1:] if child.type == "case_item"]
    if script.reasons_in(value):
        _forget(script, items, node)
        return
    for item in items:
        closed = next(i for i, child in enumerate(item.children) if child.type == ")")
        patterns = [text_of(script, child) for child in item.children[:closed] if child.is_named]
        if any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns):
            for child in item.children[closed + 1 :]:
                follow(script, child)
            return


def _for(script: Script, node: Node) -> None:
    name, *rest = node.named_children
    items = [child for child in rest if child.type != "do_group"]
    words = [word for child in items for word in words_of(script, child)]
    if any(script.reasons_in(word) for word in words) or any("*" in word or "?" in word for word in words):
        _forget(script, [node], node)
        return
    _refuse_training(script, node, "a loop around the training")
    for word in words[:MOST_TURNS]:
        script.variables[_text(name)] = word
        follow(script, rest[-1])


def _while(script: Script, node: Node) -> None:
    condition, body = node.named_children[0], node.named_children[-1]
    until = node.children[0].type == "until"
    for _ in range(MOST_TURNS):
        met = truth(script, condition)
        if met is None:
            break
        if met == until:
            return
        _refuse_training(script, node, "a loop around the training")
        follow(script, body)
    _forget(script, [node], node)


def _list(script: Script, node: Node) -> None:
    """`a && b`, `a || b`; a command that is not run is taken to succeed."""
    left, operator, right = node.children[0], node.children[1].type, node.children[2]
    met = truth(script, left)
    if met is None:
        _forget(script, [right], node)
    elif met == (operator == "&&"):
        follow(script, right)


def _function(script: Script, node: Node) -> None:
    script.functions[_text(node.named_children[0])] = node.named_children[-1]


def _unset(script: Script, node: Node) -> None:
    for child in node.named_children:
        script.variables.pop(_text(child), None)
        script.exported.pop(_text(child), None)


def _command(script: Script, node: Node) -> None:
    prefix, words = {}, []
    for child in node.children:
        if child.type == "variable_assignment":
            value = child.children[2] if len(child.children) > 2 else None
            prefix[_text(child.children[0])] = "" if value is None else text_of(script, value)
        elif child.type == "command_name":
            words += words_of(script, child.children[0])
        elif child.is_named and not child.type.endswith("redirect"):
            words += words_of(script, child)
    if not words:
        return
    if not _note_launch(script, node, prefix, words):
        _builtin(script, node, words)


def _builtin(script: Script, node: Node, words: list[str]) -> None:
    """What a command that is no training does to the variables. Other programs do nothing to them."""
    name, *arguments = words
    if LOOKS_LIKE_KEY.match(name):
        key = name.partition("=")[0]
        raise UserError(
            f"{script.at(node)}: {key} stands in a command of its own: the line before it ends without \\, with a space"
            " after it, or is a comment"
        )
    if name in script.functions:
        _call(script, node, name, arguments)
    elif name in ("exit", "return"):
        raise _End(script.at(node))
    elif name == "set" and "--" in arguments:
        script.arguments = arguments[arguments.index("--") + 1 :]
    elif name == "shift":
        count = int(arguments[0]) if arguments and arguments[0].isdigit() else 1
        script.arguments = script.arguments[count:]
    elif name == "eval":
        raise UserError(f"{script.at(node)}: eval makes a command that only a run shows; write the command itself")
    elif name in ("bash", "sh", "/bin/bash", "/bin/sh") and "-c" in arguments[:-1]:
        _inner(script, node, arguments[arguments.index("-c") + 1])
    elif name == "printf" and arguments[:1] == ["-v"] and len(arguments) > 1:
        script.variables[arguments[1]] = script.unknown(node, f"printf sets {arguments[1]}")
    elif name in SETS_VARIABLES:
        for word in arguments:
            if match := re.match(r"[A-Za-z_]\w*", word):
                script.variables[match[0]] = script.unknown(node, f"{name} sets {match[0]}")


def _call(script: Script, node: Node, name: str, arguments: list[str]) -> None:
    if script.depth > 20:
        raise UserError(f"{script.at(node)}: the function {name} calls itself")
    before, script.arguments = script.arguments, arguments
    script.depth += 1
    try:
        follow(script, script.functions[name])
    except _End as end:
        if "exit" in (script.functions[name].text or b"").decode():
            raise end from None
    finally:
        script.arguments = before
        script.depth -= 1


def _inner(script: Script, node: Node, text: str) -> None:
    """bash -c 'text'."""
    if why := script.reasons_in(text):
        if any(trainer in text for trainer in TRAINERS):
            raise UserError(f"{why[0]}, which the command of bash -c holds")
        return
    line, script.first_line = script.first_line, node.start_point[0] + script.first_line
    follow_source(script, text.encode())
    script.first_line = line


def _forget(script: Script, nodes: Sequence[Node], condition: Node) -> None:
    """Whether these statements run is unknown: so is what they set. A training among them cannot be translated."""
    why = f"it depends on {' '.join(_text(condition).split())[:60]!r}, which only a run decides"
    for node in nodes:
        _refuse_training(script, node, "whether this training runs depends on what only a run decides")
        for found in _all(node):
            if found.type == "variable_assignment":
                name = _text(found.children[0]).partition("[")[0]
                script.variables[name] = script.unknown(found, why)
                if name in script.exported:
                    script.exported[name] = str(script.variables[name])


def _refuse_training(script: Script, node: Node, why: str) -> None:
    for found in _all(node):
        if found.type == "command" and any(trainer in _text(found) for trainer in TRAINERS):
            raise UserError(f"{script.at(found)}: {why}; give a script with the one command")


def _note_launch(script: Script, node: Node, prefix: dict[str, str], words: list[str]) -> bool:
    """Note a training command, or another program of verl; whether it was one."""
    for index, word in enumerate(words):
        is_module = index > 0 and words[index - 1] == "-m"
        is_file = word.endswith(".py") and not is_module and any(PYTHON.match(w) for w in words[:index])
        if not (is_module or is_file):
            continue
        module = word.removesuffix(".py").replace("/", ".").strip(".")
        if module.rpartition(".")[2] in TRAINERS:
            before, inside = _split_before(words[: index - 1 if is_module else index])
            for name, value in inside:
                prefix[name] = value
            environment = script.exported | prefix
            script.launches.append(Launch(module, words[index + 1 :], environment, before, script.at(node)))
            return True
        if OTHER_PROGRAMS.match(word):
            script.others.append(f"{script.at(node)}: {word}")
            return True
    return False


def _split_before(words: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The program that starts Python, and the variables set by `env` before it."""
    assignments = [(found[1], found[2]) for word in words if (found := NAME_AND_VALUE.match(word))]
    program = []
    for word in words:
        if word.startswith("-") or PYTHON.match(word) or NAME_AND_VALUE.match(word):
            break
        program.append(word)
    return " ".join(word for word in program if word not in ("env", "exec", "time")), assignments


STATEMENTS = {
    "program": _each,
    "compound_statement": _each,
    "do_group": _each,
    "subshell": _each,
    "pipeline": _each,
    "negated_command": _each,
    "variable_assignments": _each,
    "redirected_statement": _redirected,
    "variable_assignment": _assign,
    "declaration_command": _declaration,
    "if_statement": _if,
    "case_statement": _case,
    "for_statement": _for,
    "c_style_for_statement": lambda script, node: _forget(script, [node], node),
    "while_statement": _while,
    "list": _list,
    "function_definition": _function,
    "unset_command": _unset,
    "command": _command,
}
"""Node of the tree -> what it does; others (comments, tests) do nothing."""


# Conditions


def truth(script: Script, node: Node) -> bool | None:
    """Whether a condition holds; None where only a run decides. A command without effect on variables: unknown as a
    condition of its own, taken to succeed in front of &&."""
    kind = node.type
    if kind == "negated_command":
        return _not(truth(script, node.named_children[-1]))
    if kind == "list":
        return _both(node.children[1].type, truth(script, node.children[0]), lambda: truth(script, node.children[2]))
    if kind in ("test_command", "parenthesized_expression"):
        inside = [child for child in node.children if child.type not in ("[", "]", "[[", "]]", "((", "))", "(", ")")]
        if node.children[0].type == "((":
            return _nonzero(number_of(script, inside[0]))
        return truth(script, inside[0]) if len(inside) == 1 else None
    if kind == "compound_statement" and node.children[0].type == "((":
        return _nonzero(number_of(script, node.named_children[0]))
    if kind == "unary_expression":
        operator, operand = node.children[0], node.children[-1]
        if operator.type == "!":
            return _not(truth(script, operand))
        return _test_one(script, _text(operator), _tested(script, operand))
    if kind == "binary_expression":
        left, operator, right = node.children[0], _text(node.children[1]), node.children[-1]
        if operator in ("&&", "||", "-a", "-o"):
            word = {"-a": "&&", "-o": "||"}.get(operator, operator)
            return _both(word, truth(script, left), lambda: truth(script, right))
        return _test_two(script, _tested(script, left), operator, _tested(script, right))
    if kind == "command":
        return _truth_of_command(script, node)
    if kind in ("variable_assignment", "variable_assignments", "declaration_command", "redirected_statement"):
        follow(script, node)
        return True
    if kind in ("word", "string", "raw_string", "simple_expansion", "expansion", "concatenation", "number"):
        text = _tested(script, node)
        return None if script.reasons_in(text) else bool(text)
    return None


def _tested(script: Script, node: Node) -> str:
    script.unset_is_empty = True
    text = text_of(script, node)
    script.unset_is_empty = False
    return text


def _truth_of_command(script: Script, node: Node) -> bool | None:
    name = _text(node).split()[0]
    if name in ("true", ":"):
        return True
    if name == "false":
        return False
    if node.parent is not None and node.parent.type == "list":
        follow(script, node)
        return True  # cd FOLDER && python3 …
    return None


def _both(operator: str, left: bool | None, right) -> bool | None:
    decided = operator == "||"
    if left is decided:
        return decided
    other = right()
    return other if left is not None or other is decided else None


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _nonzero(value: int | None) -> bool | None:
    return None if value is None else value != 0


def _test_one(script: Script, operator: str, text: str) -> bool | None:
    if script.reasons_in(text):
        return None
    if operator in ("-z", "-n"):
        return (operator == "-z") == (not text)
    if operator == "-v":
        return text in script.variables
    return None  # files: those of the machine that trains


def _test_two(script: Script, left: str, operator: str, right: str) -> bool | None:
    if script.reasons_in(left + right):
        return None
    if operator in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if operator == "!=":
        return not fnmatch.fnmatchcase(left, right)
    compare = {"-eq": "__eq__", "-ne": "__ne__", "-gt": "__gt__", "-ge": "__ge__", "-lt": "__lt__", "-le": "__le__"}
    try:
        return getattr(int(left or 0), compare[operator])(int(right or 0))
    except (ValueError, KeyError):
        return None


# Words


def words_of(script: Script, node: Node) -> list[str]:
    """The words that a node of a command becomes: quotes removed, variables put in, unquoted values split."""
    words: list[str] = []
    current: str | None = None
    for part in _parts(script, node, quoted=False):
        pieces, splits = part
        if not splits:
            current = (current or "") + pieces[0] if pieces else current
            continue
        for index, piece in enumerate(pieces):
            if index > 0 and current is not None:
                words.append(current)
                current = None
            if piece or current is not None or splits == "array":
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
    elif kind == "ansi_c_string":
        yield [text[2:-1].encode().decode("unicode_escape")], ""
    elif kind in ("string", "translated_string"):
        yield from _string_parts(script, node if kind == "string" else node.named_children[0])
    elif kind in ("concatenation", "command_name"):
        for gap, child in _with_gaps(node):
            if gap:
                yield [gap], ""
            yield from _parts(script, child, quoted)
    elif kind in ("simple_expansion", "expansion"):
        lead = text[: text.index("$")]
        if lead and quoted:
            yield [lead], ""
        yield from _expanded(script, node, quoted)
    elif kind == "command_substitution":
        yield [_output_of(script, node)], ""
    elif kind == "arithmetic_expansion":
        inside = node.named_children
        value = number_of(script, inside[0]) if len(inside) == 1 else None
        yield [script.unknown(node, f"{text} cannot be computed") if value is None else str(value)], ""
    elif kind in ("process_substitution", "brace_expression"):
        yield [script.unknown(node, f"{text} is only known to a run")], ""
    elif kind == "word" and (text == "~" or text.startswith("~/")) and not quoted:
        yield [str(script.variables.get("HOME", "~")) + text[1:]], ""
    else:
        yield [re.sub(r"\\(\n|.)", lambda m: "" if m[1] == "\n" else m[1], text, flags=re.DOTALL)], ""


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
    if isinstance(value, list):
        yield value if quoted else [word for item in value for word in item.split()], "array"
    elif quoted:
        yield [value], ""
    else:
        # White space at either end separates from what stands next to it.
        yield re.split(r"\s+", value), "words"


def _value(script: Script, node: Node, name: str, default: bool = False) -> str | list[str]:
    if name in ("@", "*"):
        return list(script.arguments)
    if name == "#":
        return str(len(script.arguments))
    if name.isdigit() and name != "0":
        return script.arguments[int(name) - 1] if int(name) <= len(script.arguments) else ""
    value = script.variables.get(name)
    if value is None:
        if default or script.unset_is_empty:
            return ""
        return script.unknown(node, f"the variable {name} is set neither in the script nor in the environment")
    return value[0] if isinstance(value, list) and value else "" if isinstance(value, list) else value


def _braced(script: Script, node: Node) -> str | list[str]:
    """${NAME}, ${NAME[@]}, ${NAME:-text} and its kin, ${#NAME}, ${NAME#pattern}, ${NAME/pattern/text}, ${NAME^^}."""
    children = node.children[1:-1]
    length = bool(children) and children[0].type == "#" and len(children) > 1
    if length:
        children = children[1:]
    if not children or children[0].type in ("!", "#"):
        return script.unknown(node, f"{_text(node)} is only known to a run")
    target, rest = children[0], children[1:]
    operator = rest[0].type if rest else ""
    operand = _operand(script, rest[1:]) if rest else ""
    absent = operator in (":-", "-", ":=", "=", ":+", "+", ":?", "?")
    value = _element(script, target, absent) if target.type == "subscript" else _value(
        script, node, _text(target), absent
    )  # fmt: skip
    if length:
        return str(len(value))
    if absent:
        return _or_default(script, node, _text(target), operator, value, operand)
    if isinstance(value, list) and operator == ":" and operand.isdigit():
        first = int(operand)
        return value[max(0, first - 1) if _text(target) in ("@", "*") else first :]
    if isinstance(value, list) or not operator:
        return value if not operator else script.unknown(node, f"{_text(node)} is only known to a run")
    if script.reasons_in(value + operand):
        return value + operand
    changed = _changed(value, operator, operand, [_text(child) for child in rest])
    return script.unknown(node, f"{_text(node)} is not understood") if changed is None else changed


def _operand(script: Script, nodes: Sequence[Node]) -> str:
    return "".join(text_of(script, child) for child in nodes if child.is_named)


def _element(script: Script, node: Node, absent: bool) -> str | list[str]:
    """${NAME[@]} or ${NAME[2]}."""
    name, index = _text(node.named_children[0]), text_of(script, node.named_children[1])
    value = script.variables.get(name)
    if value is None and not absent:
        return script.unknown(node, f"the array {name} is not set in the script")
    values = _as_list(value)
    if index in ("@", "*"):
        return values
    if not index.isdigit() or int(index) >= len(values):
        return script.unknown(node, f"{_text(node)} is only known to a run")
    return values[int(index)]


def _or_default(script: Script, node: Node, name: str, operator: str, value: str | list[str], operand: str):
    there = bool(value) if operator.startswith(":") else name in script.variables
    if operator.endswith("+"):
        return operand if there else ""
    if operator.endswith("?") and not there:
        return script.unknown(node, f"the variable {name} is not set: {operand}")
    if operator.endswith("=") and not there:
        script.variables[name] = operand
    return value if there else operand


def _changed(value: str, operator: str, operand: str, words: list[str]) -> str | None:
    if operator in ("^^", ",,"):
        return value.upper() if operator == "^^" else value.lower()
    if operator in ("^", ","):
        return (value[:1].upper() if operator == "^" else value[:1].lower()) + value[1:]
    if operator in ("#", "##"):
        cuts = [value[i:] for i in range(len(value) + 1) if fnmatch.fnmatchcase(value[:i], operand)]
        return (cuts[0] if operator == "#" else cuts[-1]) if cuts else value
    if operator in ("%", "%%"):
        cuts = [value[:i] for i in range(len(value), -1, -1) if fnmatch.fnmatchcase(value[i:], operand)]
        return (cuts[0] if operator == "%" else cuts[-1]) if cuts else value
    if operator in ("/", "//") and len(words) >= 2 and not set(words[1]) & set("*?["):
        new = words[3] if len(words) > 3 else ""
        return value.replace(words[1], new, -1 if operator == "//" else 1)
    if operator == ":" and all(word.isdigit() for word in words[1::2]):
        start = int(words[1])
        return value[start : start + int(words[3])] if len(words) > 3 else value[start:]
    return None


PURE = {
    "pwd": lambda words: os.getcwd(),
    "basename": lambda words: os.path.basename(words[0].rstrip("/")).removesuffix(words[1] if words[1:] else ""),
    "dirname": lambda words: os.path.dirname(words[0]) or ".",
    "realpath": lambda words: os.path.realpath(words[-1]),
    "echo": lambda words: " ".join(words),
}
"""Commands whose output follows from their words alone, or is where this runs."""


def _output_of(script: Script, node: Node) -> str:
    inside = node.named_children
    if len(inside) == 1 and inside[0].type == "command":
        words = [word for child in inside[0].named_children for word in words_of(
            script, child.children[0] if child.type == "command_name" else child
        )]  # fmt: skip
        if words and words[0] in PURE and not any(script.reasons_in(w) or w.startswith("-") for w in words[1:]):
            try:
                return PURE[words[0]](words[1:])
            except IndexError:
                pass
    return script.unknown(node, f"{' '.join(_text(node).split())} is only known to a run")


def number_of(script: Script, node: Node) -> int | None:
    """The value of an arithmetic expression; None where it is unknown."""
    kind, text = node.type, _text(node)
    if kind in ("number", "word"):
        return int(text, 0) if re.fullmatch(r"\d+|0x[\da-fA-F]+", text) and not re.match(r"0\d", text) else None
    if kind == "variable_name":
        return _whole(script, _value(script, node, text))
    if kind in ("simple_expansion", "expansion", "string", "command_substitution", "arithmetic_expansion"):
        return _whole(script, text_of(script, node))
    if kind == "parenthesized_expression":
        return number_of(script, node.named_children[0])
    if kind == "unary_expression" and node.children[0].type in ("-", "+"):
        value = number_of(script, node.named_children[-1])
        return None if value is None else -value if node.children[0].type == "-" else value
    if kind == "ternary_expression":
        condition, yes, no = (number_of(script, child) for child in node.named_children)
        return None if condition is None else yes if condition else no
    if kind == "binary_expression" and len(node.children) == 3:
        left, right = number_of(script, node.children[0]), number_of(script, node.children[2])
        return None if left is None or right is None else _computed(left, node.children[1].type, right)
    return None


def _whole(script: Script, value: str | list[str]) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d+\s*", value):
        return int(value)
    return 0 if value == "" else None


def _computed(left: int, operator: str, right: int) -> int | None:
    if operator in ("/", "%"):
        if right == 0:
            return None
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # bash rounds towards zero
        return quotient if operator == "/" else left - right * quotient
    if operator in ("**", "<<", ">>") and not 0 <= right <= 64:
        return None
    table = {
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
        "**": lambda: left**right,
        "<<": lambda: left << right,
        ">>": lambda: left >> right,
        "<": lambda: int(left < right),
        ">": lambda: int(left > right),
        "<=": lambda: int(left <= right),
        ">=": lambda: int(left >= right),
        "==": lambda: int(left == right),
        "!=": lambda: int(left != right),
        "&&": lambda: int(bool(left and right)),
        "||": lambda: int(bool(left or right)),
    }
    return table[operator]() if operator in table else None


def _as_list(value: str | list[str] | None) -> list[str]:
    return value if isinstance(value, list) else [value] if value else []


def _all(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _all(child)


def _text(node: Node) -> str:
    return (node.text or b"").decode()
