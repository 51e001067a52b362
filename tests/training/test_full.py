"""--config.peft.type none: all weights are trained, and everything around a training knows that there is no adapter."""

import contextlib
import json
import logging
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from perl.adapters.none import RolloutCopies, loses_updates, store_as, trained_dtype
from perl.base.errors import UserError
from perl.config.evaluation import parse as parse_eval
from perl.config.load import parse
from perl.config.schema import NoiseConfig
from perl.config.sft import parse as parse_sft
from perl.engines.vllm_sync import merged_weights
from perl.evaluation.run import evaluate
from perl.finetuning.sft import fine_tune
from perl.models.folders import content_hash
from perl.runs import out_of_memory
from perl.runs.model_card import add_results
from perl.runs.run import tied_weights_known
from perl.runs.setup import load_model
from perl.scoring.results import same_model
from perl.training.grpo import train
from perl.training.preflight import check_engine
from tests.folders import metrics, write_sums
from tests.tiny import save_tiny, tiny_model
from tests.trainers import make_trainer

NONE = ["--config.peft.type", "none"]


def flags(folder, name, **changes):
    settings = {
        "model.model_name_or_path": folder / "base",
        "dataset.dataset_name_or_path": folder / "sums.jsonl",
        "training.output_dir": folder / name,
        "training.max_steps": 2,
        "training.save_steps": 1,
        "training.per_device_train_batch_size": 4,
        "training.num_generations": 4,
        "training.max_completion_length": 8,
        "training.learning_rate": 0.01,
        "training.logging_steps": 1,
        "training.beta": 0.1,
        "training.gradient_checkpointing": "false",
        "training.report_to": "none",
        "noise_injection.enabled": "true",
        "reward.functions": json.dumps(["accuracy", f"{folder / 'digits.py'}:digits"]),
    }
    settings |= {field.replace("__", "."): value for field, value in changes.items()}
    return [*NONE, *(word for field, value in settings.items() for word in (f"--config.{field}", str(value)))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds base/, a model in bfloat16, sums.jsonl and the run of two steps, run/."""
    folder = tmp_path_factory.mktemp("full")
    save_tiny(folder / "base", scale=4.0, dtype=torch.bfloat16)
    write_sums(folder / "sums.jsonl")
    (folder / "digits.py").write_text(
        "def digits(completions, **kwargs):\n"
        "    texts = [c[0]['content'] for c in completions]\n"
        "    return [sum(x.isdigit() for x in t) / max(len(t), 1) for t in texts]\n"
    )
    validation = {"validation__datasets": json.dumps([str(folder / "sums.jsonl")]), "validation__every_steps": 1}
    train(flags(folder, "run", **validation, validation__save_best="true", validation__max_new_tokens=4))
    return folder


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_run_leaves_a_whole_model_that_transformers_loads(folder):
    run = folder / "run"
    assert not (run / "adapter").exists()
    assert not [file for file in (run / "model").iterdir() if file.suffix in (".bin", ".pt", ".pth")]
    before, after, last = weights(folder / "base"), weights(run / "model"), weights(run / "checkpoint-2")
    assert before.keys() == after.keys() == last.keys()
    for name, tensor in after.items():
        assert tensor.dtype == torch.float32  # a CPU computes in it
        assert torch.equal(tensor, last[name]), name
        assert not torch.equal(tensor, before[name].float()), name
    loaded = AutoModelForCausalLM.from_pretrained(run / "model")
    assert loaded.dtype == torch.float32
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in after.items())
    assert AutoTokenizer.from_pretrained(run / "model").chat_template


def test_configuration_and_tokenizer_are_the_bases_but_for_the_dtype(folder):
    for file in (folder / "base").iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            assert (folder / "run" / "model" / file.name).read_bytes() == file.read_bytes(), file.name
    base, own = (json.loads((folder / path / "config.json").read_text()) for path in ("base", "run/model"))
    assert (base.pop("dtype"), own.pop("dtype")) == ("bfloat16", "float32")
    assert base == own


def test_the_first_step_is_at_the_reference_and_the_sampler_is_noisy(folder):
    logged = metrics(folder / "run")
    first, second = [row for row in logged if "loss" in row]
    assert first["kl"] == 0.0 < second["kl"]
    assert first["aqn/sigma_realized"] > 0.03
    assert first["aqn/kl"] > 0


def test_a_resumed_run_ends_with_the_same_bits(folder):
    checkpoint = folder / "copy" / "checkpoint-1"
    shutil.copytree(folder / "run" / "checkpoint-1", checkpoint)
    resumed = train(flags(folder, "resumed", training__resume_from_checkpoint=checkpoint))
    whole, own = weights(folder / "run" / "model"), weights(resumed / "model")
    assert all(torch.equal(whole[name], tensor) for name, tensor in own.items())


def test_validation_names_the_checkpoint_and_keeps_the_best_model(folder):
    run = folder / "run"
    before, first, last = (
        json.loads((run / "validation" / f"step-{step}" / "sums" / "summary.json").read_text()) for step in range(3)
    )
    assert (before["model"], before["adapter"]) == (str(folder / "base"), None)
    assert (last["model"], last["adapter"], last["adapter_mode"]) == (str(run / "checkpoint-2"), None, None)
    assert not same_model(before, last)
    assert not same_model(first, last)
    assert same_model(last, last)
    assert AutoModelForCausalLM.from_pretrained(run / "best").dtype == torch.float32


def test_the_evaluator_takes_the_model_and_tells_what_it_was_trained_on(folder, tmp_path, caplog):
    command = ["--dataset", str(folder / "sums.jsonl"), "--max_new_tokens", "4", "--dp_size", "1"]
    evaluate(parse_eval(["--model", str(folder / "run" / "model"), *command, "--result_dir", str(tmp_path / "after")]))
    after = json.loads((tmp_path / "after" / "sums" / "summary.json").read_text())
    assert after["trained_on"] == {"run": str(folder / "run"), "problems": 8}
    assert "8 of its 8 problems are in the training data" in caplog.text
    model = shutil.copytree(folder / "run", tmp_path / "run") / "model"
    of_base = shutil.copytree(tmp_path / "after", tmp_path / "before") / "sums" / "summary.json"
    of_base.write_text(json.dumps(after | {"base_hash": content_hash(folder / "base")}))
    assert len(add_results(model, [tmp_path / "before", tmp_path / "after"])) == 1
    card = (model / "README.md").read_text()
    assert "| sums | this model | accuracy |" in card
    assert "| sums | the base | accuracy |" in card


def test_the_card_tells_of_no_adapter(folder):
    card = (folder / "run" / "model" / "README.md").read_text()
    assert "All weights of `base` (local), trained with [GRPO]" in card
    assert "library_name: transformers" in card
    assert "| adapter | none: all weights are trained |" in card
    assert "peft" not in card.partition("## Versions")[0].lower()


def test_supervised_fine_tuning_trains_all_weights_too(folder):
    settings = {
        "model.model_name_or_path": folder / "base",
        "dataset.dataset_name_or_path": folder / "sums.jsonl",
        "training.output_dir": folder / "tuned",
        "training.max_steps": 1,
        "training.per_device_train_batch_size": 2,
        "training.learning_rate": 0.01,
        "training.report_to": "none",
    }
    run = fine_tune([*NONE, *(word for field, value in settings.items() for word in (f"--config.{field}", str(value)))])
    before, after = weights(folder / "base"), weights(run / "model")
    assert all(not torch.equal(after[name], tensor.float()) for name, tensor in before.items() if "norm" not in name)


def test_flags_of_an_adapter_have_no_effect(folder):
    given = [
        "--config.peft.r",
        "8",
        "--config.peft.target_modules",
        "all-linear",
        "--config.rollout.merge_adapter",
        "true",
    ]
    why = "peft.type none trains all weights"
    assert parse([*flags(folder, "x"), *given]).warnings == [
        f"--config.peft.r has no effect: {why}",
        f"--config.peft.target_modules has no effect: {why}",
        "--config.rollout.merge_adapter has no effect: peft.type none has no adapter",
    ]
    assert (
        f"--config.peft.lora_alpha has no effect: {why}" in parse_sft([*NONE, "--config.peft.lora_alpha", "8"]).warnings
    )


def test_an_adapter_is_merged_or_refused(folder):
    with pytest.raises(UserError, match=r"trains all weights, and no adapter further; write .*adapter_mode merge"):
        parse([*NONE, "--config.peft.adapter", str(folder)])


def test_a_whole_model_after_adapter_is_refused_with_what_to_write(folder):
    model = folder / "run" / "model"
    for named in (model, folder / "run"):
        words = ["--model", str(folder / "base"), "--adapter", str(named), "--dataset", "gsm8k"]
        with pytest.raises(UserError, match=f"{model} is a whole model; write --model {model}"):
            evaluate(parse_eval([*words, "--result_dir", str(folder / "results")]))


def test_vllm_on_a_cpu_takes_adapters_alone(folder):
    config = parse([*flags(folder, "x"), "--config.rollout.engine", "vllm"]).build()
    config.training.vllm_mode = "colocate"
    with pytest.raises(UserError, match=r"takes the adapter alone, but all weights are trained .*rollout.engine fast"):
        check_engine(config, "")


def test_vllm_is_sent_every_weight():
    model = tiny_model()
    sent = dict(merged_weights(model, contextlib.nullcontext))
    assert sent.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(sent[name], weight) for name, weight in model.named_parameters())


def test_memory_that_runs_out_is_answered_by_an_adapter(folder):
    config = parse(flags(folder, "x")).build()
    assert "--config.peft.type lora (now none" in out_of_memory.set_first("setup", config)


@pytest.mark.parametrize(
    ("bf16", "deepspeed", "expected"),
    [(True, None, "float32"), (False, None, "float32"), (True, object(), "bfloat16"), (False, object(), "float32")],
)
def test_weights_are_float32_where_the_optimizer_writes_to_them(bf16, deepspeed, expected):
    training = SimpleNamespace(bf16=bf16, fp16=False, deepspeed_plugin=deepspeed)
    assert trained_dtype(training) == getattr(torch, expected)
    assert loses_updates(torch.bfloat16, training) == (deepspeed is None)
    assert not loses_updates(torch.float32, training)


def test_bfloat16_weights_are_a_warning(folder, caplog):
    config = parse([*flags(folder, "x"), "--config.model.dtype", "bfloat16"]).build()
    assert load_model(config).dtype == torch.bfloat16
    assert "--config.model.dtype bfloat16: the optimizer writes to weights of this dtype" in caplog.text


def test_an_update_smaller_than_half_a_spacing_is_lost_in_bfloat16():
    """What the warning says: AdamW's first step moves each weight by the learning rate."""
    for dtype, moves in ((torch.bfloat16, False), (torch.float32, True)):
        weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=1 / 600, weight_decay=0.0).step()
        assert bool((weight != 1).all()) == moves


