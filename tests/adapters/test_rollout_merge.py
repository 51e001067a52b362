"""The adapter merged for a rollout: what computes then, what the weights hold, and that every bit returns."""

import logging
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, TaskType, get_peft_model

from perl import device
from perl.adapters import ADAPTERS, rollout_merge
from perl.adapters.layers import adapted_layers
from perl.adapters.rollout_merge import RolloutMerge
from perl.config.schema import PeftConfig
from perl.noise.injector import NoiseInjector
from tests.tiny import tiny_model

pytestmark = pytest.mark.numeric

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


@pytest.fixture(params=["packed", "in place"])
def way(request, monkeypatch):
    """How a float32 model is merged: into oneDNN's copies of its weights, or, as on an accelerator, in place."""
    if request.param == "in place":
        monkeypatch.setattr(rollout_merge, "packable", lambda *_: [])
    return request.param


@pytest.mark.parametrize("method", sorted(ADAPTERS.keys() - {"none"}))
def test_merged_weights_compute_what_the_adapter_does_and_every_bit_returns(way, method):
    model = make(method)
    before, apart = state(model), logits(model)
    with model.disable_adapter():
        base = logits(model)
    assert (base - apart).abs().max() > 1e-2
    forwards = []
    layer: Any = adapted_layers(model)[0].layer
    if isinstance(getattr(layer, "lora_A", None), torch.nn.ModuleDict):  # not AdaLoRA's ParameterDict
        layer.lora_A["default"].register_forward_hook(lambda *_: forwards.append(1))
    written = way == "in place" or method == "ln_tuning"  # a norm has no copy to pack
    merge = RolloutMerge(model)
    with merge.applied():
        assert merge.merged
        assert (logits(model) - apart).abs().max() < 1e-4
        assert all(parameter.data_ptr() == before[name][0] for name, parameter in model.named_parameters())
        assert layer.merged == written
        if not written:
            require_same(model, before)  # nothing is written to the base
    assert forwards == []
    require_same(model, before)
    assert torch.equal(logits(model), apart)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN packs no bfloat16 weights on this processor"
)
def test_a_trainer_in_bfloat16_samples_in_it(monkeypatch):
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: True)
    model = make()
    before, apart = state(model), logits(model)
    with RolloutMerge(model).applied(torch.bfloat16):
        forward = vars(adapted_layers(model)[0].layer)["forward"]
        assert (forward.dtype, forward.times) == (torch.bfloat16, 2)
        difference = (logits(model) - apart).abs().max()
    assert 1e-4 < difference < 2**-6 * apart.abs().max()
    require_same(model, before)
    assert torch.equal(logits(model), apart)


@pytest.mark.parametrize("std", [0.0, 0.5])
def test_a_base_that_holds_no_adapter_yet_is_not_packed_as_a_sum_of_two(std, monkeypatch):
    packed = []
    monkeypatch.setattr(rollout_merge, "prepack", lambda *args, merged=False: packed.append(merged))
    model = make(std=std)
    with RolloutMerge(model).applied(torch.bfloat16):
        assert packed.count(True) == (len(adapted_layers(model)) if std else 0)
        assert len(packed) >= len(adapted_layers(model))


def test_an_adapter_that_is_switched_off_while_packed_is_off():
    model = make()
    with model.disable_adapter():
        base = logits(model)
    with RolloutMerge(model).applied(), model.disable_adapter():
        assert (logits(model) - base).abs().max() < 1e-4


@pytest.mark.parametrize("merge", [True, False])
def test_linear_layers_are_packed_once_and_for_the_rollout_only(merge):
    model = make(LoraConfig(r=4, target_modules=["q_proj"]))
    linears = {module for module in model.modules() if type(module) is torch.nn.Linear}
    q_proj = {adapted.layer for adapted in adapted_layers(model)}
    inside = {module for layer in q_proj for module in layer.modules()} - q_proj  # its base, A and B
    with RolloutMerge(model, merge).applied():
        replaced = {module for module in model.modules() if "forward" in vars(module)}
    assert replaced == (linears - inside | q_proj if merge else linears | q_proj)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("method", "scale"), [("lora", 2.0), ("rslora", 4.0), ("dora", 2.0)])  # 8 / 4, 8 / sqrt(4)
