"""The numbers of transformers' sdpa, without a copy for each query head. Packed sequences: training/test_packing.py."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from perl.engines import attention
from perl.engines.cache import BlockCache
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


def small(kind: str, **settings):
    """A model of transformers, two layers of four heads."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 50, "attn_implementation": "sdpa"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | settings))


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("qwen2", {}, None),
        ("qwen3", {"head_dim": 32}, None),
        ("llama", {}, None),
        ("diffllama", {}, "its layers change keys and values on their way from the cache to attention"),
        ("deepseek_v3", {"num_key_value_heads": 4, "first_k_dense_replace": 2} | LATENT, "could not be tried"),
        ("minicpm3", {"num_key_value_heads": 4} | LATENT, "could not be tried"),
    ],
)
def test_a_kernel_that_reads_blocks_gets_the_caches_keys_as_they_are_or_none(kind, settings, reason):
    model = small(kind, **settings)
    assert attention.adopt(model) is None
    found = attention.layout_lost(model, BlockCache.without_weights(model, *attention.numbers_of(model), 128))
    assert found is None if reason is None else reason in found


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
