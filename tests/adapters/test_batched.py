"""LoRA unmerged, in few products: the numbers that PEFT computes layer by layer."""

import pytest
import torch
from peft import LoraConfig

from perl.adapters.batched import BatchedUpdates
from perl.adapters.layers import adapted_layers
from perl.adapters.rollout_merge import RolloutMerge
from tests.adapters.test_rollout_merge import logits, make
from tests.tiny import tiny_model
from tests.trainers import draw, make_trainer

pytestmark = pytest.mark.numeric


class Products:
    """The shapes of the weights that linear products are made with, and of those whose product is added to another."""

    def __init__(self, monkeypatch):
        self.shapes = []
        product = torch.nn.functional.linear

        def count(x, weight, bias=None):
            self.shapes.append(tuple(weight.shape))
            return product(x, weight, bias)

        monkeypatch.setattr(torch.nn.functional, "linear", count)
        self.added = []
        add_product = torch.Tensor.addmm_

        def count_added(result, x, weight):
            self.added.append(tuple(weight.shape))
            return add_product(result, x, weight)

        monkeypatch.setattr(torch.Tensor, "addmm_", count_added)


@pytest.mark.parametrize(
    "config", ["lora", LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])]
)
def test_the_numbers_are_pefts(config):
    model = make(config, std=0.5)
    apart = logits(model)
    with model.disable_adapter():
        base = logits(model)
    assert (base - apart).abs().max() > 0.1
    with BatchedUpdates().applied(adapted_layers(model)):
        assert (logits(model) - apart).abs().max() < 1e-4
        with model.disable_adapter():
            assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), apart)  # and PEFT's own again


def test_layers_that_read_one_hidden_state_share_the_product_with_a(monkeypatch):
    model = make("lora")
    products = Products(monkeypatch)
    with BatchedUpdates().applied(adapted_layers(model)):
        logits(model)
    config = model.config
    rank = 4
    heads, key_heads = (
        n * config.hidden_size // config.num_attention_heads
        for n in (config.num_attention_heads, config.num_key_value_heads)
    )
    hidden, intermediate = config.hidden_size, config.intermediate_size
    small = [shape for shape in products.shapes if min(shape) <= 3 * rank]
    by_a = [(3 * rank, hidden), (rank, heads), (2 * rank, hidden), (rank, intermediate)]  # qkv, o, gate and up, down
    assert small == by_a * config.num_hidden_layers
    by_b = [heads, key_heads, key_heads, hidden, intermediate, intermediate, hidden]
    assert products.added == [(rank, out) for out in by_b] * config.num_hidden_layers


def test_layers_whose_names_deceive_compute_their_own(monkeypatch):
    model = make("lora", std=0.5)
    attention = model.base_model.model.model.layers[0].self_attn
    key = attention.k_proj.forward
    x, other = torch.randn(2, 1, 5, model.config.hidden_size).unbind(0)
    expected = attention.q_proj(x), key(other), attention.v_proj(x)
    with BatchedUpdates().applied(adapted_layers(model)):
        found = attention.q_proj(x), attention.k_proj(other), attention.v_proj(x)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_the_update_is_computed_in_what_the_trainer_computes_in():
    """Autocast's bfloat16 above weights of that dtype: PEFT's numbers to its rounding, and no float32 product."""
    model = make(dtype=torch.bfloat16, std=0.5)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(8, model.config.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
    updates = BatchedUpdates()
    with updates.applied(adapted_layers(model), torch.bfloat16):
        found = layer(x)
        shared = layer.forward.func.__self__
        assert {shared.a.dtype, *(b.dtype for b in shared.b)} == {torch.bfloat16}
    assert (found - layer.base_layer(x)).abs().max() > 0.5
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)
    with updates.applied(adapted_layers(model), torch.float16):  # no weight has it
        assert layer.forward.func.__self__.a.dtype == torch.float32


@pytest.mark.parametrize("bf16", [True, False])
def test_without_mixed_precision_it_keeps_the_adapters_own_precision(tmp_path, bf16):
    """As PEFT does in the trainer's forward, also above weights of bfloat16."""
    model = tiny_model(scale=4.0, dtype=torch.bfloat16)
    trainer = make_trainer(tmp_path, model=model, engine="fast", rollout={"merge_adapter": False}, bf16=bf16)
    draw(trainer, [[6, 7, 8]], 2)
    groups = trainer.step.engine.merge._batched._groups.values()
    assert {group.a.dtype for group in groups} == {torch.bfloat16 if bf16 else torch.float32}


@pytest.mark.parametrize("method", ["dora", "rslora"])
def test_other_methods_of_peft_stay_right(method):
    model = make(method, std=0.2)
    apart = logits(model)
    with BatchedUpdates().applied(adapted_layers(model)):
        assert (logits(model) - apart).abs().max() < 1e-4


def test_an_adapter_that_bfloat16_would_round_away_keeps_its_update():
    """The update of a young adapter in bfloat16 weights: batched, it is PEFT's to float32's accuracy; merged, a
    good part of it is gone."""
    model = make(dtype=torch.bfloat16, std=1e-3)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    torch.manual_seed(3)
    x = torch.randn(64, model.config.hidden_size)
    a, b = (part["default"].weight.float() for part in (layer.lora_A, layer.lora_B))
    update = 2.0 * x @ a.T @ b.T
    layer.base_layer.float()  # the product with the base in float32, so that the update shows
    with RolloutMerge(model, False).applied():
        found = layer(x) - layer.base_layer(x)
    assert ((found - update).norm() / update.norm()) < 1e-3
    merged = (layer.base_layer.weight + 2.0 * b @ a).bfloat16().float()
    assert ((x @ (merged - layer.base_layer.weight).T - update).norm() / update.norm()) > 0.1