def test_a_merged_weight_is_the_papers_formula(method, scale, dtype):
    """base + scale * BA (arXiv 2106.09685, 2312.03732); magnitude * V / ||V|| of that by rows (arXiv 2402.09353)."""
    for adapted in adapted_layers(make(method, dtype=dtype, std=0.5)):
        layer, merged = adapted.layer, adapted.merged()["weight"]
        base = layer.base_layer.weight.detach().float()
        want = base + scale * layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
        if method == "dora":
            want *= (layer.lora_magnitude_vector["default"].weight / want.norm(dim=1))[:, None]
        assert merged.dtype == torch.float32
        assert (want - base).abs().max() > 0.1
        torch.testing.assert_close(merged, want, atol=1e-5, rtol=1e-5)


def test_a_weight_merged_in_place_is_base_plus_scale_times_ba_rounded_once():
    model = make(dtype=torch.bfloat16, std=0.5)
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    update = 2.0 * layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()  # 8 / 4
    merged = layer.base_layer.weight.float() + update
    with RolloutMerge(model).applied():
        assert layer.base_layer.weight.dtype == torch.bfloat16
        assert torch.equal(layer.base_layer.weight, merged.bfloat16())


def test_an_exception_inside_brings_every_bit_back(way):
    model = make()
    before = state(model)
    with pytest.raises(RuntimeError, match="lost"), RolloutMerge(model).applied():
        raise RuntimeError("the device is lost")
    require_same(model, before)


def test_a_merge_that_breaks_half_way_brings_every_bit_back(way, monkeypatch):
    model = make()
    before = state(model)
    merge = RolloutMerge(model)
    merged = type(merge.layers[-1]).merged

    def breaks(adapted):
        if adapted.name == merge.layers[-1].name and merge.merged:
            raise RuntimeError("the device is lost")
        return merged(adapted)

    monkeypatch.setattr(type(merge.layers[-1]), "merged", breaks)
    with pytest.raises(RuntimeError, match="lost"), merge.applied():
        pass
    require_same(model, before)


@pytest.mark.parametrize("noise_first", [True, False])
def test_noise_and_merge_in_either_order(way, noise_first):
    model = make()
    before = state(model)
    noise = NoiseInjector(model, ["post_attention_layernorm"], ["input_layernorm"], seed=1, relative=False)
    with noise.applied(0.5, (0, 0)):
        noisy = logits(model)
    merge = RolloutMerge(model)
    contexts = [noise.applied(0.5, (0, 0)), merge.applied()]
    outer, inner = contexts if noise_first else contexts[::-1]
    with outer, inner:
        assert (logits(model) - noisy).abs().max() < 1e-4
    require_same(model, before)


def test_auto_leaves_a_young_adapter_unmerged_and_merges_it_later(caplog):
    model = make(dtype=torch.bfloat16, std=1e-4)
    merge = RolloutMerge(model, "auto")
    before, apart = state(model), logits(model)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            with merge.applied():
                assert not merge.merged
                assert torch.equal(logits(model), apart)
        assert merge.rounding_error > 0.3
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=1.0)
        with merge.applied():
            assert merge.merged
    assert merge.rounding_error < 0.05
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2
    assert "unmerged" in lines[0]
    assert "over 8% of it" in lines[0]
    assert "is merged into" in lines[1]
    assert all(torch.equal(p, before[n][1]) for n, p in model.named_parameters() if "lora_B" not in n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("merge", [True, "auto"])
def test_an_adapter_that_changes_nothing_yet_is_left_out_and_nothing_is_copied(way, merge, dtype, caplog, monkeypatch):
    model = make(dtype=dtype, std=0.0)
    before = state(model)
    rollouts = RolloutMerge(model, merge)
    monkeypatch.setattr(rollouts, "_clean", lambda *_: pytest.fail("a weight was copied"))
    with model.disable_adapter():
        base = logits(model)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            with rollouts.applied():
                assert (logits(model) - base).abs().max() < 1e-4
                assert torch.equal(logits(model), base) or (way, dtype) == ("packed", torch.float32)
                assert rollouts._written == []
    assert rollouts.rounding_error == 0.0
    assert ["changes no weight yet" in record.message for record in caplog.records] == [True]
    require_same(model, before)


def test_one_layer_that_has_moved_is_merged():
    model = make(dtype=torch.bfloat16, std=0.0)
    last = adapted_layers(model)[-1]
    with torch.no_grad():
        last.layer.lora_B["default"].weight.fill_(1.0)
    before = state(model)
    merge = RolloutMerge(model, True)
    with merge.applied():
        changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n][1])}
        assert changed == {f"base_model.model.{last.name}.base_layer.weight"}
    require_same(model, before)


