"""The guides' GRPO commands, translated and run for five updates on two emulated NPUs: the quickstart's model, real
GSM8K rows. Batches are smaller than the guides'; updates a rollout, completions a prompt and accumulation are theirs.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from perl.__main__ import main
from tests.test_launch_script import GSM8K, QUICKSTART_BASE

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "tests" / "verl"
pytestmark = [pytest.mark.npu, pytest.mark.slow]

REWARD = """
import json
import os

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    row = {"source": data_source, "gold": ground_truth, "index": extra_info["index"]}
    if "RANK" in os.environ:  # which what tries the reward before the run has not
        with open(os.environ["SEEN"], "a") as file:
            file.write(json.dumps(row) + "\\n")
    return sum(letter.isdigit() for letter in solution_str) / max(len(solution_str), 1)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """64 short training rows and 4 test rows of GSM8K, as the guide's `prepare` writes them."""
    if not GSM8K.is_file():
        pytest.skip("../shared/data/gsm8k is not there")
    folder = tmp_path_factory.mktemp("gsm8k")
    lines = sorted(GSM8K.read_text(encoding="utf-8").splitlines(), key=len)[:68]
    (folder / "train.jsonl").write_text("\n".join(lines[:64]) + "\n")
    (folder / "test.jsonl").write_text("\n".join(lines[64:]) + "\n")
    source = [str(folder / "train.jsonl"), str(folder / "test.jsonl")]
    assert main(["prepare", "gsm8k", "--local_save_dir", str(folder), "--source", *source]) == 0
    return folder


@pytest.mark.parametrize(
    ("guide", "prompts", "mini", "micro", "n", "k"),
    [
        ("npu_aqn_launch.sh", 8, 2, 4, 4, 4),  # 64, 16, 8 on 8 devices: accumulation 1
        ("ascend_support_grpo.sh", 8, 4, 5, 5, 2),  # 128, 64, 20: accumulation 2
        ("ascend_blog_grpo.sh", 8, 4, 5, 5, 2),
    ],
)
def test_a_guides_command_trains(run_npu, data, tmp_path, monkeypatch, capsys, guide, prompts, mini, micro, n, k):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    changes = [
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'test.parquet'}",
        f"actor_rollout_ref.model.path={QUICKSTART_BASE}",
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}",
        "data.max_response_length=8",
        "trainer.n_gpus_per_node=2",
        "trainer.test_freq=1",
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        "custom_reward_function.name=compute_score",
    ]
    assert main(["from-verl", "--json", "--output", "r.yaml", str(GUIDES / guide), "--", *changes]) == 0
    batch = json.loads(capsys.readouterr().out)["batch"]
    assert (batch["n"], batch["updates_per_rollout"]) == (n, k)
    seen = tmp_path / "seen.jsonl"
    command = ["bash", str(ROOT / "scripts" / "trl" / "openr1" / "dapo_lora_npu.sh"), "--recipe", "r.yaml"]
    command += ["--config.training.max_steps", "5", "--config.training.output_dir", "run"]
    variables = {"PYTHON": sys.executable, "NUM_PROCESSES": 2, "SEEN": str(seen), "WANDB_MODE": "disabled"}
    run_npu(command, devices=2, timeout=550, cwd=tmp_path, **variables)

    drawn = [json.loads(line) for line in seen.read_text().splitlines()]
    rollouts = -(-5 // k)
    assert len(drawn) == rollouts * prompts * n
    assert len(drawn) // rollouts == batch["completions_per_rollout"]
    assert set(Counter(row["index"] for row in drawn).values()) == {n}  # each prompt n times, none twice
    assert {row["source"] for row in drawn} == {"openai/gsm8k"}
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward" in row][: 5 // k] == list(range(k, 6, k))  # a row a step of verl
    scores = [row for row in rows if "val-core/openai/gsm8k/acc/mean@1" in row]
    assert [row["step"] for row in scores][: 1 + 5 // k] == [0, *range(k, 6, k)]  # before training, then each step
