"""verl's tool configs (multi_turn.tool_config_path): which of its tools are which here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from perl.base.paths import user_path
from perl.environments.sandbox import Limits
from perl.environments.tools import TOOLS
from perl.tools.from_verl.values import number, shown

FUSION, RETOOL = "verl.tools.sandbox_fusion_tools.SandboxFusionTool", "recipe.retool.retool.CustomSandboxFusionTool"
"""Classes that run code: verl's, and its recipe's, which takes code out of a block and prints the last line."""
SCALAR = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list", "object": "dict"}
"""JSON's types in a schema -> Python's."""


@dataclass(frozen=True)
class Tool:
    """A tool that is here too: its name, verl's seconds of a call, and what differs."""

    name: str
    seconds: float
    differs: str


def read_tools(file: str) -> list[Tool]:
    """The tools of a tool config. A ValueError, of one line, where it is none, or a tool is not here."""
    try:
        config = yaml.safe_load(user_path(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{file}: no such file here; start from-verl where verl is started, or name the file"
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: is no YAML file ({' '.join(str(error).split())})") from error
    tools = config.get("tools") if isinstance(config, dict) else None
    if not isinstance(tools, list) or not tools or not all(isinstance(each, dict) for each in tools):
        raise ValueError(f"{file}: no list of tools; verl's has tools: [{{class_name, config, tool_schema}}]")
    return [_tool(each, f"{file}: tools[{index}]") for index, each in enumerate(tools)]


def _tool(tool: dict[str, Any], where: str) -> Tool:
    """One entry; `where` it stands."""
    config = tool.get("config") or {}
    if not isinstance(tool.get("class_name"), str) or not isinstance(config, dict):
        raise ValueError(f"{where}: no class_name, or a config that is no mapping")
    kind, function = tool["class_name"], _function(tool, where)
    if "mcp" in tool or config.get("type") == "mcp":
        raise ValueError(f"{where} ({kind}): tools of MCP servers are not there; {_instead('NAME', '...')}")
    name = function.get("name") or "NAME"
    if kind not in (FUSION, RETOOL):
        raise ValueError(f"{where}: {kind} is a class on verl's BaseTool; {_instead(name, _arguments(function))}")
    language = config.get("default_language", "python")
    if language != "python":
        raise ValueError(f"{where}: default_language {shown(language)}: only python is there")
    if name not in TOOLS:
        raise ValueError(f"{where}: the tool that runs code is called {' or '.join(TOOLS)} here, not {name}; rename it")
    seconds = number(config.get("default_timeout", 30))
    differs = (
        f"code runs in perl's own sandbox, not at sandbox_fusion_url, with {min(seconds, Limits.timeout_s):g} s and"
        f" {Limits.memory_mb} MB a call"
    )
    if kind == RETOOL:
        differs += "; a last expression is printed, as there, but code in a ``` block is not taken out of it"
    return Tool(name, seconds, differs)


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
    if not isinstance(properties, dict):
        return "..."
    kinds = {name: each.get("type") if isinstance(each, dict) else None for name, each in properties.items()}
    return ", ".join(f"{name}: {SCALAR.get(str(kind), 'str')}" for name, kind in kinds.items())


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
