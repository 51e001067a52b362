"""What a card says, from records made by hand; tests/tools/test_card.py looks at those of real runs."""

import json
import re

import pytest
from huggingface_hub import ModelCard

from perl.adapters.titles import with_article
from perl.algorithms import ALGORITHMS
from perl.base.errors import UserError
from perl.models.folders import content_hash
from perl.runs.model_card import (
    add_results,
    hub_dataset,
    license_of,
    linked_algorithm,
    metadata,
    new_card,
    run_facts,
    with_results,
)


def adapter(folder, **changes):
    config = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen2.5-7B"} | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def config(**dataset):
    return {
        "common": {"seed": 42},
        "dataset": {"dataset_name_or_path": "gsm8k"} | dataset,
        "peft": {"type": "dora", "r": 16, "lora_alpha": 32, "lora_dropout": 0.0},
        "reward": {"functions": ["accuracy", "/home/me/mine.py:mine"]},
        "noise_injection": {"enabled": False, "sigma_start": 1, "sigma_end": 0, "num_stages": 2, "schedule": "linear"},
        "training": {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 8,
            "num_generations": 4,
            "loss_type": "dapo",
            "beta": 0.0,
            "learning_rate": 1e-5,
            "lr_scheduler_type": "linear",
            "max_completion_length": 256,
            "temperature": 1.0,
            "top_p": 1.0,
        },
    }


ENVIRONMENT = {"num_processes": 4, "device": "npu", "git_commit": None, "packages": {"perl": "0.4.0", "trl": "1.16.0"}}


def test_names_of_the_hub_are_metadata_and_local_ones_are_not(tmp_path):
    data = metadata(adapter(tmp_path), "gsm8k")
    assert (data.base_model, data.datasets, data.license) == ("Qwen/Qwen2.5-7B", ["openai/gsm8k"], None)
    assert data.tags == ["transformers", "lora", "base_model:adapter:Qwen/Qwen2.5-7B", "grpo", "trl", "perl"]
    local = metadata(adapter(tmp_path, base_model_name_or_path="/home/me/models/Qwen2.5-7B"), "data/sums.jsonl")
    assert (local.base_model, local.datasets) == (None, None)
    several = metadata(adapter(tmp_path), ["gsm8k", "data/sums.jsonl", "my/hub-set"])
    assert several.datasets == ["openai/gsm8k", "my/hub-set"]
    of_others = metadata(adapter(tmp_path))
    assert of_others.tags == ["transformers", "lora", "base_model:adapter:Qwen/Qwen2.5-7B"]


PPO = {
    "algorithm": {"name": "ppo", "gamma": 1.0, "lam": 0.95},
    "critic": {"lr": 1e-4, "r": 16, "warmup_steps": 0},
}


def test_the_card_names_the_algorithm(tmp_path):
    facts = run_facts(config() | PPO, ENVIRONMENT, [{"step": 1, "reward": 0.5, "loss": 1.0}])
    assert facts.settings["rewards"] == "accuracy, mine.py:mine"
    card = new_card(adapter(tmp_path), "run", "gsm8k", facts)
    assert "trained with [PPO](https://arxiv.org/abs/1707.06347) for 1 steps" in card.text
    assert card.data.tags[-3:] == ["ppo", "trl", "perl"]
    older = run_facts(config(), ENVIRONMENT, [])  # than the group
    assert linked_algorithm(older.algorithm) == "[GRPO](https://arxiv.org/abs/2402.03300)"


def test_the_licence_of_a_base_whose_card_says_nothing_is_unknown_without_a_warning(tmp_path, caplog):
    card = tmp_path / "README.md"
    for text, licence in (
        ("# A model\n", None),
        ("---\nlicense: mit\n---\n# A model\n", "mit"),
        ("---\n- mit\n---\n# A model\n", None),
        ("---\nlicense: [\n---\n# A model\n", None),
    ):
        card.write_text(text)
        assert license_of(str(tmp_path)) == licence
    assert not caplog.records


def test_hub_datasets():
    assert hub_dataset("open-r1/DAPO-Math-17k-Processed:cn") == "open-r1/DAPO-Math-17k-Processed"
    assert hub_dataset("dapo-math") == "open-r1/DAPO-Math-17k-Processed"
    assert hub_dataset("math") is None  # a task for files
    assert hub_dataset("data/sums.jsonl") is None
    assert hub_dataset("./data") is None


def test_the_curve_has_its_ends_and_eight_steps_between():
    history = [{"step": step, "reward": step / 100, "loss": 0.0} for step in range(1, 101)]
    facts = run_facts(config(), ENVIRONMENT, [*history, {"step": 100, "train_loss": 0.1}])
    assert facts.steps == 100
    assert (facts.first, facts.last) == ("0.055", "0.955")  # means of 0.01 … 0.10 and 0.91 … 1.00
    assert facts.curve_columns == ["step", "reward"]  # what was not logged has no column
    assert [row[0] for row in facts.curve] == ["1", "15", "29", "43", "58", "72", "86", "100"]
    assert facts.curve[-1] == ["100", "1.000"]
    assert facts.settings["completions a step"] == "64, 4 of each prompt"
    assert facts.settings["rewards"] == "accuracy, mine.py:mine"
    assert (facts.settings["noise (AQN)"], facts.settings["commit of perl"]) == ("none", "unknown")


