"""python -m perl from-verl: the guides' commands (tests/verl), others' (tests/verl/wild), the recipe, the lists.

Expected numbers are those of verl's arithmetic, by hand: completions an update = ppo_mini_batch_size x n, a device's
share of them = / D, accumulation = share / micro.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from perl.__main__ import main
from perl.base.errors import UserError
from perl.config.load import parse
from perl.tools.from_verl.cli import HEADER, recipe_text
from perl.tools.from_verl.keys import KEYS, handler_of
from perl.tools.from_verl.outcomes import Choices
from perl.tools.from_verl.overrides import default_keys, read_command
from perl.tools.from_verl.translate import Translation, translate
from perl.training.grpo import train

SCRIPTS = Path(__file__).parents[1] / "verl"
GUIDES = sorted([*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.yaml")])
WILD = sorted((SCRIPTS / "wild").glob("*.sh"))
GRPO = ("npu_aqn_launch.sh", "ascend_support_grpo.sh", "ascend_blog_grpo.sh")
HBM = [
    "data.train_batch_size=128",
    "data.max_response_length=1024",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
]
"""The guide's settings for a fuller memory, over its launch command."""
GOOD = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
]
LISTS = ("translated", "no_effect", "refused")


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.delenv("DATA_DIR", raising=False)


def of(source, *words, **choices) -> Translation:
    return translate(read_command(str(source) if source else None, words), Choices(**choices))


def values(result: Translation) -> dict:
    return {name: value for name, (value, _) in result.recipe().items()}


def keys_written(file: Path) -> set[str]:
    """The keys in a guide's file, found with a pattern of the test's own."""
    text = re.sub(r"(?m)^\s*#.*$", "", file.read_text(encoding="utf-8"))
    if file.suffix == ".sh":
        return {key.lstrip("+") for key in re.findall(r"(?m)(?:^|\s)([+\w]+(?:\.\w+)+)=", text)}

    def below(content, prefix=()):
        for key, value in content.items():
            yield from below(value, (*prefix, key)) if isinstance(value, dict) else [".".join((*prefix, key))]

    content = yaml.safe_load(text)
    return set(below({k: v for k, v in content.items() if k not in ("hydra", "defaults")}))


# The guides


@pytest.mark.parametrize("file", GUIDES, ids=lambda file: file.name)
def test_every_key_of_a_guide_is_known_and_in_one_list(file):
    result = of(file)
    lists = [set(getattr(result, name)) for name in LISTS]
    for key in keys_written(file):
        assert sum(key in found for found in lists) == 1 or key not in result.values, key
        assert any(key in found for found in lists), key
    assert not [why for why in result.refused.values() if "no such key" in why]


@pytest.mark.parametrize("name", GRPO)
def test_the_guides_grpo_commands_are_translated(name):
    assert of(SCRIPTS / name).refused == {}


@pytest.mark.parametrize(
    ("name", "words", "devices", "rollout", "update", "micro", "accumulation", "steps", "n", "k"),
    [
        ("npu_aqn_settings.yaml", [], 8, 256, 64, 2, 4, 16, 4, 4),
        ("npu_aqn_launch.sh", [], 8, 256, 64, 8, 1, 4, 4, 4),
        ("npu_aqn_launch.sh", HBM, 8, 512, 128, 16, 1, 4, 4, 4),
        ("ascend_blog_grpo.sh", [], 8, 640, 320, 20, 2, 4, 5, 2),
        ("ascend_support_grpo.sh", [], 8, 640, 320, 20, 2, 4, 5, 2),
        ("ascend_quickstart_ppo.sh", [], 1, 256, 64, 4, 16, 64, 1, 4),
    ],
)
def test_the_batch_is_verls(name, words, devices, rollout, update, micro, accumulation, steps, n, k):
    batch = of(SCRIPTS / name, *words).batch.as_dict()
    assert batch["devices"] == devices
    assert (batch["completions_per_rollout"], batch["completions_per_update"]) == (rollout, update)
    assert batch["per_device_train_batch_size"] == micro
    assert batch["gradient_accumulation_steps"] == accumulation
    assert batch["steps_per_generation"] == steps
    assert (batch["n"], batch["updates_per_rollout"]) == (n, k)


def test_fewer_devices_keep_the_batch():
    batch = of(SCRIPTS / "npu_aqn_launch.sh", processes=2).batch
    assert (batch.devices, batch.per_device_train_batch_size) == (2, 8)
    assert (batch.gradient_accumulation_steps, batch.steps_per_generation) == (4, 16)
    assert batch.as_dict()["completions_per_update"] == 64


def test_the_ppo_guide_is_translated_with_its_critic():
    result = of(SCRIPTS / "ascend_quickstart_ppo.sh")
    assert result.refused == {}
    found = values(result)
    wanted = {
        "algorithm.name": "ppo",
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0,
        "critic.lr": 1e-4,
        "critic.value_clip": 0.5,
        "training.num_generations": 1,
        "training.save_steps": 40,  # save_freq 10, 4 updates a step
    }
    assert {name: found[name] for name in wanted} == wanted
    assert "training.scale_rewards" not in found
    unused = ["critic.model.path", "critic.ppo_micro_batch_size_per_gpu"]
    assert [key for key in result.no_effect if key.startswith("critic.")] == unused


def test_keys_of_the_critic():
    words = [
        "trainer.critic_warmup=3",
        "critic.model.lora_rank=8",
        "algorithm.lam=0.9",
    ]
    found = values(of(SCRIPTS / "ascend_quickstart_ppo.sh", *words, learning_rate_factor=20.0))
    wanted = {
        "critic.warmup_steps": 8,  # 4 updates a step; verl trains the policy from its step 3 on
        "critic.r": 8,
        "critic.lr": pytest.approx(2e-4),
        "algorithm.lam": 0.9,
    }
    assert {name: found[name] for name in wanted} == wanted
    others = ["critic.ppo_epochs=2", "critic.optim.optimizer=SGD", "critic.model.path=other/model"]
    refused = of(SCRIPTS / "ascend_quickstart_ppo.sh", *others).refused
    assert set(refused) == {"critic.ppo_epochs", "critic.optim.optimizer", "critic.model.path"}
    grpo = of(SCRIPTS / "ascend_support_grpo.sh", "critic.optim.lr=1e-5", "critic.ppo_epochs=2")
    assert grpo.refused == {}
    for script in ("ascend_quickstart_ppo.sh", "ascend_support_grpo.sh"):
        assert "trainer.critic_warmup" in of(SCRIPTS / script, "trainer.critic_warmup=1").no_effect
    assert "trainer.critic_warmup" in of(SCRIPTS / "ascend_support_grpo.sh", "trainer.critic_warmup=2").refused
    assert "adv_estimator=gae" in grpo.no_effect["critic.optim.lr"]


