"""The policy that samples: its seeds and distribution, the adapter merged into it, and how far it is from the trained
one."""

import dataclasses
import json
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from perl.adapters import rollout_merge
from perl.base.errors import RankError, UserError
from perl.records import Sampling
from perl.runs.callbacks import MetricsWriter
from perl.training.rollout import (
    EvaluatorRules,
    RolloutRequest,
    Weights,
    evaluation_mode,
    rollout_seeds,
    sampling_of,
)
from tests.tiny import tiny_model
from tests.trainers import make_trainer
from tests.training.test_trainer import adapter_state, guide_noise


def metrics(folder, name):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row[name] for row in map(json.loads, lines) if name in row]


def test_seeds_do_not_depend_on_the_number_of_ranks():
    one = rollout_seeds(7, (3, 0), rows=8, rank=0, group_size=4)
    two = [seed for rank in (0, 1) for seed in rollout_seeds(7, (3, 0), rows=4, rank=rank, group_size=4)]
    four = [seed for rank in range(4) for seed in rollout_seeds(7, (3, 0), rows=2, rank=rank, group_size=4)]
    assert one == two == four


def test_every_row_rollout_and_run_has_its_own_seeds():
    drawn = [
        *rollout_seeds(7, (3, 0), rows=8, rank=0, group_size=4),
        *rollout_seeds(7, (3, 1), rows=8, rank=0, group_size=4),
        *rollout_seeds(7, (4, 0), rows=8, rank=0, group_size=4),
        *rollout_seeds(8, (3, 0), rows=8, rank=0, group_size=4),
    ]
    assert len(set(drawn)) == 32


def test_trls_generation_configuration_is_read_whole():
    config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.2,
        max_new_tokens=33,
    )
    assert sampling_of(config) == Sampling(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, max_new_tokens=33
    )
    assert sampling_of(GenerationConfig(max_new_tokens=4)) == Sampling(
        temperature=1.0, top_p=1.0, top_k=sampling_of(GenerationConfig()).top_k, max_new_tokens=4
    )
    assert sampling_of(GenerationConfig(do_sample=False, temperature=0.7, max_new_tokens=4)) == Sampling(
        temperature=0.0, max_new_tokens=4
    )


def test_evaluation_mode_gives_each_module_its_own_flag_back():
    base = tiny_model("mistral", attention_dropout=0.5)
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", lora_dropout=0.5)).train()
    base.model.norm.eval()

    def stop():
        raise RuntimeError("stop")

    for body in (lambda: None, stop):
        try:
            with evaluation_mode(model):
                assert not any(module.training for module in model.modules())
                body()
        except RuntimeError:
            pass
        off = {name for name, module in model.named_modules() if not module.training}
        assert off == {"base_model.model.model.norm"}


def merged_while_sampling(trainer):
    """Whether the adapter was merged while tokens were drawn, rollout by rollout, filled while it trains."""
    seen = []

    def look(*_):
        if drawing:
            seen[-1].append(trainer.sampler.merge.merged)

    drawing = []
    complete = trainer.sampler.complete

    def watched(request):
        seen.append([])
        drawing.append(True)
        try:
            return complete(request)
        finally:
            drawing.clear()

    trainer.sampler.complete = watched
    trainer.model.get_base_model().model.register_forward_pre_hook(look)
    return seen


def test_rollouts_are_multiplied_in_the_trainers_dtype_and_validations_in_the_evaluators(tmp_path, monkeypatch):
    """Which on a CPU is float32."""
    trainer = make_trainer(tmp_path, bf16=True)
    dtypes = []
    pack = rollout_merge.pack
    monkeypatch.setattr(rollout_merge, "pack", lambda *args, **kwargs: dtypes.append(args[3]) or pack(*args, **kwargs))
    asked = RolloutRequest(
        prompt_ids=[[7, 8]], seeds=[1], sampling=Sampling(max_new_tokens=2), weights=Weights(0, 0, 0.0)
    )
    trainer.sampler.complete(asked)
    assert set(dtypes) == {torch.bfloat16}
    dtypes.clear()
    trainer.sampler.complete(dataclasses.replace(asked, rules=EvaluatorRules(eos_token_ids=frozenset(), context=None)))
    assert set(dtypes) == {None}


