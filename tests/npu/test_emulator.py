"""Building the emulated NPU, and starting programs on it."""

import os
import subprocess
import sys

import pytest

from tests.npuemu import emulator

pytestmark = pytest.mark.npu


def test_the_build_is_cached_and_a_missing_compiler_is_named(npu_env, monkeypatch):
    library = emulator.build()
    before = library.stat().st_mtime_ns
    assert emulator.build() == library
    assert library.stat().st_mtime_ns == before
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(emulator.NoCompilerError, match="no C\\+\\+ compiler \\(no-such-compiler\\)"):
        emulator.build()


def test_the_environment_keeps_the_callers_npu_settings_out(npu_env, monkeypatch):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("NPUEMU_MEMORY_BYTES", "1")
    environment = npu_env(4, NPUEMU_OP_LOG="log")
    assert "ASCEND_RT_VISIBLE_DEVICES" not in environment
    assert "NPUEMU_MEMORY_BYTES" not in environment
    assert environment["NPUEMU_DEVICES"] == "4"
    assert environment["NPUEMU_OP_LOG"] == "log"


def test_run_works_from_any_folder_with_any_command(npu_env, tmp_path):
    run = str(emulator.HERE / "run")
    python = f"{sys.executable} -c 'import torch; print(torch.npu.device_count())'"
    shell = {**os.environ, "NPUEMU_DEVICES": "3"}
    done = subprocess.run([run, "bash", "-c", python], cwd=tmp_path, env=shell, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr
    none = subprocess.run([run], capture_output=True, text=True)
    assert (none.returncode, none.stderr.split(":")[0]) == (2, "usage")
