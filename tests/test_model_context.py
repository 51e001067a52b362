"""How many tokens a model can be given at all."""

import pytest
from transformers import AutoConfig

from perl.base.errors import UserError
from perl.config.schema import DatasetConfig
from perl.models.context import most_tokens
from perl.prompts import ChatTemplate
from perl.runs.setup import build_dataset, limits_of
from tests.tiny import tiny_model, tiny_tokenizer

LONG = {"short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
SMALL = {"hidden_size": 8, "num_hidden_layers": 1}


def rope(kind, **fields):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0} | fields}


@pytest.mark.parametrize(
    ("kind", "fields", "most"),
    [
        ("llama", {}, None),
        ("llama", rope("yarn", original_max_position_embeddings=40), None),
        ("llama", {"max_position_embeddings": 40} | rope("dynamic"), 40),
        ("llama", rope("longrope", original_max_position_embeddings=48, **LONG), 48),
        ("gpt2", {"n_positions": 60, "n_embd": 8, "n_layer": 1, "n_head": 1}, 60),
        ("opt", SMALL | {"max_position_embeddings": 70, "word_embed_proj_dim": 8, "num_attention_heads": 1}, 70),
        ("gptj", {"n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 1, "rotary_dim": 4}, 64),
        ("bloom", {"hidden_size": 8, "n_layer": 1, "n_head": 1}, None),
    ],
)
def test_a_model_that_computes_any_length_has_no_bound(kind, fields, most):
    found = most_tokens(AutoConfig.for_model(kind, **fields))
    assert (found and found[0]) == most


def test_completions_that_the_model_can_not_have_are_refused_before_it_is_loaded(tmp_path):
    """In a table of positions one of them ended the run hours later; with dynamic RoPE a long row changed the policy of
    its neighbours, and the loss computed another."""
    (tmp_path / "sums.jsonl").write_text('{"question": "What is 1 ?", "answer": "#### 1"}\n')
    tiny_model(**{"max_position_embeddings": 40} | rope("dynamic")).config.save_pretrained(tmp_path)
    data, limits = DatasetConfig(dataset_name_or_path=str(tmp_path / "sums.jsonl")), limits_of(str(tmp_path))
    template = ChatTemplate(tiny_tokenizer())
    longest = 40 - len(template.prompt(build_dataset(data, template)[0]["prompt"], ()))
    assert len(build_dataset(data, template, limits=limits, completion=longest)) == 1
    said = (
        f"max_completion_length {longest + 1}: .* more than 40 tokens, .*dynamic.* change .*; write at most {longest}$"
    )
    with pytest.raises(UserError, match=said):
        build_dataset(data, template, limits=limits, completion=longest + 1)