@pytest.mark.parametrize("engine", ["fast", "generate"])
def test_rollouts_with_a_merged_adapter_teach_what_those_without_do(tmp_path, engine):
    """Three steps with noise: the same tokens, so the same adapter up to rounding; the base stays bit for bit."""
    adapters = {}
    for merge in (True, False):
        folder = tmp_path / str(merge)
        folder.mkdir()
        writer = MetricsWriter(folder / "metrics.jsonl")
        settings = {"noise": guide_noise(), "max_steps": 3, "callbacks": [writer], "rollout": {"merge_adapter": merge}}
        trainer = make_trainer(folder, engine=engine, **settings)
        base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
        seen = merged_while_sampling(trainer)
        trainer.train()
        assert [set(rollout) for rollout in seen] == [{merge}] * 3
        assert all(torch.equal(p, base[n]) for n, p in trainer.model.named_parameters() if n in base)
        assert not trainer.sampler.merge.merged
        adapters[merge] = adapter_state(trainer)
    moved = {name: tensor for name, tensor in adapters[True].items() if "lora_B" in name}
    assert all(tensor.abs().max() > 1e-3 for tensor in moved.values())
    for name, tensor in adapters[True].items():
        assert torch.allclose(tensor, adapters[False][name], atol=1e-5), name
    assert metrics(tmp_path / "True", "rollout/merge_rounding_error") == [0.0] * 3  # float32: nothing is rounded away
    assert metrics(tmp_path / "False", "rollout/merge_rounding_error") == []


def in_bfloat16(trainer):
    """The base in bfloat16 and the adapter in float32, as on an accelerator."""
    for parameter in trainer.model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return trainer


def trained_by(folder, *, steps=3, dtype="float32", **settings):
    """A trainer whose adapter moves fast."""
    settings["rollout"] = {"merge_adapter": True} | settings.get("rollout", {})
    trainer = make_trainer(folder, max_steps=steps, learning_rate=5e-2, **({"engine": "fast"} | settings))
    return in_bfloat16(trainer) if dtype == "bfloat16" else trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ["fast", "generate"])
def test_sampler_and_trainer_agree_before_the_first_step(tmp_path, engine, dtype, caplog):
    trainer = trained_by(tmp_path, engine=engine, dtype=dtype, noise=guide_noise())
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert trainer.measured.tolerance == {"float32": 1e-3, "bfloat16": 0.2}[dtype]
    assert sum("sampler and trainer agree" in record.message for record in caplog.records) == 1


def test_a_float32_base_under_autocast_is_compared_as_bfloat16(tmp_path, caplog):
    """The review's: the trainer's forward runs under autocast, the decode loop does not, and the run was stopped."""
    trainer = trained_by(tmp_path, steps=2, bf16=True)
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert trainer.measured.tolerance == 0.2
    (line,) = [record.message for record in caplog.records if "sampler and trainer agree" in record.message]
    assert float(line.split()[-3]) > 1e-3  # what float32's tolerance would have refused


def test_another_models_log_probabilities_stop_the_run(tmp_path):
    """Sampled without the noise that the trainer believes in."""
    trainer = trained_by(tmp_path, noise=guide_noise())
    complete = trainer.sampler.complete
    trainer.sampler.complete = lambda request: complete(without_noise(request))
    with pytest.raises(RankError, match="does not run the policy that is trained"):
        trainer.train()
    assert trainer.state.global_step == 0


def without_noise(request):
    return dataclasses.replace(request, weights=request.weights._replace(sigma=0.0))


