"""PerlGRPOTrainer in one process: what is learned, what noise touches, and that a resumed run is the same run."""

import inspect
from dataclasses import replace

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl import GRPOTrainer

from perl.adapters import ADAPTERS
from perl.base.errors import RunError, UserError, say_once
from perl.config.schema import NoiseConfig, PeftConfig
from perl.runs.callbacks import MetricsWriter
from perl.training.grpo import import_trainer
from tests.folders import metrics
from tests.tiny import tiny_tokenizer
from tests.trainers import kept_batches, make_trainer, tokens_of


def guide_noise(**changes):
    return NoiseConfig(**({"enabled": True, "seed": 3, "sigma_start": 0.5, "sigma_end": 0.1} | changes))


def adapter_state(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def overridden(ours: type) -> set[str]:
    """Methods of TRL's and transformers' that a class of ours has in their place."""
    own = {
        name
        for kind in ours.__mro__
        if kind.__module__.startswith("perl.")
        for name, function in vars(kind).items()
        if inspect.isfunction(function) and not name.startswith("__")
    }
    return {name for name in own if callable(getattr(GRPOTrainer, name, None))}


def test_what_we_override_of_trl_and_transformers():
    """One that either of them renames would still be ours, and never be called."""
    assert overridden(import_trainer()) == {
        "training_step",
        "_prepare_inputs",
        "compute_loss",
        "_evaluate",
        "create_optimizer",
        "_clip_grad_norm",
        "_get_grad_norm",
        "_run_epoch",
        "_load_optimizer_and_scheduler",
        "_load_rng_state",
        "_save_checkpoint",
        "_save",
        "log",
    }


@pytest.mark.parametrize("adapter", sorted(ADAPTERS.keys() - {"none", "adalora"}))  # adalora masks whole layers
def test_every_adapter_trains_and_leaves_the_base_alone(tmp_path, adapter):
    trainer = make_trainer(tmp_path, adapter=adapter, noise=guide_noise())
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad and "lora_B" in name:
            assert not torch.equal(parameter, before[name]), name
        if not parameter.requires_grad:
            assert torch.equal(parameter, before[name]), name


def test_rslora_scales_by_the_root_of_the_rank(tmp_path):
    def scale(adapter):
        trainer = make_trainer(tmp_path, adapter=adapter, peft=PeftConfig(type=adapter, r=4, lora_alpha=8))
        return next(m.scaling["default"] for m in trainer.model.modules() if isinstance(m, LoraLayer))

    assert scale("lora") == 2.0  # 8 / 4
    assert scale("rslora") == 4.0  # 8 / sqrt(4)


def test_lora_plus_gives_b_its_own_learning_rate(tmp_path):
    peft = PeftConfig(type="lora_plus", r=4, lora_alpha=8, lora_plus_lr_ratio=8.0)
    trainer = make_trainer(tmp_path, adapter="lora_plus", peft=peft, learning_rate=1e-3)
    trainer.create_optimizer()
    assert {group["lr"] for group in trainer.optimizer.param_groups if group["params"]} == {1e-3, 8e-3}


def norm_weights(policy):
    return torch.cat([m.weight.detach() for n, m in policy.named_modules() if n.endswith("post_attention_layernorm")])


def test_noise_is_there_while_completions_are_generated_and_nowhere_else(tmp_path):
    trainer = make_trainer(tmp_path, noise=guide_noise())
    clean = norm_weights(trainer.model)
    seen = {"generate": [], "loss": []}
    base = trainer.model.get_base_model()
    forward = base.forward

    def spy(*args, **kwargs):
        kind = "loss" if torch.is_grad_enabled() else "generate"
        seen[kind].append((norm_weights(base), base.training))
        return forward(*args, **kwargs)

    base.forward = spy
    trainer.train()
    assert seen["generate"]
    assert seen["loss"]
    for weights, training in seen["generate"]:
        assert not torch.equal(weights, clean)
        assert training is False  # no dropout while sampling
    for weights, training in seen["loss"]:
        assert torch.equal(weights, clean)
        assert training is True
    assert torch.equal(norm_weights(trainer.model), clean)


def test_each_rollout_has_its_own_noise_of_the_stages_sigma(tmp_path):
    trainer = make_trainer(
        tmp_path, noise=guide_noise(num_stages=2), callbacks=[MetricsWriter(tmp_path / "metrics.jsonl")]
    )
    drawn = []
    applied = trainer.noise.applied
    trainer.noise.applied = lambda sigma, draw: drawn.append((sigma, draw)) or applied(sigma, draw)
    trainer.train()
    # The first one twice: sampler and trainer are compared under the same noise.
    assert drawn == [(0.5, (0, 0)), (0.5, (0, 0)), (0.1, (1, 0))]
    logged = [(r["aqn/sigma"], r["aqn/stage"], r["aqn/num_modules"]) for r in metrics(tmp_path) if "aqn/sigma" in r][:2]
    assert logged == [(0.5, 0, 2), (0.1, 1, 2)]
    # 128 numbers: the standard error of their RMS is 6 %
    assert metrics(tmp_path)[0]["aqn/sigma_realized"] == pytest.approx(0.5, rel=0.25)


def completions_of_first_rollout(folder, sigma):
    noise = NoiseConfig(enabled=sigma > 0, seed=3, sigma_start=sigma, sigma_end=0.0)
    trainer = make_trainer(folder, noise=noise, max_steps=1)
    kept = kept_batches(trainer)
    trainer.train()
    return tokens_of(kept[0])


def test_noise_changes_what_is_sampled_and_more_with_a_larger_sigma(tmp_path):
    clean = completions_of_first_rollout(tmp_path / "0", 0.0)

    def changed(sigma):
        noisy = completions_of_first_rollout(tmp_path / str(sigma), sigma)
        return sum(one != other for one, other in zip(noisy, clean, strict=True)) / len(clean)

    shares = [changed(sigma) for sigma in (0.0, 0.02, 1.0)]
    assert shares[0] == 0.0
    assert shares[2] > 0.0
    assert shares[0] <= shares[1] < shares[2]


def test_old_logps_noisy_are_the_sampling_policys(tmp_path):
    trainer = make_trainer(tmp_path, noise=guide_noise(old_logps="noisy"), max_steps=1)
    kept, logps = kept_batches(trainer), []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            (batch,) = kept
            logps.append(trainer.step.passes.logps(trainer.model, batch.rows, batch.width))
            with trainer.noise.applied(0.5, (0, 0)):
                logps.append(trainer.step.passes.logps(trainer.model, batch.rows, batch.width))

    trainer.add_callback(Look())
    trainer.train()
    (clean, noisy), old, mask = logps, kept[0].old, kept[0].mask
    assert torch.allclose(old[mask], noisy[mask], atol=1e-5)
    assert (old[mask] - clean[mask]).abs().max() > 1e-3


def test_clean_old_logps_are_the_losss_own(tmp_path):
    trainer = make_trainer(tmp_path, noise=guide_noise(), max_steps=1)
    kept = kept_batches(trainer)
    trainer.train()
    assert kept[0].old is None


def first_rollout(folder, max_batch_tokens=None, **settings):
    """Rows of the first rollout."""
    trainer = make_trainer(folder, max_steps=1, rollout={"max_batch_tokens": max_batch_tokens}, **settings)
    kept = kept_batches(trainer)
    trainer.train()
    return kept[0].rows


def test_the_fast_engine_samples_whole_completions_of_the_same_prompts(tmp_path):
    plain = first_rollout(tmp_path / "generate")
    fast = first_rollout(tmp_path / "fast", engine="fast")
    assert [row.prompt_ids for row in fast] == [row.prompt_ids for row in plain]
    eos = tiny_tokenizer().eos_token_id
    for row in fast:
        assert eos not in row.token_ids[:-1]
        assert row.token_ids[-1] == eos or len(row.token_ids) == 8
    assert len({tuple(row.token_ids) for row in fast}) > 4


def test_the_fast_engines_rows_do_not_depend_on_how_many_are_decoded_at_once(tmp_path):
    whole = first_rollout(tmp_path / "whole", engine="fast")
    few = first_rollout(tmp_path / "few", engine="fast", max_batch_tokens=40)  # room for two rows at a time
    assert [row.token_ids for row in few] == [row.token_ids for row in whole]


def test_a_resumed_run_with_the_fast_engine_is_the_same_run(tmp_path):
    whole = make_trainer(tmp_path / "whole", noise=guide_noise(), engine="fast", max_steps=3)
    whole.train()
    save = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path / "cut", noise=guide_noise(), engine="fast", max_steps=3, **save).train()
    resumed = make_trainer(tmp_path / "again", noise=guide_noise(), engine="fast", max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-1"))
    expected = adapter_state(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in adapter_state(resumed).items())


def test_noise_reaches_the_fast_engine_too(tmp_path):
    clean = first_rollout(tmp_path / "clean", engine="fast")
    noise = NoiseConfig(enabled=True, seed=3, sigma_start=1.0, sigma_end=0.0)
    noisy = first_rollout(tmp_path / "noisy", engine="fast", noise=noise)
    assert [row.token_ids for row in noisy] != [row.token_ids for row in clean]


def test_no_checkpoint_holds_noise(tmp_path):
    """Where all weights are saved, the norms are those of the beginning: nothing is learned at a rate of 0."""
    settings = {"learning_rate": 0.0, "weight_decay": 0.0, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path, adapter="none", noise=guide_noise(), **settings)
    chosen = {f"{target.name}.weight": target.weight.detach().clone() for target in trainer.noise.targets}
    trainer.train()
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert len(chosen) == 2
    assert all(torch.equal(saved[name], weight) for name, weight in chosen.items())


def test_a_clean_rollout_after_noisy_ones_is_not_called_another_policy(tmp_path, caplog):
    """Three of the four steps of one log are noisy: their difference is no rounding, and no mistake."""
    say_once.cache_clear()
    noise = guide_noise(num_stages=4, sigma_end=0.0)
    trainer = make_trainer(tmp_path, noise=noise, engine="fast", max_steps=4, logging_steps=4)
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "rollout/logp_mismatch" in row]
    assert row["rollout/logp_mismatch"] > 1e-3
    assert "missed the adapter" not in caplog.text


