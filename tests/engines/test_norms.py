"""RMSNorms as one kernel."""

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from perl.engines.norms import fuse_norms
from tests.tiny import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numbers_are_transformers(dtype):
    norm = LlamaRMSNorm(64, eps=1e-3).to(dtype)
    made = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(64, generator=made))
    x = torch.randn(5, 64, generator=made).to(dtype)
    expected = norm(x)
    fuse_norms(norm)
    assert "forward" in vars(norm)
    found = norm(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=1e-2)


def test_a_models_norms_are_fused_and_its_numbers_stay():
    model = tiny_model(scale=4.0)
    ids = torch.arange(6, 14)[None]
    expected = model(ids).logits
    fuse_norms(model)
    assert sum("forward" in vars(module) for module in model.modules()) == 2 * model.config.num_hidden_layers + 1
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)


def test_a_noisy_weight_is_read():
    norm = LlamaRMSNorm(8)
    fuse_norms(norm)
    x = torch.ones(1, 8)
    norm.weight.data.mul_(3.0)
    torch.testing.assert_close(norm(x), 3.0 * x, atol=1e-4, rtol=0)


def test_other_norms_and_mixed_dtypes_stay_as_they_are():
    other = Gemma2RMSNorm(8)  # times 1 + weight
    fuse_norms(other)
    assert "forward" not in vars(other)
    norm = LlamaRMSNorm(8)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    before = norm(x)
    fuse_norms(norm)
    assert norm(x).dtype == before.dtype == torch.float32