def test_the_ppo_guide_trains_the_quickstarts_model(tmp_path):
    model, data = "assets/quickstart-base", "assets/quickstart-data/train.jsonl"
    words = [
        f"actor_rollout_ref.model.path={model}",
        f"critic.model.path={model}",
        f"data.train_files={data}",
        "trainer.test_freq=-1",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "data.max_response_length=24",
        "trainer.total_training_steps=3",
    ]
    recipe = str(tmp_path / "ppo.yaml")
    assert main(["from-verl", "--output", recipe, str(SCRIPTS / "ascend_quickstart_ppo.sh"), "--", *words]) == 0
    fields = {"output_dir": tmp_path / "run", "max_steps": 5, "logging_steps": 1, "save_strategy": "no"}
    flags = [word for name, value in fields.items() for word in (f"--config.training.{name}", str(value))]
    run = train(["--recipe", recipe, *flags])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "critic/vf_loss" in row] == [1, 2, 3, 4, 5]
    assert (run / "critic" / "critic.safetensors").is_file()


def test_what_the_aqn_guide_says_stands_in_the_recipe():
    found = values(of(SCRIPTS / "npu_aqn_launch.sh"))
    wanted = {
        "model.model_name_or_path": "/path/to/model",
        "dataset.dataset_name_or_path": "/tmp/train_gsm8k_v4.parquet",
        "training.learning_rate": 5e-6,  # ten times verl's, which trains all weights
        "training.beta": 0.001,
        "rollout.capture_graphs": False,
        "reward.functions": ["strict"],
        "validation.datasets": ["/tmp/test_gsm8k_v4.parquet"],
        "validation.every_steps": 80,  # 20 steps of verl, 4 updates each
        "validation.before_train": True,
        "noise_injection.schedule": "linear",
        "noise_injection.sigma_start": 0.05,
        "training.save_strategy": "no",
        "training.num_train_epochs": 2,
        "training.report_to": "none",
    }
    assert {name: found[name] for name in wanted} == wanted


def test_the_defaults_that_verl_applies_silently_are_written():
    found = values(of(SCRIPTS / "npu_aqn_launch.sh"))
    wanted = {
        "training.num_iterations": 1,
        "training.epsilon": 0.2,
        "training.max_grad_norm": 1.0,
        "training.delta": 3.0,
        "training.loss_type": "dapo",
        "training.lr_scheduler_type": "constant",
        "training.weight_decay": 0.01,
        "training.use_bias_correction_kl": False,
        "training.temperature": 1.0,
    }
    assert {name: found[name] for name in wanted} == wanted
    assert values(of(None, *GOOD))["dataset.filter_overlong_prompts"] is False


def test_the_noise_says_which_meaning_it_has():
    guide, code = (of(SCRIPTS / "npu_aqn_launch.sh", noise_rule=rule) for rule in ("guide", "code"))
    assert values(guide)["noise_injection.target_modules"] == ["post_attention_layernorm"]
    assert values(code)["noise_injection.schedule"] == "exponential"
    assert values(code)["noise_injection.target_modules"] == ["norm"]
    assert [note for note in guide.notes if "linear decay, on post_attention_layernorm; --noise_rule code" in note]
    own = of(None, *GOOD, "+trainer.noise_injection.enabled=True", "+trainer.noise_injection.target_modules=[final]")
    assert values(own)["noise_injection.target_modules"] == ["final"]


def test_a_run_of_all_weights_becomes_lora_at_ten_times_the_rate_and_says_so():
    full, lora = (of(None, *GOOD, f"actor_rollout_ref.model.lora_rank={rank}") for rank in (0, 32))
    (note,) = (note for note in full.notes if "LoRA Without Regret" in note)
    assert note.endswith(
        "; 1e-05 is written, 10 times verl's: --learning_rate_factor 1 keeps verl's, --full trains all weights"
    )
    assert values(full)["training.learning_rate"] == 1e-5
    assert values(lora)["training.learning_rate"] == 1e-6
    assert not [note for note in lora.notes if "LoRA Without Regret" in note]
    assert (values(lora)["peft.r"], values(lora)["peft.lora_alpha"]) == (32, 16)
    kept = of(None, *GOOD, learning_rate_factor=1.0)
    assert values(kept)["training.learning_rate"] == 1e-6
    assert [note for note in kept.notes if "1e-06 is written, as in verl, --full trains all weights" in note]
    assert values(of(None, *GOOD, "actor_rollout_ref.model.lora_adapter_path=a"))["training.learning_rate"] == 1e-6


def test_full_keeps_all_weights_and_verls_rate():
    full = of(None, *GOOD, "actor_rollout_ref.actor.fsdp_config.param_offload=True", full=True)
    assert values(full)["peft.type"] == "none"
    assert "peft.r" not in values(full)
    assert values(full)["training.learning_rate"] == 1e-6
    assert not [note for note in full.notes if "LoRA" in note]
    assert "splits weights and optimizer" in full.no_effect["actor_rollout_ref.actor.fsdp_config.param_offload"]
    with pytest.raises(UserError, match="--full: this command of verl trains a LoRA adapter; leave --full out"):
        of(None, *GOOD, "actor_rollout_ref.model.lora_rank=32", full=True)


def test_full_is_refused_where_there_is_a_critic_and_no_note_offers_it():
    ppo = SCRIPTS / "ascend_quickstart_ppo.sh"
    with pytest.raises(UserError, match=r"--full: the critic of PPO .* computes on a frozen base; leave --full out"):
        of(ppo, full=True)
    (note,) = (note for note in of(ppo).notes if "LoRA Without Regret" in note)
    assert note.endswith("; 1e-05 is written, 10 times verl's: --learning_rate_factor 1 keeps verl's")


def test_a_critics_rate_goes_by_what_verl_trains_of_it():
    ppo = SCRIPTS / "ascend_quickstart_ppo.sh"
    ranks = {"policy": "actor_rollout_ref.model.lora_rank=8", "critic": "critic.model.lora_rank=8"}
    for of_lora, rates in (("", (1e-5, 1e-4)), ("policy", (1e-6, 1e-4)), ("critic", (1e-5, 1e-5))):
        found = values(of(ppo, *(word for who, word in ranks.items() if who == of_lora)))
        assert (found["training.learning_rate"], found["critic.lr"]) == rates
    (note,) = (note for note in of(ppo).notes if note.startswith("the critic"))
    assert "; of its learning rate 0.0001 is written, 10 times verl's: --learning_rate_factor 1 keeps" in note


def test_the_note_on_the_deviation_stands_where_one_divides():
    divided = {
        name: any("standard deviation" in note for note in of(None, *GOOD[1:], f"algorithm.adv_estimator={name}").notes)
        for name in ("grpo", "grpo_passk", "rloo", "remax", "gae")
    }
    assert divided == {"grpo": True, "grpo_passk": True, "rloo": False, "remax": False, "gae": False}


def test_one_completion_of_a_prompt_without_a_critic():
    one = [word for word in GOOD if "adv_estimator" not in word and "rollout.n=" not in word]
    for name in ("reinforce_plus_plus", "remax"):
        result = of(None, *one, f"algorithm.adv_estimator={name}", "actor_rollout_ref.rollout.n=1")
        assert not result.refused
        assert values(result)["training.num_generations"] == 1
    assert "rollout.n" in str(of(None, *one, "algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=1").refused)


