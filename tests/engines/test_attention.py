"""The numbers of transformers' sdpa, without a copy for each query head. Packed sequences: training/test_packing.py."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from perl.engines import attention
from tests.engines.models import decode, make_sequences, prompts, tiny

pytestmark = pytest.mark.numeric

VISIBLE = (torch.arange(9) < torch.tensor([[9], [4], [1]]))[:, None, None]
MASKS = {"none": None, "bool": VISIBLE, "float": torch.zeros(3, 1, 1, 9).masked_fill(~VISIBLE, float("-inf"))}


@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize("mask", MASKS)
def test_one_token_a_row(mask, heads):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, heads, 1, 16), torch.randn(3, 2, 9, 16), torch.randn(3, 2, 9, 16)
    module = SimpleNamespace(num_key_value_groups=heads // 2, is_causal=True)
    expected, _ = sdpa_attention_forward(module, query, key, value, MASKS[mask], scaling=0.3)  # type: ignore[arg-type]
    found, _ = attention.attention(module, query, key, value, MASKS[mask], scaling=0.3)
    assert found.shape == expected.shape == (3, 1, heads, 16)
    assert torch.allclose(found, expected, atol=1e-6)


def test_several_tokens_are_left_to_transformers():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    expected, _ = sdpa_attention_forward(module, query, key, value, None)  # type: ignore[arg-type]
    assert torch.equal(attention.attention(module, query, key, value, None)[0], expected)


def test_the_fast_loop_decodes_with_it(monkeypatch):
    shapes = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, **kwargs):
        shapes.append((tuple(query.shape[1:3]), key.shape[1]))
        return kernel(query, key, value, **kwargs)

    model = tiny()  # four heads on two key heads
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", spy)
    assert len(decode(model, make_sequences(prompts(4), max_new_tokens=6))) == 4
    decoding = [shape for shape in shapes if shape[0][1] <= 2]
    assert decoding
    assert set(decoding) == {((2, 2), 2)}


def test_other_attention_stays():
    model = tiny()
    model.set_attn_implementation("eager")
    assert attention.adopt(model) == "attention is eager, not sdpa"
    assert model.config._attn_implementation == "eager"


def test_nothing_of_it_is_saved_with_the_model(tmp_path):
    model = tiny()
    assert attention.adopt(model) is None
    model.save_pretrained(tmp_path)
    assert attention.ATTENTION not in (tmp_path / "config.json").read_text()
