"""The transformers releases of the two Ascend environments, as requirements_npu.txt and requirements_vllm_npu.txt pin
them: training with the one, and what it leaves read by the other, which is a major version older.

pip installs them into folders of this test session, which go to the front of PYTHONPATH; all else is the environment
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
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from perl.adapters.merge import merge_adapter
from perl.prompts import encode
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
def training_pins(tmp_path_factory) -> Path:
    """transformers of requirements_npu.txt, with a tokenizers that it takes."""
    packages = pinned("requirements_npu.txt", "transformers"), pinned("requirements_vllm_npu.txt", "tokenizers")
    return install(tmp_path_factory.mktemp("training_pins"), *packages)


@pytest.fixture(scope="session")
def evaluation_pins(tmp_path_factory) -> Path:
    """transformers and tokenizers of requirements_vllm_npu.txt, with the huggingface-hub below 1 that they want."""
    packages = [pinned("requirements_vllm_npu.txt", name) for name in ("transformers", "tokenizers")]
    return install(tmp_path_factory.mktemp("evaluation_pins"), *packages, "huggingface-hub==0.36.0")


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


def test_training_with_the_training_environments_transformers(training_pins, tmp_path):
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
    done = run_with(training_pins, ["-m", "perl.train", *flags], tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    environment = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert f"transformers=={environment['packages']['transformers']}" == pinned("requirements_npu.txt", "transformers")
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["aqn/num_modules"] for row in rows if "reward" in row] == [3, 3]
    learned = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in learned.items() if ".lora_B." in name)


READ = """
import json, sys, torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from perl.prompts import encode
folder, tokens = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
with torch.no_grad():
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([tokens])).logits[0]
print(json.dumps({
    "transformers": transformers.__version__,
    "rope_theta": AutoConfig.from_pretrained(folder).rope_theta,
    "prompt": encode(tokenizer, [{"role": "user", "content": "What is 12 + 30 ?"}]),
    "logits": logits.tolist(),
}))
"""


def test_a_merged_model_in_the_evaluation_environments_transformers(evaluation_pins, base, adapter, tmp_path):
    merge_adapter(base, adapter, tmp_path / "merged")
    tokens = [(7 * i) % 500 for i in range(64)]
    done = run_with(evaluation_pins, ["-c", READ, str(tmp_path / "merged"), json.dumps(tokens)], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert f"transformers=={found['transformers']}" == pinned("requirements_vllm_npu.txt", "transformers")
    assert found["rope_theta"] == 1e6
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert found["prompt"] == encode(tokenizer, [{"role": "user", "content": "What is 12 + 30 ?"}])

    def logits(folder: Path, **changes) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **changes)
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0]

    expected = logits(tmp_path / "merged")
    assert (torch.tensor(found["logits"]) - expected).abs().max() < 1e-5
    # What the comparison must be able to see: a default in place of the model's theta, and no adapter.
    default = {"rope_theta": 1e4, "rope_type": "default"}
    assert (logits(tmp_path / "merged", rope_parameters=default) - expected).abs().max() > 1e-2
    assert (logits(base) - expected).abs().max() > 1e-2


def test_the_evaluator_with_the_evaluation_environments_transformers(evaluation_pins, base, adapter, tmp_path):
    """The same command in both environments: the merge and the completions are the same."""
    command = [str(ROOT / "perl" / "eval.py"), "--model", str(base), "--adapter", str(adapter)]
    command += ["--dataset", str(PROBLEMS), "--task", "gsm8k", "--max_samples", "8", "--temperature", "0"]
    command += ["--max_new_tokens", "24"]
    rows = []
    for name, folder in (("here", tmp_path), ("pins", evaluation_pins)):
        done = run_with(folder, [*command, "--result_dir", name], tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = (tmp_path / name / PROBLEMS.stem / "samples.jsonl").read_text().splitlines()
        rows.append({row["key"]: (row["prompt"], row["completion"]) for row in map(json.loads, lines)})
        summary = json.loads((tmp_path / name / PROBLEMS.stem / "summary.json").read_text())
    assert f"transformers=={summary['provenance']['versions']['transformers']}" == (
        pinned("requirements_vllm_npu.txt", "transformers")
    )
    assert rows[0] == rows[1]
    assert len(rows[0]) == 8


def test_a_configuration_of_transformers_5_is_refused_where_it_would_be_misread(evaluation_pins, base, tmp_path):
    """transformers 4 would compute with its default rope_theta, and say nothing."""
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "resaved")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "resaved")
    command = [str(ROOT / "perl" / "eval.py"), "--model", "resaved", "--dataset", str(PROBLEMS), "--task", "gsm8k"]
    done = run_with(evaluation_pins, command, tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert 'add "rope_theta": 1000000.0 to it' in done.stderr