@pytest.mark.parametrize("window", [{}, {"num_iterations": 2}, {"steps_per_generation": 4}])
def test_a_resumed_run_is_the_same_run(tmp_path, window):
    """Four steps at once, and two steps, a new process's trainer, two more: bit for bit the same adapter. With
    num_iterations 2 the checkpoint lies in the middle of a generation batch when it is cut at an odd step."""
    whole = make_trainer(tmp_path / "whole", noise=guide_noise(), max_steps=4, **window)
    whole.train()
    save = {"save_strategy": "steps", "save_steps": 1}
    torch.manual_seed(123)  # whatever state the process is in must not matter
    make_trainer(tmp_path / "cut", noise=guide_noise(), max_steps=4, **window, **save).train()
    for cut in (1, 2):
        torch.manual_seed(456 + cut)
        resumed = make_trainer(tmp_path / f"again{cut}", noise=guide_noise(), max_steps=4, **window)
        resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{cut}"))
        expected = adapter_state(whole)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in adapter_state(resumed).items()), cut


def test_no_norm_matched_is_an_error_before_training(tmp_path):
    with pytest.raises(UserError, match="post_attention_layernorm"):
        make_trainer(tmp_path, noise=guide_noise(target_modules=["mlp_norm"]))


def test_prompts_are_cut_where_the_run_says(tmp_path):
    trainer = make_trainer(tmp_path)
    row = {"prompt": [{"role": "user", "content": "What is 1 + 2 ?"}]}
    full = tuple(tiny_tokenizer()("<|user|> What is 1 + 2 ? <|end|> <|assistant|>")["input_ids"])
    assert trainer.step.collector.read(row).token_ids == full
    data = trainer.config.dataset
    data.max_prompt_length, data.truncation = 4, "left"
    assert trainer.step.collector.read(row).token_ids == full[-4:]
    data.truncation = "middle"
    assert trainer.step.collector.read(row).token_ids == full[:2] + full[-2:]


