"""Every pin of this checkout against what pip's package registry offers now: what has moved.

    python -m scripts.pins [--json]

The registry is asked as `pip index versions` does, so that pip's configuration (index, proxy, certificates, passwords)
holds. Ascend's files are asked for aarch64 and Python 3.11, whatever runs here.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from perl.base.errors import UserError, report_errors
from perl.config.parser import Parser
from perl.tools.doctor.versions import SET, TABLE, release

ROOT = Path(__file__).resolve().parents[1]
TABLE_OF = "docs/ascend.md"
"""Shows the set of versions.json."""
AT_ONCE = 8
AARCH64 = [
    *("--python-version", "3.11", "--platform", "linux_aarch64", "--platform", "manylinux2014_aarch64"),
    *(word for minor in range(17, 40) for word in ("--platform", f"manylinux_2_{minor}_aarch64")),
]
BROKEN = re.compile(r"connection broken by '(.*?)': /|not a trusted or secure host")


@dataclass(frozen=True)
class Pin:
    """A package in one place of this checkout."""

    where: str
    """File, and which part of it."""
    name: str
    bounds: SpecifierSet
    """As written there; of an exact pin, what pyproject.toml and the compatibility table allow instead."""
    version: str | None
    """The exact pin; None: only bounds."""
    ascend: bool
    """To be installed on aarch64 with Python 3.11."""


@dataclass(frozen=True)
class Row:
    """What the registry offers for a pin."""

    pin: Pin
    within: str | None
    """The newest within the bounds; None: there is none."""
    newest: str | None
    offered: bool
    """Whether the pinned version, or any within the bounds, is there."""

    @property
    def moved(self) -> bool:
        """Something newer is there, or what is pinned is not."""
        held = self.pin.version or self.within
        return not self.offered or held is None or (self.newest is not None and Version(self.newest) > Version(held))


def show_versions(root: Path = ROOT, as_json: bool = False) -> int:
    """Print what has moved; returns 0.

    Raises:
        UserError: no checkout, or the registry does not answer.
    """
    pins = list(pins_of(root))
    if not pins:
        raise UserError(f"no requirements_*.txt in {root}; run it in a checkout of the repository")
    rows = compare(pins)
    print(_as_json(rows) if as_json else _as_text(rows))
    return 0


def pins_of(root: Path) -> Iterator[Pin]:
    """The requirements files, pyproject.toml's bounds, and the set of docs/ascend.md's compatibility table."""
    project = {requirement.name: requirement.specifier for _, requirement in _of_project(root)}
    for file in sorted(root.glob("requirements_*.txt")):
        requirements = list(_of_file(file))
        exact: dict[str, str] = {canonicalize_name(r.name): v for r in requirements if (v := _exact(r.specifier))}
        npu = "npu" in file.name
        pinned = SET.packages | exact if npu else exact  # an environment holds both files, and vllm
        for requirement in requirements:
            yield _pin(file.name, requirement.name, requirement.specifier, pinned, project, npu)
    for where, requirement in _of_project(root):
        yield _pin(where, requirement.name, requirement.specifier, {}, {}, False)
    if (root / TABLE_OF).is_file():
        for name, version in SET.packages.items():
            yield _pin(TABLE_OF, name, SpecifierSet(f"=={version}"), SET.packages, project, True)


def compare(pins: list[Pin]) -> list[Row]:
    """Ask the registry, each package once a platform."""
    asked = sorted({(pin.name, pin.ascend) for pin in pins})
    print(f"asking pip's package registry about {len(asked)} packages", file=sys.stderr)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            offers = dict(zip(asked, pool.map(lambda one: offered(*one), asked), strict=True))
        except UserError:
            pool.shutdown(cancel_futures=True)
            raise
    return [_row(pin, offers[pin.name, pin.ascend]) for pin in pins]


def offered(name: str, ascend: bool) -> list[Version]:
    """Versions in the registry, pre-releases included, that can be installed here, or on Ascend's platform: there as
    wheels, unless no release of the package has one.

    Raises:
        UserError: the registry does not answer.
    """
    if not ascend:
        return _index_versions(name)
    wheels = _index_versions(name, *AARCH64, "--only-binary=:all:")
    released = any(not version.is_prerelease for version in wheels)  # deepspeed: some early wheels, then sources alone
    return wheels if released else _index_versions(name, *AARCH64)


def _index_versions(name: str, *flags: str) -> list[Version]:
    finder, broken = _finder(*flags)
    if available := finder.find_all_candidates(name):
        return [Version(str(candidate.version)) for candidate in available]
    if broken:
        raise UserError(f"pip's package registry does not answer ({broken[0]}); look at `pip config list`")
    return []


@cache
def _finder(*flags: str) -> tuple[Any, list[str]]:
    """What `pip index versions` asks with (its parts, since a process of pip for each package takes minutes), and why
    connections broke so far."""
    try:
        from pip._internal.cli.cmdoptions import make_target_python
        from pip._internal.commands.index import IndexCommand
    except ImportError as error:
        raise UserError(f"there is no pip in {sys.prefix}; {sys.executable} -m ensurepip") from error
    command = IndexCommand("index", "")
    options, _ = command.parse_args(["versions", "x", "--pre", "--retries", "1", *flags])
    broken: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        if found := BROKEN.search(record.getMessage()):
            broken.append(found[1] or found[0])
        return False

    logging.getLogger("pip").addHandler(logging.NullHandler())  # its own lines
    for source in ("pip._vendor.urllib3.connectionpool", "pip._internal.index.collector", "pip._internal.network"):
        logging.getLogger(source).addFilter(note)
    session = command._build_session(options)
    return command._build_package_finder(options, session, make_target_python(options)), broken


def _row(pin: Pin, versions: list[Version]) -> Row:
    candidates = Version(pin.version).is_prerelease if pin.version else bool(pin.bounds.prereleases)
    released = [version for version in versions if candidates or not version.is_prerelease]
    within = [version for version in released if version in pin.bounds]
    there = Version(pin.version) in versions if pin.version else bool(within)
    return Row(pin, str(max(within)) if within else None, str(max(released)) if released else None, there)


def _of_file(file: Path) -> Iterator[Requirement]:
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text and not text.startswith("-"):
            yield Requirement(text)


def _of_project(root: Path) -> Iterator[tuple[str, Requirement]]:
    file = root / "pyproject.toml"
    if not file.is_file():
        return
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    groups = {"": project.get("dependencies", []), **project.get("optional-dependencies", {})}
    for group, lines in groups.items():
        for line in lines:
            yield f"{file.name}{f' [{group}]' if group else ''}", Requirement(line)


def _pin(
    where: str,
    name: str,
    specifier: SpecifierSet,
    pinned: Mapping[str, str],
    project: Mapping[str, SpecifierSet],
    ascend: bool,
) -> Pin:
    name, version = canonicalize_name(name), _exact(specifier)
    bounds = specifier
    if version is not None:
        # An environment of its own may lie outside some bounds on purpose: only those count that the pin itself meets.
        wanted = [project.get(name, SpecifierSet()), *_table_bounds(name, pinned)]
        bounds = SpecifierSet()
        for bound in wanted:
            bounds &= bound if bound.contains(version, prereleases=True) else SpecifierSet()
    return Pin(where, name, bounds, version, ascend)


def _table_bounds(name: str, pinned: Mapping[str, str]) -> Iterator[SpecifierSet]:
    """What the other pins of the same environment want of `name`, by versions.json."""
    for other, releases in TABLE["requires"].items():
        if spec := releases.get(pinned.get(other, ""), {}).get(name):
            yield SpecifierSet(spec)
    for one, other in TABLE["same_release"].items():
        if name in (one, other) and {one, other} <= pinned.keys():
            yield SpecifierSet(f"=={release(pinned[other])}.*")


def _exact(specifier: SpecifierSet) -> str | None:
    versions = [spec.version for spec in specifier if spec.operator == "==" and not spec.version.endswith("*")]
    return versions[0] if versions else None


def _as_text(rows: list[Row]) -> str:
    moved = [row for row in rows if row.moved]
    head = ("package", "where", "pinned", "newest within bounds", "newest")
    lines = [head, *(_cells(row) for row in moved)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    shown = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    missing = sum(not row.offered for row in rows)
    count = f"{len(moved)} of {len(rows)} pins and bounds have moved; {missing} name a version that is not offered"
    return "\n".join([*(shown if moved else []), count])


def _cells(row: Row) -> tuple[str, ...]:
    pinned = row.pin.version or str(row.pin.bounds) or "any"
    gone = "" if row.offered else " (not offered)"
    return row.pin.name, row.pin.where, pinned + gone, row.within or "none", row.newest or "none"


def _as_json(rows: list[Row]) -> str:
    return json.dumps(
        [
            {
                "package": row.pin.name,
                "where": row.pin.where,
                "pinned": row.pin.version,
                "bounds": str(row.pin.bounds),
                "newest_within_bounds": row.within,
                "newest": row.newest,
                "offered": row.offered,
                "moved": row.moved,
            }
            for row in rows
        ],
        indent=2,
    )


def make_parser() -> Parser:
    parser = Parser(description="What of this checkout's pins has moved in pip's package registry.")
    parser.add_argument("--json", action="store_true", help="print one JSON list, of all pins, instead of a table")
    return parser


if __name__ == "__main__":
    with report_errors():
        sys.exit(show_versions(as_json=make_parser().parse_args().json))
