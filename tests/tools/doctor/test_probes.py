"""The probes and the entry points, on this machine, with what it lacks staged as files and commands."""

import ast
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from perl.tools.doctor import probes
from perl.tools.doctor.checks import diagnose

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "check_npu_env.sh"
OUTPUTS = Path(__file__).parent / "outputs"
PACKAGE = ROOT / "perl" / "tools" / "doctor"


def check(*arguments, cwd=ROOT, **env):
    """Run the script with this Python."""
    settings = {"PYTHON": sys.executable, **env}
    return subprocess.run(
        [shutil.which("bash"), str(SCRIPT), *arguments],
        cwd=cwd,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=60,
    )


def fake_command(folder, name, body):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_script_reports_this_machine(tmp_path):
    done = check("--json", cwd=tmp_path, HCCL_API_KEY="0123456789secret")
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"], done.stderr
    assert report["checks"]["architecture"]["found"].startswith(os.uname().machine)
    assert report["checks"]["torch"]["status"] == "ok"
    assert report["unfinished"] == []
    assert "secret" not in done.stdout


def test_what_an_address_wants_is_not_shown(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://me:Pl4nted0123@head:8080")
    assert probes.environment()["RAY_ADDRESS"] == "http://<secret>@head:8080"


def test_is_a_command_of_perl():
    command = [sys.executable, "-m", "perl", "doctor", "--json", "--fix-hints"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"], done.stderr
    assert "fixes" in report


def test_script_sees_npus_that_npu_smi_lists(tmp_path):
    fake_command(tmp_path, "npu-smi", f'[ "$*" = info ] && cat {OUTPUTS}/info_910c_26.0.rc2.txt')
    done = check("--fix-hints", cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert "16 x Ascend910, 64 GB each" in done.stdout
    assert "npu-smi          26.0.rc2, 16 devices" in done.stdout
    assert "failure  device-files     no /dev/davinci*" in done.stdout


@pytest.fixture
def bare_path(tmp_path):
    """A PATH with bash alone: no Python, no coreutils."""
    (tmp_path / "bash").symlink_to(shutil.which("bash"))
    return str(tmp_path)


def test_script_without_python(bare_path):
    done = check(PATH=bare_path, PYTHON="/nonexistent/python")
    assert done.returncode == 2
    assert "failure  python" in done.stdout
    assert done.stdout.splitlines()[-1] == "cannot run: the other checks need Python"
    assert done.stderr == ""
    report = json.loads(check("--json", PATH=bare_path, PYTHON="/nonexistent/python").stdout)
    assert report["exit_code"] == 2
    assert report["checks"]["python"]["status"] == "failure"


def test_script_refuses_an_unknown_argument(bare_path):
    for environment in ({}, {"PATH": bare_path, "PYTHON": "/nonexistent/python"}):
        done = check("--jsn", **environment)
        assert done.returncode == 2
        assert re.fullmatch(r"error: unknown argument '--jsn'; known: --json, --fix-hints\n", done.stderr)


def test_a_hanging_npu_smi_is_left_behind(tmp_path, monkeypatch):
    fake_command(tmp_path, "npu-smi", "exec sleep 600")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machine = probes.gather(deadline_s=0.5)
    assert machine.commands["npu-smi info"].code == 124
    assert diagnose(machine)["npu-smi"].found == "npu-smi info did not end in time"


def test_a_slow_import_of_torch_is_named():
    machine = probes.gather(deadline_s=0.2)
    assert "timeout" in machine.torch
    assert diagnose(machine)["torch"].status == "warning"


def test_files_devices_and_processes_are_read(tmp_path):
    for name in ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).write_text("")
    (tmp_path / "dev" / "davinci1").chmod(0o640)
    for index, (vendor, kind) in enumerate([("0x19e5", "0x120000"), ("0x19e5", "0x020000"), ("0x10de", "0x120000")]):
        device = tmp_path / f"sys/bus/pci/devices/0000:0{index}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
    info = tmp_path / "usr/local/Ascend/driver/version.info"
    info.parent.mkdir(parents=True)
    info.write_text("Version=25.2.1\n")
    toolkit = tmp_path / "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info"
    toolkit.parent.mkdir(parents=True)
    toolkit.write_text("version=8.5.1\n")
    (tmp_path / "usr/local/Ascend/ascend-toolkit/set_env.sh").write_text("")
    (tmp_path / "proc/77").mkdir(parents=True)
    (tmp_path / "proc/77/stat").write_text("77 (ray::IDLE (x)) Z 1 77 77 0 -1\n")
    machine = probes.gather(root=tmp_path)
    assert machine.kind == "npu"
    assert machine.npu_devices == ["/dev/davinci0", "/dev/davinci1"]
    assert machine.devices["/dev/davinci1"].mode == "-rw-r-----"
    assert machine.pci_accelerators == 1  # a network card and another vendor's do not count
    assert [(p.pid, p.parent, p.state, p.name) for p in machine.processes] == [(77, 1, "Z", "ray::IDLE (x)")]
    findings = diagnose(machine)
    assert findings["driver"].found == "25.2.1 (CANN 8.5.1 needs 25.0.RC1)"
    assert findings["set-env"].fix == "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
    assert findings["device-files"].found == "/dev/davinci0 … davinci1, 2 in all"


def test_listening_ports_are_seen():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname()[1] in probes.gather(deadline_s=0.3).listening


def test_only_the_standard_library_is_imported():
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import perl.tools.doctor.__main__
from perl.tools.doctor.probes import gather
gather(deadline_s=0.1)
foreign = {{name.split(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names) - {{"perl", "__main__"}}
assert not foreign, foreign
"""
    # -S: no site-packages, so that an import of anything else fails
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_syntax_is_that_of_python_3_9(path):
    source = path.read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 9))
    assert "slots=True" not in source
    assert "from __future__ import annotations" in source or path.name in ("__init__.py", "__main__.py", "child.py")


def test_runs_on_python_3_9():
    old = shutil.which("python3.9")
    if not old or subprocess.run([old, "-c", ""]).returncode:
        pytest.skip("there is no python3.9 here")
    report = json.loads(check("--json", PYTHON=old).stdout)
    assert report["checks"]["python"]["status"] == "failure"
