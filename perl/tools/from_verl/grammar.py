"""The tree of a bash script, by tree-sitter's grammar, put right where the grammar reads otherwise than bash."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from perl.base.errors import UserError

PLACEHOLDER = re.compile(rb"(?<=\s)([+]{0,2}[A-Za-z_][\w.]*=)(<[A-Za-z][\w -]*>[\w./-]*)(?=[\s\\;]|$)")
"""KEY=<path>, which a shell would take for redirections."""
STAND_INS = {b"[": "\ue002".encode(), b"{": "\ue003".encode()}
"""For what the grammar does not read at the beginning of ${NAME:-…}."""
MOST_PASSES = 20
"""Over a script, each of which puts right all that it finds."""
Edit = tuple[int, int, bytes]
"""From where to where, and what stands there instead."""


def tree_of(source: bytes, place: str) -> Node:
    """The tree of a script.

    Raises:
        UserError: it is no bash.
    """
    for _ in range(MOST_PASSES):
        root = Parser(Language(tree_sitter_bash.language())).parse(source).root_node
        edits = [*_placeholders(root, source)] or [edit for node in nodes_in(root) for edit in _edits(node, source)]
        if root.has_error:
            edits = [it for it in edits if it[2] in STAND_INS.values() or it[2].startswith(b"'<")] or _rescues(source)
        bad = next((node for node in nodes_in(root) if node.type == "ERROR" or node.is_missing), None)
        if bad is not None and not edits:
            text = raw(bad).strip().splitlines() or ["something is missing"]
            raise UserError(f"{place}:{bad.start_point[0] + 1}: not bash: {text[0]:.60}")
        if not edits:
            return root
        pieces, end = [], 0
        for start, stop, text in sorted(edits):
            if start >= end:
                pieces += [source[end:start], text]
                end = stop
        source = b"".join([*pieces, source[end:]])
    raise UserError(f"{place}: brackets and redirections nest too deep; give a script with the one command")


def _placeholders(root: Node, source: bytes) -> Iterator[Edit]:
    for found in PLACEHOLDER.finditer(source):
        node = root.descendant_for_byte_range(found.start(2), found.start(2))
        while node is not None and node.type not in ("string", "raw_string", "heredoc_body", "comment"):
            node = node.parent
        if node is None:
            yield found.start(2), found.end(2), b"'" + found[2] + b"'"


def _rescues(source: bytes) -> list[Edit]:
    """What makes errors of the grammar: `# comment` between lines that go on, and [ -d / ]."""
    found = re.finditer(rb"(?<=\s)(?:`#[^`\n]*`|/(?=\s*\]))", source)
    return [(it.start(), it.end(), b"'/'" if it[0] == b"/" else b" ") for it in found]


def _edits(node: Node, source: bytes) -> Iterator[Edit]:
    """(from, to, what stands there instead) where the grammar groups otherwise than bash."""
    ends_in_tick = source[node.end_byte - 1 : node.end_byte] == b"`"
    if ends_in_tick and node.type == "command_substitution":  # `…` ends a word before it
        lead, _, inside = source[node.start_byte : node.end_byte - 1].partition(b"`")
        escaped = rb"\\([$`\\\"])" if _outside(node) == "string" else rb"\\([$`\\])"
        yield node.start_byte, node.end_byte, lead + b"$(" + re.sub(escaped, rb"\1", inside) + b")"
    start, before = node.start_byte - 2, node.prev_sibling
    begins = before is not None and before.end_byte <= start and source[start : start + 2] == b"\\ " and node.is_named
    is_value = node.type.endswith(("expansion", "substitution", "string"))
    escape = re.compile(rb"\\([ -&(-\[\]-~])").match(source, node.end_byte) if is_value else None
    if (escape or begins) and not _outside(node).endswith(("string", "expansion")):
        if escape:  # $A\] ends a word
            yield node.end_byte, escape.end(), b"'" + escape[1] + b"'"
        if begins:  # of a word that begins with it, \ and a space are lost
            yield start, start + 2, b"' '"
    plain = node.type == "$" and node.parent is not None and node.parent.type in ("concatenation", "command", "array")
    if plain and (name := re.compile(rb"[A-Za-z_]\w*|[\d@*#]").match(source, node.end_byte)):  # [a,$NAME
        yield node.start_byte, name.end(), b"${" + name[0] + b"}"
    if node.type == "ERROR" and node.text in STAND_INS and source[: node.start_byte][-1:] in (b"-", b"+", b"="):
        yield node.start_byte, node.end_byte, STAND_INS[node.text]
    if node.type in ("command", "declaration_command"):
        for (_, child), (gap, after) in itertools.pairwise(with_gaps(node)):
            if child.type == "variable_assignment" and "\n" in gap.replace("\\\n", ""):
                yield child.end_byte, child.end_byte, b";"  # several on a line, taken for the beginning of the next
            elif child.type == "variable_assignment" and gap.startswith("\\\n"):  # ends what it sets, or joins the next
                joins = not gap.replace("\\\n", "")
                yield child.end_byte, after.start_byte if joins else child.end_byte, b"" if joins else b" "
                yield after.end_byte, after.end_byte, gap.encode() if joins else b""
    elif node.type == "heredoc_redirect":
        yield from _more_behind(node)
    elif node.type == "file_redirect" and len(files := node.children_by_field_name("destination")) > 1:
        # The command's words behind a redirection, taken for files; which file does not matter here.
        text = (node.text or b"")[: files[0].end_byte - node.start_byte]
        yield node.start_byte, files[0].end_byte, re.sub(rb"(\\\n)|[^\n]", lambda m: m[1] or b" ", text)


def _outside(node: Node) -> str:
    """What the word stands in that the node is a part of."""
    parent = node.parent
    return _outside(parent) if parent is not None and parent.type == "concatenation" else parent.type if parent else ""


def _more_behind(heredoc: Node) -> Iterator[Edit]:
    """Take out a text of << with commands behind it on its line, which the grammar takes for a part of it."""
    parts = {child.type: child for child in reversed(heredoc.children)}
    ends = [parts[kind] for kind in ("heredoc_body", "heredoc_end") if kind in parts]
    if ends and {"&&", "||", "pipeline"} & parts.keys():
        yield heredoc.start_byte, parts["heredoc_start"].end_byte, b" "
        lines = (heredoc.text or b"")[ends[0].start_byte - heredoc.start_byte :].count(b"\n")
        yield ends[0].start_byte, ends[-1].end_byte, b"\n" * lines


def grouped(node: Node) -> list[list[Node]]:
    """The words of a command, an array or a loop: those that only a backslash at the end of a line parts are one."""
    groups: list[list[Node]] = []
    joins = False
    for gap, child in with_gaps(node):
        is_word = (child.is_named and child.type not in ("comment", "variable_assignment")) or child.type == "$"
        is_word = is_word and not child.type.endswith("redirect")
        if is_word and joins and not gap.replace("\\\n", ""):
            groups[-1].append(child)
        elif is_word:
            groups.append([child])
        joins = is_word
    return groups


def with_gaps(node: Node) -> Iterator[tuple[str, Node]]:
    """Each child with the text between it and the one before, which the tree leaves out."""
    end, whole = node.start_byte, node.text or b""
    for child in node.children:
        yield whole[end - node.start_byte : child.start_byte - node.start_byte].decode(), child
        end = child.end_byte


def nodes_in(node: Node) -> Iterator[Node]:
    """It and all below it, in order."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        yield node
        nodes += reversed(node.children)


def raw(node: Node, longest: int | None = None) -> str:
    """Its text, as the script has it; no more than its first bytes where there is a `longest`."""
    return (node.text or b"")[:longest].decode(errors="replace").replace("\ue002", "[").replace("\ue003", "{")
