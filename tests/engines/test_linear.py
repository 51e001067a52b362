"""Weights packed once for a rollout on a CPU: the same numbers, and nothing left behind."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from perl.adapters.rollout_merge import RolloutMerge
from perl.engines import linear
from perl.engines.hf import HFEngine
from perl.engines.linear import prepacked
from perl.records import Prompt, Sampling
from tests.engines.models import decode, make_sequences, prompts, tiny
from tests.tiny import save_tiny


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
    assert len(list(engine.generate([Prompt(token_ids=(7, 8), seed=0)], Sampling(max_new_tokens=3)))) == 1
    assert calls
    assert all("forward" not in vars(m) for m in engine.model.modules() if isinstance(m, nn.Linear))
