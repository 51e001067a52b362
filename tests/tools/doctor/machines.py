"""Staged machines: machines/NAME.toml holds facts and the verdict that is expected of them.

`base` is another machine to start from, `remove` a list of paths (["env", "ASCEND_HOME_PATH"]) taken out of it, and a
string "@name.txt" stands for the text of outputs/name.txt.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from perl.tools.doctor.machine import Command, Device, Machine, Process

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in (HERE / "machines").glob("*.toml"))


def facts(name: str) -> dict[str, Any]:
    staged = tomllib.loads((HERE / "machines" / f"{name}.toml").read_text(encoding="utf-8"))
    result = facts(staged["base"]) if "base" in staged else {}
    for path in staged.get("remove", []):
        parent = result
        for key in path[:-1]:
            parent = parent[key]
        del parent[path[-1]]  # a KeyError means that the fixture no longer removes anything
    return _merge(result, staged.get("facts", {}))


def machine(name: str) -> Machine:
    return from_facts(facts(name))


def from_facts(facts: dict[str, Any]) -> Machine:
    """Unknown names are an error: a misspelt fact would be ignored."""
    unknown = set(facts) - {f.name for f in fields(Machine)}
    if unknown:
        raise ValueError(f"unknown facts: {', '.join(sorted(unknown))}")
    facts = dict(facts)
    facts["commands"] = {name: Command(**c) for name, c in facts.get("commands", {}).items()}
    facts["devices"] = {path: Device(**d) for path, d in facts.get("devices", {}).items()}
    facts["processes"] = [Process(**p) for p in facts.get("processes", [])]
    return Machine(**facts)


def expected(name: str) -> dict[str, Any]:
    staged = tomllib.loads((HERE / "machines" / f"{name}.toml").read_text(encoding="utf-8"))
    kind = expected(staged["base"])["kind"] if "base" in staged else ""
    return {"kind": kind, "failures": [], "warnings": [], "says": []} | staged["expect"]


def _merge(base: Any, change: Any) -> Any:
    if isinstance(base, dict) and isinstance(change, dict):
        return base | {key: _merge(base.get(key), value) for key, value in change.items()}
    if isinstance(change, dict):
        return {key: _merge(None, value) for key, value in change.items()}
    if isinstance(change, str) and change.startswith("@"):
        return (HERE / "outputs" / change[1:]).read_text(encoding="utf-8")
    return change