def test_a_tenfold_rate_is_written_without_rounding_errors():
    assert "  learning_rate: 1.0e-05 " in recipe_text(of(SCRIPTS / "ascend_quickstart_ppo.sh"))


# Any key


@pytest.mark.parametrize("group", sorted({key.partition(".")[0] for key in [*KEYS, *default_keys()]}))
def test_no_default_of_verl_is_refused(group):
    """Each default, given by hand: known, and without a refusal, so that a dumped configuration is translated too."""
    given = {key for key in default_keys() if key.partition(".")[0] == group}
    plain = read_command(None, GOOD)
    own = {word.partition("=")[0] for word in GOOD}
    for key in given - own:
        assert handler_of(key) is not None, key
        plain.given[key] = plain.value(key)
    result = translate(plain, Choices())
    assert {key: why for key, why in result.refused.items() if key in given} == {}
    for key in plain.given:
        assert sum(key in getattr(result, name) for name in LISTS) == 1, key


@pytest.mark.parametrize("text", ["null", "''", "-1", "1.5", "abc", "[1,a]"])
def test_no_value_of_a_key_is_a_traceback(text):
    """Every key at once with a value that may be of the wrong type: each ends in one list."""
    words = [f"++{key}={text}" for key in KEYS if f"{key}." not in " ".join(KEYS) + "."]
    result = of(None, *words)
    for word in words:
        key = word.partition("=")[0].lstrip("+")
        assert sum(key in getattr(result, name) for name in LISTS) == 1, key


def test_a_key_of_which_nobody_knows_anything_is_refused():
    result = of(None, *GOOD, "+actor_rollout_ref.actor.wholly_new=1")
    assert "verl has no such key" in result.refused["actor_rollout_ref.actor.wholly_new"]


ONE_KEY = [
    ("+data.apply_chat_template_kwargs.enable_thinking=False", "chat_template_kwargs", {"enable_thinking": False}),
    ("data.train_files=[a.parquet,'b c.parquet']", "dataset.dataset_name_or_path", ["a.parquet", "b c.parquet"]),
    ("data.train_files=${oc.env:HOME}/a.parquet", "dataset.dataset_name_or_path", "/home/user/a.parquet"),
    ("data.max_response_length=${data.max_prompt_length}", "max_completion_length", 512),
    ("~trainer.logger", "report_to", None),
    ("trainer.logger=[wandb,tensorboard]", "report_to", ["wandb", "tensorboard"]),
    ("algorithm.norm_adv_by_std_in_grpo=False", "scale_rewards", "none"),
    ("algorithm.adv_estimator=rloo", "algorithm.name", "rloo"),
    ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.name", "reinforce_plus_plus"),
    ("algorithm.adv_estimator=reinforce_plus_plus_baseline", "algorithm.name", "reinforce_plus_plus_baseline"),
    ("algorithm.adv_estimator=remax", "algorithm.name", "remax"),
    ("algorithm.adv_estimator=opo", "algorithm.name", "opo"),
    ("algorithm.adv_estimator=gpg", "algorithm.name", "gpg"),
    ("algorithm.adv_estimator=grpo_passk", "algorithm.name", "grpo_passk"),
    ("algorithm.use_kl_in_reward=True", "algorithm.kl_in_reward", 0.001),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "importance_sampling_level", "sequence"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "loss_type", "sapo"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=cispo", "loss_type", "cispo"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=cispo", "cispo_min_ratio", 0.8),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=cispo", "epsilon_high", 1.2),
    ("trainer.save_freq=5", "save_steps", 20),
    ("actor_rollout_ref.actor.ppo_epochs=2", "num_iterations", 2),
    ("actor_rollout_ref.actor.fsdp_config.full_determinism=True", "full_determinism", True),
    ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "loss_type", "dr_grpo"),
    ("actor_rollout_ref.actor.optim.lr_warmup_steps=10", "warmup_steps", 40),
    ("actor_rollout_ref.rollout.top_k=50", "top_k", 50),
    ("trainer.total_training_steps=3", "max_steps", 12),
    ("custom_reward_function.path=r.py", "reward.functions", ["r.py:compute_score"]),
    ("data.train_files=d.parquet", "reward.functions", ["accuracy"]),
    ("data.train_files=data/geo3k/train.parquet", "reward.functions", ["accuracy", "think"]),
    ("data.train_files=data/geo3k/train.parquet", "reward.weights", [0.9, 0.1]),
    ("actor_rollout_ref.model.lora_adapter_path=runs/sft", "peft.adapter", "runs/sft"),
]


@pytest.mark.parametrize("given", [(), ("loss_agg_mode=token-mean", "clip_ratio_c=10.0")])
@pytest.mark.parametrize(("mode", "level", "loss"), [("gspo", "sequence", "grpo"), ("sapo", "token", "sapo")])
def test_gspo_and_sapo_have_a_mean_of_their_own_and_no_second_clip(mode, level, loss, given):
    """verl's compute_policy_loss_gspo and _sapo: agg_loss(…, "seq-mean-token-mean"), whatever loss_agg_mode says."""
    actor = "actor_rollout_ref.actor"
    words = [f"{actor}.policy_loss.loss_mode={mode}", *(f"{actor}.{word}" for word in given)]
    result = of(None, *GOOD, *words)
    found = values(result)
    assert (found["training.importance_sampling_level"], found["training.loss_type"]) == (level, loss)
    assert "training.delta" not in found
    assert {f"{actor}.{word.partition('=')[0]}" for word in given} <= result.no_effect.keys()


def test_cispo_clips_where_verls_does(tmp_path):
    """verl's compute_policy_loss_cispo: clamp(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high), mean over all tokens."""
    actor = "actor_rollout_ref.actor"
    cispo = f"{actor}.policy_loss.loss_mode=cispo"
    wide = of(None, *GOOD, f"{actor}.clip_ratio_low=10", cispo)  # as in verl's own example
    assert wide.refused == {}
    assert "training.cispo_min_ratio" not in values(wide)
    null = [f"{actor}.clip_ratio={0.3}", f"{actor}.clip_ratio_low=null", f"{actor}.clip_ratio_high=null"]
    found = of(None, *GOOD, cispo, f"{actor}.loss_agg_mode=token-mean", f"{actor}.clip_ratio_c=3", *null)
    assert (values(found)["training.cispo_min_ratio"], values(found)["training.epsilon_high"]) == (0.7, 1.3)
    assert values(found)["training.loss_type"] == "cispo"
    assert not {"training.epsilon", "training.delta"} & set(values(found))
    (tmp_path / "recipe.yaml").write_text(recipe_text(found))
    assert not [line for line in parse(["--recipe", str(tmp_path / "recipe.yaml")]).warnings if "training." in line]
    other = of(None, *GOOD, cispo, f"{actor}.loss_agg_mode=seq-mean-token-mean").refused
    assert set(other) == {f"{actor}.loss_agg_mode"}


