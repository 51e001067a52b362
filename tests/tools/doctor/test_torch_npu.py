"""torch-npu itself, from the package registry, on a machine without CANN: the doctor names what the loader misses."""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CANN_LIBRARIES = ["libacl_op_compiler.so", "libascendcl.so", "libge_runner.so", "libgraph.so", "libhccl.so"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "aarch64"), reason="torch-npu has no wheel for this machine"
    ),
    pytest.mark.skipif(Path("/usr/local/Ascend").exists(), reason="Ascend's software is installed here"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment with torch-npu alone; `link` lends it the packages of the test's own."""
    folder = tmp_path_factory.mktemp("torch_npu") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(packages)]
    done = subprocess.run([*install, "torch-npu==2.10.0.post4"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"torch-npu cannot be had: {done.stderr.strip().splitlines()[-1]}")
    return folder, packages


def doctor(folder):
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "check_npu_env.sh"), "--json"],
        env={**os.environ, "PYTHON": str(folder / "bin" / "python"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, json.loads(done.stdout)


def test_without_torch_only_canns_libraries_are_named(environment):
    code, report = doctor(environment[0])
    assert code == 1
    found = report["checks"]["libraries"]["found"]
    assert report["checks"]["libraries"]["status"] == "failure"
    assert all(name in found for name in CANN_LIBRARIES), found
    assert "libtorch" not in found  # the check versions says that torch is missing
    assert "torch" in report["checks"]["versions"]["found"]


def test_beside_torch_the_import_fails_and_every_library_is_named(environment):
    folder, packages = environment
    (packages / "test_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    plain = subprocess.run(
        [str(folder / "bin" / "python"), "-c", "import torch"], capture_output=True, text=True, cwd=folder
    )
    assert plain.returncode != 0  # torch-npu breaks `import torch`, which is why a child looks
    assert "torch_npu" in plain.stderr
    code, report = doctor(folder)
    assert code == 1
    assert report["kind"] == "cpu" or shutil.which("nvidia-smi")
    libraries = report["checks"]["libraries"]
    assert all(name in libraries["found"] for name in CANN_LIBRARIES), libraries
    assert "pip uninstall -y torch-npu" in libraries["fix"]
    torch = report["checks"]["torch"]
    assert torch["status"] == "failure"
    assert "libhccl.so" in torch["found"]
    assert "torch-npu 2.10.0.post4 wants torch==2.10.0" in report["checks"]["versions"]["found"]
