"""Weights packed once for a rollout on a CPU: the same numbers, and nothing left behind."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from perl import device
from perl.adapters.rollout_merge import RolloutMerge
from perl.engines import linear
from perl.engines.hf import HFEngine
from perl.engines.linear import prepack, prepacked, split, unpack
from perl.records import Prompt, Sampling
from tests.engines.models import completions, decode, make_sequences, prompts, tiny
from tests.tiny import save_tiny

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_product_is_the_same(rows, bias):
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 160, bias=bias), torch.randn(rows, 5, 96)
    with torch.no_grad():
        expected = layer(x)
        with prepacked(layer):
            assert "forward" in vars(layer)
            assert torch.allclose(layer(x), expected, atol=1e-5)
    assert "forward" not in vars(layer)


def test_a_weight_is_the_sum_of_two_bfloat16_numbers():
    torch.manual_seed(0)
    weight = torch.randn(64, 96)
    high, low = split(weight)
    assert high.dtype == low.dtype == torch.bfloat16
    left = weight - high.float() - low.float()
    assert (left.abs() <= weight.abs() * 2**-16).all()
    assert not (weight - high.float()).abs().le(weight.abs() * 2**-12).all()  # one number would not do


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN packs no bfloat16 weights on this processor"
)
def test_products_in_bfloat16_lose_nothing_of_a_small_update(monkeypatch):
    """Of W + U with U far below bfloat16's spacing in W; what is left is the rounding of x and of the result."""
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: True)
    torch.manual_seed(0)
    weight, update = torch.randn(160, 96), 1e-3 * torch.randn(160, 96)
    layer, x = nn.Linear(96, 160), torch.randn(3000, 96).bfloat16().float()  # x itself is not rounded then
    results = []
    for each in (weight, weight + update):
        prepack(layer, each, layer.bias, torch.bfloat16, merged=True)
        with torch.no_grad():
            results.append(layer(x))
        unpack(layer)
    assert results[0].dtype == torch.float32
    assert torch.allclose(results[0], F.linear(x, weight, layer.bias), rtol=2**-7, atol=2**-6)
    found, wanted = results[1] - results[0], x @ update.T
    assert (found * wanted).sum() / wanted.square().sum() == pytest.approx(1, abs=0.02)  # its share, over the noise


def test_a_cpu_without_units_for_bfloat16_computes_in_float32(monkeypatch):
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: False)
    layer, x = nn.Linear(32, 32), torch.randn(2, 32)
    with torch.no_grad():
        expected = layer(x)
        prepack(layer, layer.weight, layer.bias, torch.bfloat16)
        assert torch.allclose(layer(x), expected, atol=1e-5)
    unpack(layer)


def test_weights_of_now_are_used_each_time():
    layer, x = nn.Linear(32, 32, bias=False), torch.randn(2, 32)
    with torch.no_grad():
        with prepacked(layer):
            before = layer(x)
        layer.weight.mul_(2)
        with prepacked(layer):
            assert torch.allclose(layer(x), 2 * before, atol=1e-5)


def test_other_dtypes_and_layers_stay():
    half, embedding = nn.Linear(8, 8).bfloat16(), nn.Embedding(8, 8)
    with prepacked(nn.ModuleList([half, embedding])):
        assert "forward" not in vars(half)


def test_what_is_packed_is_not_packed_again():
    layer = nn.Linear(8, 8)
    with prepacked(layer):
        packed = vars(layer)["forward"]
        with prepacked(layer):
            assert vars(layer)["forward"] is packed
        assert vars(layer)["forward"] is packed


def test_autocast_computes_as_it_does_without():
    layer, x = nn.Linear(32, 32), torch.randn(2, 32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x)
        with prepacked(layer):
            assert torch.equal(layer(x), expected)
            assert torch.equal(layer(x.bfloat16()), expected)


def test_no_copy_that_would_take_the_memory(monkeypatch):
    monkeypatch.setattr(linear, "SHARE_OF_FREE_MEMORY", 0.0)
    layer = nn.Linear(8, 8)
    with prepacked(layer):
        assert "forward" not in vars(layer)


def test_a_rollout_and_the_evaluators_engine_use_it(monkeypatch, tmp_path):
    calls = []
    product = linear._Product.__call__
    monkeypatch.setattr(linear._Product, "__call__", lambda *args: calls.append(1) or product(*args))
    model = get_peft_model(tiny(), LoraConfig(r=2, target_modules="all-linear")).eval()
    plain = decode(model, make_sequences(prompts(3), max_new_tokens=4))
    assert not calls
    with RolloutMerge(model).applied():
        packed = decode(model, make_sequences(prompts(3), max_new_tokens=4))
    assert calls
    assert [row.token_ids for row in packed] == [row.token_ids for row in plain]
    assert all("forward" not in vars(m) for m in model.modules() if isinstance(m, nn.Linear))
    calls.clear()
    engine = HFEngine(str(save_tiny(tmp_path)))
    assert len(completions(engine, [Prompt(token_ids=(7, 8), seed=0)], Sampling(max_new_tokens=3))) == 1
    assert calls
    assert all("forward" not in vars(m) for m in engine.model.modules() if isinstance(m, nn.Linear))
