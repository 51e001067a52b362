"""Fixtures that several folders of tests share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.npuemu import emulator

REPOSITORY = Path(__file__).resolve().parent.parent


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
    """`run_npu([...], devices=2, check=True, timeout=300, cwd=None, **variables)`: run a command on emulated NPUs.

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
        env = npu_env(devices, **variables)
        done = subprocess.run(
            [*command], env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            pytest.fail(f"exit code {done.returncode}: {command}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
        return done

    return run
