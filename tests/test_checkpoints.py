"""Model folders: what a failed load says, and which tokens end a completion."""

import json

import pytest
from transformers import Qwen2Config

from perl.checkpoints import eos_token_ids, load_config, load_model, load_tokenizer, modelscope_variable, token_ids
from perl.errors import UserError
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


def test_the_modelscope_switch():
    assert modelscope_variable({"PERL_USE_MODELSCOPE": "1"}) == "PERL_USE_MODELSCOPE"
    assert modelscope_variable({"VERL_USE_MODELSCOPE": "True"}) == "VERL_USE_MODELSCOPE"
    assert modelscope_variable({"PERL_USE_MODELSCOPE": "0"}) is None
    assert modelscope_variable({}) is None