def test_gpg_is_the_loss_without_a_ratio(tmp_path):
    """verl's compute_policy_loss_gpg: -log_prob * advantages, whatever clip_ratio says."""
    actor = "actor_rollout_ref.actor"
    found = of(None, *GOOD, f"{actor}.policy_loss.loss_mode=gpg", f"{actor}.clip_ratio=0.3", f"{actor}.clip_ratio_c=3")
    assert found.refused == {}
    bounds = values(found)["training.cispo_min_ratio"], values(found)["training.epsilon_high"]
    assert (values(found)["training.loss_type"], *bounds) == ("cispo", 1.0, 1.0)
    assert not {"training.epsilon", "training.delta"} & set(values(found))
    (tmp_path / "recipe.yaml").write_text(recipe_text(found))
    assert not [line for line in parse(["--recipe", str(tmp_path / "recipe.yaml")]).warnings if "training." in line]


def test_layers_without_an_adapter_are_verls():
    lora = "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules=all-linear"
    excluded = of(None, *GOOD, *lora, "actor_rollout_ref.model.exclude_modules='.*visual.*'")
    assert values(excluded)["peft.exclude_modules"] == ".*visual.*"
    assert "peft.exclude_modules" not in values(of(None, *GOOD, *lora))


def test_images_are_read_from_the_column_images():
    assert not of(None, *GOOD, "data.image_key=images").refused
    assert of(None, *GOOD, "data.image_key=pictures").refused == {"data.image_key": "name the column images"}


@pytest.mark.parametrize(("word", "field", "value"), ONE_KEY)
def test_one_key(word, field, value):
    result = of(None, *GOOD, word)  # train_batch_size 1024, mini 256: k is 4
    assert result.refused == {}
    assert values(result).get(field if "." in field else f"training.{field}") == value


def test_kl_in_the_reward_with_its_estimator_and_controller():
    on = ["algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=low_var_kl", "algorithm.kl_ctrl.kl_coef=0.02"]
    fixed = values(of(None, *GOOD, *on))
    assert (fixed["algorithm.kl_in_reward"], fixed["algorithm.kl_in_reward_estimator"]) == (0.02, "low_var_kl")
    assert "algorithm.kl_in_reward_target" not in fixed
    adaptive = ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2", "algorithm.kl_ctrl.horizon=500"]
    adapted = of(None, *GOOD, *on, *adaptive)
    assert adapted.refused == {}
    found = values(adapted)
    assert (found["algorithm.kl_in_reward_target"], found["algorithm.kl_in_reward_horizon"]) == (0.2, 500)
    off = of(None, *GOOD, *on[1:], *adaptive)
    assert {"algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.target_kl"} <= set(off.no_effect)


@pytest.mark.parametrize(
    ("verls", "ours"), [("k1", "k1"), ("kl", "k1"), ("abs", "abs"), ("k2", "mse"), ("low_var_kl", None)]
)
def test_estimators_of_kl_in_the_loss(verls, ours):
    actor = "actor_rollout_ref.actor"
    result = of(None, *GOOD, f"{actor}.use_kl_loss=True", f"{actor}.kl_loss_type={verls}")
    assert result.refused == {}
    assert values(result).get("algorithm.kl_estimator") == ours
    assert values(result)["training.beta"] == 0.001
    straight = of(None, *GOOD, f"{actor}.use_kl_loss=True", f"{actor}.kl_loss_type={verls}+")
    assert "write mse" in straight.refused[f"{actor}.kl_loss_type"]


def test_an_estimator_of_kl_that_is_not_there():
    actor = "actor_rollout_ref.actor"
    result = of(None, *GOOD, f"{actor}.use_kl_loss=True", f"{actor}.kl_loss_type=gae")
    known = "kl, k1, abs, mse, k2, low_var_kl, k3 are there"
    assert result.refused == {f"{actor}.kl_loss_type": f"gae: {known}"}


def test_only_estimators_that_discount_have_gamma():
    word = "algorithm.gamma=0.99"
    assert "algorithm.gamma" not in values(of(None, *GOOD, word))
    assert values(of(None, *GOOD, "algorithm.adv_estimator=reinforce_plus_plus", word))["algorithm.gamma"] == 0.99


def test_an_adapter_to_start_from_is_lora_of_its_own_rank():
    result = of(None, *GOOD, "actor_rollout_ref.model.lora_adapter_path=runs/sft")
    assert "peft.r" not in values(result)
    assert not any("all weights" in note for note in result.notes)


@pytest.mark.parametrize("engine", ["fast", "vllm"])
def test_a_cap_of_verl_0_5_that_is_off_corrects_nothing(engine):
    result = of(None, *GOOD, "+actor_rollout_ref.actor.tis_imp_ratio_cap=-1", engine=engine)
    assert "actor_rollout_ref.actor.tis_imp_ratio_cap" in result.no_effect
    assert values(result).get("rollout.importance_correction") == ("none" if engine == "vllm" else None)


def test_arguments_of_a_reward_go_to_a_file_of_the_users_alone():
    file, kwargs = "custom_reward_function.path=", "+custom_reward_function.reward_kwargs.method=flexible"
    assert values(of(None, *GOOD, file + "r.py", kwargs))["reward.kwargs"] == {"method": "flexible"}
    assert "takes no arguments" in str(of(None, *GOOD, file + "verl/utils/reward_score/gsm8k.py", kwargs).refused)
    assert "reward.kwargs" not in values(of(None, *GOOD, kwargs))  # perl.train would refuse it


def test_a_validation_by_another_rule_than_verls_is_told():
    own = "custom_reward_function.path=r.py"
    assert any("verl validates by custom_reward_function" in note for note in of(None, *GOOD, own).notes)
    for words in ([], [own, "trainer.val_before_train=False"]):
        assert not any("verl validates by" in note for note in of(None, *GOOD, *words).notes)


def test_each_pass_over_a_rollout_counts_as_updates():
    found = values(of(None, *GOOD, "actor_rollout_ref.actor.ppo_epochs=2", "trainer.save_freq=5"))
    assert (found["training.num_iterations"], found["training.save_steps"]) == (2, 40)


def test_vllm_keeps_its_settings_and_corrects_only_where_verl_does():
    found = values(of(SCRIPTS / "ascend_support_grpo.sh", engine="vllm"))
    assert found["rollout.engine"] == "vllm"
    assert found["training.vllm_tensor_parallel_size"] == 2
    assert found["training.vllm_gpu_memory_utilization"] == 0.6
    assert found["rollout.importance_correction"] == "none"  # ours is token with vLLM
    cap = "+actor_rollout_ref.actor.tis_imp_ratio_cap=2"
    corrected = values(of(SCRIPTS / "ascend_support_grpo.sh", cap, engine="vllm"))
    assert corrected["rollout.importance_correction"] == "token"
    assert corrected["training.vllm_importance_sampling_clip_max"] == 2.0
    own = values(of(SCRIPTS / "ascend_support_grpo.sh", cap))
    assert (own["rollout.importance_correction"], "training.vllm_mode" in own) == ("token", False)


def test_dapos_punishment_weighs_as_in_verl():
    found = values(of(None, *GOOD, *OVERLONG, "data.train_files=dapo.parquet"))
    assert found["reward.functions"] == ["accuracy", "overlong"]
    assert found["reward.weights"] == [2.0, 0.5]  # verl's -1 and 1 lie twice as far apart as 0 and 1
    assert found["reward.overlong_cache_length"] == 4096


