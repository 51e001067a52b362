"""What the Makefile hands to the scripts that it starts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("where", ["command line", "environment"])
def test_the_quickstart_runs_in_the_environment_that_make_has_made(where, tmp_path):
    """PYTHON is what .venv is made with, and has nothing of what is installed there."""
    for file in ("Makefile", "requirements_cpu.txt", "pyproject.toml", "scripts/quickstart.sh"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / file, tmp_path / file)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$0 $2"\n')
    python.chmod(0o755)
    (tmp_path / ".venv" / ".installed-train").touch()
    command = ["make", "--no-print-directory", "quickstart"]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "PYTHON")}
    if where == "command line":
        command.append("PYTHON=/usr/bin/false")
    else:
        environment["PYTHON"] = "/usr/bin/false"
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(python), "perl.tools.quickstart"]
