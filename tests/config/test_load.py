"""What a command line and a recipe become, and what each mistake says."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import transformers
import trl.trainer.grpo_config
import trl.trainer.grpo_trainer
import yaml

from perl.adapters.checks import check_method
from perl.base.errors import UserError
from perl.config.derived import correction_of, scored_quantizations
from perl.config.load import GRPO, NOT_TAKEN, parse, parse_for
from perl.config.schema import GROUPS
from perl.config.sft import SFT
from perl.config.sft import parse as parse_sft
from perl.config.training import TrainingConfig
from perl.config.unused_flags import RULES, Rule, never
from perl.training.preflight import check_training


def message(*argv):
    with pytest.raises(UserError) as caught:
        parse(list(argv))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(path, text):
    path.write_text(text)
    return str(path)


def test_defaults_are_the_guides():
    values = parse([]).values
    assert (values.peft.type, values.peft.r, values.peft.lora_alpha) == ("lora", 16, 32)
    assert (values.noise_injection.sigma_start, values.noise_injection.sigma_end) == (0.05, 0.0005)
    assert values.noise_injection.num_stages == 10
    assert values.noise_injection.target_modules == ["post_attention_layernorm"]
    assert values.noise_injection.exclude_patterns == ["input_layernorm"]
    assert values.training.use_vllm is False


def test_the_shipped_recipe_is_the_guides_run():
    training = parse(["--recipe", "recipes/dapo_lora.yaml"]).values.training
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (1, 16)
    assert (training.num_generations, training.max_completion_length) == (2, 256)
    assert (training.learning_rate, training.max_steps) == (1e-5, 1024)


def test_flags_go_before_the_recipe_and_the_recipe_before_the_defaults(tmp_path):
    recipe = write(tmp_path / "r.yaml", "training: {max_steps: 7, learning_rate: 1e-4}\npeft: {r: 4}\n")
    values = parse(["--recipe", recipe, "--config.training.max_steps", "9"]).values
    assert (values.training.max_steps, values.training.learning_rate) == (9, 1e-4)
    assert (values.peft.r, values.peft.lora_alpha) == (4, 32)


def test_a_tilde_in_output_dir_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = write(tmp_path / "r.yaml", "training: {output_dir: ~/runs/a}\n")
    for parsed in (parse(["--config.training.output_dir", "~/runs/a"]), parse_sft(["--recipe", recipe])):
        assert parsed.values.training.output_dir == f"{tmp_path}/runs/a"


def test_a_recipe_goes_before_its_base(tmp_path):
    (tmp_path / "more").mkdir()
    write(tmp_path / "all.yaml", "common: {seed: 5}\ntraining: {max_steps: 7, learning_rate: 1e-4}\n")
    write(tmp_path / "half.yaml", "base: all.yaml\ntraining: {max_steps: 8, logging_steps: 3}\n")
    recipe = write(tmp_path / "more" / "r.yaml", "base: ../half.yaml\npeft: {r: 4}\ntraining: {logging_steps: 2}\n")
    values = parse(["--recipe", recipe]).values
    training = values.training
    assert (training.max_steps, training.learning_rate, training.logging_steps) == (8, 1e-4, 2)
    assert (values.common.seed, values.peft.r) == (5, 4)


def test_a_recipe_goes_before_what_its_base_says_by_another_name(tmp_path):
    base = "rollout: {engine: vllm}\ntraining: {max_steps: 300, seed: 5}\n"
    write(tmp_path / "base.yaml", base)
    over = "base: base.yaml\ncommon: {seed: 6}\ntraining: {num_train_epochs: 2, use_vllm: false}\n"
    parsed = parse(["--recipe", write(tmp_path / "r.yaml", over)])
    values = parsed.values
    assert (values.rollout.engine, values.common.seed, values.training.max_steps) == ("fast", 6, -1)
    assert values.training.num_train_epochs == 2
    assert parsed.warnings == []


def test_a_link_to_a_recipe_finds_its_base(tmp_path):
    (tmp_path / "there").mkdir()
    write(tmp_path / "there" / "base.yaml", "common: {seed: 5}\n")
    (tmp_path / "link.yaml").symlink_to(write(tmp_path / "there" / "r.yaml", "base: base.yaml\n"))
    assert parse(["--recipe", str(tmp_path / "link.yaml")]).values.common.seed == 5


def test_mistakes_in_a_base(tmp_path):
    first = write(tmp_path / "a.yaml", "base: b.yaml\n")
    assert message("--recipe", first) == f"--recipe {first}: base: there is no file {tmp_path / 'b.yaml'}"
    write(tmp_path / "b.yaml", "base: a.yaml\n")
    assert message("--recipe", first) == f"--recipe {first}: base {first} builds on itself; leave one base out"
    around = write(tmp_path / "around.yaml", f"base: ../{tmp_path.name}/around.yaml\n")
    assert message("--recipe", around) == f"--recipe {around}: base {around} builds on itself; leave one base out"
    write(tmp_path / "b.yaml", "trainin: {max_steps: 1}\n")
    assert f"--recipe {tmp_path / 'b.yaml'}: unknown group" in message("--recipe", first)
    write(tmp_path / "b.yaml", "training: {max_stepz: 1}\n")
    assert f"--recipe {tmp_path / 'b.yaml'}: unknown flag --config.training.max_stepz" in message("--recipe", first)
    assert "base must be the path of a recipe, not 3" in message("--recipe", write(tmp_path / "c.yaml", "base: 3\n"))


def test_the_dump_repeats_the_configuration_and_holds_no_secret(tmp_path):
    first = parse(
        [
            *("--config.training.hub_token", "hf_secret", "--config.training.output_dir", "o"),
            *("--config.common.seed", "5", "--config.reward.weights", "[0.5]"),
            *("--config.noise_injection.enabled", "true", "--config.dataset.max_prompt_length", "null"),
        ]
    )
    dump = first.dump()
    assert "hf_secret" not in dump
    assert "output_dir" not in dump
    again = parse(["--recipe", write(tmp_path / "config.yaml", dump)])
    assert yaml.safe_load(again.dump()) == yaml.safe_load(dump)
    assert again.values.common.seed == again.values.training.seed == 5
    assert again.values.noise_injection.enabled is True
    assert again.values.dataset.max_prompt_length is None  # a null that overrides a default


def test_every_grpo_field_is_a_flag():
    values = parse(["--config.training.loss_type", "dr_grpo", "--config.training.scale_rewards", "none"]).values
    assert (values.training.loss_type, values.training.scale_rewards) == ("dr_grpo", "none")


def test_max_prompt_length_is_taken_in_both_places():
    assert parse(["--config.training.max_prompt_length", "77"]).values.dataset.max_prompt_length == 77
    assert parse(["--config.dataset.max_prompt_length", "78"]).values.training.max_prompt_length == 78


@pytest.mark.parametrize(("flags", "correction"), [
    ((), "none"),
    (("--config.rollout.workers", "2"), "none"),
    (("--config.rollout.workers", "2", "--config.rollout.lag", "1"), "token"),
    (("--config.rollout.workers", "2", "--config.rollout.max_staleness", "1"), "token"),
    (("--config.rollout.workers", "2", "--config.rollout.lag", "1", "--config.rollout.importance_correction", "none"),
     "none"),
    (("--config.rollout.quantization", "int8"), "token"),
    (("--config.rollout.quantization", "int8", "--config.rollout.importance_correction", "none"), "none"),
])  # fmt: skip
def test_what_an_older_policy_draws_is_corrected_unless_said_otherwise(flags, correction):
    values = parse(flags).values
    assert correction_of(values.rollout) == correction
    if "--config.rollout.importance_correction" not in flags:
        assert values.rollout.importance_correction == "auto"  # config.yaml goes with another lag too


@pytest.mark.parametrize(("flags", "said"), [
    (("--config.rollout.engine", "generate"), "--config.rollout.engine generate draws with weights"),
    (("--config.peft.type", "none"), "--config.peft.type none: all weights are trained"),
    (("--config.peft.type", "oft"), "--config.peft.type oft: is no sum"),
    (("--config.rollout.merge_adapter", "true"), "--config.rollout.merge_adapter true: quantised weights would round"),
])  # fmt: skip
def test_what_a_quantised_sampler_goes_without(flags, said):
    assert message("--config.rollout.quantization", "int8", *flags).startswith(
        f"--config.rollout.quantization int8: {said}"
    )


SCORED = ("--config.validation.datasets", '["gsm8k"]')
QUANTIZED = ("--config.validation.quantized", "true")
INT8, VLLM = ("--config.rollout.quantization", "int8"), ("--config.rollout.engine", "vllm")
WORKERS = ("--config.rollout.workers", "1")


@pytest.mark.parametrize(("flags", "scored"), [
    (SCORED, ("none",)),
    ((*SCORED, *INT8), ("none",)),
    ((*SCORED, *INT8, *QUANTIZED), ("none", "int8")),
    ((*SCORED, *INT8, *WORKERS, *QUANTIZED), ("none", "int8")),
    ((*SCORED, *INT8, *VLLM, *QUANTIZED), ("int8",)),
    ((*SCORED, *INT8, *VLLM, *WORKERS), ("none",)),
])  # fmt: skip
def test_what_a_validation_scores_the_policy_above(flags, scored):
    assert scored_quantizations(parse(flags).values) == scored


@pytest.mark.parametrize(("flags", "said"), [
    (QUANTIZED, "true: --config.rollout.quantization is none"),
    ((*INT8, *VLLM), "false: vLLM holds the policy above the int8 base alone, and validates; write"),
    ((*INT8, *VLLM, *WORKERS, *QUANTIZED), "true: the workers alone hold the int8 base"),
])  # fmt: skip
def test_a_validation_of_a_policy_that_nobody_holds_is_refused(flags, said):
    assert message(*SCORED, *flags).startswith(f"--config.validation.quantized {said}")
    unscored = parse(flags)  # nothing is validated
    assert unscored.values.validation.datasets == []


@pytest.mark.parametrize(("flags", "workers", "kind", "share"), [
    ((), 0, "npu", 0.3),
    ((), 2, "npu", 0.8),
    ((), 2, "cpu", 0.15),  # one memory
    (("--config.training.vllm_gpu_memory_utilization", "0.5"), 2, "npu", 0.5),
])  # fmt: skip
def test_vllm_takes_more_of_a_device_that_it_has_alone(flags, workers, kind, share):
    assert parse(flags).build(1).training.vllm_share(workers, kind) == share


def test_unknown_flag_names_the_nearest():
    said = message("--config.training.max_stepz", "3")
    assert "--config.training.max_stepz" in said
    assert "did you mean --config.training.max_steps?" in said


def test_a_flag_of_a_group_that_the_program_has_not_is_no_other_misspelt():
    """perl.sft proposed --config.training.dataloader_num_workers."""
    with pytest.raises(UserError, match=r"^unknown flag --config\.rollout\.workers; --help all lists the known ones$"):
        parse_sft(["--config.rollout.workers", "2"])


def test_no_abbreviations():
    assert "unknown flag --config.training.max_step;" in message("--config.training.max_step", "3")


def test_a_learning_rate_below_0_is_told_before_anything_is_loaded():
    with pytest.raises(UserError, match=r"^--config\.training\.learning_rate -0\.1: write a number from 0$"):
        parse(["--config.training.learning_rate", "-0.1", "--config.training.bf16", "false"]).build(processes=1)


def test_a_whole_number_that_no_float_holds_is_one_line():
    assert message("--config.training.max_steps", "1" + 400 * "0") == (
        "--config.training.max_steps: larger than any number can be; write a smaller one"
    )


@pytest.mark.parametrize(("flag", "value"), [("adam_beta1", "1.0"), ("adam_beta2", "1.5"), ("adam_beta1", "-0.1")])
def test_betas_that_adam_cannot_have_are_told_before_anything_is_loaded(flag, value):
    said = f"--config.training.{flag} {float(value)}: write a number from 0, below 1"
    assert message(f"--config.training.{flag}", value) == said


@pytest.mark.parametrize("value", ["0.0", "1.7"])
def test_a_share_for_vllm_is_of_one_device(value):
    flag = "--config.training.vllm_gpu_memory_utilization"
    assert message(flag, value) == f"{flag} {value}: write a number above 0, to 1"


def test_wrong_type_names_flag_and_value():
    said = message("--config.training.learning_rate", "fast")
    assert "--config.training.learning_rate" in said
    assert "fast" in said


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("peft.adapter_mode", "new", "'continue' or 'merge', not new"),
        ("noise_injection.target_kl_start", "-1", "a number above 0, not -1"),
        ("peft.lora_dropout", "2", "a number from 0 to 1, not 2"),
        ("peft.r", "2.5", "a whole number from 1, not 2.5"),
        ("common.seed", "x", "a whole number, not x"),
        ("training.learning_rate", "fast", "a number, not fast"),
        ("validation.save_best", "maybe", "true or false, not maybe"),
    ],
)
def test_a_value_of_another_type_is_told_what_it_must_be(flag, value, expected):
    assert message(f"--config.{flag}", value) == f"--config.{flag}: expected {expected}"


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("rollout.capture_graphs", "maybe", "true or false or 'auto'"),
        ("dataset.max_prompt_length", "x", "a whole number from 1 or null"),
    ],
)
def test_a_value_of_none_of_several_types_is_told_what_they_are(flag, value, expected):
    with pytest.raises(UserError) as error:
        parse([f"--config.{flag}", value])
    assert str(error.value) == f"--config.{flag}: expected {expected}, not {value}"


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("training.r", "--config.peft.r"),
        ("training.lora_alpha", "--config.peft.lora_alpha"),
        ("training.batch_size", "--config.training.per_device_train_batch_size"),
        ("training.lr", "--config.training.learning_rate"),
        ("critic.learning_rate", "--config.critic.lr"),
        ("algorithm.adv_estimator", "--config.algorithm.name"),
        ("algorithm.kl_ctrl.kl_coef", "--config.algorithm.kl_in_reward"),
        ("actor.kl_loss_coef", "--config.training.beta"),
        ("algorithm.clip_ratio_high", "--config.training.epsilon_high"),
        ("algorithm.filter_groups", "--config.algorithm.dynamic_sampling"),
    ],
)
def test_a_field_of_another_group_or_by_another_name_is_found(flag, meant):
    assert message(f"--config.{flag}", "8") == f"unknown flag --config.{flag}; did you mean {meant}?"


@pytest.mark.parametrize(
    ("flag", "value", "written"),
    [
        ("reward.functions", "accuracy", '["accuracy"]'),
        ("reward.functions", "accuracy,format", '["accuracy", "format"]'),
        ("reward.weights", "0.5", "[0.5]"),
    ],
)
def test_a_word_where_a_list_is_wanted_says_what_to_write(flag, value, written):
    said = message(f"--config.{flag}", value)
    assert said.startswith(f"--config.{flag}: expected ")
    assert said.endswith(f"not {value}; write '{written}'")
    assert parse([f"--config.{flag}", written])


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("|0", '["|0"]'),
        ("{0", '["{0"]'),
        ("\x08", '["\\b"]'),
        ("!!python/name:os.system", '["!!python/name:os.system"]'),
        ("2024-13-45", '["2024-13-45"]'),
        ("&a {b: *a}", '["'),  # holds itself
        ("{{" + 2000 * "{", '["{{'),
        ("gsm8k,3", '["gsm8k", 3]'),
    ],
)
def test_a_word_that_is_no_yaml_is_one_line_where_a_list_is_wanted(value, written):
    """The line that says what to write read the word as YAML once more, and raised its errors."""
    with pytest.raises(UserError) as told:
        parse([f"--config.validation.datasets={value}"])
    assert "expected a list" in str(told.value)
    assert f"; write '{written}" in str(told.value)


@pytest.mark.parametrize("flag", ["validation.datasets", "reward.functions", "training.reward_weights"])
@pytest.mark.parametrize("value", ["[1", "[[[[[["])
def test_a_list_that_breaks_off_is_one_line(flag, value):
    with pytest.raises(UserError, match=rf"^--config.{flag}: expected [^;]*, not {re.escape(value)}$"):
        parse([f"--config.{flag}={value}"])


def test_epochs_of_the_user_go_before_the_recipes_steps(tmp_path):
    recipe = write(tmp_path / "r.yaml", "training: {max_steps: 7, num_train_epochs: 4}\n")
    parsed = parse(["--recipe", recipe, "--config.training.num_train_epochs", "2"])
    assert (parsed.values.training.max_steps, parsed.values.training.num_train_epochs) == (-1, 2)
    assert parsed.warnings == ["--config.training.num_train_epochs 2 decides: the recipe's max_steps 7 is left out"]
    again = parse(["--recipe", write(tmp_path / "again.yaml", parsed.dump())])
    assert (again.values.training.max_steps, again.values.training.num_train_epochs) == (-1, 2)


@pytest.mark.parametrize(
    ("written", "flags", "steps", "said"),
    [
        ("{max_steps: 7, num_train_epochs: 4}", [], 7, "the recipe's max_steps 7 decides: the recipe's num_train_epoc"),
        ("{num_train_epochs: 4}", ["max_steps", "9"], 9, "--config.training.max_steps 9 decides: the recipe's num_tr"),
        ("{max_steps: 7}", ["max_steps", "9"], 9, None),
        ("{num_train_epochs: 4}", [], -1, None),
        ("{max_steps: 7, num_train_epochs: 3}", [], 7, None),  # TRL's default, as a run's own config.yaml has it
    ],
)
def test_epochs_are_never_left_out_in_silence(tmp_path, written, flags, steps, said):
    recipe = write(tmp_path / "r.yaml", f"training: {written}\n")
    words = [f"--config.training.{flags[0]}", flags[1]] if flags else []
    parsed = parse(["--recipe", recipe, *words])
    assert parsed.values.training.max_steps == steps
    assert [line.startswith(said or "") for line in parsed.warnings] == ([True] if said else [])


def test_of_epochs_and_steps_as_flags_the_steps_decide_and_a_line_says_so():
    parsed = parse(["--config.training.num_train_epochs", "2", "--config.training.max_steps", "9"])
    assert parsed.values.training.max_steps == 9
    (line,) = parsed.warnings
    assert line == "--config.training.num_train_epochs has no effect: training.max_steps is given, and decides"


@pytest.mark.parametrize(
    ("flags", "because"),
    [
        (["--config.training.trust_remote_code", "true"], "transformers' own code"),
        (["--config.training.weight_decay", "0.1", "--config.peft.type", "lora_plus"], "lora_plus decays no weights"),
    ],
)
def test_fields_that_perl_does_not_use_are_warned_of(flags, because):
    (line,) = parse(flags).warnings
    assert because in line


def test_a_secret_in_a_mapping_is_in_no_dump():
    argv = ["--config.training.model_init_kwargs", '{"token": "hf_secret", "use_cache": false}']
    dump = parse(argv).dump()
    assert "hf_secret" not in dump
    assert yaml.safe_load(dump)["training"]["model_init_kwargs"] == {"use_cache": False}


def test_a_value_without_a_flag():
    assert "'true'" in message("true")


def test_values_out_of_range():
    assert "sigma_start" in message("--config.noise_injection.sigma_start", "-1")
    assert "num_stages" in message("--config.noise_injection.num_stages", "0")
    assert "truncation" in message("--config.dataset.truncation", "above")


@pytest.mark.parametrize(
    ("ours", "trls", "values"),
    [
        ("common.seed", "training.seed", ("1", "2")),
        ("reward.weights", "training.reward_weights", ("[1.0]", "[2.0]")),
        ("dataset.max_prompt_length", "training.max_prompt_length", ("1", "2")),
    ],
)
def test_two_names_of_one_thing_may_not_contradict(ours, trls, values):
    said = message(f"--config.{ours}", values[0], f"--config.{trls}", values[1])
    assert ours in said
    assert trls in said
    parse([f"--config.{ours}", values[0], f"--config.{trls}", values[0]])


def test_a_rewards_deadline_is_shorter_than_that_of_the_processes_that_wait_for_it():
    deadline = ["--config.reward.function_deadline_s", "60"]
    assert "raise ddp_timeout" in message(*deadline, "--config.training.ddp_timeout", "60")
    parse([*deadline, "--config.training.ddp_timeout", "61"])
    two = ["--config.reward.functions", '["accuracy", "format"]']
    assert "of 4 calls one after the other" in message(
        *deadline, *two, ALGORITHM, "remax", "--config.training.ddp_timeout", "240"
    )


def test_a_recipe_may_not_contradict_itself(tmp_path):
    recipe = write(tmp_path / "r.yaml", "common: {seed: 1}\ntraining: {seed: 2}\n")
    assert "training.seed" in message("--recipe", recipe)


def test_engine_is_the_one_switch():
    assert parse(["--config.training.use_vllm", "true"]).values.rollout.engine == "vllm"
    assert parse(["--config.rollout.engine", "vllm"]).values.training.use_vllm is True
    said = message("--config.rollout.engine", "generate", "--config.training.use_vllm", "true")
    assert "use_vllm" in said


VLLM = ("--config.rollout.engine", "vllm")
TRLS = "--config.training.vllm_importance_sampling_"
OURS = "--config.rollout.importance_correction"


@pytest.mark.parametrize(("flags", "correction"), [
    ((*VLLM,), "token"),  # not TRL's own default, sequence_mask
    ((*VLLM, f"{TRLS}mode", "token_mask"), "token_mask"),
    ((*VLLM, f"{TRLS}correction", "true", f"{TRLS}mode", "sequence_truncate"), "sequence"),
    ((*VLLM, f"{TRLS}correction", "false"), "none"),
    ((*VLLM, f"{TRLS}correction", "true"), "token"),
    ((*VLLM, OURS, "sequence_mask"), "sequence_mask"),
    ((*VLLM, OURS, "none", f"{TRLS}correction", "false"), "none"),
    ((f"{TRLS}mode", "token_mask"), "none"),  # of vLLM alone, as a line says
])  # fmt: skip
def test_trls_fields_say_of_vllm_what_ours_says_of_every_engine(tmp_path, flags, correction):
    parsed = parse(flags)
    assert correction_of(parsed.values.rollout) == correction
    assert len(parsed.warnings) == (VLLM[0] not in flags)
    again = parse(["--recipe", write(tmp_path / "config.yaml", parsed.dump())])
    assert correction_of(again.values.rollout) == correction


def test_a_flag_goes_before_the_recipe_whichever_of_the_names_it_uses(tmp_path):
    written = write(tmp_path / "config.yaml", parse([]).dump())  # of a run with another engine
    assert correction_of(parse([*VLLM, "--recipe", written]).values.rollout) == "token"
    ours = write(tmp_path / "ours.yaml", "rollout: {importance_correction: sequence}")
    trls = write(tmp_path / "trls.yaml", "training: {vllm_importance_sampling_mode: token_mask}")
    off = write(tmp_path / "off.yaml", "rollout: {importance_correction: none}")
    for recipe, flags, correction in (
        (ours, [f"{TRLS}mode", "token_mask"], "token_mask"),
        (trls, [OURS, "none"], "none"),
        (trls, [f"{TRLS}correction", "true"], "token_mask"),
        (off, [f"{TRLS}correction", "true"], "token"),
    ):
        assert correction_of(parse([*VLLM, "--recipe", recipe, *flags]).values.rollout) == correction
    assert "they mean the same; give one" in message(*VLLM, OURS, "token", f"{TRLS}mode", "token_mask")
    assert "unknown mode 'tokens'" in message(*VLLM, f"{TRLS}mode", "tokens")


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_a_field_of_trls_for_an_engine_that_perl_has_not_is_no_flag(tmp_path, name):
    assert f"training.{name}" not in parse([]).values
    unknown = f"unknown flag --config.training.{name}; did you mean"
    assert message(f"--config.training.{name}", "1").startswith(unknown)
    recipe = write(tmp_path / "r.yaml", f"training: {{{name}: 1}}\n")
    assert message("--recipe", recipe).startswith(f"--recipe {recipe}: {unknown}")


def test_the_noisy_old_policy_is_corrected_as_the_clean_one_but_never_by_itself():
    noisy = ["--config.noise_injection.enabled", "true", "--config.noise_injection.old_logps", "noisy"]
    assert correction_of(parse([*noisy, *VLLM]).values.rollout) == "token"
    said = message(*noisy, "--config.rollout.quantization", "int8", "--config.rollout.behaviour", "exact")
    assert "nothing is left to correct; write engine, or old_logps clean" in said


def test_rising_noise_is_refused():
    flags = ["--config.noise_injection.enabled", "true", "--config.noise_injection.sigma_end", "0.1"]
    assert "swap" in message(*flags)


def test_noise_that_never_is_and_a_schedule_that_ends_at_0():
    on = ["--config.noise_injection.enabled", "true"]
    alone = [*on, "--config.noise_injection.warmup_stage", "true", "--config.noise_injection.num_stages", "1"]
    assert "num_stages 1: with warmup_stage the only stage would have no noise; write 2 or more" in message(*alone)
    to_0 = [*on, "--config.noise_injection.sigma_end", "0", "--config.noise_injection.schedule"]
    assert "never reaches sigma_end 0" in message(*to_0, "exponential")
    assert parse([*to_0, "logarithmic"]).warnings == []  # 1 - ln(1 + x (e - 1)) is 0 at x = 1


def test_checkpoints_by_the_best_score_are_the_validations():
    """There was never one."""
    said = message("--config.training.save_strategy", "best", "--config.training.metric_for_best_model", "loss")
    assert "save_strategy best: is of TRL's own evaluation; write steps or epoch, and --config.validation.save" in said


def test_a_temperature_of_sapo_divides():
    sapo = ["--config.algorithm.name", "sapo"]
    assert "write a number above 0" in message(*sapo, "--config.training.sapo_temperature_neg", "0")


def test_a_kl_term_of_k2_is_not_weighed_by_the_ratio():
    flags = ["--config.training.beta", "0.1", "--config.training.use_bias_correction_kl", "true"]
    assert parse(flags).warnings == []
    (said,) = parse([*flags, "--config.algorithm.kl_estimator", "mse"]).warnings
    assert said.startswith("--config.training.use_bias_correction_kl has no effect: algorithm.kl_estimator mse is not")


def test_target_kl_needs_a_falling_target_and_a_sigma_to_begin_with():
    adaptive = ["--config.noise_injection.enabled", "true", "--config.noise_injection.schedule", "target_kl"]
    assert "swap" in message(*adaptive, "--config.noise_injection.target_kl_end", "0.5")
    assert "never leaves 0" in message(*adaptive, "--config.noise_injection.sigma_start", "0")
    assert "target_kl_end" in message(*adaptive, "--config.noise_injection.target_kl_end", "0")
    # sigma_end's default, which target_kl does not read, is above this sigma_start
    assert parse([*adaptive, "--config.noise_injection.sigma_start", "0.0001"]).warnings == []


def test_fields_that_the_noises_schedule_does_not_read_are_warned_of():
    on = ["--config.noise_injection.enabled", "true"]
    (said,) = parse([*on, "--config.noise_injection.target_kl_start", "0.1"]).warnings
    assert said == "--config.noise_injection.target_kl_start has no effect: noise_injection.schedule is not target_kl"
    adaptive = [*on, "--config.noise_injection.schedule", "target_kl"]
    (said,) = parse([*adaptive, "--config.noise_injection.sigma_end", "0.01"]).warnings
    assert said.startswith("--config.noise_injection.sigma_end has no effect: noise_injection.schedule target_kl sets")
    (said,) = parse(["--config.noise_injection.sigma_end", "0.01"]).warnings  # one reason, not two
    assert said.endswith("noise_injection.enabled is false")


def test_as_many_weights_as_rewards():
    said = message("--config.reward.functions", '["accuracy","format"]', "--config.reward.weights", "[1.0]")
    assert "one weight for each function" in said


def test_recipe_mistakes(tmp_path):
    assert "no file nowhere.yaml" in message("--recipe", "nowhere.yaml")
    assert message("--recipe", str(tmp_path)) == f"--recipe {tmp_path}: is a folder; name a YAML file in it"
    assert "/dev/null: is a device or a pipe" in message("--recipe", "/dev/null")
    assert "did you mean training?" in message("--recipe", write(tmp_path / "a.yaml", "trainin: {max_steps: 1}"))
    assert "max_steps?" in message("--recipe", write(tmp_path / "b.yaml", "training: {max_stepz: 1}"))
    assert "not YAML" in message("--recipe", write(tmp_path / "c.yaml", "training: [1"))
    assert "must hold groups" in message("--recipe", write(tmp_path / "d.yaml", "- 1"))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("training:\n  max_steps: 7\ntraining:\n  save_steps: 5\n", "training stands in line 1 and again in line 3"),
        ("peft:\n  r: 4\ntraining: {max_steps: 7, max_steps: 8}\n", "max_steps stands in line 3 and again in line 3"),
    ],
)
def test_a_group_or_a_field_that_stands_twice_in_a_recipe_is_refused(tmp_path, written, said):
    """The first was dropped without a word."""
    recipe = write(tmp_path / "r.yaml", written)
    assert message("--recipe", recipe) == f"--recipe {recipe}: not YAML: {said}; write it once"


def test_keys_that_yaml_merges_do_not_stand_twice(tmp_path):
    merged = "training: &a {max_steps: 7, seed: 3}\ncommon: &b {debug: true, seed: 3}\n"
    recipe = write(tmp_path / "r.yaml", merged + "reward: {kwargs: {<<: *a, max_steps: 8, c: {<<: *b}}}\n")
    values = parse(["--recipe", recipe]).values
    assert values.reward.kwargs == {"max_steps": 8, "seed": 3, "c": {"debug": True, "seed": 3}}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("training: {max_steps: null}", "training.max_steps: expected a whole number"),
        ("peft: {type: null}", "peft.type: expected text"),
        ("common:\n  seed:", "common.seed: expected a whole number"),
        ("dataset:\n  filter_overlong_prompts:", "dataset.filter_overlong_prompts: expected true or false"),
        ("algorithm: {kl_in_reward: null}", "algorithm.kl_in_reward: expected a number from 0"),
        ("reward: {functions: null}", "reward.functions: expected a list"),
    ],
)
def test_a_field_left_blank_in_a_recipe_says_what_it_must_be(tmp_path, written, said):
    """They became None: a traceback later, or the opposite of the default without a word."""
    recipe = write(tmp_path / "r.yaml", written)
    assert message("--recipe", recipe) == f"--recipe {recipe}: --config.{said}, not null; leave the line out"


@pytest.mark.parametrize("program", [GRPO, SFT], ids=lambda program: program.name)
def test_a_recipe_may_say_null_where_the_default_is_null(tmp_path, program):
    groups = {**program.groups, "training": program.training_class()}
    recipe = {
        name: {field.name: None for field in dataclasses.fields(group) if field.default is None}
        for name, group in groups.items()
    }
    for name in NOT_TAKEN:
        recipe["training"].pop(name, None)
    assert recipe["model"]["dtype"] is None
    file = write(tmp_path / "r.yaml", yaml.safe_dump(recipe))
    assert parse_for(program, ["--recipe", file]).values.model.dtype is None


def test_flags_without_effect_get_one_warning_each():
    argv = ["--config.training.vllm_gpu_memory_utilization", "0.2", "--config.noise_injection.sigma_start", "0.1"]
    warnings = parse(argv).warnings
    assert len(warnings) == 2
    assert "noise_injection.enabled is false" in warnings[0]
    assert "rollout.engine is not vllm" in warnings[1]


@pytest.mark.parametrize(
    "flag", ["loss_type bnpo", "top_entropy_quantile 0.5", "entropy_coef 0.1", "use_adaptive_entropy true"]
)
def test_tokens_of_a_micro_batch_have_no_effect_where_rows_stand(flag):
    name, value = flag.split()
    tokens = ["--config.training.max_tokens_per_microbatch", "4096"]
    (said,) = parse([*tokens, f"--config.training.{name}", value]).warnings
    assert said.startswith("--config.training.max_tokens_per_microbatch has no effect: the loss (")
    assert parse(tokens).warnings == []


def test_every_rule_is_about_a_field_that_exists():
    fields = list(parse([]).values.keys(branches=False))
    for rule in RULES:
        for prefix in rule.prefixes:
            assert any(name.startswith(prefix) for name in fields), prefix


READ_BY_OTHERS = {
    "processes, devices and dtypes: TrainingArguments, Trainer.create_accelerator_and_postprocess": """
        accelerator_config ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
        ddp_static_graph deepspeed fsdp fsdp_config full_determinism parallelism_config tf32 torch_compile_backend
        torch_compile_mode use_cache""",
    "optimizer and schedule: Trainer.create_optimizer, create_scheduler": """
        adam_beta1 adam_beta2 adam_epsilon learning_rate lr_scheduler_kwargs lr_scheduler_type optim_args
        optim_target_modules warmup_steps""",
    "the loop: Trainer.train, _run_epoch, training_step": """
        debug ignore_data_skip logging_nan_inf_filter restore_callback_states_from_checkpoint skip_memory_metrics
        torch_empty_cache_steps""",
    "the log: Trainer.log, DefaultFlowCallback, the trackers' callbacks": """
        include_num_input_tokens_seen log_level log_level_replica log_on_each_node logging_first_step logging_steps
        logging_strategy trackio_bucket_id trackio_space_id trackio_static_space_id""",
    "checkpoints: Trainer._save_checkpoint, _push_from_checkpoint": """
        enable_jit_checkpoint hub_always_push hub_strategy save_on_each_node save_only_model save_steps""",
    "GRPOTrainer.__init__, whose copies its log, engine generate and perl read; GRPOConfig.__post_init__": """
        cache_implementation disable_dropout log_completions log_completions_hub_repo log_unique_prompts
        num_completions_to_print router_aux_loss_coef shuffle_dataset temperature vllm_importance_sampling_cap""",
}
"""Fields of `training` that nothing of perl reads from it, by the code of transformers and TRL that does in a run."""
READ_BY_NAME = {
    "perl.config.load": "max_prompt_length vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "perl.training.collect": "min_p repetition_penalty temperature top_k top_p",
}
"""Fields that perl reads by strings of their names."""
REFUSED = {
    "auto_find_batch_size": "true",
    "eval_strategy": "steps",
    "load_best_model_at_end": "true",
    "neftune_noise_alpha": "5",
    "sync_ref_model": "true",
    "use_liger_kernel": "true",
    "vllm_mode": "server",
}
NO_READERS = (
    "tools",
    "finetuning",
    "config/checks.py",
    "config/sft.py",
    "config/unused_flags.py",
    "training/preflight.py",
)
"""Of perl/: what only checks, plans, or fine-tunes."""


def read_in_perl() -> set[str]:
    """Attributes that a run of perl.train reads of something called args or training."""
    found = set()
    for file in Path("perl").rglob("*.py"):
        if str(file.relative_to("perl")).startswith(NO_READERS):
            continue
        names = {"args", "training", *(["self"] if file == Path("perl/config/training.py") else [])}
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                of = getattr(node.value, "attr", getattr(node.value, "id", None))
                found |= {node.attr} if of in names else set()
    return found


def test_every_field_of_training_is_read_or_told_of():
    sources = [Path(module.__file__) for module in (trl.trainer.grpo_trainer, trl.trainer.grpo_config)]
    library = Path(transformers.__file__).parent
    sources += [*library.glob("train*.py"), library / "integrations" / "integration_utils.py"]
    text = "\n".join(file.read_text() for file in sources)
    fields = {field.name for field in dataclasses.fields(TrainingConfig)} - set(NOT_TAKEN)
    others = {name for names in READ_BY_OTHERS.values() for name in names.split()} & fields
    assert {name for name in others if not re.search(rf"\b(args|self)\.{name}\b", text)} == set()
    by_name = {name for names in READ_BY_NAME.values() for name in names.split()}
    told = {name for name in fields for rule in RULES if rule.active is never and without_effect(rule, name)}
    assert told.isdisjoint(others | by_name)
    assert fields - read_in_perl() - others - by_name - told - REFUSED.keys() == set()


def without_effect(rule: Rule, name: str) -> bool:
    """Whether a rule is about the field `name` of training."""
    return f"training.{name}".startswith(rule.prefixes) and f"training.{name}" not in rule.keep


@pytest.mark.parametrize(("name", "value"), REFUSED.items())
def test_fields_that_a_run_cannot_follow_are_refused(name, value):
    with pytest.raises(UserError, match=name):
        check_training(parse([f"--config.training.{name}", value]).build().training)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("data_seed 7", "data_seed has no effect: perl reads the prompts itself, in the order of common.seed"),
        ("max_tool_calling_iterations 3", "has no effect: environment.max_turns bounds the turns"),
        ("metric_for_best_model loss", "has no effect: it is of TRL's own evaluation"),
        ("log_completions_hub_repo a/b", "log_completions_hub_repo has no effect: training.log_completions is false"),
        ("importance_sampling_level sequence loss_type vespo", "has no effect: loss_type vespo weighs by the ratio of"),
        ("num_completions_to_print 3", "has no effect: training.log_completions is false"),
        ("vllm_importance_sampling_cap 2", "has no effect: rollout.importance_correction is none"),
    ],
)
def test_fields_of_trl_that_perl_does_otherwise_are_warned_of(flags, said):
    (line,) = parse([word if i % 2 else f"--config.training.{word}" for i, word in enumerate(flags.split())]).warnings
    assert said in line


@pytest.mark.parametrize("read", [parse, parse_sft], ids=["train", "sft"])
@pytest.mark.parametrize(
    ("flag", "without", "because", "with_it"),
    [
        ("training.save_steps 10", "training.save_strategy no", "training.save_strategy is not steps", "steps"),
        ("training.save_total_limit 2", "training.save_strategy no", "training.save_strategy is no", "epoch"),
        ("training.warmup_steps 10", "training.lr_scheduler_type constant", "constant has no warm-up", "cosine"),
        ("logging.wandb_project p", "training.report_to none", "does not name wandb", '["tensorboard","wandb"]'),
    ],
)
def test_flags_of_what_is_not_done_are_warned_of(read, flag, without, because, with_it):
    given, other = (f"--config.{words}".split() for words in (flag, without))
    (said,) = read([*given, *other]).warnings
    assert said.startswith(f"{given[0]} has no effect: ")
    assert because in said
    assert read([*given, other[0], with_it]).warnings == []


def test_a_deadline_of_grading_is_for_what_grades():
    deadline = "--config.reward.deadline_s", "3", "--config.reward.functions"
    (said,) = parse([*deadline, '["strict","overlong"]']).warnings
    assert said.startswith("--config.reward.deadline_s has no effect: reward.functions does not hold accuracy")
    assert parse([*deadline, '["strict","accuracy"]']).warnings == []
    assert parse([*deadline, '["strict"]', "--config.validation.datasets", '["gsm8k"]']).warnings == []


@pytest.mark.parametrize("text", ["[1]", "{bad", "word"])
@pytest.mark.parametrize("name", ["chat_template_kwargs", "generation_kwargs"])
def test_what_is_no_mapping_is_one_line(name, text):
    said = message(f"--config.training.{name}", text)
    assert said == f"--config.training.{name}: expected a JSON object, not {text}; write it as '{{\"name\": value}}'"
    values = parse([f"--config.training.{name}", '{"min_p": 0.1}']).values.training
    assert values[name] == {"min_p": 0.1}


def test_vespos_kl_may_be_weighed_by_the_ratio_of_a_level():
    kl = ["--config.training.beta", "0.1", "--config.training.loss_type", "vespo"]
    assert parse([*kl, "--config.training.importance_sampling_level", "sequence"]).warnings == []


def test_a_recipes_unused_fields_are_not_warned_of(tmp_path):
    recipe = write(tmp_path / "r.yaml", "noise_injection: {enabled: false, sigma_start: 0.1}\n")
    assert parse(["--recipe", recipe]).warnings == []


def test_a_recipes_settings_for_another_method_than_the_flags_are_left_out(tmp_path):
    recipe = write(tmp_path / "r.yaml", "peft: {r: 32, lora_alpha: 64, lora_dropout: 0.05}\n")
    parsed = parse(["--recipe", recipe, "--config.peft.type", "hra"])
    assert parsed.warnings == [
        "the recipe's peft.lora_alpha 64 is left out: --config.peft.type hra does not read it",
        "the recipe's peft.lora_dropout 0.05 is left out: --config.peft.type hra does not read it",
    ]
    assert parsed.values.peft.r == 32
    again = parse(["--recipe", write(tmp_path / "config.yaml", parsed.dump())])  # what the run writes repeats it
    assert (again.values.peft, again.warnings) == (parsed.values.peft, [])
    check_method(again.build().peft, again.build().training, "")


def test_what_a_flag_or_the_recipe_sets_for_its_own_method_stays(tmp_path):
    recipe = write(tmp_path / "r.yaml", "peft: {type: miss, lora_alpha: 64}\n")
    for words in ([], ["--config.peft.type", "miss"], ["--config.peft.type", "hra", "--config.peft.lora_alpha", "8"]):
        parsed = parse(["--recipe", recipe, *words])
        assert parsed.warnings == []
        with pytest.raises(UserError, match=r"lora_alpha (64|8): peft.type (miss|hra) does not read it"):
            check_method(parsed.build().peft, parsed.build().training, "")


def test_numbers_of_our_groups_are_plain_as_checkpoints_hold_them():
    flags = ["--config.noise_injection.sigma_start", "0.04", "--config.noise_injection.schedule", "target_kl"]
    config = parse([*flags, "--config.algorithm.kl_in_reward", "0.1"]).build()
    assert type(config.noise_injection.sigma_start) is float
    for group in GROUPS:
        numbers = [value for value in vars(getattr(config, group)).values() if isinstance(value, int | float)]
        assert {type(number) for number in numbers} <= {bool, int, float}, group


def test_bf16_is_decided_by_the_device():
    config = parse([]).build()
    assert config.training.use_cpu is True
    assert config.training.bf16 is False


def test_grpoconfigs_own_complaint_is_one_line():
    with pytest.raises(UserError, match="num_generations"):
        parse(["--config.training.num_generations", "3", "--config.training.per_device_train_batch_size", "2"]).build()


def test_a_flag_goes_before_the_recipe_by_either_name(tmp_path):
    written = parse(["--recipe", "recipes/dapo_lora.yaml"]).dump()  # names everything twice
    recipe = write(tmp_path / "config.yaml", written)
    flags = ["--config.training.max_prompt_length", "256", "--config.common.seed", "5"]
    for file in ("recipes/dapo_lora.yaml", recipe):
        values = parse(["--recipe", file, *flags]).values
        assert values.dataset.max_prompt_length == values.training.max_prompt_length == 256
        assert values.common.seed == values.training.seed == 5
    values = parse(["--recipe", recipe, "--config.dataset.max_prompt_length", "null"]).values
    assert values.dataset.max_prompt_length is values.training.max_prompt_length is None
    quiet = ["--config.noise_injection.enabled", "false"]
    for flag in (["--config.rollout.engine", "vllm"], ["--config.training.use_vllm", "true"]):
        values = parse(["--recipe", recipe, *quiet, *flag]).values
        assert (values.rollout.engine, values.training.use_vllm) == ("vllm", True)
    vllm = write(tmp_path / "vllm.yaml", "rollout: {engine: vllm}\n")
    values = parse(["--recipe", vllm, "--config.training.use_vllm", "false"]).values
    assert (values.rollout.engine, values.training.use_vllm) == ("fast", False)


def test_a_token_of_the_vocabulary_is_no_secret():
    from perl.config.sft import parse as parse_sft

    dump = yaml.safe_load(parse_sft(["--config.training.pad_token", "<|end|>"]).dump())
    assert dump["training"]["pad_token"] == "<|end|>"
    assert "hub_token" not in dump["training"]


def test_trackers_are_given_no_secret():
    argv = ["--config.training.generation_kwargs", '{"api_key": "s3cret", "top_k": 3, "url": "https://me:s3cret@host"}']
    config = parse(argv).build()
    assert config.training.generation_kwargs["api_key"] == "s3cret"
    assert config.training.to_dict()["generation_kwargs"] == {"top_k": 3, "url": "https://<secret>@host"}
    assert "s3cret" not in config.training.to_json_string()


ALGORITHM = "--config.algorithm.name"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--config.training.beta", "-0.1"], "beta -0.1: a coefficient below 0"),
        (
            [ALGORITHM, "ppo", "--config.algorithm.dynamic_sampling", "true"],
            "dynamic_sampling true: one completion of a prompt is always equal to itself",
        ),
        (["--config.training.loss_type", "cispo"], r"epsilon_high null \(epsilon 0.2\): with loss_type cispo"),
        ([ALGORITHM, "cispo", "--config.training.epsilon_high", "0.28"], "epsilon_high 0.28: with loss_type cispo"),
        (
            [ALGORITHM, "ppo", "--config.critic.warmup_steps", "3", "--config.training.max_steps", "3"],
            "warmup_steps 3: the training ends after step 3, before the policy would learn",
        ),
        (
            ["--config.algorithm", "ppo"],
            "--config.algorithm ppo: is a group of fields; .*such as --config.algorithm.na",
        ),
        (["--config.critic", "null"], "--config.critic null: is a group of fields; .*such as --config.critic.lr"),
    ],
)
def test_mistakes_with_an_algorithm_are_one_line(flags, told):
    with pytest.raises(UserError, match=told) as error:
        parse(flags)
    assert "\n" not in str(error.value)


def test_cispos_ratio_may_be_held_at_1():
    flags = ["--config.training.loss_type", "cispo", "--config.training.epsilon_high", "1.0"]  # verl's gpg
    assert parse([*flags, "--config.training.cispo_min_ratio", "1.0"]).warnings == []


def test_no_completion_of_a_prompt_is_a_mistake_also_where_one_would_do():
    with pytest.raises(UserError, match="num_generations 0: a prompt needs at least 1 completion"):
        parse([ALGORITHM, "ppo", "--config.training.num_generations", "0"]).build(processes=1)


def test_one_completion_of_a_prompt_where_no_group_is_compared():
    one = ["--config.training.num_generations", "1"]
    assert parse([ALGORITHM, "reinforce_plus_plus", *one]).values.training.num_generations == 1
    for name in ("rloo", "reinforce_plus_plus_baseline"):
        with pytest.raises(UserError, match=f"algorithm {name} compares the completions of a prompt"):
            parse([ALGORITHM, name, *one])


def test_what_shapes_trls_advantages_has_no_effect_where_a_critic_makes_them():
    flags = ["--config.training.scale_rewards", "none"]
    further = ["--config.training.multi_objective_aggregation", "normalize_then_sum"]
    assert parse(flags).warnings == []
    warnings = parse([ALGORITHM, "ppo", *flags, *further]).warnings
    assert [line.partition(":")[0] for line in warnings] == [
        "--config.training.multi_objective_aggregation has no effect",
        "--config.training.scale_rewards has no effect",
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("rollout.workers=2 rollout.engine=generate", "rollout.workers 2: workers draw with engine fast or vllm"),
        ("rollout.piece_size=4 rollout.engine=generate", "rollout.piece_size 4: without workers engine fast alone"),
        ("rollout.lag=1", "rollout.lag 1: the trainer cannot draw while it trains"),
        ("rollout.max_staleness=1", "rollout.max_staleness 1: the trainer cannot draw while it trains"),
        ("rollout.max_staleness=1 rollout.lag=1 rollout.workers=1", "rollout.lag 1 says which policy draws"),
        ("rollout.max_staleness=1 rollout.piece_size=4 rollout.workers=1", "with max_staleness there are no pieces"),
        ("rollout.max_staleness=1 rollout.workers=1 algorithm.name=remax", "for which an engine would run empty"),
        ("rollout.lag=1 rollout.workers=1 peft.type=none", "each policy that is kept is a whole model"),
        ("rollout.lag=1 rollout.workers=1 algorithm.dynamic_sampling=true", "nothing can be drawn ahead"),
        (
            "rollout.lag=1 rollout.workers=1 noise_injection.enabled=true noise_injection.schedule=target_kl",
            "schedule target_kl measures what the noise does",
        ),
    ],
)
def test_what_workers_or_a_lag_cannot_have_is_one_line(flags, said):
    given = [part for flag in flags.split() for part in f"--config.{flag}".split("=")]
    assert said in message(*given)
