"""scripts/trl/openr1/dapo_lora_npu.sh, run from another folder as a user would."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.tiny import save_tiny

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "trl" / "openr1" / "dapo_lora_npu.sh"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
QUICKSTART_BASE = ROOT / "assets" / "quickstart-base"
QUICKSTART_PROBLEMS = ROOT / "assets" / "quickstart-data" / "train.jsonl"


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("Qwen2.5-Tiny"), scale=4.0)


@pytest.fixture
def sums(tmp_path):
    file = tmp_path / "sums.jsonl"
    rows = [{"question": f"What is {i} + 3 ?", "answer": f"#### {i + 3}"} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def flags(model, data, **changes):
    settings = {
        "model.model_name_or_path": model,
        "dataset.dataset_name_or_path": data,
        "training.max_steps": 2,
        "training.gradient_accumulation_steps": 2,
        "training.max_completion_length": 8,
        "training.report_to": "none",
    } | changes
    return [word for name, value in settings.items() for word in (f"--config.{name}", str(value))]


def launch(argv, cwd, timeout=400, env=None, **variables):
    base = env or {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "NUM_PROCESSES", "PYTHONPATH"))}
    command = ["bash", str(SCRIPT), *argv]
    return subprocess.run(
        command, cwd=cwd, env=base | variables, capture_output=True, text=True, timeout=timeout, check=False
    )


def run_folder(done):
    line = next(line for line in done.stdout.splitlines() if line.startswith("run folder: "))
    return Path(line.removeprefix("run folder: "))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_on_a_plain_cpu(tmp_path, model, sums, processes):
    done = launch(flags(model, sums), tmp_path, NUM_PROCESSES=str(processes))
    assert done.returncode == 0, done.stdout + done.stderr
    folder = run_folder(done)
    assert folder.parent == tmp_path / "outputs"
    assert folder.name.startswith("grpo_lora_qwen2_5_tiny")
    assert "_cpu_" in folder.name
    assert f"num_processes: {processes}\n" in (folder / "output.log").read_text()
    assert "step 2/2" in done.stdout
    assert {p.name for p in folder.iterdir()} >= {
        *("adapter", "metrics.jsonl", "config.yaml", "environment.json", "output.log")
    }
    assert json.loads((folder / "environment.json").read_text())["num_processes"] == processes


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, model, sums):
    done = launch([*flags(model, sums), "--config.training.max_stepz", "3"], tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: unknown flag --config.training.max_stepz; did you mean --config.training.max_steps?\n"
    )
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.model_name_or_path": "./nowhere"}, "./nowhere: no such folder"),
        ({"dataset.dataset_name_or_path": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"training.num_generations": 3}, "does not divide the 16 completions"),
        ({"peft.type": "lorra"}, "did you mean 'lora'"),
        ({"reward.functions": '["acuracy"]'}, "did you mean 'accuracy'"),
        ({"training.num_generations": 1}, "a group needs at least 2 completions"),
        ({"training.loss_type": "ppo"}, "unknown loss 'ppo'"),
        ({"training.importance_sampling_level": "row"}, "importance_sampling_level: unknown"),
        ({"training.use_vllm": "true"}, "use --config.rollout.engine fast"),
        ({"training.max_steps": 0}, "max_steps 0: no step to train"),
        ({"training.sync_ref_model": "true"}, "its base, which never changes"),
        ({"training.gradient_accumulation_steps": 32}, "8 prompts, but a generation batch takes"),
        ({"training.resume_from_checkpoint": "true"}, "no checkpoint in outputs"),
        ({"training.output_dir": "/dev/null/run"}, "/dev/null is no folder"),
        ({"reward.functions": '["overlong"]', "reward.overlong_cache_length": 64}, "must be between 1 and"),
        (
            {"dataset.max_prompt_length": 3, "dataset.filter_overlong_prompts": "false"},
            "8 prompts are longer than 3 tokens",
        ),
    ],
)
def test_the_plan_finds_every_mistake_before_anything_starts(tmp_path, model, sums, monkeypatch, changes, said):
    from perl.errors import UserError
    from perl.tools.launch import plan

    monkeypatch.delenv("NUM_PROCESSES", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        plan(flags(model, sums, **changes))
    assert list(tmp_path.iterdir()) == [sums]


def test_the_plan_checks_the_batch_of_all_processes(model, sums, monkeypatch):
    from perl.errors import UserError
    from perl.tools.launch import plan

    monkeypatch.setenv("NUM_PROCESSES", "3")
    argv = flags(model, sums, **{"training.num_generations": 4, "training.gradient_accumulation_steps": 1})
    with pytest.raises(UserError, match="num_generations 5 does not divide the 24 completions"):
        plan([*argv, "--config.training.num_generations", "5"])
    plan(argv)  # 8 x 3 completions hold groups of 4


def test_a_failure_while_training_ends_with_the_log_and_its_exit_code(tmp_path, model, sums):
    reward = tmp_path / "broken.py"
    reward.write_text("def broken(**kwargs):\n    raise RuntimeError('no reward today')\n")
    done = launch(flags(model, sums, **{"reward.functions": json.dumps([f"{reward}:broken"])}), tmp_path)
    assert done.returncode not in (0, 2)
    assert "no reward today" in done.stdout
    assert str(run_folder(done) / "output.log") in done.stderr


@pytest.mark.npu
def test_more_processes_than_npus(tmp_path, model, sums, npu_env):
    done = launch(flags(model, sums), tmp_path, env=npu_env(2), NUM_PROCESSES="3")
    assert done.returncode == 2
    assert "only 2 npu device(s) are visible" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.npu
@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.exists(), reason=f"no real GSM8K rows at {GSM8K}")
def test_on_two_npus_with_zero2_and_real_gsm8k_rows(tmp_path, model, npu_env):
    argv = flags(model, GSM8K, **{"dataset.example_numbers": 32, "dataset.max_prompt_length": 256})
    done = launch(argv, tmp_path, env=npu_env(2))
    assert done.returncode == 0, done.stdout + done.stderr + (run_folder(done) / "output.log").read_text()[-3000:]
    folder = run_folder(done)
    assert "_npu_" in folder.name
    log = (folder / "output.log").read_text()
    assert "num_processes: 2\n" in log
    assert "2 process(es) on npu, npu_4.yaml" in done.stdout
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["device"] == "npu"
    assert environment["variables"]["HCCL_BUFFSIZE"] == "512"
    assert environment["variables"]["VLLM_ASCEND_ENABLE_NZ"] == "0"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["aqn/num_modules"] for row in rows if "reward" in row] == [2, 2]


@pytest.mark.npu
@pytest.mark.slow
def test_on_two_npus_the_adapter_learns_the_quickstarts_problems(tmp_path, npu_env):
    """A tiny random model earns nothing on GSM8K; the quickstart's base does on its own problems."""
    argv = flags(
        QUICKSTART_BASE,
        QUICKSTART_PROBLEMS,
        **{
            "training.num_generations": 4,
            "training.gradient_accumulation_steps": 4,
            "training.per_device_train_batch_size": 4,
            "training.max_completion_length": 32,
            "training.learning_rate": 1e-3,
        },
    )
    done = launch(argv, tmp_path, env=npu_env(2), HCCL_BUFFSIZE="300")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = run_folder(done)
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    moved = [tensor.abs().max().item() for name, tensor in adapter.items() if "lora_B" in name]
    assert moved
    assert all(value > 0 for value in moved)
    assert json.loads((folder / "environment.json").read_text())["variables"]["HCCL_BUFFSIZE"] == "300"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["reward"] > 0 for row in rows if "reward" in row)
