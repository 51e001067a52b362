"""What --config.algorithm.name sets, and what overrides it."""

import re

import pytest
import yaml

from perl.algorithms import ALGORITHMS
from perl.base.errors import UserError
from perl.config.load import parse
from tests.docs_commands import ROOT


def test_the_algorithm_sets_what_nobody_has_said():
    parsed = parse(["--config.algorithm.name", "dapo"])
    training = parsed.values.training
    assert (training.loss_type, training.epsilon, training.epsilon_high) == ("dapo", 0.2, 0.28)
    assert parsed.values.reward.functions == ["accuracy", "overlong"]
    assert parsed.warnings == []


def test_recipe_and_flags_go_before_the_algorithm_and_are_told(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("algorithm: {name: gspo}\ntraining: {epsilon: 0.1, epsilon_high: 4e-4}\n")
    parsed = parse(["--recipe", str(recipe), "--config.training.loss_type", "bnpo"])
    training = parsed.values.training
    assert (training.loss_type, training.epsilon, training.epsilon_high) == ("bnpo", 0.1, 4e-4)
    assert training.importance_sampling_level == "sequence"
    assert parsed.warnings == [
        "--config.training.loss_type bnpo overrides algorithm gspo, which sets grpo",
        "the recipe's training.epsilon 0.1 overrides algorithm gspo, which sets 0.0003",
    ]


def test_a_flag_chooses_another_algorithm_than_the_recipes(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("algorithm: {name: gspo}\n")
    values = parse(["--recipe", str(recipe), "--config.algorithm.name", "dr_grpo"]).values
    assert (values.training.loss_type, values.training.scale_rewards) == ("dr_grpo", "none")
    assert values.training.importance_sampling_level == "token"


def test_the_configuration_of_a_run_repeats_it(tmp_path):
    first = parse(["--config.algorithm.name", "gspo", "--config.training.epsilon", "0.2"])
    (tmp_path / "config.yaml").write_text(first.dump())
    again = parse(["--recipe", str(tmp_path / "config.yaml")])
    assert yaml.safe_load(again.dump()) == yaml.safe_load(first.dump())


def test_an_unknown_algorithm_is_named_with_the_nearest():
    with pytest.raises(UserError) as caught:
        parse(["--config.algorithm.name", "dappo"])
    assert "--config.algorithm.name" in str(caught.value)
    assert "did you mean 'dapo'" in str(caught.value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_sets_fields_that_there_are_and_agrees_with_itself(name):
    assert parse(["--config.algorithm.name", name]).warnings == []


def test_the_recipe_lines_of_the_page_are_those_of_the_algorithms(tmp_path):
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(algorithm: \{name: (\w+)\})` \| (.*) \|$", text, flags=re.MULTILINE)
    assert [name for _, name, _ in rows] == list(ALGORITHMS)
    for line, name, sets in rows:
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(line + "\n")
        parsed = parse(["--recipe", str(recipe)])
        assert parsed.warnings == []
        groups = {
            group: fields for cell in re.findall("`(.*?)`", sets) for group, fields in yaml.safe_load(cell).items()
        }
        written = {f"{group}.{field}": value for group, fields in groups.items() for field, value in fields.items()}
        assert written == ALGORITHMS[name].settings, name
        assert {field: parsed.values[field] for field in written} == written, name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("algorithm.gamma 0.9", "algorithm.name discounts no reward"),
        ("algorithm.gamma 0.9 algorithm.name reinforce_plus_plus", None),
        ("algorithm.lam 0.9", "algorithm.name has no generalized advantage estimation"),
        ("training.scale_rewards none", None),
        ("training.scale_rewards none algorithm.name grpo_passk", None),
        (
            "training.scale_rewards batch algorithm.name rloo",
            "algorithm.name or multi_objective_aggregation has a scale",
        ),
        (
            "training.scale_rewards batch algorithm.name gdpo",
            "algorithm.name or multi_objective_aggregation has a scale",
        ),
        (
            "training.scale_rewards batch algorithm.name ppo",
            "algorithm.name or multi_objective_aggregation has a scale",
        ),
        (
            "training.multi_objective_aggregation normalize_then_sum algorithm.name ppo",
            "the advantages of algorithm.name are made of the weighted sum",
        ),
        (
            "training.multi_objective_aggregation normalize_then_sum algorithm.name rloo",
            "the advantages of algorithm.name are made of the weighted sum",
        ),
        ("algorithm.kl_estimator k1", "training.beta is 0"),
        ("algorithm.kl_estimator k1 training.beta 0.1", None),
        ("algorithm.kl_in_reward_target 0.1", "algorithm.kl_in_reward is 0"),
        ("algorithm.kl_in_reward 0.1 algorithm.kl_in_reward_horizon 5", "algorithm.kl_in_reward_target is null"),
        ("algorithm.kl_in_reward 0.1 algorithm.kl_in_reward_target 0.1 algorithm.kl_in_reward_horizon 5", None),
        ("training.delta 2.0 algorithm.name sapo", "it clips the losses"),
        ("training.epsilon 0.1 algorithm.name cispo", "it clips the losses"),
        ("training.epsilon_high 0.3 algorithm.name vespo", "it clips the losses"),
        ("training.vespo_k_pos 2.5", "loss_type is not vespo"),
        ("training.entropy_target 0.5", "use_adaptive_entropy is false"),
    ],
)
def test_flags_without_effect_under_an_algorithm_are_told(flags, said):
    words = [word for pair in zip(*[iter(flags.split())] * 2, strict=True) for word in (f"--config.{pair[0]}", pair[1])]
    warnings = [line for line in parse(words).warnings if "has no effect" in line]
    assert len(warnings) == (said is not None)
    assert said is None or said in warnings[0]


def test_what_a_critic_cannot_have_is_refused():
    words = ["--config.algorithm.name", "ppo", "--config.training.torch_compile", "true"]
    with pytest.raises(UserError, match="torch_compile true: algorithm ppo computes policy and critic"):
        parse(words)


def test_kl_in_the_reward_needs_one_reward():
    with pytest.raises(UserError, match="normalize_then_sum"):
        parse(["--config.algorithm.name", "gdpo", "--config.algorithm.kl_in_reward", "0.1"])
