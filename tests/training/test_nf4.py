"""model.quantization nf4: the base in 4 bits, by bitsandbytes itself on a CPU, and the adapter above it."""

import json
import shutil
import sys

import pytest
import torch

from perl.adapters import ADAPTERS
from perl.adapters.delivery import base_digest
from perl.adapters.start import continued
from perl.base.errors import UserError
from perl.finetuning.sft import fine_tune
from perl.models.few_bits import require_bitsandbytes, state_of
from perl.models.folders import load_model
from perl.training.grpo import train
from tests.environments import working
from tests.tiny import save_tiny
from tests.trainers import SUMS, draw, make_trainer, move_adapter
from tests.training import test_pool, test_resume
from tests.training.small_run import write_inputs

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.qlora

NF4 = {"quantization": "nf4", "dtype": torch.float32}
WORKS = [name for name, adapter in ADAPTERS.items() if "nf4" not in adapter.refused]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), scale=4.0)


@pytest.fixture
def model(folder):
    return load_model(folder, **NF4)


def trained_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_the_policy_is_close_to_that_of_the_float_base(folder, model):
    """Of 64 x 64 weights a layer 4 bits and the scales of 64 blocks, of 8 bits, are there."""
    layer = model.model.layers[0].mlp.up_proj
    state = state_of(layer.weight)
    assert layer.weight.nbytes == 64 * 64 // 2
    assert (state["absmax"].dtype, len(state["absmax"])) == (torch.uint8, 64)
    assert type(model.lm_head) is torch.nn.Linear
    ids = torch.arange(6, 26)[None]
    with torch.no_grad():
        logps = [each(ids).logits.log_softmax(-1) for each in (load_model(folder, dtype=torch.float32), model)]
    kl = (logps[0].exp() * (logps[0] - logps[1])).sum(-1).mean()
    assert 1e-4 < kl < 0.02


@pytest.mark.parametrize("name", WORKS)
def test_training_moves_the_adapter_alone(folder, model, tmp_path, name):
    """The sampler computes as the trainer does, and what is computed in evaluation leaves the bits alone."""
    trainer = make_trainer(tmp_path, model=model, adapter=name, engine="fast")
    policy, before = trainer.policy.bare, trained_of(trainer.model)
    held = base_digest(policy)
    trainer.train()
    after = trained_of(trainer.model)
    assert base_digest(policy) == held
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert not all(torch.equal(before[name], tensor) for name, tensor in after.items())
    logged = [row for row in trainer.state.log_history if "rollout/logp_kl" in row]
    assert len(logged) == 2
    assert all(row["rollout/logp_mismatch"] < 1e-4 for row in logged)
    assert trainer.applied.parameters == sum(p.numel() for p in load_model(folder).parameters())


def test_so_it_is_with_a_critic(model, tmp_path):
    trainer = make_trainer(
        tmp_path, model=model, engine="fast", algorithm={"name": "ppo"}, num_generations=1, prompts=SUMS
    )
    trainer.train()
    assert all(tensor.isfinite().all() for tensor in trained_of(trainer.model).values())


def test_the_decode_loop_and_generate_draw_the_same(folder, tmp_path):
    prompts, drawn = [[4, 22, 23, 7], [4, 22, 23, 7, 9, 11]], []
    for engine in ("fast", "generate"):
        trainer = make_trainer(tmp_path / engine, model=load_model(folder, **NF4), engine=engine, top_k=1)
        move_adapter(trainer.model, 0.1)
        drawn.append(draw(trainer, prompts, 2))
    assert drawn[0] == drawn[1]


def test_a_run_is_the_same_with_workers_and_without_and_when_it_is_resumed(folder, tmp_path):
    saved = {"load": NF4, "save_strategy": "steps", "save_steps": 3}
    alone, trainer, _ = test_pool.train(folder, tmp_path / "alone", 0, 0, **saved)
    assert trainer.policy.bare.is_loaded_in_4bit
    pooled, trainer, _ = test_pool.train(folder, tmp_path / "pooled", 1, 0, **saved)
    assert test_pool.same(alone, pooled)
    again, _, steps = test_pool.train(
        folder, tmp_path / "alone", 0, 0, checkpoint=str(tmp_path / "alone/checkpoint-3"), **saved
    )
    assert steps == [3, 4]
    assert test_pool.same(alone, again)


@pytest.mark.slow
def test_so_it_is_with_conversations(tmp_path):
    place = working.make_place(tmp_path)
    settings = {"load": NF4, "max_steps": 2, "per_device_train_batch_size": 4}
    alone, batches, _ = working.train(place, tmp_path / "alone", **settings)
    pooled, others, logged = working.train(place, tmp_path / "pooled", rollout={"workers": 1}, **settings)
    assert working.conversations_of(others) == working.conversations_of(batches)
    assert test_pool.same(alone, pooled)
    assert logged[0]["turns/mean"] > 1
    assert all(row["rollout/engine_mismatch"] < 1e-4 for row in logged)


