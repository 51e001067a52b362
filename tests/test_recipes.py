"""The recipes: each is read without a warning, has the batches of the guide it is of, and trains."""

import json
from pathlib import Path

import pytest
import yaml

from perl.config.load import parse
from perl.tools.from_verl.cli import recipe_text
from perl.tools.from_verl.outcomes import Choices
from perl.tools.from_verl.overrides import read_command
from perl.tools.from_verl.translate import translate
from perl.training.grpo import train
from tests.tiny import geometry_file, save_tiny, save_tiny_vision

RECIPES = sorted(Path("recipes").glob("*.yaml"))
GUIDES = {
    "gsm8k_qwen2_5_0_5b": (640, 320, 5),
    "gsm8k_full": (640, 320, 5),
    "gsm8k_qwen2_5_7b": (640, 320, 5),
    "gsm8k_aqn": (256, 64, 4),
    "gsm8k_aqn_hbm": (512, 128, 4),
    "dapo_math_7b": (256, 16, 16),
    "ppo_gsm8k": (256, 64, 1),
    "geo3k_qwen2_5_vl_7b": (2560, 640, 5),
}
"""Completions a rollout and an update of the verl command on its devices, and its rollout.n."""
DEVICES = {"ppo_gsm8k": 1}
"""Of the guide, where they are not eight."""
HBM = (
    "data.train_batch_size=128",
    "data.max_response_length=1024",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
)
"""The AQN guide's settings for a fuller memory, over its launch command."""
COMMANDS = {
    "gsm8k_aqn": ("npu_aqn_launch", (), 20),
    "gsm8k_aqn_hbm": ("npu_aqn_launch", HBM, 20),
    "gsm8k_qwen2_5_0_5b": ("ascend_support_grpo", (), 20),
    "gsm8k_qwen2_5_7b": ("ascend_blog_grpo", (), 20),
    "gsm8k_full": ("ascend_support_grpo", (), 1),
    "ppo_gsm8k": ("ascend_quickstart_ppo", (), 10),
}
"""Recipe -> the guide's command in tests/verl, words after it, and the learning rate over verl's, which is for all
weights (1: all weights are trained here too)."""
NOT_OF_THE_COMMAND = {
    "dataset.dataset_name_or_path": "the task by its name; the guide's file is of its machine",
    "validation.datasets": "the same",
    "training.run_name": "the guide's experiment_name, which names another model",
    "logging.wandb_project": "the guide's project_name",
    "training.epsilon_high": "null is epsilon",
}
NOT_OF_THE_COMMAND_EITHER = {
    "gsm8k_aqn": {"model.model_name_or_path": "/path/to/model in the guide"},
    "gsm8k_aqn_hbm": {"model.model_name_or_path": "/path/to/model in the guide"},
    "gsm8k_qwen2_5_7b": {
        "model.model_name_or_path": "the model of the guide's table",
        "training.per_device_train_batch_size": "a smaller forward of the same update, as 7B leaves less room",
        "training.gradient_accumulation_steps": "the same",
        "training.steps_per_generation": "the same",
    },
}


def test_each_recipe_of_a_guide_is_known():
    assert {path.stem for path in RECIPES} == {*GUIDES, "dapo_lora", "quickstart", "real_sft", "real_grpo"}


@pytest.mark.parametrize("name", GUIDES)
def test_batches_are_verls(name):
    parsed = parse(["--recipe", f"recipes/{name}.yaml"])
    assert parsed.warnings == []
    training = parsed.values.training
    rows = DEVICES.get(name, 8) * training.per_device_train_batch_size
    batches = rows * training.steps_per_generation, rows * training.gradient_accumulation_steps
    assert (*batches, training.num_generations) == GUIDES[name]
    assert training.steps_per_generation % training.gradient_accumulation_steps == 0


@pytest.mark.parametrize("name", GUIDES)
def test_what_verl_sets_in_silence_is_written_out(name):
    written = yaml.safe_load(Path(f"recipes/{name}.yaml").read_text())["training"]
    expected = {"num_iterations": 1, "epsilon": 0.2, "max_grad_norm": 1.0, "temperature": 1.0, "max_steps": -1}
    if name != "dapo_math_7b":
        expected |= {"loss_type": "bnpo", "lr_scheduler_type": "constant", "weight_decay": 0.01, "delta": 3.0}
        expected |= {"use_bias_correction_kl": False, "beta": 0.01 if name.startswith("geo3k") else 0.001}
    if name.startswith("ppo"):
        del expected["use_bias_correction_kl"]
        expected["beta"] = 0.0
    assert {field: written.get(field) for field in expected} == expected