@pytest.mark.parametrize("settings", [{}, {"engine": "fast"}, {"adapter": "none"}, {"beta": 0.1}])
def test_no_hook_is_left_by_a_step(tmp_path, settings):
    """transformers adds one each time TRL enables gradient checkpointing again, behind each rollout: a run got slower
    with each step."""

    counts = []

    class Hooks(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            counts.append(sum(len(module._forward_hooks) for module in model.modules()))

    make_trainer(tmp_path, max_steps=3, gradient_checkpointing=True, callbacks=[Hooks()], **settings).train()
    assert counts[0] == counts[2] > 0


def test_rows_without_gradient_are_counted_and_shown(tmp_path):
    """They are in no micro-batch, but they were sampled, and who looks at completions wants to see them."""

    def some_equal(completions, **columns):
        return [1.0] * 4 + [0.0, 1.0, 1.0, 1.0]

    trainer = make_trainer(tmp_path, engine="fast", max_steps=1, rewards=[some_equal], log_completions=True)
    kept = kept_batches(trainer)
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "num_tokens" in row]
    assert row["num_tokens"] == sum(len(row.prompt_ids) + len(row.token_ids) for row in kept[0].rows)
    assert row["update/rows_left_out"] == 0.5
    assert len(trainer._logs["completion"]) == 8
    assert list(trainer._logs["rewards"]["some_equal"]) == some_equal([])
    assert list(trainer._logs["advantages"]) == pytest.approx([0.0] * 4 + [-1.5, 0.5, 0.5, 0.5], abs=1e-3)