OVERLONG = [
    "reward_model.reward_manager=dapo",
    "+reward_model.overlong_buffer.enable=True",
    "+reward_model.overlong_buffer.len=4096",
    "+reward_model.overlong_buffer.penalty_factor=0.5",
]


def test_a_punishment_that_verl_multiplies_by_0_is_none():
    result = of(None, *GOOD, *OVERLONG[:-1], "+reward_model.overlong_buffer.penalty_factor=0.0", "data.train_files=x")
    assert values(result)["reward.functions"] == ["accuracy"]
    assert "penalty_factor 0" in result.no_effect["reward_model.overlong_buffer.len"]
    dapo = ["python3", "-m", "recipe.dapo.main_dapo", *GOOD, *OVERLONG[:-1], "data.train_files=x"]
    assert values(of(None, *dapo))["reward.functions"] == ["accuracy"]  # 0.0 is dapo_trainer's default


@pytest.mark.parametrize("group", ["reward_model", "reward"])
def test_another_length_for_the_punishment_alone_is_refused(group):
    """verl's begins len tokens before max_resp_len, ours before the longest completion."""
    key = f"{group}.reward_kwargs.max_resp_len"
    other = [*GOOD, "data.max_response_length=4096", f"+{key}=2048"]
    assert of(None, *other, *OVERLONG).refused[key].startswith("it differs from data.max_response_length, 4096")
    assert of(None, *other).refused == of(None, *other[:-1], f"+{key}=4096", *OVERLONG).refused == {}


@pytest.mark.parametrize(
    ("source", "weight"),
    [("lighteval/MATH", 1.0), ("math_dapo", 2.0), ("math", 2.0), ("aime24", 2.0), ("openai/gsm8k", 1.0)],
)
def test_accuracy_weighs_as_verls_score_of_the_rows(tmp_path, source, weight):
    """verl's math_reward and gsm8k score 0 or 1, its math_dapo -1 or 1, by the data_source of each row."""
    row = {"data_source": source, "prompt": [{"role": "user", "content": "1 + 1"}]}
    row |= {"reward_model": {"ground_truth": "2"}, "ability": "math", "extra_info": {}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    files = f"data.train_files={tmp_path / 'train.jsonl'}"
    result = of(None, *GOOD, *OVERLONG, files)
    assert values(result)["reward.weights"] == [weight, 0.5]
    assert any(f"it weighs {weight:g}: verl's score of these rows is" in note for note in result.notes)
    unscaled = values(of(None, *GOOD, files, "algorithm.norm_adv_by_std_in_grpo=False"))
    assert unscaled.get("reward.weights", [1.0]) == [weight]
    assert "reward.weights" not in values(of(None, *GOOD, files))  # divided by the group's standard deviation
    rloo, whitened = (f"algorithm.adv_estimator={name}" for name in ("rloo", "reinforce_plus_plus"))
    assert values(of(None, *GOOD[1:], rloo, files)).get("reward.weights", [1.0]) == [weight]
    assert "reward.weights" not in values(of(None, *GOOD[1:], whitened, files))
    with_kl = of(None, *GOOD[1:], whitened, files, "algorithm.use_kl_in_reward=True")
    assert values(with_kl).get("reward.weights", [1.0]) == [weight]


def test_a_run_that_is_dapo_has_its_name_and_each_note_once(tmp_path):
    script = SCRIPTS / "wild" / "dapo_7b_ray.sh"
    result = of(script)
    assert values(result)["algorithm.name"] == "dapo"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe_text(result))))
    assert not [line for line in parse(["--recipe", str(recipe)]).warnings if "algorithm dapo" in line]
    texts = [note.partition(": ")[2] for note in result.notes if note.startswith("reward_model.")]
    assert len(texts) == len(set(texts)) == 1
    actor = "actor_rollout_ref.actor"
    changes = f"{actor}.clip_ratio_high=0.2", f"{actor}.loss_agg_mode=seq-mean-token-mean"
    for change in (*changes, "algorithm.filter_groups.enable=False"):
        assert "algorithm.name" not in values(of(script, change)), change


def test_gpg_on_rows_that_verl_scores_with_minus_one_has_a_factor_of_one():
    """Its factor is rows over rows whose score is not 0: all of them there, the right ones here."""
    words = [*GOOD[1:], "algorithm.adv_estimator=gpg"]
    found = values(of(None, *words, "data.train_files=dapo.parquet"))
    assert "algorithm.name" not in found
    assert (found["training.scale_rewards"], found["reward.weights"]) == ("none", [2.0])
    own = values(of(None, *words, "data.train_files=dapo.parquet", "custom_reward_function.path=r.py"))
    assert own["algorithm.name"] == "gpg"


def test_only_the_reward_manager_dapo_punishes_long_completions():
    result = of(None, *GOOD, *OVERLONG[1:])
    assert values(result)["reward.functions"] == ["accuracy"] or values(result)["reward.functions"] == ["strict"]
    assert "dapo looks at it, and this one is naive" in result.no_effect["reward_model.overlong_buffer.len"]


def test_a_test_freq_of_verls_validates_when_verl_does():
    """verl's ray_trainer: `test_freq > 0 and (is_last_step or global_steps % test_freq == 0)`."""
    files = "data.val_files=v.parquet"
    off = values(of(None, *GOOD, files, "trainer.test_freq=-1"))
    assert (off["validation.every_steps"], off["validation.after_train"]) == (None, False)
    on = values(of(None, *GOOD, files, "trainer.test_freq=5"))
    assert (on["validation.every_steps"], on.get("validation.after_train", True)) == (20, True)


VALIDATION = "actor_rollout_ref.rollout.val_kwargs."


def test_validation_draws_as_verls_does(tmp_path):
    found = values(of(SCRIPTS / "wild" / "dapo_7b_ray.sh"))
    assert {name: found[f"validation.{name}"] for name in ("n", "temperature", "top_p", "top_k")} == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 0.7,
        "top_k": 0,  # -1 of verl's
    }
    drawn = [f"{VALIDATION}do_sample=True", f"{VALIDATION}temperature=0.6", f"{VALIDATION}top_k=20"]
    found = values(of(None, *GOOD, *drawn))
    assert found["validation.top_p"] == 1.0  # written out: the task's own may be another
    assert found["validation.top_k"] == 20
    greedy = of(None, *GOOD, f"{VALIDATION}top_p=0.7", f"{VALIDATION}n=4")
    assert values(greedy)["validation.n"] == 1
    assert "validation.top_p" not in values(greedy)
    assert greedy.no_effect[f"{VALIDATION}top_p"].startswith("validation is greedy")
    (tmp_path / "recipe.yaml").write_text(recipe_text(greedy))
    assert parse(["--recipe", str(tmp_path / "recipe.yaml")]).build().validation.n == 1


