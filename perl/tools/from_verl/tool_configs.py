"""verl's tool configs (multi_turn.tool_config_path): which of its tools are which here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from perl.base.files import read_yaml
from perl.base.paths import user_path
from perl.environments.sandbox import Limits
from perl.environments.tools import TOOLS
from perl.tools.from_verl.values import above_0

FUSION, RETOOL = "verl.tools.sandbox_fusion_tools.SandboxFusionTool", "recipe.retool.retool.CustomSandboxFusionTool"
"""Classes that run code: verl's, and its recipe's, which takes code out of a block and prints the last line."""
SCALAR = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list", "object": "dict"}
"""JSON's types in a schema -> Python's."""
MOST_BYTES, MOST_DEPTH = 1 << 16, 100
NAME = re.compile(r"[A-Za-z_][\w.-]{0,199}", re.ASCII)
"""Of a class, a function, a language: what a message can show on its line."""


@dataclass(frozen=True)
class Tool:
    """A tool that is here too: its name, verl's seconds of a call, and what differs."""

    name: str
    seconds: float
    differs: str


def read_tools(file: str) -> list[Tool]:
    """The tools of a tool config. A ValueError, of one line, where it is none, or a tool is not here."""
    config = _content(file)
    tools = config.get("tools") if isinstance(config, dict) else None
    if not isinstance(tools, list) or not tools or not all(isinstance(each, dict) for each in tools):
        raise ValueError(f"{file}: no list of tools; verl's has tools: [{{class_name, config, tool_schema}}]")
    known = [_tool(each, f"{file}: tools[{index}]") for index, each in enumerate(tools)]
    names = [tool.name for tool in known]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{file}: two tools are called {twice[0]}; leave one out")
    return known


def _content(file: str) -> Any:
    """What the file holds."""
    place = user_path(file)
    try:
        if place.exists() and not place.is_file():  # of a pipe no end may come
            raise ValueError("a folder, a device or a pipe; name a YAML file")
        with place.open("rb") as handle:
            content = handle.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES >> 10} KiB; name a file with the tools alone")
        text = content.decode()
        _require_plain(text)
        return read_yaml(text)
    except FileNotFoundError:
        raise ValueError(
            f"{file}: no such file here; start from-verl where verl is started, or name the file"
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: is no YAML file ({' '.join(str(error).split())})") from error


def _require_plain(text: str) -> None:
    """A ValueError for an alias, as a few lines of them can stand for more than any memory holds, or for themselves;
    and for brackets that YAML's reader would need hours for."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"an alias in line {event.start_mark.line + 1}; write out what it stands for")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise ValueError("brackets nest too deep")


def _tool(tool: dict[str, Any], where: str) -> Tool:
    """One entry; `where` it stands."""
    config = tool.get("config") or {}
    if tool.get("class_name") is None or not isinstance(config, dict):
        raise ValueError(f"{where}: no class_name, or a config that is no mapping")
    kind, function = _name(tool["class_name"], f"{where}: class_name"), _function(tool, where)
    if "mcp" in tool or config.get("type") == "mcp":
        raise ValueError(f"{where} ({kind}): tools of MCP servers are not there; {_instead('NAME', '...')}")
    name = _name(function.get("name") or "NAME", f"{where}: its function's name")
    if kind not in (FUSION, RETOOL):
        raise ValueError(f"{where}: {kind} is a class on verl's BaseTool; {_instead(name, _arguments(function))}")
    language = _name(config.get("default_language", "python"), f"{where}: default_language")
    if language != "python":
        raise ValueError(f"{where}: default_language {language}: only python is there")
    if name not in TOOLS:
        raise ValueError(f"{where}: the tool that runs code is called {' or '.join(TOOLS)} here, not {name}; rename it")
    try:
        seconds = above_0(config.get("default_timeout", 30))
    except ValueError as error:
        raise ValueError(f"{where}: default_timeout: {error}") from error
    differs = (
        f"code runs in perl's own sandbox, not at sandbox_fusion_url, with {min(seconds, Limits.timeout_s):g} s and"
        f" {Limits.memory_mb} MB a call"
    )
    if kind == RETOOL:
        differs += "; a last expression is printed, as there, but code in a ``` block is not taken out of it"
    return Tool(name, seconds, differs)


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(f"{where} is no name; write letters, digits, _, - and dots, at most 200")
    return value


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """The schema's part that names the function; {} where the class has it itself."""
    schema = tool.get("tool_schema") or {}
    function = schema.get("function", {}) if isinstance(schema, dict) else None
    if not isinstance(function, dict):
        raise ValueError(f"{where}: its tool_schema is no schema of a function")
    return function


def _arguments(function: dict[str, Any]) -> str:
    """What the function takes, as Python writes it."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict) or not all(
        isinstance(each, str) and each.isidentifier() for each in properties
    ):
        return "..."
    kinds = {name: each.get("type") if isinstance(each, dict) else None for name, each in properties.items()}
    return ", ".join(
        f"{name}: {SCALAR.get(kind, 'str') if isinstance(kind, str) else 'str'}" for name, kind in kinds.items()
    )


def _instead(name: str, arguments: str) -> str:
    """What to write for a tool that is not here."""
    return (
        f"write def {name}({arguments}) -> str in a file of your own, its docstring with Args:, give multi_turn.enable="
        f"False here, and --config.environment.tools '[\"tools.py:{name}\"]' to the training"
    )


def allowed(tools: list[Tool]) -> float:
    """environment.tool_timeout_s, the seconds of a turn's calls, by which no call here ends before verl's or the
    sandbox's own limit: a call has half of it."""
    return 2 * max(min(tool.seconds, Limits.timeout_s) for tool in tools)
