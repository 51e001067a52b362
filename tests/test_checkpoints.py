"""Model folders: what a failed load says, and which tokens end a completion."""

import json

import pytest
import torch
from transformers import Qwen2Config

from perl.base.errors import UserError
from perl.models.folders import (
    MODELSCOPE_VARIABLES,
    Checkpoint,
    eos_token_ids,
    load_config,
    load_model,
    load_tokenizer,
    modelscope_variable,
    resolve_model,
    token_ids,
)
from tests.tiny import save_tiny, tiny_tokenizer


def test_what_is_loaded_is_what_was_saved(tmp_path):
    save_tiny(tmp_path)
    assert load_config(tmp_path).hidden_size == 64
    assert load_tokenizer(tmp_path, padding_side="left").padding_side == "left"
    assert load_model(tmp_path).config.vocab_size == len(tiny_tokenizer())


@pytest.mark.parametrize("load", [load_config, load_tokenizer, load_model])
def test_a_failed_load_is_one_line_that_names_the_flag(load, tmp_path):
    with pytest.raises(UserError, match=r"^--my\.model .*: no config\.json in this folder; name the folder"):
        load(tmp_path, "--my.model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"^--my\.model .*: cannot be loaded as a causal language model: ") as caught:
        load(tmp_path, "--my.model")
    assert "\n" not in str(caught.value)


def test_tokens_that_end_a_completion_are_the_generation_configs_and_the_tokenizers(tmp_path):
    tokenizer = tiny_tokenizer()
    own = tokenizer.convert_tokens_to_ids("<|end|>")
    assert eos_token_ids(tmp_path, Qwen2Config(eos_token_id=9), tokenizer) == frozenset([9, own])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [11, 12]}))
    assert eos_token_ids(tmp_path, Qwen2Config(eos_token_id=9), tokenizer) == frozenset([11, 12, own])
    assert [token_ids(named) for named in (None, 0, [1, 2], ())] == [[], [0], [1, 2], []]


def test_the_modelscope_switch(monkeypatch):
    for name in MODELSCOPE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert modelscope_variable() is None
    monkeypatch.setenv("PERL_USE_MODELSCOPE", "0")
    assert modelscope_variable() is None
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "True")
    assert modelscope_variable() == "VERL_USE_MODELSCOPE"
    monkeypatch.setenv("PERL_USE_MODELSCOPE", "1")
    assert modelscope_variable() == "PERL_USE_MODELSCOPE"


def test_pickled_weights_are_refused(tmp_path):
    save_tiny(tmp_path / "model")
    whole = load_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(whole.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    said = r"^--model .*: its weights are pickled \(pytorch_model\.bin\), which is not loaded; .* as safetensors$"
    with pytest.raises(UserError, match=said):
        resolve_model(str(tmp_path / "model"))
    with pytest.raises(UserError, match="cannot be loaded as a causal language model"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/x/model.safetensors", "pytorch_model.bin", 3])
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path, name):
    """transformers would read them, and a merge would write there."""
    for folder in ("model", "other"):
        save_tiny(tmp_path / folder)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (lambda folder: resolve_model(str(folder)), Checkpoint):
        with pytest.raises(UserError, match=r"model\.safetensors\.index\.json names "):
            read(tmp_path / "model")


def test_a_model_that_brings_code_is_refused_without_asking(tmp_path, monkeypatch):
    (tmp_path / "modeling_x.py").write_text("open('ran', 'w').close()\n")
    auto = {"AutoConfig": "modeling_x.XConfig", "AutoModelForCausalLM": "modeling_x.XModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x-of-its-own", "auto_map": auto}))
    monkeypatch.setattr("builtins.input", lambda text: pytest.fail(f"asked: {text}"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"it brings Python code of its own \(auto_map\), which is not run$"):
        load_config(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_model_with_an_adapter_in_its_folder_is_refused(tmp_path):
    """transformers would load the adapter with it."""
    save_tiny(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))
    with pytest.raises(UserError, match=r"holds a model and an adapter \(adapter_config\.json\) in one folder"):
        resolve_model(str(tmp_path))
