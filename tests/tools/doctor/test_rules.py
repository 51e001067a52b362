"""The small rules behind the checks: version order, CANN's and HCCL's grammars, the table itself."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest

from perl.tools.doctor import versions
from perl.tools.doctor.checks.network import hccl_ports, matching_interfaces
from perl.tools.doctor.checks.runtime import ids_that_cann_reads
from perl.tools.doctor.checks.software import TRAINING_BOUNDS

ROOT = Path(__file__).parents[3]


def test_versions_are_ordered():
    rising = [
        "8.0.RC3",
        "8.0.0",
        "8.3.RC1",
        "8.3.RC2",
        "8.5.0",
        "8.5.1",
        "9.0.0-beta.1",
        "9.0.0",
        "24.1.rc3",
        "24.1.rc3.7",
    ]
    rising += ["24.1.0", "24.1.0.3", "25.0.rc1", "25.0", "25.2.1", "26.0.rc2"]
    for lower, higher in itertools.pairwise(rising):
        assert versions.compare(lower, higher) == -1, (lower, higher)
        assert versions.compare(higher, lower) == 1, (lower, higher)
    for lower, higher in [("0.18.0rc1", "0.18.0"), ("2.9.0", "2.9.0.post1"), ("2.9.0.post2", "2.10.0")]:
        assert versions.compare(lower, higher) == -1
    assert versions.compare("2.10", "2.10.0+cpu") == 0


@pytest.mark.parametrize(
    ("version", "spec", "met"),
    [
        ("2.9.1", "==2.9.0", False),
        ("2.9.0+cpu", "==2.9.0", True),
        ("2.9.0.post1", ">=2.9.0,<2.10", True),
        ("4.57.6", ">=4.57.4,<5", True),
        ("5.0.0rc1", ">=4.57.4,<5", True),  # a pre-release of 5 sorts below 5
        ("5.5.4", ">=4.57.4,<5", False),
    ],
)
def test_specifiers(version, spec, met):
    assert versions.satisfies(version, spec) is met


def test_the_table_contradicts_itself_nowhere():
    """The set meets every requirement that the table knows, and names the CANN that suits its packages."""
    assert versions.conflicts(versions.SET.packages) == []
    for name, table in versions.TABLE["cann"].items():
        assert table[versions.SET.packages[name]] == versions.series(versions.SET.cann)
    assert versions.series(versions.SET.cann) in versions.TABLE["driver"]


def test_what_differs_from_the_set():
    packages = {"torch": "2.9.1", "torch-npu": "2.10.0.post4", "other": "1.0"}
    assert versions.SET.changes(packages) == ["torch 2.9.1 -> 2.10.0"]


@pytest.mark.parametrize(
    ("value", "count", "read"),
    [
        ("0,1,2,3", 8, [0, 1, 2, 3]),
        ("1, 2,3", 8, [1]),  # CANN's documentation gives this very example
        ("1,3,8", 8, [1, 3]),  # and this one
        ("8", 8, []),
        ("", 8, []),
        ("0;1", 8, [0]),
        ("3,2", 8, [3, 2]),
    ],
)
def test_ids_that_cann_reads(value, count, read):
    assert ids_that_cann_reads(value, count) == read


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("enp,eth", ["eth0", "eth1", "enp1"]),
        ("^eth", ["enp1"]),
        ("^=eth0", ["eth1", "enp1"]),
    ],
)
def test_hccl_socket_ifname(rule, names):
    assert matching_interfaces(rule, ["lo", "eth0", "eth1", "enp1"]) == names


@pytest.mark.parametrize(
    ("env", "ports"),
    [
        ({}, [range(60000, 60032)]),
        ({"HCCL_IF_BASE_PORT": "50000"}, [range(50000, 50032)]),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "auto"}, []),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "60000,60050-60100"}, [range(60000, 60001), range(60050, 60101)]),
    ],
)
def test_hccl_ports(env, ports):
    assert hccl_ports(env) == ports


def test_bounds_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {}
    for line in project["dependencies"]:
        name, spec = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*(.*)", line).groups()
        declared[name] = spec
    assert {name: declared[name] for name in TRAINING_BOUNDS} == TRAINING_BOUNDS
