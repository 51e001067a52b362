"""The critic of PPO in one process: what it computes, learns, saves, and that the policy never sees it."""

import copy
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from perl.algorithms.ppo import gae
from perl.base.errors import UserError
from perl.config.load import parse
from perl.records import Trajectory
from perl.runs.checkpoints import CRITIC, require_same_critic
from perl.training.critic import SCALE, value_loss
from perl.training.grpo import save_critic
from perl.training.passes import Passes
from tests.tiny import tiny_model
from tests.trainers import make_trainer, move_adapter, reward_tokens

pytestmark = pytest.mark.numeric

PPO: dict[str, Any] = {"algorithm": {"name": "ppo"}, "rewards": (reward_tokens,), "loss_type": "dapo", "engine": "fast"}


def ppo(folder, **settings: Any) -> Any:
    fields: dict[str, Any] = PPO | {"critic": {"lr": 1e-2, "r": 4}} | settings
    return make_trainer(folder, **fields)


def move_critic(trainer, seed=6):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.step.critic.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


def of_policy(trainer):
    return {
        name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name and p.requires_grad
    }


def of_critic(trainer):
    return {name: p.detach().clone() for name, p in trainer.step.critic.weights.named_parameters()}


def rows():
    """Two prompts, of 3 and 2 tokens; three completions, of 3, 1 and 2."""
    prompts, completions = [(6, 7, 8), (6, 7, 8), (9, 10)], [[11, 12, 2], [13], [14, 2]]
    return [
        Trajectory(row={}, position=0, sample=i, prompt_ids=p, token_ids=c)
        for i, (p, c) in enumerate(zip(prompts, completions, strict=True))
    ]


def values_of(trainer):
    """float32 [3, 3]."""
    return trainer.step.passes.values(trainer.model, rows(), 3)


def test_value_loss_by_hand():
    values = torch.tensor([0.9, 0.3, 0.6])
    old, returns = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([1.0, 0.0, 0.0])
    losses, clipped = value_loss(values, old, returns, 0.2)
    # clipped to 0.7, 0.3, 0.6: (0.7 - 1)² counts more than (0.9 - 1)²; the others are within 0.2
    assert losses.tolist() == pytest.approx([0.045, 0.045, 0.18])
    assert clipped.tolist() == [True, False, False]
    losses, clipped = value_loss(values, old, returns, None)
    assert losses.tolist() == pytest.approx([0.005, 0.045, 0.18])
    assert not clipped.any()


