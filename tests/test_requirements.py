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
from packaging.utils import canonicalize_name

from perl.tools.doctor.versions import SETS, TABLE

ROOT = Path(__file__).parents[1]
TRAINING, EVALUATION = ROOT / "requirements_npu.txt", ROOT / "requirements_vllm_npu.txt"
ONE = ROOT / "requirements_npu_one.txt"


def pins(path):
    """Version by normalised name; everything in these files, and in those that they include, is pinned exactly."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("-r "):
            found |= pins(path.parent / line.removeprefix("-r "))
        elif line:
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


def test_pins_are_those_of_the_doctors_sets():
    training, evaluation, one = SETS[:3]
    assert training.packages.items() <= pins(TRAINING).items()
    wanted = {name: version for name, version in evaluation.packages.items() if name != "vllm"}
    assert wanted.items() <= pins(EVALUATION).items()
    script = (ROOT / "scripts" / "install_npu.sh").read_text(encoding="utf-8")
    assert {name: v for name, v in one.packages.items() if name != "vllm"}.items() <= pins(ONE).items()
    alone = re.findall(r"--no-deps (vllm==\S+)$", script, re.MULTILINE)
    assert alone == [f"vllm=={entry.packages['vllm']}" for entry in (evaluation, one)]


def compile_requirements(*arguments):
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if not uv:
        pytest.skip("uv is not installed")
    platform = ["--python-platform", "aarch64-manylinux_2_36", "--python-version", "3.11"]
    style = [] if "--annotate" in arguments else ["--no-annotate"]
    rest = [str(argument) for argument in arguments if argument != "--annotate"]
    command = [uv, "pip", "compile", "--no-header", *style, *platform, *rest]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if re.search(r"error sending request|dns error|Failed to fetch|connection", done.stderr, re.IGNORECASE):
        pytest.skip(f"the package registry cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    return done


@pytest.mark.slow
@pytest.mark.parametrize("path", [TRAINING, EVALUATION], ids=lambda path: path.name)
def test_resolves_for_aarch64(path):
    done = compile_requirements(path)
    assert done.returncode == 0, done.stderr
    resolved = {Requirement(line).name: line.strip() for line in done.stdout.splitlines() if line.strip()}
    for name, version in pins(path).items():
        assert resolved[name] == f"{name}=={version}"
    # On aarch64 no CUDA build of torch comes along.
    assert not [name for name in resolved if name.startswith("nvidia-")]


@pytest.mark.slow
def test_one_environment_resolves_for_aarch64_but_for_triton_ascend(tmp_path):
    """triton-ascend is in Ascend's own index: with the version that the public registry has, all else resolves."""
    done = compile_requirements(ONE)
    if done.returncode:
        assert f"there is no version of triton-ascend=={pins(ONE)['triton-ascend']}" in done.stderr
    override = tmp_path / "override.txt"
    override.write_text("triton-ascend==3.2.0\n")
    done = compile_requirements(ONE, "--override", override)
    assert done.returncode == 0, done.stderr
    resolved = {Requirement(line).name: line.strip() for line in done.stdout.splitlines() if line.strip()}
    for name, version in pins(ONE).items():
        assert resolved[name] == f"{name}=={version if name != 'triton-ascend' else '3.2.0'}"
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
def test_one_environment_lists_what_vllm_imports(tmp_path):
    """By the metadata of vllm's wheel for aarch64: each of its requirements is pinned within its bounds, but for torch,
    what is made for CUDA, and opencv."""
    asked = requirements_of_wheel(f"vllm=={SETS[2].packages['vllm']}", tmp_path)
    cuda = {"flashinfer-python", "flashinfer-cubin", "apache-tvm-ffi", "tilelang", "nvidia-cudnn-frontend"}
    cuda |= {"fastsafetensors", "nvidia-cutlass-dsl", "quack-kernels", "tokenspeed-mla", "humming-kernels"}
    another = {"torch", "torchaudio", "torchvision", "opencv-python-headless"}
    pinned = pins(ONE)
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
    both.write_text("vllm==0.18.0\nvllm-ascend==0.18.0\n")
    override.write_text("opencv-python-headless==4.11.0.86\n")  # a smaller quarrel, settled in our file
    done = compile_requirements(both, "--override", override)
    assert done.returncode == 1
    assert re.search(r"vllm-ascend==0.18.0 depends on\s+torch\w*==2.9.0", done.stderr), done.stderr


@pytest.mark.slow
def test_what_vllm_imports_is_listed(tmp_path):
    """Everything that vllm's metadata asks for is pinned in our file, but for what is made for CUDA."""
    everything, override = tmp_path / "everything.txt", tmp_path / "override.txt"
    everything.write_text(EVALUATION.read_text(encoding="utf-8") + "\nvllm==0.18.0\n")
    pinned = pins(EVALUATION)
    names = ("torch", "torchaudio", "torchvision", "opencv-python-headless")
    override.write_text("\n".join(f"{name}=={pinned[name]}" for name in names))
    done = compile_requirements(everything, "--override", override, "--annotate", "--annotation-style=line")
    assert done.returncode == 0, done.stderr
    asked = set()
    for line in done.stdout.splitlines():
        package, _, via = line.partition("# via ")
        if "vllm" in re.split(r",\s*", via.strip()):
            asked.add(package.split("==")[0])
    cuda = {"flashinfer-python", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "quack-kernels"}
    assert len(asked) > 40
    assert asked - cuda - set(pinned) <= set()


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
    assert sum("requirements_npu.txt" in line for line in commands) == 1
    assert sum("requirements_vllm_npu.txt" in line for line in commands) == 1
    without = [line for line in commands if "--no-deps" in line]
    assert len(without) == 1
    assert without[0].endswith("--no-deps vllm==0.18.0")
    assert commands.index(without[0]) > next(i for i, line in enumerate(commands) if "requirements_vllm" in line)


def test_install_of_one_environment_leaves_the_other():
    assert ".venv-eval" not in install("train", "--dry-run").stdout
    assert ".venv-train" not in install("eval", "--dry-run").stdout
    assert ".venv-one" not in install("all", "--dry-run").stdout


def test_install_of_one_environment_for_both():
    done = install("one", "--dry-run")
    commands = [line for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert not [line for line in commands if ".venv-train" in line or ".venv-eval" in line]
    (pinned,) = [line for line in commands if "requirements_npu_one.txt" in line]
    assert "mirrors.huaweicloud.com/ascend" in pinned
    (alone,) = [line for line in commands if "--no-deps" in line]
    assert alone.endswith("--no-deps vllm==0.23.0")
    assert commands.index(pinned) < commands.index(alone) < len(commands) - 1
    assert "PYTHON=.venv-one/bin/python" in commands[-1]


def test_install_refuses_an_unknown_argument():
    done = install("trian")
    assert done.returncode == 2
    assert done.stderr == "error: unknown argument 'trian'; known: train, eval, all, one, --dry-run, --python\n"
