"""The recipes: each is read without a warning, has the batches of the guide it is of, and trains."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from perl.__main__ import main
from perl.config.load import GRPO, parse, recipe_content
from perl.finetuning.sft import fine_tune
from perl.tools.from_verl.cli import recipe_text
from perl.tools.from_verl.outcomes import Choices
from perl.tools.from_verl.overrides import read_command
from perl.tools.from_verl.translate import translate
from perl.training.grpo import train
from tests.test_launch_script import launch
from tests.tiny import geometry_file, save_tiny, save_tiny_vision

RECIPES = sorted(Path("recipes").glob("*.yaml"))
GUIDES = {
    "gsm8k_qwen2_5_0_5b": (640, 320, 5),
    "gsm8k_full": (640, 320, 5),
    "gsm8k_qwen2_5_7b": (640, 320, 5),
    "gsm8k_pool_7b": (640, 320, 5),
    "gsm8k_pool_nodes_7b": (640, 320, 5),
    "gsm8k_qwen2_5_14b": (640, 320, 5),
    "gsm8k_qwen2_5_32b": (640, 320, 5),
    "math_qwen3_8b": (1280, 320, 5),
    "gsm8k_aqn": (256, 64, 4),
    "gsm8k_aqn_hbm": (512, 128, 4),
    "dapo_math_7b": (256, 16, 16),
    "dapo_math_qwen3_8b": (256, 16, 16),
    "retool": (1024, 256, 16),
    "ppo_gsm8k": (256, 64, 1),
    "geo3k_qwen2_5_vl_7b": (2560, 640, 5),
}
"""Completions a rollout and an update of the verl command on its devices, and its rollout.n."""
DEVICES = {"ppo_gsm8k": 1, "gsm8k_pool_7b": 4}
"""That train, where they are not eight."""
HBM = (
    "data.train_batch_size=128",
    "data.max_response_length=1024",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
)
"""The AQN guide's settings for a fuller memory, over its launch command."""
DAPO_QWEN3_8B = (
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B-Base",
    "algorithm.filter_groups.enable=False",
    "data.shuffle=False",
    "trainer.n_gpus_per_node=8",
    "trainer.val_before_train=False",
    "trainer.test_freq=10",
    "trainer.total_training_steps=100",
)
"""What run_dapo_qwen3_8b_base_npu.sh has otherwise than run_dapo_qwen2.5_7b_npu.sh."""
COMMANDS = {
    "gsm8k_aqn": ("npu_aqn_launch", (), 10),
    "gsm8k_aqn_hbm": ("npu_aqn_launch", HBM, 10),
    "gsm8k_qwen2_5_0_5b": ("ascend_support_grpo", (), 10),
    "gsm8k_qwen2_5_7b": ("ascend_blog_grpo", (), 10),
    "gsm8k_full": ("ascend_support_grpo", (), 1),
    "ppo_gsm8k": ("ascend_quickstart_ppo", (), 10),
    "math_qwen3_8b": ("grpo_qwen3_8b_npu", (), 10),
    "dapo_math_7b": ("dapo_qwen2_5_7b_npu", ("trainer.n_gpus_per_node=8",), 10),
    "dapo_math_qwen3_8b": ("dapo_qwen2_5_7b_npu", DAPO_QWEN3_8B, 10),
}
"""Recipe -> the guide's command in tests/verl, words after it, and the learning rate over verl's, which is for all
weights (1: all weights are trained here too)."""
QWEN3_8B = {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
QWEN3_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
QWEN2_5_14B = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40}
QWEN2_5_14B |= {"num_key_value_heads": 8}
QWEN2_5_32B = QWEN2_5_14B | {"intermediate_size": 27648, "num_hidden_layers": 64}
PLANNED: dict[str, tuple[dict[str, Any], float]] = {
    "gsm8k_qwen2_5_14b": (QWEN2_5_14B, 14.77),
    "gsm8k_qwen2_5_32b": (QWEN2_5_32B, 32.76),
    "math_qwen3_8b": (QWEN3_8B, 8.19),
    "dapo_math_qwen3_8b": (QWEN3_8B, 8.19),
    "dapo_lora_7b": ({}, 7.62),
    "dapo_lora_14b": (QWEN2_5_14B, 14.77),
    "retool": ({}, 7.62),
    "sft_qwen3_8b": (QWEN3_8B, 8.19),
}
"""Recipe -> its model's config.json over that of Qwen2.5-7B, and 1e9 parameters as the model's card has them."""
POOLS = {"gsm8k_pool_7b": 4, "gsm8k_pool_nodes_7b": 8}
"""Recipe -> devices that train; as many draw."""
NOT_OF_THE_COMMAND = {
    "dataset.dataset_name_or_path": "the task by its name; the guide's file is of its machine",
    "validation.datasets": "the same",
    "training.run_name": "the guide's experiment_name, which names another model",
    "logging.wandb_project": "the guide's project_name",
    "training.epsilon_high": "null is epsilon",
}
VALIDATION = "every_steps", "n", "max_new_tokens", "temperature", "top_k", "top_p"
NOT_OF_THE_COMMAND_EITHER = {
    "gsm8k_aqn": {"model.model_name_or_path": "/path/to/model in the guide"},
    "gsm8k_aqn_hbm": {"model.model_name_or_path": "/path/to/model in the guide"},
    "gsm8k_qwen2_5_7b": {
        "model.model_name_or_path": "the model of the guide's table",
        "training.per_device_train_batch_size": "a smaller forward of the same update, as 7B leaves less room",
        "training.gradient_accumulation_steps": "the same",
        "training.steps_per_generation": "the same",
    },
    "math_qwen3_8b": {"training.report_to": "the same, in a list"},
    "dapo_math_7b": {
        "algorithm.dynamic_sampling_metric": "accuracy is the default",
        "training.max_tokens_per_microbatch": "a row a forward",
        "training.logging_steps": "a row for each update",
        **{f"validation.{field}": "without the script's validation" for field in VALIDATION},
    },
    "dapo_math_qwen3_8b": {
        "algorithm.name": "DAPO's other parts",
        "training.max_tokens_per_microbatch": "a row a forward",
        "validation.top_k": "0 and 1.0 are what it is without",
        "validation.top_p": "the same",
    },
}


