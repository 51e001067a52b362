"""Rewards, losses and gradients that are NaN or infinite: the run stops with its batch saved, or makes no update."""

import json
import math

import pytest
from safetensors.torch import load_file

from perl.base.errors import RunError, UserError
from perl.runs.nonfinite import MOST_IN_A_ROW, require_finite_weights, save_batch
from tests.tiny import tiny_model
from tests.trainers import make_trainer, reward_digits
from tests.training.poison import Steps, poison


@pytest.mark.parametrize(
    ("what", "said"),
    [("loss", "the loss and the norm of the gradient are not finite"), ("gradient", "the norm of the gradient is not")],
)
def test_the_run_stops_before_the_update_and_leaves_the_batch(tmp_path, what, said):
    steps = Steps()
    trainer = make_trainer(tmp_path, max_steps=3, callbacks=[steps])
    poison(trainer, what, {2})
    with pytest.raises(
        RunError, match=f"^step 2: {said}.*; the batch is in {tmp_path}/nonfinite_step_2; --config"
    ) as e:
        trainer.train()
    assert e.value.exit_code == 1
    assert len(steps.weights) == 1
    last = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert all((last[name] == weight).all() for name, weight in steps.weights[0].items())

    folder = tmp_path / "nonfinite_step_2"
    rows = json.loads((folder / "rank-0.json").read_text())
    assert len(rows) == 8  # two groups of four
    assert rows[0]["prompt"][0]["content"].startswith("What is ")
    assert rows[0].keys() == {"prompt", "completion", "reward_digits"}
    texts = [row["completion"] for row in rows]
    assert [row["reward_digits"] for row in rows] == pytest.approx(reward_digits(texts))
    tensors = load_file(folder / "rank-0.safetensors")
    assert {"0.mask", "0.advantages", "0.sampler"} <= tensors.keys()


def test_a_batch_that_cannot_be_saved_is_said_in_the_same_line(tmp_path):
    (tmp_path / "nonfinite_step_2" / "rank-0.safetensors").mkdir(parents=True)  # as a full disk: safetensors' own error
    trainer = make_trainer(tmp_path, max_steps=3)
    poison(trainer, "loss", {2})
    with pytest.raises(RunError, match=r"^step 2: the loss .* not finite; the batch cannot be saved \(.*\); --config"):
        trainer.train()


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_an_update_is_skipped_and_counted(tmp_path, what):
    steps = Steps()
    trainer = make_trainer(tmp_path, max_steps=4, callbacks=[steps], on_nonfinite="skip")
    poison(trainer, what, {2, 3})
    trainer.train()
    assert steps.moved() == [False, False, True]
    logged = [row["nonfinite/skipped"] for row in trainer.state.log_history if "loss" in row]
    assert logged == [0, 1, 2, 2]
    (updates,) = {int(state["step"]) for state in trainer.optimizer.state.values()}
    assert updates == 2  # Adam's moments have not seen the others
    assert not (tmp_path / "nonfinite_step_2").exists()


def test_no_update_is_made_where_only_the_critics_gradient_is_not_finite(tmp_path):
    steps, ppo = Steps(), {"algorithm": {"name": "ppo"}, "loss_type": "dapo", "engine": "fast"}
    trainer = make_trainer(tmp_path, max_steps=3, callbacks=[steps], on_nonfinite="skip", **ppo)
    bias = trainer.step.critic.weights.head.bias
    bias.register_hook(lambda gradient: gradient * (math.nan if trainer.state.global_step == 1 else 1.0))
    trainer.train()
    assert steps.moved() == [False, True]
    assert trainer.nonfinite.skipped == 1
    assert all(weight.isfinite().all() for weight in trainer.step.critic.parameters())


def test_after_so_many_skipped_updates_in_a_row_the_run_stops(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=20, gradient_accumulation_steps=1, on_nonfinite="skip")
    poison(trainer, "loss", {1, *range(3, 20)})
    said = f"^step {2 + MOST_IN_A_ROW}: .* as in 9 updates before, which were skipped; the batch is in [^;]*$"
    with pytest.raises(RunError, match=said):
        trainer.train()


