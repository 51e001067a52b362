"""The adapter folded into the base: what the weights then hold, what computes, and that every bit returns."""

import logging

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, TaskType, get_peft_model

from perl import device
from perl.adapters import ADAPTERS
from perl.adapters.fold import AdapterFold
from perl.adapters.layers import adapted_layers, expected
from perl.config.schema import PeftConfig
from perl.noise.injector import NoiseInjector
from tests.tiny import tiny_model

TOKENS = torch.tensor([[7, 9, 11, 8, 20, 3]])


def make(config="lora", *, dtype=torch.float32, std=0.05):
    """A tiny PeftModel in evaluation mode whose B (and magnitudes) have moved by N(0, std²)."""
    if isinstance(config, str):
        config = ADAPTERS[config].build(PeftConfig(type=config, r=4, lora_alpha=8))
    model = get_peft_model(tiny_model(dtype=dtype, scale=4.0), config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter.add_(torch.randn_like(parameter) * std)
    return model


def state(model):
    return {name: (parameter.data_ptr(), parameter.detach().clone()) for name, parameter in model.named_parameters()}


def require_same(model, before):
    for name, parameter in model.named_parameters():
        pointer, bits = before[name]
        assert torch.equal(parameter, bits), name
        assert parameter.data_ptr() == pointer, name
    assert not any(adapted.layer.merged for adapted in adapted_layers(model))


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits[0].float()


@pytest.mark.parametrize("method", sorted(ADAPTERS))
def test_folded_weights_compute_what_the_adapter_does_and_every_bit_returns(method):
    model = make(method)
    before, apart = state(model), logits(model)
    with model.disable_adapter():
        assert (logits(model) - apart).abs().max() > 1e-2
    forwards = []
    layer = adapted_layers(model)[0].layer
    layer.lora_A["default"].register_forward_hook(lambda *_: forwards.append(1))
    fold = AdapterFold(model)
    with fold.applied():
        assert fold.folded
        assert layer.merged
        assert (logits(model) - apart).abs().max() < 1e-4
        assert all(parameter.data_ptr() == before[name][0] for name, parameter in model.named_parameters())
    assert forwards == []
    require_same(model, before)
    assert torch.equal(logits(model), apart)


def test_a_folded_weight_is_base_plus_scale_times_ba_rounded_once():
    model = make(dtype=torch.bfloat16, std=0.5)
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    update = 2.0 * layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()  # 8 / 4
    merged = layer.base_layer.weight.float() + update
    with AdapterFold(model).applied():
        assert layer.base_layer.weight.dtype == torch.bfloat16
        assert torch.equal(layer.base_layer.weight, merged.bfloat16())


@pytest.mark.parametrize("method", sorted(ADAPTERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pefts_merge_is_the_written_out_formula(method, dtype):
    for adapted in adapted_layers(make(method, dtype=dtype)):
        for name, merged in adapted.merged().items():
            base = adapted.weights()[name].float()
            want = expected(adapted, name, base)
            assert want is not None
            assert ((merged - want.weight).abs() <= want.slack).all(), name
            # The slack is far below the update: an adapter that is a hundredth off would show.
            assert want.slack.mean() <= 0.01 * (merged - base).abs().mean()


def test_an_exception_inside_brings_every_bit_back():
    model = make(dtype=torch.bfloat16, std=0.5)
    before = state(model)
    with pytest.raises(RuntimeError, match="lost"), AdapterFold(model).applied():
        raise RuntimeError("the device is lost")
    require_same(model, before)


def test_a_fold_that_breaks_half_way_brings_every_bit_back(monkeypatch):
    model = make()
    before = state(model)
    fold = AdapterFold(model)
    merge = type(fold.layers[-1]).merged

    def breaks(adapted):
        if adapted.name == fold.layers[-1].name and any(a.layer.merged for a in fold.layers):
            raise RuntimeError("the device is lost")
        return merge(adapted)

    monkeypatch.setattr(type(fold.layers[-1]), "merged", breaks)
    with pytest.raises(RuntimeError, match="lost"), fold.applied():
        pass
    require_same(model, before)


@pytest.mark.parametrize("noise_first", [True, False])
def test_noise_and_fold_in_either_order(noise_first):
    model = make()
    before = state(model)
    noise = NoiseInjector(model, ["post_attention_layernorm"], ["input_layernorm"], seed=1)
    with noise.applied(0.5, (0, 0)):
        noisy = logits(model)
    fold = AdapterFold(model)
    contexts = [noise.applied(0.5, (0, 0)), fold.applied()]
    outer, inner = contexts if noise_first else contexts[::-1]
    with outer, inner:
        assert (logits(model) - noisy).abs().max() < 1e-4
    require_same(model, before)


def test_auto_keeps_a_young_adapter_apart_and_folds_it_later(caplog):
    model = make(dtype=torch.bfloat16, std=1e-4)
    fold = AdapterFold(model, "auto")
    before, apart = state(model), logits(model)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            with fold.applied():
                assert not fold.folded
                assert torch.equal(logits(model), apart)
        assert fold.share_lost > 0.3
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=1.0)
        with fold.applied():
            assert fold.folded
    assert fold.share_lost < 0.05
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2
    assert "kept apart" in lines[0]
    assert "over 10% of it" in lines[0]
    assert "folded" in lines[1]
    assert all(torch.equal(p, before[n][1]) for n, p in model.named_parameters() if "lora_B" not in n)


def test_true_folds_whatever_is_lost_and_false_never_does():
    model = make(dtype=torch.bfloat16, std=1e-4)
    forced, never = AdapterFold(model, True), AdapterFold(model, False)
    with forced.applied():
        assert forced.folded
    assert forced.share_lost > 0.3
    with never.applied():
        assert not never.folded
    assert never.share_lost is None


def test_share_lost_is_the_sum_over_layers_by_hand():
    model = make(LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]), dtype=torch.bfloat16, std=0.01)
    lost = update = 0.0
    for adapted in adapted_layers(model):
        layer = adapted.layer
        base = layer.base_layer.weight.detach().double()
        a, b = (part["default"].weight.detach().double() for part in (layer.lora_A, layer.lora_B))
        delta = 2.0 * b @ a
        lost += float(((base + delta).bfloat16().double() - base - delta).square().sum())
        update += float(delta.square().sum())
    fold = AdapterFold(model, True)
    with fold.applied():
        pass
    assert fold.share_lost == pytest.approx((lost / update) ** 0.5, rel=1e-3)