@pytest.mark.parametrize("asked", [[], [f"{VALIDATION}do_sample=False"]])
def test_verls_agent_loop_validates_by_the_temperature_alone(asked):
    """It is verl's default, and never reads do_sample; the engines before it (mode sync) do."""
    words = [*GOOD, f"{VALIDATION}temperature=0.6", f"{VALIDATION}n=8", f"{VALIDATION}top_p=0.95", *asked]
    found = values(of(None, *words))
    assert [found[f"validation.{name}"] for name in ("temperature", "n", "top_p")] == [0.6, 8, 0.95]
    found = values(of(None, *words, "actor_rollout_ref.rollout.mode=sync"))
    assert [found[f"validation.{name}"] for name in ("temperature", "n")] == [0.0, 1]


def test_steps_beyond_verls_epochs_are_told():
    result = of(None, *GOOD, "trainer.total_training_steps=500", "trainer.total_epochs=1")
    assert values(result)["training.max_steps"] == 2000  # 4 updates a step
    assert result.no_effect["trainer.total_epochs"] == "total_training_steps decides here"
    (note,) = [note for note in result.notes if note.startswith("trainer.total_training_steps: ")]
    assert "verl ends after total_epochs=1 where that is earlier" in note


def test_warmup_style_goes_before_the_name_that_took_its_place():
    optim = "actor_rollout_ref.actor.optim"
    words = [*GOOD, f"{optim}.lr_scheduler_type=constant"]
    assert values(of(None, *words, f"{optim}.warmup_style=cosine"))["training.lr_scheduler_type"] == "cosine"
    assert values(of(None, *words, f"{optim}.warmup_style=null"))["training.lr_scheduler_type"] == "constant"


def test_a_warm_up_of_the_whole_run_is_no_single_step():
    """transformers takes warmup_steps 1.0 for one step."""
    ratio = "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"
    assert values(of(None, *GOOD, f"{ratio}=0.1"))["training.warmup_steps"] == 0.1
    assert "write a ratio below 1" in of(None, *GOOD, f"{ratio}=1.0").refused[ratio]


def test_ratios_that_verl_divides_or_rejects_by_are_refused():
    group = "algorithm.rollout_correction"
    normalized = f"{group}.rollout_is_batch_normalize"
    assert normalized in of(None, *GOOD, f"{group}.rollout_is=token", f"{normalized}=True").refused
    for words in ([f"{group}.rollout_is=token", f"{normalized}=False"], [f"{normalized}=True"]):
        assert of(None, *GOOD, *words).refused == {}
    veto = f"{group}.rollout_token_veto_threshold"  # of older versions, and by itself
    assert veto in of(None, *GOOD, f"+{veto}=1e-4").refused
    rejected = of(None, *GOOD, f"{group}.rollout_rs=token", f"{group}.rollout_rs_threshold=2.0").refused
    assert "importance_correction token_mask or sequence_mask" in rejected[f"{group}.rollout_rs"]


def test_how_far_verls_rollouts_may_be_ahead_is_said_in_terms_of_a_lag():
    """Its threshold is a share of samples: no number of batches."""
    result = of(None, *GOOD, "+async_training.staleness_threshold=0.5")
    assert "--config.rollout.lag or max_staleness" in result.no_effect["async_training.staleness_threshold"]


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (f"{VALIDATION}top_p=1.5", "1.5 is not above 0 and at most 1"),
        (f"{VALIDATION}top_k=many", "many is not a whole number"),
        (f"{VALIDATION}n=0", "0 is not a whole number from 1"),
        (f"{VALIDATION}temperature=-1", "-1 is below 0"),
        (f"{VALIDATION}top_k=inf", "inf is not a whole number"),
        ("data.val_max_samples=some", "some is not a whole number"),
        ("trainer.test_freq=often", "often is not a whole number"),
        ("trainer.val_before_train=1", "1 is neither true nor false"),
    ],
)
def test_a_known_setting_of_validation_alone_is_never_refused(word, why):
    drawn = [f"{VALIDATION}do_sample=True", f"{VALIDATION}temperature=1"]
    drawn = [given for given in drawn if given.partition("=")[0] not in word]
    result = of(None, *GOOD, *drawn, word)
    key, _, value = word.lstrip("+").partition("=")
    assert result.refused == {}
    assert result.no_effect[key].startswith(f"left out: {why}")
    (note,) = (note for note in result.notes if note.startswith("warning: "))
    assert note.startswith(f"warning: {key}={value} is left out of the validation: {why}")


@pytest.mark.parametrize("key", [f"{VALIDATION}min_p", "data.val_of_tomorrow"])
def test_a_setting_of_validation_that_verl_lacks_is_refused_as_others_are(key):
    assert of(None, *GOOD, f"+{key}=0.1").refused[key].startswith("verl has no such key")


@pytest.mark.parametrize("files", ["", "null", "[]", "$(ls)"])
def test_without_files_that_can_be_named_nothing_is_validated(tmp_path, files):
    (tmp_path / "run.sh").write_text(
        f"python3 -m verl.trainer.main_ppo {' '.join(GOOD)} trainer.test_freq=5 data.val_files={files}\n"
    )
    result = of(tmp_path / "run.sh")
    assert result.refused == {}
    assert [name for name in values(result) if name.startswith("validation.")] == []
    assert result.no_effect["trainer.test_freq"].endswith("or no val_files")
    assert any(note.startswith("warning: data.val_files=") for note in result.notes)


def test_a_critics_keys_do_not_speak_as_if_there_were_none():
    ppo = of(None, "algorithm.adv_estimator=gae", "critic.optim.lr=1e-5", "critic.use_dynamic_bsz=True")
    assert ppo.translated["critic.optim.lr"] == {"critic.lr": 1e-4}
    assert "as the policy is" in ppo.no_effect["critic.use_dynamic_bsz"]
    grpo = of(None, "algorithm.adv_estimator=grpo", "critic.optim.lr=1e-5").no_effect["critic.optim.lr"]
    assert grpo == "only PPO (adv_estimator=gae) has it"


def test_filtered_groups_are_dynamic_sampling():
    """verl's limit counts batches of gen_batch_size prompts; the punishment is in seq_reward, and not in acc."""
    script = SCRIPTS / "wild" / "dapo_7b_ray.sh"
    found = values(of(script))
    assert found["algorithm.dynamic_sampling"] is True
    assert found["algorithm.dynamic_sampling_metric"] == "accuracy"
    assert found["algorithm.max_resample_factor"] == 30.0  # 10 batches of 3 x 512 prompts for one of 512
    with_punishment = values(of(script, "algorithm.filter_groups.metric=seq_reward"))
    assert with_punishment["algorithm.dynamic_sampling_metric"] == "sum"
    unlimited = of(script, "algorithm.filter_groups.max_num_gen_batches=0")
    assert "10 unless it is said" in unlimited.no_effect["algorithm.filter_groups.max_num_gen_batches"]
    off = of(script, "algorithm.filter_groups.enable=False")
    assert "algorithm.dynamic_sampling" not in values(off)
    assert off.no_effect["algorithm.filter_groups.metric"] == "algorithm.filter_groups.enable is False"
    wrong = of(script, "algorithm.filter_groups.metric=reward")
    assert "reward: acc, score, seq_reward, seq_final_reward" in wrong.refused["algorithm.filter_groups.metric"]


