"""How every entry point ends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perl.errors import UserError, lookup

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command",
    [["bash", "scripts/check_npu_env.sh"], [sys.executable, "-m", "perl"], [sys.executable, "-u", "-m", "perl"]],
)
def test_a_reader_that_goes_away_ends_the_command_quietly(command):
    """`| head -1`, with the reader gone before the first line."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=120)
    assert said == ""
    assert process.returncode == 141


@pytest.mark.parametrize(
    "command",
    [
        "-m perl compare --help",
        "-m perl doctor --help",
        "-m perl grade --help",
        "-m perl merge --help",
        "-m perl prepare --help",
        "-m perl report --help",
        "-m perl.train --help",
        "perl/eval.py --help",
    ],
)
def test_the_first_line_of_every_command_is_enough(command):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} {command} | head -1"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("usage: ")
    assert done.stderr == ""


def test_a_table_whose_reader_goes_away_ends_quietly():
    """rich answers a closed pipe with exit code 1; the evaluator and `compare` print through it."""
    code = (
        "from rich.console import Console\n"
        "from perl.errors import report_errors\n"
        "with report_errors():\n"
        "    Console().print('a table')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=120)
    assert (process.returncode, said) == (141, "")


def test_another_broken_pipe_is_no_reason_to_be_quiet():
    code = "from perl.errors import report_errors\nwith report_errors():\n    raise BrokenPipeError('a worker is gone')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "a worker is gone" in done.stderr


def test_a_name_in_another_case_is_found():
    with pytest.raises(UserError, match="did you mean 'gsm8k'"):
        lookup({"gsm8k": 1, "math": 2}, "GSM8K", "task")


@pytest.mark.parametrize(
    "command",
    [["perl/eval.py", "--help"], ["-m", "perl", "grade", "--help"], ["-m", "perl.train"], ["-m", "perl.tools.launch"]],
)
def test_a_python_without_the_packages_is_one_line(command):
    """-S leaves site-packages out: a clone before anything was installed."""
    done = subprocess.run(
        [sys.executable, "-S", *command], cwd=ROOT, env={}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.match(r"error: \w+ is not installed for .*python\S*; run make quickstart", line)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("errors.UserError('on this rank alone')", "error: on this rank alone\n"),
        ("RuntimeError('[pair.cc:537] Connection closed by peer [::1]:1')", "Connection closed by peer"),
        ("RuntimeError('shapes differ')", "shapes differ"),
    ],
)
def test_what_one_of_several_processes_raises_is_shown_at_last(error, shown):
    """It waits for the launcher, as the error of another process is the one to see; a defect of its own does not."""
    program = f"""if True:
        import time
        from perl import errors
        waited = []
        time.sleep = waited.append
        try:
            with errors.report_errors():
                raise {error}
        finally:
            print(waited, flush=True)
    """
    environment = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == ("[]\n" if "shapes" in error else "[30.0]\n")
    assert shown in done.stderr
