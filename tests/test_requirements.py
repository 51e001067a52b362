"""The Ascend requirements: they resolve, agree with the doctor's table, and lie within pyproject.toml's bounds."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from perl.tools.doctor.versions import SET, TABLE

ROOT = Path(__file__).parents[1]
TRAINING, WHOLE = ROOT / "requirements_npu.txt", ROOT / "requirements_vllm_npu.txt"
PYTHONS = ("3.11", "3.12")


def pins(path):
    """Version by normalised name; everything in these files, and in those that they include, is pinned exactly."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("-r "):
            found |= pins(path.parent / line.removeprefix("-r "))
        elif line and not line.startswith("--"):
            requirement = Requirement(line)
            (spec,) = requirement.specifier
            assert spec.operator == "==", line
            found[canonicalize_name(requirement.name)] = spec.version
    return found


def dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [project["optional-dependencies"][name] for name in ("deepspeed", "logging", "modelscope")]
    return [Requirement(line) for lines in [project["dependencies"], *extras] for line in lines]


def test_training_pins_lie_within_the_bounds_of_pyproject():
    pinned = pins(TRAINING)
    for requirement in dependencies():
        name = canonicalize_name(requirement.name)
        if name == "pyarrow":  # comes with datasets
            continue
        assert requirement.specifier.contains(pinned[name]), f"{requirement} does not admit {pinned[name]}"