@pytest.mark.parametrize("name", COMMANDS)
def test_every_setting_is_that_of_the_guides_command(name, tmp_path):
    script, words, factor = COMMANDS[name]
    choices = Choices(learning_rate_factor=factor, full=factor == 1)
    translated = translate(read_command(f"tests/verl/{script}.sh", words), choices)
    (tmp_path / "translated.yaml").write_text(recipe_text(translated))
    ours, verls = (
        vars(parse(["--recipe", str(path)]).values.as_flat())
        for path in (f"recipes/{name}.yaml", tmp_path / "translated.yaml")
    )
    assert ours["validation.every_steps"] in (10, 40, 80)
    differing = {field for field in {*ours, *verls} if ours.get(field) != verls.get(field)}
    reasons = NOT_OF_THE_COMMAND | NOT_OF_THE_COMMAND_EITHER.get(name, {})
    assert differing <= reasons.keys()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny_model"), scale=4.0)


def test_geometry_trains_a_tiny_vision_model_for_two_steps(tmp_path):
    model, data = save_tiny_vision(tmp_path / "model"), geometry_file(tmp_path / "train.parquet")
    settings = {
        "model.model_name_or_path": model,
        "dataset.dataset_name_or_path": data,
        "training.output_dir": tmp_path / "run",
        "training.max_steps": 2,
        "training.per_device_train_batch_size": 5,
        "training.gradient_accumulation_steps": 1,
        "training.steps_per_generation": 2,
        "training.max_completion_length": 8,
        "validation.datasets": "[]",
        "training.report_to": "none",
    }
    flags = [word for field, value in settings.items() for word in (f"--config.{field}", str(value))]
    run = train(["--recipe", "recipes/geo3k_qwen2_5_vl_7b.yaml", *flags])
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = "rewards/accuracy/mean", "rewards/think/mean"
    assert [row["step"] for row in logged if "loss" in row] == [1, 2]
    assert all(name in logged[0] for name in rewards)


@pytest.mark.parametrize("name", [name for name in GUIDES if not name.startswith("geo3k")])
def test_each_trains_a_tiny_model_for_two_steps(name, model, tmp_path):
    """One process, one group a micro-batch, two updates of one rollout."""
    form = "Answer: {}" if name.startswith("dapo") else "#### {}"
    rows = [{"question": f"What is {i} + 3 ?", "answer": form.format(i + 3)} for i in range(4)]
    if name.startswith("dapo"):
        rows = [{"prompt": row["question"], "solution": str(i + 3)} for i, row in enumerate(rows)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    group = max(2, GUIDES[name][2])
    settings = {
        "model.model_name_or_path": model,
        "dataset.dataset_name_or_path": tmp_path / "sums.jsonl",
        "dataset.max_prompt_length": 100,
        "training.output_dir": tmp_path / "run",
        "training.max_steps": 2,
        "training.per_device_train_batch_size": group,
        "training.gradient_accumulation_steps": 1,
        "training.steps_per_generation": 2,
        "training.max_completion_length": 8,
    }
    if name.startswith("dapo"):
        settings["reward.overlong_cache_length"] = 4
    settings["training.logging_steps"] = 1
    if "gsm8k" in name:
        row = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "What is 2 + 3 ?"}]}
        row |= {"ability": "math", "reward_model": {"style": "rule", "ground_truth": "5"}, "extra_info": {"index": 0}}
        (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
        settings |= {"validation.datasets": json.dumps([str(tmp_path / "test.jsonl")]), "validation.max_new_tokens": 8}
    flags = [word for field, value in settings.items() for word in (f"--config.{field}", str(value))]
    assert train(["--recipe", f"recipes/{name}.yaml", *flags]) == tmp_path / "run"
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged if "loss" in row] == [1, 2]
    first = next(row for row in logged if "loss" in row)
    reward = yaml.safe_load(Path(f"recipes/{name}.yaml").read_text())["reward"]["functions"]
    assert {f"rewards/{one}/mean" for one in reward} <= first.keys()
    assert ("aqn/sigma" in first) == ("aqn" in name)
    validated = [row["step"] for row in logged if "val-core/openai/gsm8k/acc/mean@1" in row]
    assert validated == ([] if name.startswith("dapo") else [2] if name.startswith("ppo") else [0, 2])
    assert ("critic/vf_loss" in logged[0]) == name.startswith("ppo")
    result = "model/model.safetensors" if name == "gsm8k_full" else "adapter/adapter_model.safetensors"
    assert (tmp_path / "run" / result).is_file()