# Scripts


WILD_REFUSED = {
    "dapo_7b_ray.sh": set(),
    "dapo_npu_without_filter.sh": set(),
    "fsdp2_two_nodes.sh": set(),
    "grpo_engine_choice.sh": set(),
    "grpo_lora_3b.sh": set(),
    "grpo_megatron.sh": {
        "actor_rollout_ref.actor.strategy",
        "actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn",
    },
    "grpo_qwen2_7b_math.sh": set(),
    "gspo_dynamic.sh": set(),
    "multiturn_sglang.sh": {"actor_rollout_ref.rollout.multi_turn.tool_config_path"},
    "ppo_arrays.sh": {"reward_model.enable"},
    "prorl_source_env.sh": {"data.train_files"},
    "remax_sglang.sh": set(),
    "rloo.sh": set(),
}


@pytest.mark.parametrize("script", WILD, ids=lambda script: script.name)
def test_scripts_of_others_are_read(script):
    result = of(script)
    assert set(result.refused) == WILD_REFUSED[script.name]
    for key in keys_written(script) - {"test.parquet"}:
        known = [name for name in (*result.translated, *result.no_effect, *result.refused) if name == key]
        assert known or "." not in key or key.startswith("data.part"), key


def test_variables_arrays_and_conditions_are_followed():
    choice = of(SCRIPTS / "wild" / "grpo_engine_choice.sh")
    assert choice.batch.devices == 16  # case "${DEVICE}" in npu) GPUS=16
    assert values(choice)["training.max_steps"] == 400  # an argument of the function, 4 updates a step
    assert "date +%s" in choice.no_effect["trainer.experiment_name"]
    assert choice.no_effect["data.dataloader_num_workers"]  # $(nproc)
    parts = of(SCRIPTS / "wild" / "fsdp2_two_nodes.sh")
    assert values(parts)["dataset.dataset_name_or_path"] == ["/data/part1.parquet", "/data/part2.parquet"]
    assert (parts.nodes, parts.batch.devices) == (2, 16)
    dapo = of(SCRIPTS / "wild" / "dapo_npu_without_filter.sh")
    assert values(dapo)["training.max_completion_length"] == 20480  # $((1024 * 20))


def test_nothing_of_a_script_is_executed(tmp_path):
    script = tmp_path / "run.sh"
    touched = tmp_path / "touched"
    words = " ".join(GOOD)
    script.write_text(
        f"touch {touched}\nA=$(touch {touched})\necho `touch {touched}` > {touched}\n"
        f"python3 -m verl.trainer.main_ppo {words} trainer.experiment_name=$A\n"
    )
    assert of(script).refused == {}
    assert not touched.exists()


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('X="a  b"; data.train_files="$X"', "a  b"),
        ("data.train_files=${X:-d}", "d"),
        ("X=a/b.c; data.train_files=${X##*/}", "b.c"),
        ("X=a/b.c; data.train_files=${X%.*}", "a/b"),
        ("X=aXbX; data.train_files=${X//X/-}", "a-b-"),
        ("X=Ab; data.train_files=${X,,}", "ab"),
        ("X=(a b c); data.train_files=${X[1]}${#X[@]}", "b3"),
        ("X=3; data.train_files=a$(( (X + 1) * 2 % 5 ))", "a3"),
        ("X=$(basename /a/b.parquet .parquet); data.train_files=$X", "b"),
        ("[[ -z $X && 2 -gt 1 ]] && Y=yes; data.train_files=$Y", "yes"),
        ('if [ "$X" != "" ]; then Y=1; elif [[ abc == a* ]]; then Y=2; fi; data.train_files=a$Y', "a2"),
        ("X=a; X+=b; data.train_files=$X", "ab"),
        ("X=(a b c); Y=(${X[@]:1}); data.train_files=${Y[0]}${#Y[@]}", "b2"),
        ('f() { Y=${*:2}; }\nf a b c; data.train_files="$Y"', "b c"),
        ("while [[ $# -gt 0 ]]; do shift; done; data.train_files=a$#", "a0"),
        ('A=("data.seed=1" "x y"); data.train_files="${A[1]}" "${@:1}" "$@"', "x y"),
        ('f() { Y=("$*" "$@"); }\nf a b; data.train_files="${Y[0]}${#Y[@]}"', "a b3"),
        ('X=(a b); Y=("${X[*]}" ${X[*]} "${X[*]:1}" "c${*}"); data.train_files="${Y[0]}${Y[4]}${#Y[@]}"', "a bc5"),
        ('X=(a b); data.train_files="${X[*]}"', "a b"),
        ('X=; data.train_files="a"$X', "a"),
        ("export X=a; data.train_files='$X'", "$X"),
        ("data.train_files=a\\ b", "a b"),
        ("X=~/a; data.train_files=$X", "/home/me/a"),
        ("X=(~/a); data.train_files=${X[0]}${Y:-~}", "/home/me/a/home/me"),
        ("X='~/a' Y=b~/c; data.train_files=a${#X}${#Y}", "a34"),
        ("X=a Y=b\nZ=c X=d \\\n  true; data.train_files=$X$Y${Z:-e}", "abe"),
        ("X=1$(date); data.train_files=a${X:+b}", "ab"),
        ("X=$((3037000500 * 3037000500)); data.train_files=a$X", "a-9223372036709301616"),
    ],
)
def test_bash(tmp_path, monkeypatch, line, value):
    monkeypatch.setenv("HOME", "/home/me")
    before, _, setting = line.rpartition("; ")
    script = tmp_path / "run.sh"
    script.write_text(f"{before}\npython3 -m verl.trainer.main_ppo {' '.join(GOOD)} {setting}\n")
    assert values(of(script))["dataset.dataset_name_or_path"] == value


@pytest.mark.parametrize("shell", ["bash -c", "srun -n 1 /bin/sh -lc", "env WANDB_MODE=offline bash -c", "eval"])
def test_a_training_in_a_text_is_one_line(tmp_path, shell):
    (tmp_path / "run.sh").write_text(f"\n{shell} 'cd /x && python3 -m verl.trainer.main_ppo {' '.join(GOOD)}'\n")
    with pytest.raises(UserError, match=r"run.sh:2: \w+: the command stands in a text; write it out, as a line of the"):
        of(tmp_path / "run.sh")


def test_variables_that_mean_the_same_stand_before_the_command(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "export VERL_USE_MODELSCOPE WANDB_API_KEY=0123\nVERL_USE_MODELSCOPE=True\n"
        f"env WANDB_MODE=offline RAY_DEDUP_LOGS=0 python3 -m verl.trainer.main_ppo {' '.join(GOOD)}\n"
    )
    result = of(script)
    assert result.variables() == {"NUM_PROCESSES": "8", "VERL_USE_MODELSCOPE": "True", "WANDB_MODE": "offline"}
    assert "RAY_DEDUP_LOGS" in result.no_effect
    assert "0123" not in str((result.translated, result.no_effect, result.values))