def test_mixed_precision_samples_with_copies_that_hold_the_noise():
    model = tiny_model(tie_word_embeddings=True)
    own = dict(model.named_parameters())
    copies = RolloutCopies(model, torch.bfloat16)
    for number in (1.0, 2.0):
        with torch.no_grad():
            own["model.norm.weight"].fill_(number + 2**-12)
        with copies.applied():
            assert model.model.norm.weight.dtype == torch.bfloat16
            assert model.model.norm.weight.tolist() == [number] * 64
            assert model.lm_head.weight is model.model.embed_tokens.weight
            assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
        assert all(weight is own[name] for name, weight in model.named_parameters())
        assert model.model.norm.weight.tolist() == [number + 2**-12] * 64


def test_noise_that_the_copies_round_away_is_not_reported(tmp_path):
    """5e-4 is a quarter of half a spacing of bfloat16 below the norms' 1. The first rollout is compared with the
    trainer, which puts the noise on the float32 weights too."""
    noise = NoiseConfig(enabled=True, seed=3, sigma_start=5e-4, sigma_end=1e-4)
    trainer = make_trainer(tmp_path, adapter="none", bf16=True, engine="fast", noise=noise, learning_rate=1e-6)
    trainer.train()
    noisy = [row for row in trainer.state.log_history if "aqn/sigma_realized" in row]
    assert [row["aqn/sigma"] > 0 for row in noisy] == [True, True]
    assert all(row["aqn/sigma_realized"] < 0.1 * row["aqn/sigma"] for row in noisy)