def test_each_recipe_of_a_guide_is_known():
    known = {*GUIDES, *PLANNED, "dapo_lora", "quickstart", "real_sft", "real_grpo", "retool_sft", "retool_grpo"}
    assert {path.stem for path in RECIPES} == known


@pytest.mark.parametrize("name", GUIDES)
def test_batches_are_verls(name):
    parsed = parse(["--recipe", f"recipes/{name}.yaml"])
    without_sampling = ["the recipe's algorithm.dynamic_sampling False overrides algorithm dapo, which sets True"]
    assert parsed.warnings == (without_sampling if name == "dapo_math_qwen3_8b" else [])
    training = parsed.values.training
    rows = DEVICES.get(name, 8) * training.per_device_train_batch_size
    batches = rows * training.steps_per_generation, rows * training.gradient_accumulation_steps
    assert (*batches, training.num_generations) == GUIDES[name]
    assert training.steps_per_generation % training.gradient_accumulation_steps == 0


@pytest.mark.parametrize("name", GUIDES)
def test_what_verl_sets_in_silence_is_written_out(name):
    written = recipe_content(f"recipes/{name}.yaml", GRPO)[0]["training"]
    expected = {"num_iterations": 1, "epsilon": 0.2, "max_grad_norm": 1.0, "temperature": 1.0, "max_steps": -1}
    if not name.startswith(("dapo", "retool")):
        expected |= {"loss_type": "dapo", "lr_scheduler_type": "constant", "weight_decay": 0.01, "delta": 3.0}
        expected |= {"use_bias_correction_kl": False, "beta": 0.01 if name.startswith("geo3k") else 0.001}
    if name.startswith("ppo"):
        del expected["use_bias_correction_kl"]
        expected["beta"] = 0.0
    if name == "dapo_math_qwen3_8b":
        expected["max_steps"] = 1600
    written = {"max_steps": -1} | written  # a base's goes where the recipe says num_train_epochs
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
    differing = {field for field in {*ours, *verls} if ours.get(field) != verls.get(field)}
    reasons = NOT_OF_THE_COMMAND | NOT_OF_THE_COMMAND_EITHER.get(name, {})
    assert differing <= reasons.keys()


