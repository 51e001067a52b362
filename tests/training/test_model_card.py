"""What a card says, from records made by hand; tests/tools/test_card.py looks at those of real runs."""

import json
import re

import pytest
from huggingface_hub import ModelCard

from perl.adapters import with_article
from perl.algorithms import ALGORITHMS
from perl.base.errors import UserError
from perl.base.provenance import provenance
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
from tests.results import record, summary


def adapter(folder, **changes):
    config = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen2.5-7B"} | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def trained_on(dataset):
    return config() | {"dataset": {"dataset_name_or_path": dataset}}


def settings(run):
    """The table of settings on the card of a run: row -> value."""
    return dict(re.findall(r"^\| (.+?) \| (.+) \|$", run.text.partition("| setting | value |")[2], re.MULTILINE))


def config():
    return {
        "common": {"seed": 42},
        "dataset": {"dataset_name_or_path": "gsm8k"},
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
    data = metadata(adapter(tmp_path), config())
    assert (data.base_model, data.datasets, data.license) == ("Qwen/Qwen2.5-7B", ["openai/gsm8k"], None)
    assert data.tags == ["transformers", "lora", "base_model:adapter:Qwen/Qwen2.5-7B", "grpo", "trl", "perl"]
    local = metadata(
        adapter(tmp_path, base_model_name_or_path="/home/me/models/Qwen2.5-7B"), trained_on("data/sums.jsonl")
    )
    assert (local.base_model, local.datasets) == (None, None)
    several = metadata(adapter(tmp_path), trained_on(["gsm8k", "data/sums.jsonl", "my/hub-set"]))
    assert several.datasets == ["openai/gsm8k", "my/hub-set"]
    of_others = metadata(adapter(tmp_path))
    assert of_others.tags == ["transformers", "lora", "base_model:adapter:Qwen/Qwen2.5-7B"]


def test_the_card_names_the_algorithm(tmp_path):
    ppo = config() | {"algorithm": {"name": "ppo", "gamma": 1.0, "lam": 0.95}}
    card = new_card(adapter(tmp_path), "run", run_facts(ppo, ENVIRONMENT, [{"step": 1, "reward": 0.5, "loss": 1.0}]))
    assert "trained with [PPO](https://arxiv.org/abs/1707.06347) for 1 steps" in card.text
    assert card.data.tags[-3:] == ["ppo", "trl", "perl"]
    older = run_facts(config(), ENVIRONMENT, [])  # than the group
    assert older["linked_algorithm"] == "[GRPO](https://arxiv.org/abs/2402.03300)"


def test_the_card_says_how_it_was_trained_without_a_path_of_this_machine(tmp_path):
    facts = run_facts(config(), ENVIRONMENT, []) | {"applied": {"trained": 5, "parameters": 2000}}
    assert settings(new_card(adapter(tmp_path), "run", facts)) == {
        "rewards": "accuracy, mine.py:mine",
        "loss": "dapo, beta 0.0",
        "adapter": "dora, r 16, lora_alpha 32, lora_dropout 0.0; 5 of 2,000 parameters trained (0.250%)",
        "seed": "42",
        "devices": "4 × npu",
        "commit of perl": "unknown",
    }
    merged = config()
    merged["peft"] |= {"adapter": "/home/me/run/adapter", "adapter_mode": "merge"}
    card = new_card(adapter(tmp_path), "run", run_facts(merged, ENVIRONMENT, []))
    assert settings(card)["adapter"].endswith("lora_dropout 0.0; on the base merged with an earlier adapter")
    merged["peft"]["adapter_mode"] = "continue"
    card = new_card(adapter(tmp_path), "run", run_facts(merged, ENVIRONMENT, []))
    assert settings(card)["adapter"].endswith("lora_dropout 0.0; continues an earlier adapter")


def test_the_card_of_a_fine_tuning_says_which_tokens_the_loss_is_of(tmp_path):
    run = {name: group for name, group in config().items() if name not in ("reward", "noise_injection")}
    facts = run_facts(run, ENVIRONMENT, [{"step": 1, "loss": 2.0, "mean_token_accuracy": 0.25}])
    card = new_card(adapter(tmp_path), "run", facts | {"learned": "completions"})
    assert "trained with supervised fine-tuning for 1 steps" in card.text
    assert "The loss of the learned tokens, in nats; it is no evaluation" in card.text
    assert "| 1 | 2.0000 | 0.250 |" in card.text
    assert settings(card)["loss"] == "dapo, of completions"
    assert not {"rewards", "noise (AQN)"} & settings(card).keys()


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
    assert facts["steps"] == 100
    assert (facts["first"], facts["last"]) == ("0.055", "0.955")  # means of 0.01 … 0.10 and 0.91 … 1.00
    assert facts["curve_columns"] == ["step", "reward"]  # what was not logged has no column
    assert [row[0] for row in facts["curve"]] == ["1", "15", "29", "43", "58", "72", "86", "100"]
    assert facts["curve"][-1] == ["100", "1.000"]


def test_the_base_that_drew(tmp_path):
    def rollouts(**rollout):
        made = config() | {"rollout": rollout}
        return settings(new_card(adapter(tmp_path), "run", run_facts(made, ENVIRONMENT, []))).get("rollouts")

    assert rollouts() is rollouts(quantization="none") is None
    assert rollouts(quantization="int8") == "by the base in int8; the adapter is trained above the base as it is"


def test_the_base_that_was_quantised(tmp_path):
    def base(**applied):
        facts = run_facts(config(), ENVIRONMENT, []) | {"applied": {"trained": 5, "parameters": 2000} | applied}
        return settings(new_card(adapter(tmp_path), "run", facts)).get("base")

    assert base() is base(quantised="") is None
    assert base(quantised="4 bits (bitsandbytes, nf4)") == (
        "[Qwen/Qwen2.5-7B](https://huggingface.co/Qwen/Qwen2.5-7B) in 4 bits (bitsandbytes, nf4); the adapter is"
        " trained above these weights, and scores differ above others"
    )


def test_the_noise_in_a_few_words(tmp_path):
    def noise(**changes):
        made = config()
        made["noise_injection"] |= {"enabled": True, "target_kl_start": 0.01, "target_kl_end": 0.001} | changes
        return settings(new_card(adapter(tmp_path), "run", run_facts(made, ENVIRONMENT, [])))["noise (AQN)"]

    assert noise() == "linear, 2 stages, σ from 1 to 0"
    assert noise(relative=True) == "linear, 2 stages, σ from 1 of each layer's RMS to 0"
    held = "target_kl, 2 stages, σ from 1 for a KL divergence from 0.01 to 0.001 nats a token"
    assert noise(schedule="target_kl", relative=False) == held


def test_a_checkpoint_before_the_first_log_has_no_curve():
    facts = run_facts(config(), ENVIRONMENT, [])
    assert (facts["steps"], facts["first"], facts["curve"]) == (0, "–", [])


def test_results_replace_those_between_the_marks_and_nothing_else():
    text = with_results("# A\n\nmine", "first")
    assert text.endswith("## Results\n\n<!-- perl: results -->\nfirst\n<!-- perl: end of results -->\n")
    again = with_results(text + "\nand this\n", r"second \1")
    assert again == text.replace("first", r"second \1") + "\nand this\n"


def test_an_evaluation_that_has_not_ended_is_left_out_with_a_line(tmp_path, caplog):
    folder = adapter(tmp_path / "adapter", use_dora=True)
    estimate = {"value": 0.5, "low": 0.25, "high": 0.75}
    changes = {
        "adapter_hash": content_hash(folder),
        "base_hash": "b",
        "dataset": "gsm8k",
        "problems": 10,
        "metrics": {"accuracy": estimate, "avg@1": estimate, "pass@1": estimate, "maj@1": estimate},
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 512, "seed": 0},
        "engines": ["vllm"],
        "dtype": "auto",
        "truncated": 0.1,
        "unextracted": 0.0,
        "provenance": provenance() | {"versions": {"vllm": "0.31.0"}, "git_commit": "abc"},
    }
    for name in ("gsm8k", "math500"):
        (tmp_path / "results" / name).mkdir(parents=True)
        (tmp_path / "results" / name / "run.json").write_text("{}")
    (tmp_path / "results" / "gsm8k" / "summary.json").write_text(json.dumps(summary([record("a-0")], 1, **changes)))
    (result,) = add_results(folder, [tmp_path / "results"])
    assert (result.dataset_type, result.dataset_name, result.metric_value) == ("openai/gsm8k", "gsm8k", 50.0)
    assert "math500 is left out: its evaluation has not ended" in caplog.text
    card = ModelCard.load(folder / "README.md")
    assert "A DoRA adapter for [Qwen/Qwen2.5-7B](https://huggingface.co/Qwen/Qwen2.5-7B). Made with" in card.text
    assert "| gsm8k | this adapter | accuracy | 50.00 | 25.00 – 75.00 |" in card.text
    sampling = "temperature 0, top_p 1, top_k 0, max_new_tokens 512, seed 0"
    assert f"{sampling}; engine vllm, dtype auto; truncated 10.0%" in card.text
    assert "## Training" not in card.text  # nothing is known of it
    quantised = summary([record("a-0")], 1, **changes, quantization="int4")
    (tmp_path / "results" / "math500" / "summary.json").write_text(json.dumps(quantised))
    plain, other = add_results(folder, [tmp_path / "results"])
    assert ("quantization" in plain.metric_args, other.metric_args["quantization"]) == (False, "int4")
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "| gsm8k | this adapter, in int4 | accuracy | 50.00 | 25.00 – 75.00 |" in text
    assert "dtype auto, weights in int4; truncated" in text


def test_every_algorithm_links_its_paper():
    links = [linked_algorithm(name) for name in ALGORITHMS]
    assert linked_algorithm("reinforce_plus_plus") == "[REINFORCE++](https://arxiv.org/abs/2501.03262)"
    assert all(re.fullmatch(r"\[.+\]\(https://arxiv.org/abs/\d{4}\.\d{5}\)", link) for link in links)


@pytest.mark.parametrize("content", ["[1, 2]", "3", "[" * 100_000])
def test_a_file_without_fields_is_one_line(tmp_path, content):
    adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(UserError, match=r"adapter_config.json is not readable \(.*\); copy it again"):
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
