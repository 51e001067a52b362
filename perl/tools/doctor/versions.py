"""Version numbers and the table of what goes with what (versions.json)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

TABLE = json.loads((Path(__file__).parent / "versions.json").read_text(encoding="utf-8"))

_STAGES = {"dev": 0, "alpha": 1, "a": 1, "beta": 2, "b": 2, "rc": 3, "post": 6}
_NUMBER = 5  # above every pre-release stage, below "post"


@dataclass(frozen=True)
class Set:
    """The environment on Ascend."""

    install: str
    cann: str
    python: str
    packages: dict[str, str]

    def changes(self, packages: dict[str, str]) -> list[str]:
        """What of the installed `packages` differs: "torch 2.9.1 -> 2.9.0"."""
        return [
            f"{name} {packages[name]} -> {version}"
            for name, version in self.packages.items()
            if name in packages and compare(packages[name], version) != 0
        ]


SET = Set(**TABLE["set"])


def key(version: str) -> tuple[tuple[int, int], ...]:
    """Sorts Python's, CANN's and the driver's versions: 8.3.RC2 < 8.3.0 < 8.5, 2.9.0 < 2.9.0.post1 < 2.10.0.

    A local part ("+cpu") is dropped: it names the build, not the version.
    """
    parts = re.findall(r"\d+|[a-z]+", version.lower().split("+")[0])
    result: list[tuple[int, int]] = []
    for i, part in enumerate(parts):
        if part.isdigit():
            if i and parts[i - 1] in _STAGES:
                result[-1] = (result[-1][0], int(part))
            else:
                result.append((_NUMBER, int(part)))
        elif part in _STAGES:
            result.append((_STAGES[part], 0))
    while result and result[-1] == (_NUMBER, 0):
        result.pop()
    return tuple(result)


def compare(left: str, right: str) -> int:
    """-1, 0 or 1."""
    a, b = key(left), key(right)
    length = max(len(a), len(b))
    pad = ((_NUMBER, 0),)
    a, b = a + pad * (length - len(a)), b + pad * (length - len(b))
    return (a > b) - (a < b)


def satisfies(version: str, spec: str) -> bool:
    """Whether `version` meets a specifier such as ">=4.57.4,<5" or "==2.9.0"."""
    for clause in spec.split(","):
        match = re.fullmatch(r"\s*(==|>=|<=|<|>)\s*(\S+)\s*", clause)
        if not match:
            raise ValueError(f"versions.json: cannot read the specifier {clause!r}")
        order = compare(version, match[2])
        if not {"==": order == 0, ">=": order >= 0, "<=": order <= 0, "<": order < 0, ">": order > 0}[match[1]]:
            return False
    return True


def series(version: str) -> str:
    """Its first two numbers: "8.5" of "8.5.1", "9.1" of "9.1.0"."""
    return ".".join(re.findall(r"\d+", version)[:2])


def conflicts(packages: dict[str, str]) -> list[str]:
    """Each requirement of an installed package that another installed package does not meet, as a clause."""
    result = []
    for name, other in TABLE["same_release"].items():
        if name in packages and other in packages and release(packages[name]) != release(packages[other]):
            wants = f"{other}=={release(packages[name])}"
            result.append(f"{name} {packages[name]} wants {wants}, found {packages[other]}")
    for name, releases in TABLE["requires"].items():
        for wanted, spec in releases.get(_public(packages.get(name, "")), {}).items():
            if wanted in packages and not satisfies(packages[wanted], spec):
                result.append(f"{name} {packages[name]} wants {wanted}{spec}, found {packages[wanted]}")
    return result


def unlisted(packages: dict[str, str]) -> list[str]:
    """Installed releases of Ascend's packages that the table does not know, so that nothing is said of them."""
    return [
        f"{name} {packages[name]}"
        for name, table in TABLE["cann"].items()
        if name in packages and _public(packages[name]) not in table
    ]


def release(version: str) -> str:
    """Its first three numbers: "2.9.0" of "2.9.0.post1+cpu"."""
    return ".".join(re.findall(r"\d+", _public(version))[:3])


def _public(version: str) -> str:
    return version.split("+")[0]