@pytest.mark.parametrize("name", PLANNED)
def test_the_memory_in_a_recipes_head_is_plans(name, tmp_path, capsys):
    """`# python -m perl plan, GB on each of 8, zero2: 910b rollout 1.2, update 3.4 of 64; h100 …`"""
    changes, billions = PLANNED[name]
    config = json.loads(Path("tests/tools/plan/qwen2_5_7b_instruct.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = Path(f"recipes/{name}.yaml").read_text()
    (line,) = re.findall(r"(?m)^# python -m perl plan, GB on each of 8, .*", text)
    parallel = line.split(", ")[2].split(":")[0]
    command = ["plan", f"recipes/{name}.yaml", "--count", "8", "--parallel", parallel, "--json"]
    command += ["--config.model.model_name_or_path", str(tmp_path)]
    parts = []
    for device, size in (("910b", 64), ("h100", 80)):
        assert main([*command, "--device", device]) == 0
        found = json.loads(capsys.readouterr().out)
        assert round(found["parameters"] / 1e9, 2) == billions
        assert found["fits"][str(size)]
        peaks = ", ".join(f"{phase} {size / 2**30:.1f}" for phase, size in found["peak"].items())
        parts.append(f"{device} {peaks} of {size}")
    assert line == f"# python -m perl plan, GB on each of 8, {parallel}: {'; '.join(parts)}"


@pytest.mark.parametrize("name", POOLS)
def test_plan_knows_what_trains_and_what_draws(name, tmp_path, capsys):
    """`# python -m perl plan, GB on each of 4, zero2: 910b trains 1.2, draws 3.4; h100 …`"""
    count = POOLS[name]
    (tmp_path / "config.json").write_text(Path("tests/tools/plan/qwen2_5_7b_instruct.json").read_text())
    command = ["plan", f"recipes/{name}.yaml", "--count", str(count), "--parallel", "zero2", "--json"]
    command += ["--config.model.model_name_or_path", str(tmp_path)]
    parts = []
    for device in ("910b", "h100"):
        assert main([*command, "--device", device]) == 0
        found = json.loads(capsys.readouterr().out)
        (note,) = [note for note in found["notes"] if f"{count} + {count} devices: {count} workers draw" in note]
        drawn = re.findall(r"each holds ([\d.]+) GB", note)[0]
        parts.append(f"{device} trains {max(found['peak'].values()) / 2**30:.1f}, draws {drawn}")
    assert (
        f"# python -m perl plan, GB on each of {count}, zero2: {'; '.join(parts)}\n"
        in Path(f"recipes/{name}.yaml").read_text()
    )


@pytest.mark.parametrize("page", ["README.md", "README_zh.md"])
def test_the_readmes_table_has_the_peaks_of_the_heads(page):
    rows = {
        name: (a, b)
        for name, a, b in re.findall(r"(?m)^\| (\w+) \|.*\| ([\d.]+) \| ([\d.]+) \|$", Path(page).read_text())
    }
    heads = {}
    for name in (*PLANNED, *POOLS):
        parts = re.findall(r"(?m)(?:910b|h100) (.*?)(?:;|$)", Path(f"recipes/{name}.yaml").read_text())
        heads[name] = tuple(max(re.findall(r"\d+\.\d", part), key=float) for part in parts)
    assert {name: rows[name] for name in heads} == heads


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Family -> folder of a tiny model."""
    folder = tmp_path_factory.mktemp("tiny_models")
    qwen3 = save_tiny(folder / "qwen3", family="qwen3", head_dim=32, scale=4.0)
    return {"qwen2": save_tiny(folder / "qwen2", scale=4.0), "qwen3": qwen3}


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


def tiny_flags(name: str, models: dict[str, Path], folder: Path) -> list[str]:
    """Flags of two updates of one rollout, one group a micro-batch, logged after each; its run is in folder/run."""
    of_math = "math" in name
    form = "Answer: {}" if of_math else "#### {}"
    rows = [{"question": f"What is {i} + 3 ?", "answer": form.format(i + 3)} for i in range(4)]
    if of_math:
        rows = [{"prompt": row["question"], "solution": str(i + 3)} for i, row in enumerate(rows)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "What is 2 + 3 ?"}]}
    row |= {"ability": "math", "reward_model": {"style": "rule", "ground_truth": "5"}, "extra_info": {"index": 0}}
    (folder / "test.jsonl").write_text(json.dumps(row) + "\n")
    settings = {
        "model.model_name_or_path": models["qwen3" if "qwen3" in name else "qwen2"],
        "dataset.dataset_name_or_path": folder / "sums.jsonl",
        "dataset.max_prompt_length": 100,
        "training.output_dir": folder / "run",
        "training.max_steps": 2,
        "training.per_device_train_batch_size": max(2, GUIDES.get(name, (0, 0, 2))[2]),
        "training.gradient_accumulation_steps": 1,
        "training.steps_per_generation": 2,
        "training.max_completion_length": 8,
        "training.logging_steps": 1,
        "training.report_to": "none",
    }
    if "pool" in name:
        settings["rollout.workers"] = 1
    if name.startswith("dapo_math"):
        settings |= {"reward.overlong_cache_length": 4, "validation.datasets": "[]"}
    elif name == "retool":  # a prompt that lists the tool
        settings |= {"dataset.max_prompt_length": 600, "environment.sandbox": "limits"}
    elif not name.startswith("dapo_lora"):
        settings |= {"validation.datasets": json.dumps([str(folder / "test.jsonl")]), "validation.max_new_tokens": 8}
    return [word for field, value in settings.items() for word in (f"--config.{field}", str(value))]


def require_run(name: str, run: Path) -> None:
    """Two steps with the recipe's rewards, noise, critic and validation, and their result."""
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged if "loss" in row] == [1, 2]
    first = next(row for row in logged if "loss" in row)
    recipe, _ = recipe_content(f"recipes/{name}.yaml", GRPO)
    assert {f"rewards/{one}/mean" for one in recipe["reward"]["functions"]} <= first.keys()
    assert ("aqn/sigma" in first) == recipe.get("noise_injection", {}).get("enabled", False)
    validated = [row["step"] for row in logged if "val-core/openai/gsm8k/acc/mean@1" in row]
    assert validated == ([] if name.startswith(("dapo", "retool")) else [2] if name.startswith("ppo") else [0, 2])
    assert ("critic/vf_loss" in first) == name.startswith("ppo")
    result = "model/model.safetensors" if name == "gsm8k_full" else "adapter/adapter_model.safetensors"
    assert (run / result).is_file()


@pytest.mark.parametrize("name", [name for name in GUIDES if not name.startswith("geo3k") and "nodes" not in name])
def test_each_trains_a_tiny_model_for_two_steps(name, models, tmp_path):
    assert train(["--recipe", f"recipes/{name}.yaml", *tiny_flags(name, models, tmp_path)]) == tmp_path / "run"
    require_run(name, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k_pool_nodes_7b", "dapo_lora_7b", "dapo_lora_14b"])
def test_those_that_are_not_trained_above_start_by_the_launch_script(name, models, tmp_path):
    recipe = Path("recipes").resolve() / f"{name}.yaml"
    done = launch(["--recipe", str(recipe), *tiny_flags(name, models, tmp_path)], tmp_path, NUM_PROCESSES="1")
    assert done.returncode == 0, done.stdout + done.stderr
    require_run(name, tmp_path / "run")


def test_the_fine_tuning_of_qwen3_trains_a_tiny_model_for_two_steps(models, tmp_path):
    tiny_flags("sft_qwen3_8b", models, tmp_path)
    settings = {
        "model.model_name_or_path": models["qwen3"],
        "dataset.dataset_name_or_path": tmp_path / "sums.jsonl",
        "dataset.eval_dataset": tmp_path / "sums.jsonl",
        "training.output_dir": tmp_path / "run",
        "training.max_steps": 2,
        "training.per_device_train_batch_size": 2,
    }
    flags = [word for field, value in settings.items() for word in (f"--config.{field}", str(value))]
    run = fine_tune(["--recipe", "recipes/sft_qwen3_8b.yaml", *flags])
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged if "loss" in row] == [1, 2]
    assert any("eval_loss" in row for row in logged)
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
