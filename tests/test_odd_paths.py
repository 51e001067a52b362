"""Every program in a folder whose name a shell, a URL or a splitter of words would take for something else."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.test_launch_script import flags, launch, plain_environment
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[1]
ODD = "a b ü 中 'q' \"d\" $(touch pwned) `touch pwned` ; & % #"
SCRIPT_OF_VERL = """MODEL="{model}"
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.model.path="'$MODEL'"
"""


def python(arguments: list[str], folder: Path) -> str:
    env = plain_environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_each_program_works_in_a_folder_with_an_odd_name(tmp_path):
    folder = tmp_path / ODD
    folder.mkdir()
    model, data = save_tiny(folder / "mödel 模", scale=4.0), folder / "süms 题.jsonl"
    rows = [{"question": f"What is {i} + 3 ?", "answer": f"#### {i + 3}"} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = folder / "my réward.py"
    reward.write_text("def digits(completions, **_):\n    return [float(len(str(c))) for c in completions]\n")
    changes = {
        "training.max_steps": 1,
        "training.report_to": "[wandb, tensorboard]",
        "training.output_dir": folder / "rün 1",
        "reward.functions": json.dumps([f"{reward}:digits"]),
    }
    done = launch(flags(model, data, **changes), folder, WANDB_MODE="offline")
    assert done.returncode == 0, done.stdout + done.stderr
    adapter = folder / "rün 1" / "adapter"
    assert (adapter / "adapter_model.safetensors").is_file()

    python(["-m", "perl", "merge", "--model", str(model), "--adapter", str(adapter), "--output", "mergéd"], folder)
    scores = ["--dataset", str(data), "--result_dir", "scöres 分", "--max_new_tokens", "4", "--max_samples", "2"]
    python([str(ROOT / "perl" / "eval.py"), "--model", str(model), "--adapter", str(adapter), *scores], folder)
    printed = python(["-m", "perl", "report", "rün 1", "scöres 分", "--output", "pagé.html"], folder)
    assert "pagé.html" in printed
    assert "rün 1" in (folder / "pagé.html").read_text()
    python(["-m", "perl", "card", str(adapter), "--results", "scöres 分"], folder)
    assert not list(tmp_path.rglob("pwned"))


def test_from_verl_in_a_folder_with_an_odd_name(tmp_path):
    folder = tmp_path / ODD
    folder.mkdir()
    (folder / "rün.sh").write_text(SCRIPT_OF_VERL.format(model=tmp_path / "plain mödel"))
    printed = python(["-m", "perl", "from-verl", "--output", "rün 2.yaml", "rün.sh"], folder)
    assert shlex.split(printed.splitlines()[-1])[-1] == "rün 2.yaml"
    recipe = yaml.safe_load((folder / "rün 2.yaml").read_text())
    assert recipe["model"]["model_name_or_path"] == str(tmp_path / "plain mödel")
    assert not list(tmp_path.rglob("pwned"))
