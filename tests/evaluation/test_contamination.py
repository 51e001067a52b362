"""An adapter scored on what its own run has trained on: a real run, then the evaluation of its adapter."""

import json
import logging
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from perl.config.schema import EnvironmentConfig
from perl.evaluation.as_trained import warn_of_training
from perl.evaluation.contamination import trained_on
from perl.evaluation.run import evaluate
from perl.records import Problem
from perl.tasks.trained import TRAINED_PROBLEMS
from perl.training.grpo import train


@pytest.fixture(scope="module")
def run(tiny, sums, tmp_path_factory) -> Path:
    """One step of training on the first 30 of the 40 rows (the last repeats the first)."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = {
        "model.model_name_or_path": tiny,
        "dataset.dataset_name_or_path": sums,
        "dataset.example_numbers": 30,
        "training.max_steps": 1,
        "training.per_device_train_batch_size": 4,
        "training.num_generations": 4,
        "training.gradient_accumulation_steps": 1,
        "training.max_completion_length": 8,
        "training.learning_rate": 0.1,
        "training.save_strategy": "no",
        "training.report_to": "none",
        "training.output_dir": folder,
        "reward.functions": '["accuracy"]',
        "noise_injection.enabled": "false",
    }
    return train([word for name, value in settings.items() for word in (f"--config.{name}", str(value))])


def test_a_run_writes_down_which_problems_it_trains_on(run, undisturbed):
    written = json.loads((run / TRAINED_PROBLEMS).read_text())
    keys = {key for key, _ in undisturbed}
    assert len(written["problems"]) == 30
    assert {f"{problem}-0" for problem in written["problems"]} <= keys


def test_the_evaluation_says_how_many_problems_were_trained_on(run, config, tmp_path, caplog):
    """Of the 40 problems the first 30 were trained on, and the last is the first once more. A random tiny model gets no
    reward in one step, so the adapter of the run is its checkpoint's with weights of the test's own."""
    caplog.set_level(logging.WARNING)
    adapter = changed(run / "adapter")
    changes = {"adapter": [str(adapter)], "result_dir": str(tmp_path), "n": 1, "max_new_tokens": 4}
    summary = evaluate(replace(config, **changes, temperature=0.0))["sums"]
    assert summary["trained_on"] == {"run": str(run), "problems": 31}
    assert json.loads((tmp_path / "sums" / "summary.json").read_text())["trained_on"]["problems"] == 31
    said = [record.getMessage() for record in caplog.records if "training data" in record.getMessage()]
    assert said == [
        f"{config.dataset}: 31 of its 40 problems are in the training data of {run}; the score does not tell how it"
        " does on new problems"
    ]


def changed(adapter: Path) -> Path:
    """The adapter with a lora_B that is not zero: one that changes nothing is refused."""
    import torch
    from safetensors.torch import load_file, save_file

    file = adapter / "adapter_model.safetensors"
    torch.manual_seed(0)
    weights = {name: w if "lora_A" in name else torch.randn_like(w) * 0.1 for name, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return adapter


def test_other_problems_count_zero_and_a_folder_outside_of_a_run_tells_nothing(run, tmp_path):
    other = {"0123456789abcdef-0": Problem(task="gsm8k", question="What is 1 * 1 ?", gold="1")}
    assert trained_on(run / "adapter", other) == {"run": str(run), "problems": 0}
    assert trained_on(tmp_path, other) is None


def test_the_evaluation_says_what_the_chat_template_was_given_in_training(config, tmp_path, caplog):
    for name, given in (("run", {"enable_thinking": False}), ("plain", None)):
        (tmp_path / name).mkdir()
        group = {"training": {"chat_template_kwargs": given}}
        (tmp_path / name / "config.yaml").write_text(json.dumps(group))
    folders = [tmp_path / "run/adapter", tmp_path / "run/checkpoint-3", tmp_path / "plain/adapter", tmp_path / "none"]
    warn_of_training(config, folders)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        f"{tmp_path}/run/adapter was trained with other prompts: write"
        """ --chat_template_kwargs '{"enable_thinking": false}'"""
    )
    warn_of_training(replace(config, chat_template_kwargs={"enable_thinking": False}), folders)
    assert len(caplog.records) == 1


def test_the_evaluation_says_what_system_prompt_stood_in_training(config, tmp_path, caplog):
    for name, text in (("run", "It's sums."), ("plain", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(json.dumps({"dataset": {"system_prompt": text}}))
    folders = [tmp_path / "run/adapter", tmp_path / "run/checkpoint-3", tmp_path / "plain/adapter", tmp_path / "none"]
    warn_of_training(replace(config, system_prompt="It's sums."), folders)
    assert not caplog.records
    warn_of_training(config, folders)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        f"{tmp_path}/run/adapter was trained with other prompts: write --system_prompt"
        """ 'It'"'"'s sums.'"""
    )


def test_a_system_prompt_of_several_lines_is_said_in_one(config, tmp_path, caplog):
    text = 'It\'s "so":\n\tbe brief \\ end'
    (tmp_path / "config.yaml").write_text(json.dumps({"dataset": {"system_prompt": text}}))
    warn_of_training(config, [tmp_path / "adapter"])
    said = caplog.records[0].getMessage()
    assert "\n" not in said
    word = said.partition("--system_prompt ")[2]
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, text=True, check=True)
    assert done.stdout == text


def test_the_evaluation_says_what_conversations_an_adapter_was_trained_in(config, tmp_path, caplog):
    """Two checkpoints of one run are told of once; with the same environment, wherever its file lies, nothing is."""
    caplog.set_level(logging.WARNING)
    group = asdict(EnvironmentConfig(tools=["python", "own tools.py:add"], max_turns=4))
    for name, environment in (("run", group), ("plain", asdict(EnvironmentConfig()))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(json.dumps({"environment": environment}))
    folders = [tmp_path / "run/adapter", tmp_path / "run/checkpoint-3", tmp_path / "plain/adapter", tmp_path / "none"]
    warn_of_training(config, folders)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        f"{tmp_path}/run/adapter was trained in conversations, and its first turn alone is scored; write"
        """ --environment.tools '["python", "own tools.py:add"]' --environment.max_turns 4"""
    )
    same = EnvironmentConfig(tools=["python", "elsewhere/own tools.py:add"], max_turns=4, tool_timeout_s=9)
    warn_of_training(replace(config, environment=same), folders)
    assert len(caplog.records) == 1
    warn_of_training(replace(config, environment=EnvironmentConfig(tools=["python"])), folders)
    assert caplog.records[1].getMessage() == (
        f"{tmp_path}/run/adapter was trained in conversations of other settings (tools, max_turns); write"
        """ --environment.tools '["python", "own tools.py:add"]' --environment.max_turns 4"""
    )