def test_a_resumed_run_counts_on_in_the_row(tmp_path):
    settings = {"gradient_accumulation_steps": 1, "on_nonfinite": "skip", "save_strategy": "steps", "save_steps": 6}
    first = make_trainer(tmp_path, max_steps=6, **settings)
    poison(first, "loss", set(range(1, 20)))
    first.train()
    resumed = make_trainer(tmp_path, max_steps=20, **settings)
    poison(resumed, "loss", set(range(1, 20)))
    with pytest.raises(RunError, match=f"^step {MOST_IN_A_ROW}: .* as in 9 updates before"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_the_line_that_ends_the_run_names_the_reward_that_was_never_finite(tmp_path):
    def broken(completions, **_):
        return [math.inf] * len(completions)

    trainer = make_trainer(
        tmp_path, max_steps=20, gradient_accumulation_steps=1, rewards=[reward_digits, broken], on_nonfinite="skip"
    )
    said = f"^step {MOST_IN_A_ROW}: a reward is not finite: broken on completion 0 .* as in 9 updates before"
    with pytest.raises(RunError, match=said):
        trainer.train()


def test_the_reward_of_a_steps_first_rollout_is_named_after_its_second(tmp_path):
    calls = []

    def broken(completions, **_):
        calls.append(1)
        return [math.inf if len(calls) % 2 else 0.5] * len(completions)

    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "on_nonfinite": "skip"}
    trainer = make_trainer(tmp_path, max_steps=20, rewards=[broken], **settings)
    with pytest.raises(RunError, match=f"^step {MOST_IN_A_ROW}: a reward is not finite: broken on completion 0 "):
        trainer.train()


def rewards_of(*numbers):
    """A reward that gives these numbers to the rows of its second call, and an irregular one to all others."""
    calls = []

    def reward(completions, **_):
        calls.append(1)
        return list(numbers) if len(calls) == 2 else reward_digits(completions)

    return reward


def test_a_reward_that_is_not_finite_stops_the_run_and_names_the_row(tmp_path):
    """math.inf is what perl.rewards.files makes of NaN too."""
    trainer = make_trainer(tmp_path, rewards=[rewards_of(0.0, 1.0, math.inf, 0.0, *[0.5] * 4)])
    with pytest.raises(RunError, match=r"^step 2: a reward is not finite: reward on completion 2 .prompt 'What is .*"):
        trainer.train()
    rows = json.loads((tmp_path / "nonfinite_step_2" / "rank-0.json").read_text())
    assert [row["reward"] for row in rows[:4]] == [0.0, 1.0, "inf", 0.0]


@pytest.mark.parametrize("numbers", [[0.0, 1.0, math.inf, 0.0, *[0.5] * 4], [None] * 8])
def test_a_rollout_without_finite_rewards_makes_no_update(tmp_path, numbers):
    steps = Steps()
    trainer = make_trainer(
        tmp_path, max_steps=3, rewards=[rewards_of(*numbers)], callbacks=[steps], on_nonfinite="skip"
    )
    trainer.train()
    assert steps.moved() == [False, True]
    assert trainer.nonfinite.skipped == 1


def test_no_reward_at_all_says_which_functions_gave_none(tmp_path):
    trainer = make_trainer(tmp_path, rewards=[rewards_of(*[None] * 8)])
    with pytest.raises(RunError, match=r"^step 2: no reward of reward for any of the 8 completions; the batch is in"):
        trainer.train()


def test_a_row_without_a_reward_is_no_mistake(tmp_path):
    """TRL's None: the function does not apply to the row."""
    trainer = make_trainer(tmp_path, rewards=[rewards_of(None, 1.0, 0.0, 0.5, *[None] * 4)])
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_a_base_with_a_weight_that_is_not_finite_is_refused_by_its_name(tmp_path, adapter):
    model = tiny_model(scale=4.0)
    model.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 2] = math.inf
    said = r"^--config.model.model_name_or_path .*: model.layers.1.mlp.up_proj.weight holds NaN or infinity; copy"
    with pytest.raises(UserError, match=said):
        make_trainer(tmp_path, model=model, adapter=adapter)


def test_large_weights_are_no_mistake():
    """Their sum is beyond what float32 holds."""
    model = tiny_model()
    model.get_parameter("model.layers.1.mlp.up_proj.weight").data.fill_(3e38)
    require_finite_weights(model, "")


def test_a_run_that_goes_on_in_a_window_leaves_its_batch_too(tmp_path):
    """Of the rows of the data set a checkpoint has kept the prompts."""
    settings = {"max_steps": 3, "steps_per_generation": 4}
    make_trainer(tmp_path, save_strategy="steps", save_steps=1, **settings).train()
    resumed = make_trainer(tmp_path / "again", **settings)
    poison(resumed, "loss", {2})
    with pytest.raises(RunError, match=r"^step 2: the loss and .* the batch is in"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    (first, *_) = json.loads((tmp_path / "again" / "nonfinite_step_2" / "rank-0.json").read_text())
    assert first["prompt"][0]["content"].startswith("What is ")


def test_the_batch_is_left_whatever_its_calls_have_as_arguments(tmp_path):
    """Half of a surrogate pair, which no file takes as it is."""
    rows = [{"completion": [{"arguments": {"a": "é\ud800"}}]}]
    save_batch(tmp_path, 0, rows)
    assert json.loads((tmp_path / "rank-0.json").read_text(encoding="utf-8")) == rows