def test_the_copy_goes_to_host_memory_where_the_device_has_no_room(monkeypatch):
    model = make()
    size = sum(w.numel() * w.element_size() for adapted in adapted_layers(model) for w in adapted.weights().values())
    fold = AdapterFold(model)
    assert not fold._needs_host()  # a CPU has no other memory
    monkeypatch.setattr(device, "free_memory", lambda: 2 * size)
    assert not fold._needs_host()
    monkeypatch.setattr(device, "free_memory", lambda: 2 * size - 1)
    assert fold._needs_host()
    before = state(model)
    with fold.applied():
        pass
    require_same(model, before)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4), "changes no weights"),
        (LoraConfig(r=4, target_modules=["lm_head"]), "tied to another weight"),
    ],
)
def test_what_cannot_be_folded_says_so_once_and_runs_apart(config, reason, caplog):
    base = tiny_model()
    base.lm_head.weight = base.model.embed_tokens.weight
    model = get_peft_model(base, config).eval()
    before = state(model)
    fold = AdapterFold(model, True)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            with fold.applied():
                assert not fold.folded
    assert [reason in record.message for record in caplog.records] == [True]
    require_same(model, before)


def test_other_methods_fold_by_pefts_own_merge():
    model = make(IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), std=0.5)
    before, apart = state(model), logits(model)
    fold = AdapterFold(model)
    with fold.applied():
        assert fold.folded
        assert (logits(model) - apart).abs().max() < 1e-4
    require_same(model, before)