def test_a_resumed_run_compares_its_sampler_anew(tmp_path, monkeypatch):
    """What the first run found says nothing of this one's sampler, which may have missed the adapter."""
    make_trainer(tmp_path / "run", engine="fast", max_steps=3, save_strategy="steps", save_steps=1).train()
    resumed = make_trainer(tmp_path / "again", engine="fast", max_steps=3)
    stream = type(resumed.step.engine).stream

    def another_policys(engine, prompts):
        for place, completion in stream(engine, prompts):
            yield place, replace(completion, logprobs=tuple(number - 1.0 for number in completion.logprobs))

    monkeypatch.setattr(type(resumed.step.engine), "stream", another_policys)
    with pytest.raises(RunError, match="1 nats from the trainer's on average"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))


@pytest.mark.parametrize("engine", ["fast", "generate"])
def test_generation_kwargs_reach_the_rollout(tmp_path, engine):
    """The engine `generate` heeded none of them, and no engine the special tokens."""

    def drawn(**kwargs):
        settings = {"num_generations": 8, "max_steps": 1, "learning_rate": 0.0, "generation_kwargs": kwargs}
        trainer = make_trainer(tmp_path, engine=engine, **settings)
        kept = kept_batches(trainer)
        trainer.train()
        (ids,) = {tuple(row.token_ids) for row in kept[0].rows}  # eight greedy completions of one prompt
        return ids

    whole = drawn(top_k=1, min_new_tokens=8)
    assert len(whole) == 8
    end = next(token for token in whole if token != tiny_tokenizer().eos_token_id)
    assert drawn(top_k=1, eos_token_id=[tiny_tokenizer().eos_token_id, end]) == whole[: whole.index(end) + 1]