def test_whether_there_is_an_update_is_decided_by_all_ranks(monkeypatch):
    """This rank's shard of the update is zero, another one's is not."""
    merge = RolloutMerge(make(dtype=torch.bfloat16, std=0.0), True)
    asked = []
    monkeypatch.setattr(rollout_merge, "any_rank", lambda holds, where: asked.append(holds) or True)
    monkeypatch.setattr(rollout_merge.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(rollout_merge.dist, "all_reduce", lambda tensor: None)
    with merge.applied():
        assert len(merge._written) == sum(len(adapted.weights()) for adapted in merge.layers)
    assert asked == [False]


def test_auto_begins_below_8_percent_and_stops_above_12(monkeypatch, caplog):
    merge = RolloutMerge(make(dtype=torch.bfloat16, std=0.5), "auto")
    errors = [0.5, 0.11, 0.09, 0.08, 0.09, 0.11, 0.12, 0.13, 0.11, 0.09, 0.07]
    measured = iter(errors)
    monkeypatch.setattr(merge, "_measure", lambda: next(measured))
    found = []
    with caplog.at_level(logging.INFO):
        for _ in errors:
            with merge.applied():
                found.append(merge.merged)
    assert found == [False, False, False, True, True, True, True, False, False, False, True]
    said = ["is merged" in record.message for record in caplog.records]
    assert said == [False, True, False, True]  # once for each change
    assert "over 8% of it" in caplog.records[0].message
    assert "at most 12% of it" in caplog.records[1].message


@pytest.mark.parametrize("merging", [True, False])
def test_between_the_bounds_a_rollout_does_what_the_one_before_did(merging, monkeypatch):
    merge = RolloutMerge(make(dtype=torch.bfloat16, std=0.5), "auto")
    merge.merging = merging
    monkeypatch.setattr(merge, "_measure", lambda: 0.1)
    with merge.applied():
        assert merge.merged == merging


def test_true_merges_whatever_is_lost_and_false_never_does():
    model = make(dtype=torch.bfloat16, std=1e-4)
    forced, never = RolloutMerge(model, True), RolloutMerge(model, False)
    with forced.applied():
        assert forced.merged
    assert forced.rounding_error > 0.3
    with never.applied():
        assert not never.merged
    assert never.rounding_error is None


def test_rounding_error_is_the_sum_over_layers_by_hand():
    model = make(LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]), dtype=torch.bfloat16, std=0.01)
    lost = update = 0.0
    for adapted in adapted_layers(model):
        layer = adapted.layer
        base = layer.base_layer.weight.detach().double()
        a, b = (part["default"].weight.detach().double() for part in (layer.lora_A, layer.lora_B))
        delta = 2.0 * b @ a
        lost += float(((base + delta).bfloat16().double() - base - delta).square().sum())
        update += float(delta.square().sum())
    merge = RolloutMerge(model, True)
    with merge.applied():
        pass
    assert merge.rounding_error == pytest.approx((lost / update) ** 0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4), "changes no weights"),
        (LoraConfig(r=4, target_modules=["lm_head"]), "tied to another weight"),
    ],
)
def test_what_cannot_be_merged_says_so_once_and_runs_unmerged(config, reason, caplog):
    base = tiny_model()
    base.lm_head.weight = base.model.embed_tokens.weight
    model = get_peft_model(base, config).eval()
    before = state(model)
    merge = RolloutMerge(model, True)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            with merge.applied():
                assert not merge.merged
    assert [reason in record.message for record in caplog.records] == [True]
    require_same(model, before)


def test_other_methods_merge_by_pefts_own_merge(way):
    model = make(IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), std=0.5)
    before, apart = state(model), logits(model)
    merge = RolloutMerge(model)
    with merge.applied():
        assert merge.merged
        assert (logits(model) - apart).abs().max() < 1e-4
    require_same(model, before)