def test_a_configuration_by_its_name(tmp_path):
    (tmp_path / "base.yaml").write_text("data: {train_batch_size: 512, max_prompt_length: 100}\n")
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [file://verl/trainer/config]}\ndefaults: [ppo_megatron_trainer, base, _self_]\n"
        "data: {max_prompt_length: 200}\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo --config-name=mine {' '.join(GOOD)}\n")
    result = of(script)
    assert values(result)["dataset.max_prompt_length"] == 200
    assert result.batch.prompts_per_rollout == 512
    assert {"hydra", "defaults", "--config-name"} <= result.no_effect.keys()


# The command


def test_the_recipe_is_written_and_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["from-verl", "--output", "r.yaml", str(SCRIPTS / "npu_aqn_launch.sh")]) == 0
    text = Path("r.yaml").read_text()
    assert text.startswith(HEADER)
    assert "  learning_rate: 5.0e-06  # actor_rollout_ref.actor.optim.lr\n" in text
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "NUM_PROCESSES=8 bash scripts/trl/openr1/dapo_lora_npu.sh --recipe r.yaml"
    for title in ("translated", "without effect here", "batch", "notes"):
        assert title in printed.splitlines()
    parsed = parse(["--recipe", "r.yaml"])
    assert parsed.warnings == []
    config = parsed.build(8)
    assert config.training.generation_batch_size == 256  # completions a rollout
    assert config.training.per_device_train_batch_size * 8 * config.training.gradient_accumulation_steps == 64
    assert config.training.loss_type == "dapo"


@pytest.mark.parametrize("script", [s for s in WILD if not WILD_REFUSED[s.name]], ids=lambda script: script.name)
def test_recipes_of_others_scripts_are_taken(tmp_path, script):
    result = of(script)
    (tmp_path / "r.yaml").write_text(recipe_text(result))
    config = parse(["--recipe", str(tmp_path / "r.yaml")]).build(result.batch.devices)
    assert config.training.generation_batch_size == result.batch.as_dict()["completions_per_rollout"]


def test_json_is_one_line_with_each_key_in_one_list(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = SCRIPTS / "ascend_support_grpo.sh"
    assert main(["from-verl", str(script), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["batch"]["completions_per_update"] == 320
    assert shlex.split(found["command"])[-1] == "ascend_support_grpo_perl.yaml"
    keys = [*found["translated"], *found["no_effect"], *found["refused"]]
    assert len(keys) == len(set(keys))
    assert set(keys) == keys_written(script) | {"VLLM_ATTENTION_BACKEND"}
    assert found["translated"]["data.train_batch_size"] == {"training.steps_per_generation": 4}


SECRET = "Pl4nted0123456789"
WITH_SECRETS = [
    *GOOD,
    "custom_reward_function.path=r.py",
    f"+custom_reward_function.reward_kwargs.api_key={SECRET}",
    "+custom_reward_function.reward_kwargs.method=flexible",
    f"+custom_reward_function.reward_kwargs.server=https://me:{SECRET}@host/",
    f"trainer.wandb_proxy=http://me:{SECRET}@proxy:8080",
]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_no_secret_of_a_script_is_printed_or_written(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(
        f"export WANDB_API_KEY={SECRET} HF_TOKEN={SECRET} HF_ENDPOINT=https://me:{SECRET}@hub\n"
        f"python3 -m verl.trainer.main_ppo {' '.join(WITH_SECRETS)}\n"
    )
    assert main(["from-verl", "--output", "r.yaml", *flags, "run.sh"]) == 0
    printed, recipe = capsys.readouterr().out, Path("r.yaml").read_text()
    assert SECRET not in printed + recipe
    assert yaml.safe_load(recipe)["reward"]["kwargs"] == {"method": "flexible", "server": "https://<secret>@host/"}
    assert "secrets in it stay out of the recipe: have your code read them from the environment" in printed


def test_no_secret_is_printed_with_what_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["from-verl", "--", *GOOD, f"trainer.some_api_key={SECRET}"]) == 2
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err
    assert printed.err.startswith("error: trainer.some_api_key=<secret>: ")


def test_names_of_columns_are_no_secrets(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["from-verl", "--", *GOOD, "data.prompt_key=prompt"]) == 0
    assert "data.prompt_key=prompt" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[["--json"], []], [[], ["--json"]], [["--json"], ["--output", "r.yaml"]]])
def test_words_after_a_file_go_before_it(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    before, after = flags
    assert main(["from-verl", *before, str(SCRIPTS / "npu_aqn_launch.sh"), *after, "--", *HBM]) == 0
    assert json.loads(capsys.readouterr().out)["batch"]["completions_per_rollout"] == 512


def test_a_whole_command_line_is_taken_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["WANDB_MODE=offline", "python3", "-m", "verl.trainer.main_ppo", *GOOD]
    assert main(["from-verl", "--json", "--", *words]) == 0
    assert json.loads(capsys.readouterr().out)["translated"]["WANDB_MODE"] == {"WANDB_MODE": "offline"}


@pytest.mark.slow
def test_run_starts_the_launch_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    words = [*GOOD, "trainer.n_gpus_per_node=1", "actor_rollout_ref.model.path=/nowhere/model"]
    command = [sys.executable, "-m", "perl", "from-verl", "--run", "--", *words]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 2  # the script's own check of the recipe
    assert "/nowhere/model: no such folder" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("NUM_PROCESSES=1 bash ")


def test_the_launch_script_takes_the_place_of_from_verl(tmp_path, monkeypatch):
    """Ctrl-C reaches every process of a terminal: a parent that waits would kill the script before its checkpoint."""
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr("os.execvpe", lambda *words: started.append(words))
    assert main(["from-verl", "--run", "--", *GOOD, "trainer.n_gpus_per_node=1", "trainer.nnodes=1"]) is None
    [(file, words, variables)] = started
    assert (file, words[2:]) == ("bash", ["--recipe", str(tmp_path / "from_verl.yaml")])
    assert words[1].endswith("dapo_lora_npu.sh")
    assert variables["NUM_PROCESSES"] == "1"


@pytest.mark.parametrize("name", ["HF_ENDPOINT", "HF_HOME"])
def test_run_passes_on_no_variable_of_a_script_that_redirects_the_token(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(name, raising=False)
    started = []
    monkeypatch.setattr("os.execvpe", lambda *words: started.append(words))
    command = f"{name}=https://other python3 -m verl.trainer.main_ppo {' '.join(GOOD)} trainer.nnodes=1"
    (tmp_path / "run.sh").write_text(f"{command}\n")
    with pytest.raises(UserError, match=f"^--run: the script sets {name}=https://other, .*; export it yourself, or"):
        main(["from-verl", "--run", "run.sh"])
    assert not started
    monkeypatch.setenv(name, "https://other")
    main(["from-verl", "--run", "run.sh"])
    assert started[0][2][name] == "https://other"


def test_several_nodes_get_accelerates_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["from-verl", "--json", "--", *GOOD, "trainer.nnodes=2", "trainer.device=npu"]) == 0
    command = json.loads(capsys.readouterr().out)["command"]
    assert "--num_machines 2 --num_processes 16" in command
    assert "scripts/accelerate/npu_4.yaml" in command