def test_the_noise_in_a_few_words():
    def said(**noise):
        made = config()
        made["noise_injection"] |= {"enabled": True, "target_kl_start": 0.01, "target_kl_end": 0.001} | noise
        return run_facts(made, ENVIRONMENT, []).settings["noise (AQN)"]

    assert said() == "σ from 1 to 0, linear, 2 stages"
    assert said(relative=True) == "σ from 1 to 0 of each layer's RMS, linear, 2 stages"
    held = "σ from 1, set for a KL divergence from 0.01 to 0.001 nats a token, 2 stages"
    assert said(schedule="target_kl", relative=False) == held


def test_a_checkpoint_before_the_first_log_has_no_curve():
    facts = run_facts(config(), ENVIRONMENT, [])
    assert (facts.steps, facts.first, facts.curve) == (0, "–", [])


def test_results_replace_those_between_the_marks_and_nothing_else():
    text = with_results("# A\n\nmine", "first")
    assert text.endswith("## Results\n\n<!-- perl: results -->\nfirst\n<!-- perl: end of results -->\n")
    again = with_results(text + "\nand this\n", r"second \1")
    assert again == text.replace("first", r"second \1") + "\nand this\n"


def test_an_evaluation_that_has_not_ended_is_left_out_with_a_line(tmp_path, caplog):
    folder = adapter(tmp_path / "adapter", use_dora=True)
    estimate = {"value": 0.5, "low": 0.25, "high": 0.75}
    summary = {
        "adapter_hash": content_hash(folder),
        "base_hash": "b",
        "dataset": "gsm8k",
        "problems": 10,
        "n": 1,
        "metrics": {"accuracy": estimate, "avg@1": estimate, "pass@1": estimate, "maj@1": estimate},
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 512, "seed": 0},
        "engines": ["vllm"],
        "dtype": "auto",
        "truncated": 0.1,
        "unextracted": 0.0,
        "provenance": {"versions": {"vllm": "0.31.0"}, "git_commit": "abc"},
    }
    for name in ("gsm8k", "math500"):
        (tmp_path / "results" / name).mkdir(parents=True)
        (tmp_path / "results" / name / "run.json").write_text("{}")
    (tmp_path / "results" / "gsm8k" / "summary.json").write_text(json.dumps(summary))
    (result,) = add_results(folder, [tmp_path / "results"])
    assert (result.dataset_type, result.dataset_name, result.metric_value) == ("openai/gsm8k", "gsm8k", 50.0)
    assert "math500 is left out: its evaluation has not ended" in caplog.text
    card = ModelCard.load(folder / "README.md")
    assert "A DoRA adapter for [Qwen/Qwen2.5-7B](https://huggingface.co/Qwen/Qwen2.5-7B). Made with" in card.text
    assert "| gsm8k | this adapter | accuracy | 50.00 | 25.00 – 75.00 |" in card.text
    assert "greedy, at most 512 tokens, seed 0; engine vllm, dtype auto; truncated 10.0%" in card.text
    assert "## Training" not in card.text  # nothing is known of it


def test_a_card_names_the_algorithm_and_what_it_has_beyond_grpo(tmp_path):
    said = {"gamma": 1.0, "lam": 0.95, "kl_in_reward": 0.01, "kl_in_reward_estimator": "k1", "dynamic_sampling": False}
    made = config() | {"algorithm": said | {"name": "ppo"}, "critic": {"lr": 1e-3, "r": 8, "warmup_steps": 2}}
    facts = run_facts(made, ENVIRONMENT, [{"step": 1, "reward": 0.5, "loss": 0.1}])
    assert facts.settings["critic"] == "learning rate 0.001, LoRA r 8, warmup 2 steps"
    assert (facts.settings["gamma, lambda"], facts.settings["KL in the reward"]) == ("1.0, 0.95", "0.01, k1")
    assert facts.curve_columns == ["step", "reward"]  # as of every algorithm with rewards
    card = new_card(adapter(tmp_path), "run", "gsm8k", facts)
    assert "trained with [PPO](https://arxiv.org/abs/1707.06347) for 1 steps" in card.text
    assert "ppo" in card.data.to_dict()["tags"]
    of_dapo = said | {"name": "dapo", "dynamic_sampling": True, "max_resample_factor": 10.0}
    settings = run_facts(config() | {"algorithm": of_dapo}, ENVIRONMENT, []).settings
    assert settings["dynamic sampling"] == "at most 10 times the groups of a batch"
    assert "critic" not in settings


def test_every_algorithm_links_its_paper():
    links = [linked_algorithm(name) for name in ALGORITHMS]
    assert linked_algorithm("reinforce_plus_plus") == "[REINFORCE++](https://arxiv.org/abs/2501.03262)"
    assert all(re.fullmatch(r"\[.+\]\(https://arxiv.org/abs/\d{4}\.\d{5}\)", link) for link in links)


@pytest.mark.parametrize("content", ["[1, 2]", "3", "[" * 100_000])
def test_a_file_without_fields_is_one_line(tmp_path, content):
    adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(UserError, match=r"adapter_config.json: (holds .*, and no fields; copy it again|not readable)"):
        new_card(tmp_path, "name")


@pytest.mark.parametrize(
    ("method", "written"),
    [
        ("LoRA", "A LoRA"),
        ("OFT", "An OFT"),
        ("(IA)³", "An (IA)³"),
        ("AdaLoRA", "An AdaLoRA"),
        ("HRA", "An HRA"),
        ("rsLoRA", "An rsLoRA"),
        ("PiSSA", "A PiSSA"),
    ],
)
def test_the_article_is_that_of_the_methods_name(method, written):
    assert with_article(method) == written