def test_values_are_those_of_the_base_with_the_critics_weights_in_it(tmp_path):
    trainer = ppo(tmp_path, model=tiny_model(scale=4.0, seed=3))
    move_adapter(trainer.model, 0.05)
    move_critic(trainer)
    alone = copy.deepcopy(tiny_model(scale=4.0, seed=3)).eval()
    weights, head = trainer.step.critic.weights, trainer.step.critic.weights.head
    linears = [m for layer in alone.model.layers for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    with torch.no_grad():
        for linear, update in zip(linears, weights.updates, strict=True):
            linear.weight += SCALE * update.b @ update.a
    values = values_of(trainer)
    for place, row in enumerate(rows()):
        with torch.no_grad():
            hidden = alone.model(torch.tensor([[*row.prompt_ids, *row.token_ids]])).last_hidden_state[0]
            expected = (hidden @ head.weight[0] + head.bias)[len(row.prompt_ids) - 1 : -1]
        torch.testing.assert_close(values[place, : len(row.token_ids)], expected, rtol=1e-4, atol=1e-5)
        assert not values[place, len(row.token_ids) :].any()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_pass_gives_the_policys_numbers_and_gradients_and_the_critics(tmp_path, checkpointing):
    """Against the policy's pass without a critic, and the critic's alone, without checkpointing."""

    def gradients(loss, trainer):
        trainer.model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}

    trainer = ppo(tmp_path, gradient_checkpointing=checkpointing)
    trainer.model.train()
    move_adapter(trainer.model, 0.05)
    move_critic(trainer)
    said, work = trainer.step.passes.forward(trainer.model, rows(), 3, ("policy", "critic"))
    both = gradients(said.logps.square().sum() + said.values.square().sum(), trainer)

    plain = make_trainer(tmp_path / "plain", engine="fast")
    plain.model.train()
    move_adapter(plain.model, 0.05)
    scored = plain.step.passes.score(plain.model, rows(), 3)
    torch.testing.assert_close(said.logps, scored.logps)
    torch.testing.assert_close(said.entropies, scored.entropies)
    policys = gradients(scored.logps.square().sum(), plain)
    assert policys.keys() == {name for name in both if "lora_" in name}
    for name, gradient in policys.items():
        torch.testing.assert_close(both[name], gradient, rtol=1e-4, atol=1e-6, msg=name)

    alone = ppo(tmp_path / "alone")
    move_critic(alone)
    valued, half = alone.step.passes.forward(alone.model, rows(), 3, ("critic",))
    torch.testing.assert_close(said.values, valued.values)
    critics = gradients(valued.values.square().sum(), alone)
    assert critics.keys() == {name for name in both if "lora_" not in name}
    assert len(critics) == 2 * 14 + 2  # seven linear layers in each of two blocks, and the head
    for name, gradient in critics.items():
        torch.testing.assert_close(both[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert work.tokens == 2 * half.tokens


def test_nothing_of_the_critic_stays_in_the_layers_after_a_pass(tmp_path):
    trainer = ppo(tmp_path)
    move_critic(trainer)
    ids = torch.tensor([[6, 7, 8, 9]])
    before = trainer.model(ids).logits
    values_of(trainer)
    assert torch.equal(trainer.model(ids).logits, before)
    assert not any("forward" in vars(module) for module in trainer.model.base_model.model.model.layers.modules())


def test_the_head_starts_at_zero_and_computes_in_float32(tmp_path):
    trainer = ppo(tmp_path, model=tiny_model(dtype=torch.bfloat16))
    values = values_of(trainer)
    assert values.dtype == torch.float32
    assert not values.any()
    assert {p.dtype for p in trainer.step.critic.parameters()} == {torch.float32}


@pytest.mark.parametrize("generations", [1, 4])
def test_policy_and_critic_learn_and_the_base_stays(tmp_path, generations):
    trainer = ppo(tmp_path, num_generations=generations, max_steps=3, num_iterations=1)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert moved <= trained
    assert {name for name in trained if "lora_B" in name or name.startswith("critic.")} <= moved
    logged = [row for row in trainer.state.log_history if "loss" in row]
    names = {"vf_loss", "values_mean", "returns_mean", "explained_variance", "vf_clipfrac", "grad_norm", "vpred_mean"}
    assert {f"critic/{name}" for name in names} <= logged[0].keys()
    assert logged[0]["critic/values_mean"] == 0.0
    assert logged[0]["critic/returns_mean"] > 0.0
    assert logged[0]["advantages/mean"] == pytest.approx(0.0, abs=1e-5)
    assert logged[0]["advantages/std"] == pytest.approx(1.0, abs=0.03)
    # the first loss: half the mean squared return, as all values are 0
    assert logged[0]["loss"] == pytest.approx(logged[0]["critic/vf_loss"], abs=1e-4)
    assert logged[0]["update/rows_left_out"] == 0.0


def test_the_update_is_the_same_however_the_rows_are_cut(tmp_path):
    def trained(name, **settings):
        trainer = ppo(tmp_path / name, num_generations=1, max_steps=2, max_grad_norm=1e9, optim="sgd", **settings)
        trainer.train()
        return of_policy(trainer) | of_critic(trainer)

    four = trained("4", per_device_train_batch_size=4, gradient_accumulation_steps=2)
    eight = trained("8", per_device_train_batch_size=8, gradient_accumulation_steps=1)
    tokens = trained("t", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_tokens_per_microbatch=40)
    for name, tensor in four.items():
        torch.testing.assert_close(eight[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
        torch.testing.assert_close(tokens[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_in_the_warm_up_the_critic_alone_is_trained(tmp_path):
    trainer = ppo(tmp_path, critic={"lr": 1e-2, "warmup_steps": 2}, max_steps=2, weight_decay=0.1)
    policy, critic = of_policy(trainer), of_critic(trainer)
    trainer.train()
    assert all(torch.equal(tensor, policy[name]) for name, tensor in of_policy(trainer).items())
    assert not any(torch.equal(tensor, critic[name]) for name, tensor in of_critic(trainer).items() if ".b" in name)


def test_a_warm_up_as_long_as_the_epochs_is_refused(tmp_path):
    trainer = ppo(tmp_path, critic={"warmup_steps": 50}, max_steps=-1, num_train_epochs=1)
    with pytest.raises(UserError, match=r"warmup_steps 50: the training ends after step \d+, before the policy would"):
        trainer.train()


def test_the_critic_has_its_own_learning_rate_and_the_policys_schedule(tmp_path):
    trainer = ppo(tmp_path, critic={"lr": 0.5}, learning_rate=1e-3, max_steps=4)
    trainer.create_optimizer_and_scheduler(4)
    critics = {id(p) for p in trainer.step.critic.parameters()}
    for group in trainer.optimizer.param_groups:
        assert {id(p) in critics for p in group["params"]} <= {group["lr"] == 0.5}
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == 28 + len(critics)
    trainer.optimizer.step()
    trainer.lr_scheduler.step()
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {0.75e-3, 0.375}


def test_noise_is_not_on_while_values_are_computed(tmp_path, monkeypatch):
    from perl.config.schema import NoiseConfig

    trainer = ppo(tmp_path, noise=NoiseConfig(enabled=True, seed=3, sigma_start=0.5, sigma_end=0.1))
    norm = trainer.model.base_model.model.model.layers[0].post_attention_layernorm
    clean, seen, values = norm.weight.detach().clone(), [], Passes.values

    def look(passes, model, rows, width):
        seen.append(norm.weight.detach().clone())
        return values(passes, model, rows, width)

    monkeypatch.setattr(Passes, "values", look)
    trainer.train()
    assert len(seen) == 2  # two rollouts
    assert all(torch.equal(weight, clean) for weight in seen)


def test_the_adapter_is_saved_without_the_critic_and_the_critic_apart(tmp_path):
    trainer = ppo(tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-1"
    with safe_open(checkpoint / "adapter_model.safetensors", "pt") as saved:
        names = list(saved.keys())
    assert len(names) == 28
    assert all("lora_" in name for name in names)
    assert [path.name for path in (checkpoint / "critic").iterdir()] == ["critic.safetensors"]
    saved = load_file(checkpoint / "critic" / "critic.safetensors")
    assert saved.keys() == of_critic(trainer).keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in of_critic(trainer).items())
    trainer.save_model(str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter" / "critic").exists()


@pytest.mark.parametrize("window", [{}, {"num_iterations": 2}])
def test_a_resumed_run_is_the_same_run(tmp_path, window):
    """Bit for bit, policy and critic; with num_iterations 2 cut in the middle of a rollout, whose values are kept."""
    save = {"save_strategy": "steps", "save_steps": 1}
    whole = ppo(tmp_path / "whole", max_steps=3, num_generations=1, **window, **save)
    whole.train()
    resumed = ppo(tmp_path / "again", max_steps=3, num_generations=1, **window)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    for of in (of_policy, of_critic):
        expected = of(whole)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in of(resumed).items())


def test_another_critics_checkpoint_is_refused(tmp_path):
    first = ppo(tmp_path)
    first.save_critic(tmp_path)
    with pytest.raises(UserError, match=r"critic has other shapes.*--config.critic.r"):
        ppo(tmp_path / "b", critic={"r": 8}).step.critic.load(tmp_path)
    require_same_critic(str(tmp_path), "ppo", has_critic=True)
    require_same_critic(None, "ppo", has_critic=True)
    with pytest.raises(UserError, match=r"it holds a critic, and --config.algorithm.name grpo has none"):
        require_same_critic(str(tmp_path), "grpo", has_critic=False)
    with pytest.raises(UserError, match=r"it holds no critic, and --config.algorithm.name ppo has one"):
        require_same_critic(str(tmp_path / "b"), "ppo", has_critic=True)


def test_a_reference_and_an_adapter_that_goes_on_leave_the_critic_trained(tmp_path):
    trainer = ppo(tmp_path, beta=0.1, max_steps=2)
    critic = of_critic(trainer)
    trainer.train()
    assert not any(torch.equal(tensor, critic[name]) for name, tensor in of_critic(trainer).items() if ".b" in name)
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)


def test_a_model_that_is_not_packed_is_refused_at_the_start(tmp_path):
    model = tiny_model(attn_implementation="eager")
    with pytest.raises(UserError, match=r"--config.algorithm.name ppo: .*packed micro-batches"):
        ppo(tmp_path, model=model)


def test_one_completion_is_for_algorithms_without_groups(tmp_path):
    one = ["--config.training.num_generations", "1", "--config.training.output_dir", str(tmp_path)]
    assert parse(["--config.algorithm.name", "ppo", *one]).build(processes=3).training.num_generations == 1
    with pytest.raises(UserError, match=r"--config.training.num_generations 1: algorithm grpo compares"):
        parse(one)
    assert parse(["--config.algorithm.name", "ppo"]).values.training.num_generations == 1


def test_flags_of_a_critic_that_is_not_there_are_told():
    warnings = parse(["--config.critic.lr", "1e-3"]).warnings
    assert warnings == ["--config.critic.lr has no effect: only algorithm.name ppo has a critic"]
    assert parse(["--config.algorithm.name", "ppo", "--config.critic.lr", "1e-3"]).warnings == []


def test_a_warm_up_as_long_as_the_training_is_refused():
    words = ["--config.algorithm.name", "ppo", "--config.critic.warmup_steps", "10", "--config.training.max_steps"]
    with pytest.raises(UserError, match=r"warmup_steps 10: the training ends after step 10, before the policy"):
        parse([*words, "10"])
    assert parse([*words, "11"]).warnings == []


def test_a_critic_that_cannot_be_written_leaves_the_one_that_was_there(tmp_path, monkeypatch):
    trainer = ppo(tmp_path)
    save_critic(trainer, tmp_path)
    file = tmp_path / CRITIC
    before = file.read_bytes()

    def half(tensors, path):
        path.write_bytes(before[: len(before) // 2])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("perl.training.critic.save_file", half)
    with pytest.raises(OSError, match="No space left"):
        save_critic(trainer, tmp_path)
    assert file.read_bytes() == before


def test_advantages_are_estimated_once_a_rollout(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("perl.algorithms.ppo.gae", lambda *arguments: calls.append(1) or gae(*arguments))
    ppo(tmp_path, max_steps=2).train()
    assert len(calls) == 2
