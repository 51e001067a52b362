"""Fixtures that several folders of tests share."""

from __future__ import annotations

import gc
import importlib
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest

from perl.base.errors import say_once
from tests.npuemu import emulator

REPOSITORY = Path(__file__).resolve().parent.parent

# TRL imports vLLM wherever it is installed, which takes seconds in every process; the tests that train with vLLM do so
# in processes of their own.
setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda min_version=None: False)  # noqa: B010

UNTIL = float(os.environ.get("PERL_TESTS_UNTIL", "inf"))
"""Seconds since the epoch after which no test is begun: CI has 90 minutes, and on a slow processor the whole takes
longer."""
if "PYTEST_XDIST_WORKER" in os.environ:  # a test may run others
    os.environ.pop("PERL_TESTS_UNTIL", None)

AT_START = dict(os.environ)
OF_TRACKERS = ("TENSORBOARD_", "WANDB_", "TRACKIO_", "HF_TOKEN")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A run that may not come to its end begins with another module each time, so that none is always left out."""
    if math.isfinite(UNTIL):
        modules = list(dict.fromkeys(item.path for item in items))
        first = int(UNTIL) % max(1, len(modules))
        order = {path: place for place, path in enumerate(modules[first:] + modules[:first])}
        items.sort(key=lambda item: order[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > UNTIL:
        pytest.skip("PERL_TESTS_UNTIL: the time of this run is used up")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a library has logged of damaged input may hold half a character, which ends xdist as it sends the report."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="module")
def quick_collections():
    """Each training collects garbage once; to walk over all modules imported so far takes longer than to train."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _nothing_is_left_for_the_next_test():
    """Of what a run in this process changes: the environment, the level of our log, what `say_once` has said."""
    before = dict(os.environ)
    say_once.cache_clear()
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    for name in os.environ.keys() - AT_START.keys():
        if name.startswith(OF_TRACKERS):  # `before` holds those of a run that a fixture of the module made
            del os.environ[name]
    logging.getLogger("perl").setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def npu_env() -> Callable[..., dict[str, str]]:
    """`npu_env(devices=2, **variables)`: the environment of a subprocess that sees emulated NPUs."""
    try:
        emulator.build()
    except emulator.NoCompilerError as missing:
        pytest.skip(f"emulated NPU: {missing}")
    return emulator.environment


@pytest.fixture(scope="session")
def run_npu(npu_env: Callable[..., dict[str, str]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_npu([...], devices=2, check=True, timeout=300, **variables)`: run a command on emulated NPUs.

    The result's stdout and stderr are text. With `check`, a command that fails fails the test and shows its output.
    """

    def run(
        command: Sequence[str],
        *,
        devices: int = 2,
        check: bool = True,
        timeout: float = 300,
        cwd: Path = REPOSITORY,
        **variables: str | int,
    ) -> subprocess.CompletedProcess[str]:
        process = subprocess.Popen(
            [*command],
            env=npu_env(devices, **variables),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a launcher's workers end with it
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            pytest.fail(f"no end after {timeout} s: {command}\n{stdout[-4000:]}\n{stderr[-8000:]}")
        if check and process.returncode:
            pytest.fail(f"exit code {process.returncode}: {command}\n{stdout[-4000:]}\n{stderr[-8000:]}")
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    return run
