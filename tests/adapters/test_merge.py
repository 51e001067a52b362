"""The merged model on disk computes what PEFT computes, keeps a young adapter, and refuses what it cannot merge."""

from __future__ import annotations

import argparse
import json
import logging
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, OFTConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from perl.adapters.merge import merge_adapter, read_report, warn_of_other_base
from perl.adapters.start import merge_into
from perl.base.errors import UserError
from perl.models.folders import Checkpoint, content_hash, resolve_model
from perl.tools import merge
from tests.tiny import tiny_model

TOKENS = torch.tensor([[5, 17, 300, 2, 99, 511, 64, 8]])


def make_base(
    folder: Path, *, hidden: int = 64, layers: int = 2, dtype=torch.bfloat16, tied: bool = False, **save
) -> Path:
    model = tiny_model(
        dtype=dtype,
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=tied,
    )
    model.save_pretrained(folder, **save)
    (folder / "tokenizer_config.json").write_text('{"odd   spacing":  1,"rope_theta": 1e6}\n')
    return folder


def make_adapter(folder: Path, base: Path, *, std: float = 0.05, config=None) -> Path:
    """An adapter whose weights that start at zero (or at the identity) have moved by N(0, std²)."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wrapped = get_peft_model(model, config or LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter.add_(torch.randn_like(parameter) * std)
    wrapped.save_pretrained(folder)
    return folder


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits[0]


def peft_logits(base: Path, adapter: Path) -> torch.Tensor:
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter))


def folder_logits(folder: Path) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


METHODS = {
    "lora": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    "rslora": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], use_rslora=True),
    "dora": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_dora=True),
    "bias_all": LoraConfig(r=4, lora_alpha=8, target_modules=["gate_proj"], bias="all"),
    "head_saved_whole": LoraConfig(r=4, target_modules=["v_proj"], modules_to_save=["lm_head"]),
    "embeddings": LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "pissa": LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa"),
    "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": OFTConfig(oft_block_size=8, r=0, target_modules=["q_proj", "up_proj"]),
}


@pytest.mark.parametrize("method", METHODS)
def test_merged_model_on_disk_computes_what_peft_computes(method, tmp_path):
    base = make_base(tmp_path / "base", dtype=torch.float32)
    adapter = make_adapter(tmp_path / "adapter", base, config=METHODS[method])
    report = merge_adapter(base, adapter, tmp_path / "out")
    expected = peft_logits(base, adapter)
    assert (folder_logits(tmp_path / "out") - expected).abs().max() < 1e-5
    assert (folder_logits(base) - expected).abs().max() > 1e-3
    assert report.rounding_error < 1e-4
    assert report.dtype == "float32"
    assert read_report(tmp_path / "out") == report


def test_changes_only_the_adapted_weights_and_copies_every_other_file(base, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", base, config=LoraConfig(r=4, target_modules=["q_proj"]))
    report = merge_adapter(base, adapter, tmp_path / "out")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}
    assert report.tensors == 2
    assert {t.dtype for t in after.values()} == {torch.bfloat16}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "out"]


def test_a_merged_weight_is_the_rounded_sum(base, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", base, config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    merge_adapter(base, adapter, tmp_path / "out")
    name = "model.layers.1.self_attn.q_proj"
    stored = load_file(adapter / "adapter_model.safetensors")
    update = 2.0 * stored[f"base_model.model.{name}.lora_B.weight"] @ stored[f"base_model.model.{name}.lora_A.weight"]
    expected = (Checkpoint(base).read(f"{name}.weight").float() + update).bfloat16()
    assert torch.equal(Checkpoint(tmp_path / "out").read(f"{name}.weight"), expected)


def test_a_young_adapter_is_written_in_float32(base, tmp_path, caplog):
    adapter = make_adapter(tmp_path / "adapter", base, std=1e-4)
    with caplog.at_level(logging.WARNING):
        report = merge_adapter(base, adapter, tmp_path / "out")
    assert report.dtype == "float32"
    assert report.rounding_dtype == "bfloat16"
    assert report.rounding_error > 0.3
    assert "written in float32" in report.note
    assert [r.message for r in caplog.records if "--adapter_mode lora" in r.message] == [report.note]
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}
    assert AutoConfig.from_pretrained(base).dtype == torch.bfloat16
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.float32  # what an engine would round to
    expected = peft_logits(base, adapter)
    assert (folder_logits(tmp_path / "out") - expected).abs().max() < 1e-5


def test_rounding_error_is_one_when_rounding_returns_the_base(base, tmp_path, caplog):
    adapter = make_adapter(tmp_path / "adapter", base, std=1e-7)
    report = merge_adapter(base, adapter, tmp_path / "out")
    assert report.rounding_error == pytest.approx(1.0, abs=0.05)
    assert report.dtype == "float32"


def test_a_report_of_another_version_is_one_line(base, tmp_path):
    merge_adapter(base, make_adapter(tmp_path / "adapter", base), tmp_path / "out")
    file = tmp_path / "out" / "merge.json"
    file.write_text(file.read_text().replace('"rounding_error"', '"share_lost"'))
    for text in (
        file.read_text(),
        "[1]",
        "[" * 100_000,
        "\udcff",
        file.read_text().replace('"effect": ', '"effect": "'),
    ):
        file.write_text(text, errors="surrogateescape")
        with pytest.raises(UserError, match=r"merge\.json: .* of an older version; merge again into a new folder"):
            read_report(tmp_path / "out")


def test_an_earlier_merge_that_computes_nan_is_made_again(base, tmp_path):
    report = merge_adapter(base, make_adapter(tmp_path / "adapter", base), tmp_path / "out")
    file = tmp_path / "out" / "merge.json"
    file.write_text(json.dumps(asdict(report) | {"written_error": float("nan")}))
    assert read_report(tmp_path / "out") is None


def test_the_asked_dtype_is_written_even_when_it_loses(base, tmp_path, caplog):
    adapter = make_adapter(tmp_path / "adapter", base, std=4e-4)
    report = merge_adapter(base, adapter, tmp_path / "out", "bfloat16")
    assert report.dtype == "bfloat16"
    assert report.rounding_error > 0.1
    assert "as bfloat16 is asked for" in report.note


@pytest.mark.parametrize(
    ("std", "says"),
    [
        (2e-6, "write --config.model.dtype float32, or --config.peft.adapter_mode continue"),
        (0.0, "merge: --config.peft.adapter {adapter}: changes nothing"),
    ],
)
def test_what_cannot_be_merged_is_told_in_the_flags_of_a_training(base, tmp_path, std, says):
    adapter = make_adapter(tmp_path / "adapter", base, std=std)
    with pytest.raises(UserError) as error:
        merge_into(base, adapter, tmp_path / "out", torch.bfloat16)
    assert says.format(adapter=adapter) in str(error.value)
    assert "--adapter_mode lora" not in str(error.value)


def test_a_sharded_base_gives_the_same_shards(tmp_path):
    base = make_base(tmp_path / "base", max_shard_size="100KB")
    adapter = make_adapter(tmp_path / "adapter", base)
    merge_adapter(base, adapter, tmp_path / "out")
    assert Checkpoint(tmp_path / "out").shards == Checkpoint(base).shards
    assert len(Checkpoint(base).shards) > 2
    merge_adapter(base, adapter, tmp_path / "wide", "float32")
    index = json.loads((tmp_path / "wide" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        t.numel() * 4 for shard in Checkpoint(base).shards for t in load_file(base / shard).values()
    )


@pytest.mark.parametrize(
    ("weight", "dtype", "message"),
    [(1e5, "float16", r"written in float16 differs .* by nan"), (math.nan, "auto", "are NaN or infinite")],
)
def test_a_model_that_computes_no_numbers_is_refused(tmp_path, weight, dtype, message):
    """float16 ends at 65504."""
    base = make_base(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0] = weight
    tensors["model.layers.0.mlp.down_proj.weight"][:, 0] *= 1e-5
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    adapter = make_adapter(tmp_path / "adapter", base, config=config)
    with pytest.raises(UserError, match=message):
        merge_adapter(base, adapter, tmp_path / "out", dtype)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            "PROMPT_TUNING changes no weights, and can't be",
        ),
        (
            LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], alora_invocation_tokens=[3, 4]),
            "acts after its alora_invocation_tokens alone, and can't be",
        ),
        (
            LoraConfig(r=4, target_modules=["o_proj"], lora_bias=True),
            "PEFT can't merge it: .* the base layer has no bias",
        ),
    ],
)
def test_what_peft_can_not_merge_is_one_line(base, tmp_path, config, message):
    adapter = make_adapter(tmp_path / "adapter", base, config=config)
    with pytest.raises(UserError, match=message):
        merge_adapter(base, adapter, tmp_path / "out")


def test_an_untrained_adapter_is_refused(base, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", base, std=0.0)
    with pytest.raises(UserError, match="untrained or empty"):
        merge_adapter(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("other", "message"), [({"hidden": 128}, "does not fit"), ({"layers": 3}, "belongs to another base model")]
)
def test_an_adapter_of_another_base_is_refused(base, tmp_path, other, message):
    adapter = make_adapter(tmp_path / "adapter", make_base(tmp_path / "other", **other))
    with pytest.raises(UserError, match=message):
        merge_adapter(base, adapter, tmp_path / "out")


def test_an_adapter_with_too_few_layers_is_refused(tmp_path):
    base = make_base(tmp_path / "base", layers=3)
    config = LoraConfig(r=4, target_modules=["q_proj"])
    adapter = make_adapter(tmp_path / "adapter", make_base(tmp_path / "other", layers=2), config=config)
    with pytest.raises(UserError, match=r"lacks .*layers\.2"):
        merge_adapter(base, adapter, tmp_path / "out")


def test_a_merge_goes_where_a_link_leads_and_replaces_no_folder_that_one_stands_in(tmp_path, monkeypatch):
    base = make_base(tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", base)
    disk = tmp_path / "disk" / "merged"
    disk.mkdir(parents=True)
    (tmp_path / "link").symlink_to(disk)
    merge_adapter(base, adapter, tmp_path / "link")
    assert (disk / "merge.json").is_file()
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="is the current folder, which would be replaced; write a new folder in it"):
        merge_adapter(base, adapter, Path())


def test_perl_merge_knows_the_home_folder(tmp_path, monkeypatch):
    base = make_base(tmp_path / "base")
    make_adapter(tmp_path / "home" / "adapter", base)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    parser = argparse.ArgumentParser()
    merge.add_arguments(parser)
    assert merge.run(parser.parse_args(["--model", str(base), "--adapter=~/adapter", "--output=~/out"])) == 0
    assert (tmp_path / "home" / "out" / "merge.json").is_file()


CHANGES_OF_ONE = {
    "head": LoraConfig(r=4, target_modules=["lm_head"]),
    "embedding": LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "embedding_saved_whole": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
}
CHANGES_OF_BOTH = {
    "tokens": LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[3, 4]),
    "embedding": LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True),
    "embedding_saved_whole": LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("change", CHANGES_OF_ONE)
def test_a_change_of_one_of_two_tied_weights_is_refused(change, dtype, tmp_path):
    """In bfloat16 a change of the embedding alone once passed for rounding."""
    base = make_base(tmp_path / "base", tied=True, dtype=dtype)
    adapter = make_adapter(tmp_path / "adapter", base, config=CHANGES_OF_ONE[change])
    with pytest.raises(UserError, match="tied to another weight"):
        merge_adapter(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("change", CHANGES_OF_BOTH)
def test_tied_weights_that_change_together_are_merged(change, tmp_path):
    base = make_base(tmp_path / "base", tied=True, dtype=torch.float32)
    adapter = make_adapter(tmp_path / "adapter", base, config=CHANGES_OF_BOTH[change])
    merge_adapter(base, adapter, tmp_path / "out")
    expected = peft_logits(base, adapter)
    assert (folder_logits(tmp_path / "out") - expected).abs().max() < 1e-5
    assert (folder_logits(base) - expected).abs().max() > 1e-3
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()


def test_another_base_name_is_one_warning(base, tmp_path, caplog):
    adapter = make_adapter(tmp_path / "adapter", base)
    config = json.loads((adapter / "adapter_config.json").read_text())
    names = (("/x/Qwen2___5-7B", 1), (f"/elsewhere/{base.name}", 0), (f"/run/{base.name[1:]}", 1))  # the last: its end
    for named, warned in names:
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": named}))
        caplog.clear()
        merge_adapter(base, adapter, tmp_path / "out")
        assert sum("is that the same model" in r.message for r in caplog.records) == warned


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def test_an_adapter_of_a_quantised_base_is_one_warning_and_stands_in_the_report(base, tmp_path, caplog):
    adapter = make_adapter(tmp_path / "run/adapter", base, std=1.0)
    (tmp_path / "run/peft.json").write_text(json.dumps({"type": "lora", "quantised": "4 bits (bitsandbytes, nf4)"}))
    report = merge_adapter(base, adapter, tmp_path / "merged")
    assert report.trained_above == "4 bits (bitsandbytes, nf4)"
    assert read_report(tmp_path / "merged") == report
    said = f"{adapter} was trained above a base in 4 bits (bitsandbytes, nf4), and is put on {base} in floating-point"
    assert caplog.text.count(said) == 1
    config = AutoConfig.from_pretrained(base)
    config.quantization_config = NF4
    caplog.clear()
    warn_of_other_base(adapter, {}, base, config)  # the base that it was trained above
    assert not caplog.records
    (tmp_path / "run/peft.json").write_text('{"type": "lora"}')  # of an older version
    assert merge_adapter(base, adapter, tmp_path / "merged").trained_above == ""


def test_a_base_that_is_stored_quantised_is_refused(tmp_path):
    base = make_base(tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", base)
    fields = json.loads((base / "config.json").read_text()) | {"quantization_config": NF4}
    (base / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"base: is stored in 4 bits \(bitsandbytes, nf4\), and an adapter is merged"):
        merge_adapter(base, adapter, tmp_path / "merged")


def test_missing_files_are_one_line_errors(base, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        merge_adapter(base, tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-5" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"did you mean .*checkpoint-5"):
        merge_adapter(base, tmp_path / "run", tmp_path / "out")
    with pytest.raises(UserError, match=r"no adapter_model\.safetensors"):
        merge_adapter(base, tmp_path / "run" / "checkpoint-5", tmp_path / "out")
    with pytest.raises(UserError, match="no such folder"):
        resolve_model(str(tmp_path / "missing"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="exists and is not a merged model"):
        merge_adapter(base, make_adapter(tmp_path / "adapter", base), tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"


def test_content_hash_follows_content_and_not_the_path(base, tmp_path):
    adapter = make_adapter(tmp_path / "a", base)
    copy = tmp_path / "b"
    copy.mkdir()
    for file in adapter.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert content_hash(copy) == content_hash(adapter)
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 64}))
    assert content_hash(copy) != content_hash(adapter)