@pytest.mark.parametrize("merge", [True, False])
def test_an_adapter_that_is_off_while_sampling_stops_a_run_that_goes_on_with_one(tmp_path, merge):
    """At the start of a run with a trained adapter; a fresh one changes nothing yet."""
    trainer = trained_by(tmp_path, rollout={"merge_adapter": merge})
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    complete = trainer.sampler.complete

    def without(request):
        with trainer.model.disable_adapter():
            return complete(request)

    trainer.sampler.complete = without
    with pytest.raises(RankError, match="does not run the policy that is trained"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_sampler_that_misses_the_adapter_later_shows_in_the_metric_and_is_said(tmp_path, caplog):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    settings = {"callbacks": [writer], "lr_scheduler_type": "constant"}
    trainer = trained_by(tmp_path, rollout={"merge_adapter": False}, **settings)
    complete = trainer.sampler.complete

    def without(request):
        with trainer.model.disable_adapter():
            return complete(request)

    trainer.sampler.complete = without
    trainer.train()
    found = metrics(tmp_path, "rollout/logp_mismatch")
    assert found[0] < 1e-4
    assert min(found[1:]) > 1e-3
    assert any("it may have missed the adapter" in record.message for record in caplog.records)


def test_generation_kwargs_reach_the_rollout(tmp_path):
    """The review's: the fast engine dropped them."""
    trainer = make_trainer(tmp_path, engine="fast", generation_kwargs={"min_new_tokens": 8})
    lengths = []
    complete = trainer.sampler.complete

    def watched(request):
        found = complete(request)
        lengths.extend(map(len, found.token_ids))
        return found

    trainer.sampler.complete = watched
    trainer.train()
    assert lengths == [8] * 16


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences", "stop_strings"])
def test_generation_kwargs_that_no_rollout_can_have_are_refused(tmp_path, name):
    value = "stop" if name == "stop_strings" else 2
    with pytest.raises(UserError, match=f"--config.training.generation_kwargs: {name}"):
        make_trainer(tmp_path, engine="fast", generation_kwargs={name: value})


def test_completions_are_graded_while_others_are_drawn(tmp_path):
    """Each is told as soon as it ends, with its own row and the text that the rewards get."""
    told, rewarded, order = [], [], []

    def reward(completions, prompts, **kwargs):
        rewarded.append(sorted((p[-1]["content"], c[0]["content"]) for p, c in zip(prompts, completions, strict=True)))
        order.append("reward")
        return [float(len(c[0]["content"])) for c in completions]

    trainer = make_trainer(tmp_path, engine="fast", max_completion_length=30, max_steps=1)
    trainer.reward_funcs = [reward]

    def early(text, row):
        told.append((row["prompt"][-1]["content"], text))
        order.append("early")

    trainer.grade_early = early
    step = trainer.sampler.decoder.model.get_base_model()
    step.register_forward_hook(lambda *_: order.append("forward") if not torch.is_grad_enabled() else None)
    trainer.train()
    assert [sorted(told)] == rewarded
    first, last = order.index("early"), len(order) - 1 - order[::-1].index("early")
    assert "forward" in order[first:last]  # others were still drawn
    assert order.index("reward") > last


def test_no_cache_is_held_during_the_update_on_a_cpu(tmp_path):
    """On an accelerator it lives on with its graphs (tests/npu/test_captured_graphs.py)."""
    trainer = make_trainer(tmp_path, engine="fast")
    held = []
    trainer.model.get_base_model().model.layers[0].register_forward_hook(  # TRL's fused head calls no lm_head
        lambda *_: held.append(trainer.sampler.decoder.cache is not None) if torch.is_grad_enabled() else None
    )
    trainer.train()
    assert held
    assert not any(held)
    assert trainer.sampler.decoder.cache is None


def test_the_mismatch_is_rounding_without_noise_and_more_with_it(tmp_path):
    for name, noise in (("clean", None), ("noisy", guide_noise()), ("old", guide_noise(old_logps="noisy"))):
        (tmp_path / name).mkdir()
        writer = MetricsWriter(tmp_path / name / "metrics.jsonl")
        trained_by(tmp_path / name, noise=noise, callbacks=[writer]).train()
    found = {name: metrics(tmp_path / name, "rollout/logp_mismatch") for name in ("clean", "noisy", "old")}
    assert [len(values) for values in found.values()] == [3, 3, 3]
    assert max(found["clean"] + found["old"]) < 1e-4  # against the noisy policy, the noise is on both sides
    assert min(found["noisy"]) > 1e-2
    assert min(metrics(tmp_path / "noisy", "rollout/logp_kl")) > 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_correction_weights_the_loss(tmp_path, level):
    """One step on the same samples: a bound of 1/2 below and above halves the gradient of plain SGD exactly."""
    moved = {}
    for name, rollout, bounds in (
        ("none", {}, {}),
        ("half", {"importance_correction": level}, {"clip_min": 0.49999999, "clip_max": 0.5}),
        ("one", {"importance_correction": level}, {"clip_max": 3.0}),
    ):
        extra = {f"vllm_importance_sampling_{key}": value for key, value in bounds.items()}
        plain = {"optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        trainer = trained_by(tmp_path / name, steps=1, rollout=rollout, **plain, **extra)
        before = adapter_state(trainer)
        trainer.train()
        assert trainer.use_vllm is False
        moved[name] = torch.cat([(t - before[n]).flatten() for n, t in adapter_state(trainer).items()])
    assert moved["none"].abs().max() > 1e-4
    assert torch.allclose(moved["half"], moved["none"] / 2, atol=1e-7)
    assert torch.allclose(moved["one"], moved["none"], atol=1e-7)  # the sampler is the policy: all ratios are 1
