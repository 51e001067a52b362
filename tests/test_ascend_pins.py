"""The transformers release that requirements_npu.txt pins: training and evaluation with it.

pip installs it into a folder of this test session, which goes to the front of PYTHONPATH; all else is the environment
that the tests run in (its torch too).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.adapters.test_merge import make_adapter

ROOT = Path(__file__).parents[1]
BASE = ROOT / "assets" / "quickstart-base"
PROBLEMS = ROOT / "assets" / "quickstart-data" / "train.jsonl"
pytestmark = pytest.mark.slow


def pinned(requirements: str, package: str) -> str:
    """`package==version` as a line of the file has it."""
    found = re.search(rf"^{package}==\S+", (ROOT / requirements).read_text(), re.MULTILINE)
    assert found, f"{requirements} pins no {package}"
    return found.group()


def install(folder: Path, *packages: str) -> Path:
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--target", str(folder), *packages], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        pytest.skip(f"pip cannot get {' '.join(packages)}: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="session")
def pins(tmp_path_factory) -> Path:
    """transformers of requirements_npu.txt, with a tokenizers that it takes."""
    packages = pinned("requirements_npu.txt", "transformers"), pinned("requirements_vllm_npu.txt", "tokenizers")
    return install(tmp_path_factory.mktemp("pins"), *packages)


def run_with(folder: Path, command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model folder as hubs have it, written for transformers 4, with a rope_theta that is not the default."""
    folder = tmp_path_factory.mktemp("models") / "base"
    shutil.copytree(BASE, folder)
    config = json.loads((folder / "config.json").read_text())
    assert "rope_theta" in config
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1e6}))
    return folder


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), base)


def test_training(pins, tmp_path):
    settings = {
        "model.model_name_or_path": BASE,
        "dataset.dataset_name_or_path": PROBLEMS,
        "training.max_steps": 2,
        "training.per_device_train_batch_size": 16,  # some group of its four has unequal rewards
        "training.num_generations": 4,
        "training.max_completion_length": 32,
        "training.logging_steps": 1,
        "training.learning_rate": 1e-3,
        "training.output_dir": "out",
        "training.report_to": "none",
        "noise_injection.enabled": "true",
    }
    flags = [word for name, value in settings.items() for word in (f"--config.{name}", str(value))]
    done = run_with(pins, ["-m", "perl.train", *flags], tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    environment = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert f"transformers=={environment['packages']['transformers']}" == pinned("requirements_npu.txt", "transformers")
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["aqn/num_modules"] for row in rows if "reward" in row] == [3, 3]
    learned = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in learned.items() if ".lora_B." in name)


def test_the_evaluator(pins, base, adapter, tmp_path):
    """The same command here and with the pinned release: the merge and the completions are the same."""
    command = [str(ROOT / "perl" / "eval.py"), "--model", str(base), "--adapter", str(adapter)]
    command += ["--dataset", str(PROBLEMS), "--task", "gsm8k", "--max_samples", "8", "--temperature", "0"]
    command += ["--max_new_tokens", "24"]
    rows = []
    for name, folder in (("here", tmp_path), ("pins", pins)):
        done = run_with(folder, [*command, "--result_dir", name], tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = (tmp_path / name / PROBLEMS.stem / "samples.jsonl").read_text().splitlines()
        rows.append({row["key"]: (row["prompt"], row["completion"]) for row in map(json.loads, lines)})
        summary = json.loads((tmp_path / name / PROBLEMS.stem / "summary.json").read_text())
    assert f"transformers=={summary['provenance']['versions']['transformers']}" == (
        pinned("requirements_npu.txt", "transformers")
    )
    assert rows[0] == rows[1]
    assert len(rows[0]) == 8