@pytest.mark.parametrize("name", ["plain", "noise", "dropout", "ppo"])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(folder, tmp_path, name):
    settings = test_resume.SETTINGS[name]
    whole, _ = test_resume.run(tmp_path / "whole", model=load_model(folder, **NF4), **settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    checkpoint = str(tmp_path / "cut" / f"checkpoint-{test_resume.CUT}")
    resumed, _ = test_resume.run(tmp_path / "cut", checkpoint, model=load_model(folder, **NF4), **settings)
    assert test_pool.same(whole, resumed)
    assert test_resume.rows(tmp_path / "whole") == test_resume.rows(tmp_path / "cut")


def test_the_digest_knows_the_scales(model):
    from peft import LoraConfig, get_peft_model

    policy = get_peft_model(model, LoraConfig())
    held = base_digest(policy)
    policy.base_model.model.model.layers[0].mlp.up_proj.weight.quant_state.absmax[0] += 1
    assert base_digest(policy) != held


def test_a_new_adapter_begins_as_above_the_float_base(folder, tmp_path):
    """By the run's seed, whatever random numbers were drawn before."""
    started = []
    for draws, load in enumerate(({}, NF4, NF4)):
        model = load_model(folder, **load)
        torch.rand(draws)
        started.append(trained_of(make_trainer(tmp_path, model=model).model))
    assert test_pool.same(started[0], started[1])
    assert test_pool.same(started[1], started[2])


def test_an_adapter_that_is_trained_further_begins_with_its_own_bits(folder, tmp_path):
    """TRL rounds what is trained above 4 bits to bfloat16."""
    first = make_trainer(tmp_path / "first", model=load_model(folder))
    move_adapter(first.model, 0.1)
    first.save_model(str(tmp_path / "adapter"))
    model = load_model(folder, **NF4)
    model.name_or_path = str(folder)
    second = make_trainer(tmp_path / "second", model=continued(model, tmp_path / "adapter"), beta=0.1)
    assert test_pool.same(trained_of(first.model), trained_of(second.model))
    second.train()
    assert second.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)  # TRL's reference has them too
    assert second.policy.bare.is_loaded_in_4bit


def flags(inputs, folder, **changes):
    values = {"model.quantization": "nf4", "training.max_steps": 1, "training.output_dir": folder}
    values = inputs | values | {name.replace("__", "."): value for name, value in changes.items()}
    return [word for name, value in values.items() for word in (f"--config.{name}", str(value))]


def test_from_worked_answers_to_grpo(tmp_path):
    """perl.sft, and perl.train on with its adapter, or with it in the float weights, which are quantised then."""
    inputs = write_inputs(tmp_path)
    of_sft = {name: value for name, value in inputs.items() if name.startswith(("model", "peft", "dataset"))}
    of_sft |= {"training.gradient_checkpointing": "true", "training.report_to": "none"}
    first = fine_tune(flags(of_sft, tmp_path / "sft"))
    peft = json.loads((first / "peft.json").read_text())
    assert peft["parameters"] == sum(p.numel() for p in load_model(inputs["model.model_name_or_path"]).parameters())
    common = {"validation__datasets": json.dumps([str(tmp_path / "sums.jsonl")]), "validation__max_new_tokens": 4}
    common |= {"training__report_to": "none", "peft__adapter": first / "adapter"}
    further = train(flags(inputs, tmp_path / "continue", **common))
    assert (further / "adapter" / "adapter_model.safetensors").is_file()
    merged = train(flags(inputs, tmp_path / "merge", peft__adapter_mode="merge", **common))
    base = load_model(merged / "base")
    assert {p.dtype for p in base.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"peft__type": "none", "peft__r": 16},
            r"quantization nf4: --config.peft.type none: 4 bits can't be trained; write lora",
        ),
        ({"peft__type": "pissa"}, "--config.peft.type pissa: it starts from singular components"),
        ({"peft__type": "milora_plus"}, "--config.peft.type milora_plus: it starts from singular components"),
        ({"peft__type": "hra"}, "--config.peft.type hra: PEFT multiplies the base's weight, which is split or packed"),
        ({"rollout__quantization": "int8"}, "rollout.quantization int8: the base is quantised already, by"),
        (
            {"rollout__engine": "vllm"},
            "quantization nf4: vLLM is not given such a base; write --config.rollout.engine fast",
        ),
        (
            {"training__model_init_kwargs": '{"quantization_config": {"load_in_8bit": true}}'},
            "model_init_kwargs: quantization_config has no place there; write --config.model.quantization nf4",
        ),
    ],
)
def test_what_it_can_t_be_had_with_is_one_line(tmp_path, changes, said):
    with pytest.raises(UserError, match=said) as error:
        train(flags(write_inputs(tmp_path), tmp_path / "run", **changes))
    assert "\n" not in str(error.value)


def test_a_model_that_is_quantised_already_is_refused(tmp_path, model):
    inputs = write_inputs(tmp_path)
    file = tmp_path / "model" / "config.json"
    config = model.config.quantization_config.to_dict()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    with pytest.raises(UserError, match="is quantised already; leave the flag out"):
        train(flags(inputs, tmp_path / "run"))


def test_where_bitsandbytes_is_not_installed_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"nf4: bitsandbytes is not installed; pip install"):
        require_bitsandbytes("--config.model.quantization nf4")


def test_an_npu_is_refused(run_npu, tmp_path):
    command = [sys.executable, "-m", "perl.train", *flags(write_inputs(tmp_path), tmp_path / "run")]
    done = run_npu(command, devices=1, check=False)
    assert done.returncode == 2
    assert "nf4: bitsandbytes has no kernels for a device of kind npu; write none" in done.stderr
