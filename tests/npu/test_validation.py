"""Validation by two processes, on CPUs and on emulated NPUs: DDP, ZeRO-3 and FSDP2, with unequal shares of rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from perl.config.evaluation import EvalConfig
from perl.config.schema import EnvironmentConfig
from perl.evaluation.run import evaluate
from perl.scoring.results import read_samples
from tests.environments.calling import save_calling
from tests.npu.test_training import CONFIGS, zero3_with_nothing_persistent
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.npu, pytest.mark.slow]
SETTINGS = {
    "model.dtype": "float32",
    "training.bf16": "false",
    "training.max_steps": 2,
    "training.per_device_train_batch_size": 2,
    "training.num_generations": 4,
    "training.max_completion_length": 8,
    "training.learning_rate": 0.01,
    "training.logging_steps": 1,
    "training.save_steps": 2,
    "noise_injection.enabled": "true",
    "peft.r": 4,
    "peft.lora_dropout": 0.1,
}


def rows(numbers) -> str:
    return "".join(json.dumps({"question": f"What is {i} + 3 ?", "answer": f"#### {i + 3}"}) + "\n" for i in numbers)


def words(folder: Path, **changes: object) -> list[str]:
    settings = SETTINGS | {
        "model.model_name_or_path": folder / "model",
        "dataset.dataset_name_or_path": folder / "sums.jsonl",
        "reward.functions": json.dumps([f"{folder / 'digits.py'}:digits"]),
    }
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    return [word for name, value in settings.items() for word in (f"--config.{name}", str(value))]


@pytest.mark.parametrize("strategy", ["cpu", "zero3", "npu_fsdp2"])
def test_two_processes_score_what_the_evaluator_does_and_train_as_without_it(run_npu, tmp_path, strategy):
    save_tiny(tmp_path / "model", scale=4.0)
    (tmp_path / "sums.jsonl").write_text(rows(range(8)))
    (tmp_path / "others.jsonl").write_text(rows(range(11, 16)))  # five problems: three and two
    (tmp_path / "digits.py").write_text(
        "def digits(completions, **kwargs):\n"
        "    texts = [c[0]['content'] for c in completions]\n"
        "    return [sum(x.isdigit() for x in t) / max(len(t), 1) for t in texts]\n"
    )
    config = zero3_with_nothing_persistent(tmp_path) if strategy == "zero3" else CONFIGS / f"{strategy}.yaml"
    validation = {
        "validation__datasets": json.dumps([str(tmp_path / "others.jsonl")]),
        "validation__every_steps": 1,
        "validation__n": 3,
        "validation__temperature": 0.8,
        "validation__max_new_tokens": 20,
        "validation__save_best": "true",
    }
    for name, changes in (("run", validation), ("plain", {})):
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        argv = words(tmp_path, training__output_dir=tmp_path / name, **changes)
        command = [*launcher, "--num_processes", "2", "-m", "perl.train", *argv]
        if strategy == "cpu":
            env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            subprocess.run(command, check=True, env=env, cwd=ROOT, timeout=400)
        else:
            run_npu(command, timeout=400)
    ours, theirs = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("run", "plain"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(tensor.abs().max() > 0 for name, tensor in ours.items() if "lora_B" in name)

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row for row in lines if "val-core/openai/gsm8k/acc/mean@3" in row}
    assert list(found) == [0, 1, 2]
    assert (tmp_path / "run" / "best" / "adapter_model.safetensors").is_file()
    settings = {"n": 3, "temperature": 0.8, "max_new_tokens": 20}
    adapter = [str(tmp_path / "run" / "checkpoint-2")]
    model, data, result_dir = (str(tmp_path / name) for name in ("model", "others.jsonl", "evaluated"))
    evaluate(EvalConfig(model, data, result_dir, adapter, **settings))
    theirs = read_samples(tmp_path / "evaluated" / "others" / "samples.jsonl")
    ours = read_samples(tmp_path / "run" / "validation" / "step-2" / "others" / "samples.jsonl")
    assert len(ours) == 15
    for row, record in theirs.items():
        assert ours[row] | {"time": 0} == record | {"time": 0}


SUMS = '''
class Sums:
    def reset(self, gold: str, **row) -> None:
        self.made = 0
        if int(gold) % 2:
            raise RuntimeError("lost")

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        self.made += 1
        return a + b

    def get_reward(self) -> float:
        return float(self.made > 0)
'''


@pytest.mark.parametrize("strategy", ["cpu", "zero3"])
def test_a_process_whose_conversations_all_fail_waits_for_the_others(run_npu, tmp_path, strategy):
    """Of two problems one process has each; only the second one's environment begins."""
    save_calling(tmp_path / "model")
    (tmp_path / "sums.jsonl").write_text(rows(range(1, 16, 2)))
    (tmp_path / "others.jsonl").write_text(rows([18, 19]))
    (tmp_path / "tools.py").write_text(SUMS)
    config = zero3_with_nothing_persistent(tmp_path) if strategy == "zero3" else CONFIGS / f"{strategy}.yaml"
    asked = {"n": 4, "temperature": 1.0, "max_new_tokens": 64}
    changes = {
        "environment__factory": f"{tmp_path}/tools.py:Sums",
        "reward__functions": "[]",
        "training__max_completion_length": 32,
        "training__max_steps": 1,
        "training__output_dir": tmp_path / "run",
        "validation__datasets": json.dumps([str(tmp_path / "others.jsonl")]),
    } | {f"validation__{name}": value for name, value in asked.items()}
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command = [*launcher, "--num_processes", "2", "-m", "perl.train", *words(tmp_path, **changes)]
    if strategy == "cpu":
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, check=True, env=env, cwd=ROOT, timeout=400, capture_output=True, text=True)
    else:
        done = run_npu(command, timeout=400)
    said = "validation on others: 4 of 8 conversations have failed, the first one: RuntimeError: lost (tools.py:"
    assert done.stdout.count(said) == 2  # before and after the training, by the first process alone
    environment = EnvironmentConfig(factory=f"{tmp_path}/tools.py:Sums")
    model, data, results = (str(tmp_path / name) for name in ("model", "others.jsonl", "results"))
    evaluate(EvalConfig(model, data, results, environment=environment, **asked))
    before, evaluated = (
        read_samples(each / "others/samples.jsonl") for each in (tmp_path / "run/validation/step-0", Path(results))
    )
    assert {place: row.get("conversation") for place, row in before.items()} == {
        place: row.get("conversation") for place, row in evaluated.items()
    }
    assert sum(row["error"] is None for row in before.values()) == 4
