"""The Ascend requirements: they resolve, agree with the doctor's table, and lie within pyproject.toml's bounds."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from perl.tools.doctor.versions import SETS

ROOT = Path(__file__).parents[1]
TRAINING, EVALUATION = ROOT / "requirements_npu.txt", ROOT / "requirements_vllm_npu.txt"


def pins(path):
    """Version by normalised name; everything in these files is pinned exactly."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.split("#")[0].strip()
        if line:
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
    training, evaluation = SETS[0], SETS[1]
    assert training.packages.items() <= pins(TRAINING).items()
    wanted = {name: version for name, version in evaluation.packages.items() if name != "vllm"}
    assert wanted.items() <= pins(EVALUATION).items()
    script = (ROOT / "scripts" / "install_npu.sh").read_text(encoding="utf-8")
    assert re.findall(r"--no-deps (vllm==\S+)$", script, re.MULTILINE) == [f"vllm=={evaluation.packages['vllm']}"]


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


def test_install_refuses_an_unknown_argument():
    done = install("trian")
    assert done.returncode == 2
    assert done.stderr == "error: unknown argument 'trian'; known: train, eval, all, --dry-run, --python\n"