def test_pins_are_those_of_the_doctors_set():
    assert {name: v for name, v in SET.packages.items() if name != "vllm"}.items() <= pins(WHOLE).items()
    assert all(SpecifierSet(SET.python).contains(python) for python in PYTHONS)
    for file in (ROOT / "scripts" / "install_npu.sh", WHOLE):
        alone = re.findall(r"--no-deps (vllm==\S+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert alone == [f"vllm=={SET.packages['vllm']}"], file


def compile_requirements(*arguments, python="3.11"):
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if not uv:
        pytest.skip("uv is not installed")
    platform = ["--python-platform", "aarch64-manylinux_2_36", "--python-version", python]
    command = [uv, "pip", "compile", "--no-header", "--no-annotate", *platform, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lost = r"error sending request|dns error|Failed to fetch|connection"
    if done.returncode and re.search(lost, done.stderr, re.IGNORECASE):
        pytest.skip(f"the package registry cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    return done


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("path", [TRAINING, WHOLE], ids=lambda path: path.name)
def test_resolves_for_aarch64(path, python, tmp_path):
    """All but triton-ascend, which Ascend's own index alone has in this version; what is Ascend's comes as wheels."""
    here, override = tmp_path / path.name, tmp_path / "override.txt"
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("--")]
    here.write_text("\n".join(lines).replace(f"\n-r {TRAINING.name}\n", "\n" + TRAINING.read_text(encoding="utf-8")))
    override.write_text("triton-ascend; python_version < '3'\n")
    wheels = ["--only-binary", "torch-npu", "--only-binary", "vllm-ascend"]
    done = compile_requirements(here, "--override", override, *wheels, python=python)
    assert done.returncode == 0, done.stderr
    resolved = {Requirement(line).name: line.strip() for line in done.stdout.splitlines() if line.strip()}
    for name, version in pins(path).items():
        assert name == "triton-ascend" or resolved[name] == f"{name}=={version}"
    # On aarch64 no CUDA build of torch comes along.
    assert not [name for name in resolved if name.startswith("nvidia-")]


def requirements_of_wheel(package, folder):
    """What the wheel for aarch64 and Python 3.11 asks for, by its metadata in the registry."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--no-deps"]
    command += ["--target", str(folder / "none"), "--python-version", "3.11", "--only-binary=:all:"]
    command += ["--platform", "manylinux_2_28_aarch64", "--platform", "manylinux_2_34_aarch64"]
    command += ["--report", str(report), package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot get the metadata of {package}: {done.stderr.strip().splitlines()[-1]}")
    (found,) = json.loads(report.read_text())["install"]
    aarch64 = {"platform_machine": "aarch64", "python_version": "3.11", "python_full_version": "3.11.9", "extra": ""}
    asked = [Requirement(line) for line in found["metadata"]["requires_dist"]]
    return [requirement for requirement in asked if not requirement.marker or requirement.marker.evaluate(aarch64)]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.23.0", "0.24.0rc1", "0.26.0rc1"])
def test_the_doctors_table_is_the_metadata_of_vllm_ascend(version, tmp_path):
    found = {canonicalize_name(r.name): r.specifier for r in requirements_of_wheel(f"vllm-ascend=={version}", tmp_path)}
    wanted = dict(TABLE["requires"]["vllm-ascend"][version])
    assert wanted.pop("vllm") == f"=={version.partition('rc')[0]}"  # by its number; the metadata do not name vllm
    assert {name: str(found[name]) for name in wanted} == wanted


@pytest.mark.slow
def test_what_vllm_imports_is_listed(tmp_path):
    """By the metadata of vllm's wheel for aarch64: each of its requirements is pinned within its bounds, but for torch,
    what is made for CUDA, and opencv."""
    asked = requirements_of_wheel(f"vllm=={SET.packages['vllm']}", tmp_path)
    cuda = {"flashinfer-python", "flashinfer-cubin", "apache-tvm-ffi", "tilelang", "nvidia-cudnn-frontend"}
    cuda |= {"fastsafetensors", "nvidia-cutlass-dsl", "quack-kernels", "tokenspeed-mla", "humming-kernels"}
    another = {"torch", "torchaudio", "torchvision", "opencv-python-headless"}
    pinned = pins(WHOLE)
    assert len(asked) > 60
    for requirement in asked:
        name = canonicalize_name(requirement.name)
        if name not in cuda:
            assert name in pinned, requirement
            assert name in another or requirement.specifier.contains(pinned[name]), f"{requirement}: {pinned[name]}"


@pytest.mark.slow
def test_vllm_cannot_be_resolved_beside_vllm_ascend(tmp_path):
    """The reason for the step without dependencies: should this ever resolve, the step can go."""
    both, override = tmp_path / "both.txt", tmp_path / "override.txt"
    both.write_text(f"vllm=={SET.packages['vllm']}\nvllm-ascend=={SET.packages['vllm-ascend']}\n")
    override.write_text("triton-ascend; python_version < '3'\n")
    done = compile_requirements(both, "--override", override)
    assert done.returncode == 1
    assert re.search(r"vllm-ascend==0.23.0\s+depends\s+on\s+torch\w*==2.10.0", done.stderr), done.stderr


@pytest.mark.slow
def test_the_old_guides_set_does_not_resolve(tmp_path):
    guide = tmp_path / "guide.txt"
    guide.write_text("torch==2.9.1\ntorch-npu==2.9.0\ntrl==0.28.0\nvllm==0.15.1\nvllm-ascend==0.13.0\n")
    done = compile_requirements(guide)
    assert done.returncode == 1
    assert "No solution found" in done.stderr


def install(*arguments):
    script = str(ROOT / "scripts" / "install_npu.sh")
    return subprocess.run(["bash", script, *arguments], capture_output=True, text=True, cwd="/")


def test_install_prints_what_it_would_do():
    done = install("--dry-run")
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if line.startswith("+ ")]
    make, training, whole, alone, check = commands
    assert make.endswith(" .venv-npu")
    assert training.endswith("-r requirements_npu.txt -e .")
    assert whole.endswith("-r requirements_vllm_npu.txt")
    assert alone.endswith(f"--no-deps vllm=={SET.packages['vllm']}")
    assert "PYTHON=.venv-npu/bin/python" in check


def test_install_takes_the_python_that_is_asked_for():
    assert "python3.11 " in install("--dry-run", "--python", "3.11").stdout.replace("--python 3.11", "python3.11")


def test_install_refuses_an_unknown_argument():
    done = install("train")
    assert done.returncode == 2
    assert done.stderr == "error: unknown argument 'train'; known: --dry-run, --python\n"
