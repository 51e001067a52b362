"""How models write calls of tools: a parser for each family, by vLLM's names of them (--tool-call-parser).

A call is as OpenAI's API has it, {"type": "function", "function": {"name": …, "arguments": {…}}}; one that can't be
read has "error" besides, in words for the model. Several of a turn stand in their order.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

Call = dict[str, Any]
Parser = Callable[[str], tuple[str, list[Call]]]
"""From the text of a turn, special tokens included, to what is left of it without its calls, and these."""

PARSER_FLAG = "--config.environment.tool_call_parser"
PYTHON_TAG = "<|python_tag|>"
DEEPEST = 64
"""Brackets of a call in each other: pickle and json take hundreds."""
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FENCE = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```", re.DOTALL)


def hermes_calls(text: str) -> tuple[str, list[Call]]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them: Hermes 2, Qwen2.5, Qwen3."""
    return _HERMES.sub("", text).strip(), [_call(each) for each in _HERMES.findall(text)]


def llama3_calls(text: str) -> tuple[str, list[Call]]:
    """The whole turn is `{"name": …, "parameters": {…}}`, several with `;` between them, or Python code behind
    `<|python_tag|>`. A JSON object without these two is an answer."""
    tagged = PYTHON_TAG in text
    rest = text.rpartition(PYTHON_TAG)[2].strip()
    if not rest.startswith("{"):
        return (text.partition(PYTHON_TAG)[0].strip(), [_python(rest)]) if tagged else (text, [])
    calls: list[Call] = []
    while rest.startswith("{"):
        try:
            _, end = json.JSONDecoder(strict=False).raw_decode(rest)
        except (ValueError, RecursionError):
            end = len(rest)
        if not (tagged or calls or _states_a_call(rest[:end])):
            return text, []
        calls.append(_call(rest[:end]))
        rest = rest[end:].lstrip("; \n")
    return text.partition(PYTHON_TAG)[0].strip() if tagged else rest, calls


def _states_a_call(text: str) -> bool:
    """Of one that can't be read, by its words."""
    try:
        stated = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return '"name"' in text and ('"parameters"' in text or '"arguments"' in text)
    return "name" in stated and ("parameters" in stated or "arguments" in stated)


def python_fences(text: str) -> tuple[str, list[Call]]:
    """Blocks ```` ```python … ``` ````, each a call of the tool `python` (ReTool, arXiv 2504.11536). They stay in the
    text."""
    return text, [_python(code) for code in _FENCE.findall(text)]


PARSERS: dict[str, Parser] = {"hermes": hermes_calls, "llama3_json": llama3_calls, "python_fence": python_fences}


def read_calls(text: str, parser: Parser, thinking: bool = False) -> tuple[str, list[Call]]:
    """As `parser`, of what stands behind the reasoning that a turn begins with: what a model thinks of calling is no
    call. Further on the marks are words, of an argument's code perhaps.

    Args:
        thinking: the prompt ends with <think>.
    """
    thought, closed, said = "", "", text
    if thinking or text.lstrip().startswith("<think>"):
        thought, closed, said = text.partition("</think>")
    rest, calls = parser(said)
    return thought + closed + rest, calls


def _python(code: str) -> Call:
    return {"type": "function", "function": {"name": "python", "arguments": {"code": code}}}


def _call(text: str) -> Call:
    try:
        stated = _read(text)
    except (ValueError, RecursionError) as error:
        return _unreadable("", f"the call is no JSON: {error}")
    if not isinstance(stated, dict) or not isinstance(name := stated.get("name"), str):
        return _unreadable("", 'the call names no tool; write {"name": "...", "arguments": {...}}')
    arguments = stated.get("arguments", stated.get("parameters", {}))
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = _read(arguments)
    if not isinstance(arguments, dict):
        return _unreadable(name, "the arguments of the call are no JSON object")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _read(text: str) -> Any:
    """What files and other processes take too. Raises ValueError, or RecursionError."""
    read = json.loads(text, strict=False)  # models leave line breaks in strings as they are
    json.dumps(read, ensure_ascii=False, allow_nan=False).encode()  # half of a surrogate pair is no text, NaN no JSON
    level, depth = [read], 0
    while nested := [one for one in level if isinstance(one, dict | list)]:
        if (depth := depth + 1) > DEEPEST:
            raise ValueError(f"more than {DEEPEST} brackets stand in each other")
        level = [each for one in nested for each in (one.values() if isinstance(one, dict) else one)]
    return read


def _unreadable(name: str, error: str) -> Call:
    return {"type": "function", "function": {"name": name, "arguments": {}}, "error": error}