def test_a_tied_head_is_not_missing_in_a_checkpoint(tmp_path, caplog):
    fields = {"adapter": "none", "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, model=tiny_model(tie_word_embeddings=True), **fields).train()
    again = make_trainer(tmp_path, model=tiny_model(tie_word_embeddings=True), **fields | {"max_steps": 2})
    log = logging.getLogger("transformers.trainer")
    log.addHandler(caplog.handler)
    with tied_weights_known(again):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    log.removeHandler(caplog.handler)
    assert again.state.global_step == 2
    assert again.model.lm_head.weight is again.model.model.embed_tokens.weight
    assert "missing keys" not in caplog.text


def test_mixed_precision_on_a_cpu_ends_in_its_dtype(folder):
    run = train(flags(folder, "mixed", training__bf16="true", training__max_steps=1))
    assert {tensor.dtype for tensor in weights(run / "checkpoint-1").values()} == {torch.float32}
    assert {tensor.dtype for tensor in weights(run / "model").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(run / "checkpoint-1").dtype == torch.bfloat16


def test_store_as_keeps_names_and_counts_bytes(tmp_path):
    tiny_model().save_pretrained(tmp_path, max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    before = json.loads(index.read_text())
    store_as(tmp_path, torch.bfloat16)
    after = json.loads(index.read_text())
    assert after["weight_map"] == before["weight_map"]
    assert after["metadata"]["total_size"] * 2 == before["metadata"]["total_size"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() == tiny_model().num_parameters()
