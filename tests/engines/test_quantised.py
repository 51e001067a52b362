"""Linear layers of int8 weights: the numbers by hand, rows that know nothing of each other, what they lose, and the
sampler that they make."""

import logging
from typing import get_args, get_type_hints

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from perl.adapters.rollout_merge import RolloutMerge
from perl.base.errors import UserError
from perl.config.schema import RolloutConfig
from perl.engines import quantised
from perl.engines.quantised import (
    SCHEMES,
    FloatProduct,
    HiddenStates,
    Int4Product,
    Int8Product,
    Quantisation,
    QuantisedLayers,
    QuantisedProduct,
    by_size,
    global_scale,
    quantise_e4m3,
    quantise_groups,
    quantise_nvfp4,
    quantise_rows,
    wide_inputs,
)
from perl.engines.quantised_base import QuantisedBase, quantisable
from perl.engines.torch_policy import TorchPolicyEngine, TorchRules
from perl.noise.injector import NoiseInjector
from perl.records import Weights
from tests.engines.models import completions, tiny
from tests.engines.test_torch_policy import SAMPLING, adapted, ask, drawn, make_engine, same, state
from tests.quantised import needs_int8

pytestmark = [pytest.mark.numeric, needs_int8]


EIGHT = torch.empty(0, dtype=torch.int64)
"""No input has 16 bits."""


def product(weight, bias=None, bits=16) -> QuantisedProduct:
    """Of int8 weights, with activations of so many bits; 4: of int4 weights. With 12, inputs 0 and 3 have 16."""
    if bits == 4:
        return Int4Product(weight, bias)
    return Int8Product(weight, bias, HiddenStates(), {8: EIGHT, 12: torch.tensor([0, 3]), 16: None}[bits])


def test_rows_as_whole_numbers_by_hand():
    numbers, scale = quantise_rows(torch.tensor([[1.27, -0.5, 0.0, 0.013], [0.0, 0.0, 0.0, 0.0]]), 127)
    assert scale.flatten().tolist() == pytest.approx([0.01, 0.0])
    assert numbers.tolist() == [[127.0, -50.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(("bits", "expected"), [
    # w = [[127, -64, 32], [0, 127, -127]] at scales 0.01 and 0.02; of x = [1.27, 0.3, -0.1] the numbers of 8 bits are
    # [127, 30, -10] at scale 0.01, those of 16 bits [16256, 3840, -1280] at 1.27 / 16256.
    (8, [0.01 * 0.01 * (127 * 127 - 64 * 30 - 32 * 10), 0.01 * 0.02 * (127 * 30 + 127 * 10)]),
    (16, [1.27 / 16256 * 0.01 * (127 * 16256 - 64 * 3840 - 32 * 1280), 1.27 / 16256 * 0.02 * 127 * (3840 + 1280)]),
])  # fmt: skip
def test_a_product_by_hand(bits, expected):
    weight = torch.tensor([[1.27, -0.64, 0.32], [0.0, 2.54, -2.54]])
    made = product(weight, torch.tensor([1.0, 0.0]), bits)(torch.tensor([[[1.27, 0.3, -0.1]]]))
    assert made.shape == (1, 1, 2)
    assert made.flatten().tolist() == pytest.approx([1.0 + expected[0], expected[1]], rel=1e-6)


def test_groups_as_whole_numbers_by_hand():
    # The largest of the first group is -2 = -8 * 0.25; of the second 4 = -8 * -0.5; of the third 0.
    weight = torch.zeros(1, 96)
    weight[0, :4] = torch.tensor([-2.0, 1.0, 0.3, 1.99])
    weight[0, 32:35] = torch.tensor([4.0, -1.0, -3.9])
    numbers, scale = quantise_groups(weight)
    assert scale[0, :2].tolist() == [0.25, -0.5]
    assert numbers[0, :4].tolist() == [-8.0, 4.0, 1.0, 7.0]  # 1.99 / 0.25 would be 8
    assert numbers[0, 32:35].tolist() == [-8.0, 2.0, 7.0]
    assert not numbers[0, 64:].any()


def test_a_product_of_int4_by_hand():
    weight = torch.zeros(3, 64)
    weight[0, :3] = torch.tensor([-2.0, 1.0, 0.3])  # 0.25 * [-8, 4, 1]
    weight[0, 32] = 4.0  # -0.5 * -8
    weight[2, 63] = -1.0  # 0.125 * -8
    x = torch.zeros(1, 1, 64)
    x[0, 0, [0, 1, 2, 32, 63]] = torch.tensor([1.0, 2.0, 4.0, -0.5, 8.0])  # all of them bfloat16 numbers
    made = product(weight, torch.tensor([0.0, 0.5, 0.0]), 4)(x)
    assert made.shape == (1, 1, 3)
    assert made.flatten().tolist() == [-2.0 + 2.0 + 1.0 - 2.0, 0.5, -8.0]


def test_numbers_of_fp8_by_hand():
    # An e4m3 has three bits of mantissa: 448, 28 * 16 / 17 -> 26, 0.5 as it is; the rows' scales are 2 / 448 and 0.
    numbers, scale = quantise_e4m3(torch.tensor([[2.0, -28 / 224 * 16 / 17, 0.5 / 224, 0.0], [0.0] * 4]))
    assert scale.flatten().tolist() == pytest.approx([2 / 448, 0.0])
    assert numbers.tolist() == [[448.0, -26.0, 0.5, 0.0], [0.0] * 4]


def test_numbers_of_nvfp4_by_hand():
    """With 2,688 = 448 * 6 for the scale of scales a group's is 448 times its largest number, an e4m3."""
    weight = torch.zeros(1, 48)
    weight[0, :6] = torch.tensor([-1.0, 0.5, 0.26, 0.24, 0.42, 0.01])  # in units of 1 / 6: -6, 3, 1.56, 1.44, 2.52
    weight[0, 16:19] = torch.tensor([0.5, 0.21, -0.125])  # in units of 1 / 12: 6, 2.52, -1.5
    assert global_scale([weight, weight / 2]) == 2688.0
    numbers, scales = quantise_nvfp4(weight, 2688.0)
    assert scales.tolist() == [[448.0, 224.0, 0.0]]
    assert numbers[0, :6].tolist() == [-12.0, 6.0, 3.0, 3.0, 6.0, 0.0]  # twice -6, 3, 1.5, 1.5, 3, 0
    assert numbers[0, 16:19].tolist() == [12.0, 6.0, -3.0]
    assert not numbers[0, 32:].any()
    ties = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] + [0.0] * 8])  # the even one of two neighbours
    numbers, scales = quantise_nvfp4(ties, 1.0)
    assert scales.tolist() == [[1.0]]
    assert numbers[0, :8].tolist() == [12.0, 0.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0]


def test_products_of_fp8_and_nvfp4_by_hand():
    weight = torch.zeros(2, 16)
    weight[0, :3], weight[1, 0] = torch.tensor([3.0, -1.0, 0.5]), 1.5
    x = torch.zeros(1, 1, 16)
    x[0, 0, :3] = torch.tensor([4.0, 2.0, 1.0])
    expected = [12.0 - 2.0 + 0.5 + 1.0, 6.0]
    for name in ("fp8", "nvfp4"):
        made = FloatProduct(weight, torch.tensor([1.0, 0.0]), SCHEMES[name], global_scale([weight]))(x)
        assert made.shape == (1, 1, 2)
        assert made.flatten().tolist() == pytest.approx(expected, rel=2**-8)


@pytest.mark.parametrize("bits", [4, 8, 12, 16])
@pytest.mark.parametrize("shape", [(64, 33), (32, 7), (576, 192), (320, 128)])
def test_a_rows_bits_do_not_depend_on_its_neighbours(bits, shape):
    torch.manual_seed(0)
    layer = product(torch.randn(shape[1], shape[0]), torch.randn(shape[1]), bits)
    rows = torch.randn(40, shape[0])
    rows[3] *= 1000.0
    whole = layer(rows)
    for first, last in ((0, 1), (3, 4), (2, 4), (0, 8), (7, 40)):
        assert torch.equal(layer(rows[first:last]), whole[first:last])
    assert torch.equal(layer(rows.view(8, 5, -1)), whole.view(8, 5, -1))


def test_sixteen_bits_lose_a_hundredth_of_what_eight_do():
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (48, 64)).float()  # nothing is lost of it
    weight[:, 0] = 127.0
    x = torch.randn(50, 64)
    exact = (x.double() @ weight.double().t()).float()
    lost = {bits: float((product(weight, bits=bits)(x) - exact).norm() / exact.norm()) for bits in (8, 16)}
    assert 1e-3 < lost[8] < 0.02
    assert lost[16] < lost[8] / 50


def test_two_inputs_of_sixteen_bits_leave_the_others_their_digits():
    """Inputs 0 and 3 are 30 times as large as the others, which eight bits would leave four numbers either way."""
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (48, 64)).float()
    weight[:, 0] = 127.0
    x = torch.randn(50, 64)
    x[:, [0, 3]] = torch.tensor([90.0, -120.0])
    small = x.clone()
    small[:, [0, 3]] = 0.0
    of_others = (small.double() @ weight.double().t()).float()
    exact = (x.double() @ weight.double().t()).float()
    lost = {bits: float((product(weight, bits=bits)(x) - exact).norm() / of_others.norm()) for bits in (8, 12)}
    assert lost[8] > 0.1
    assert lost[12] < 0.02


def test_numbers_with_inputs_of_sixteen_bits_by_hand():
    # The others' largest is 1.27 = 127 * 0.01; 20.0 is then 2000 = 15 * 128 + 80, which rounds to 16 * 128 - 48.
    x = torch.tensor([[20.0, 1.27, -0.5, 0.0], [0.0, 1.28, 0.0, 325.12]])
    wide = torch.tensor([0, 3])
    largest = torch.tensor([16256.0, 127.0, 127.0, 16256.0])
    low, high, scale = HiddenStates().numbers(x, wide, largest)
    assert scale.flatten().tolist() == pytest.approx([0.01, 0.02])  # 325.12 would be more than 16256 at 0.01
    assert (low.int() - 128).tolist() == [[-48, 127, -50, 0], [0, 64, 0, 0]]
    assert (high.int() - 128).tolist() == [[16, 0], [0, 127]]


def test_the_inputs_of_sixteen_bits_are_those_that_are_large_on_a_probe():
    model = tiny()
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight[[3, 17, 40]] = 50.0
    layers = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    found = wide_inputs(model, list(layers.values()), SCHEMES["int8_w8a8"])
    for name in ("gate_proj", "up_proj"):
        assert {3, 17, 40} <= set(found[layers[f"model.layers.1.mlp.{name}"]].tolist())
    assert len(found[layers["model.layers.0.self_attn.q_proj"]]) == 16  # a quarter
    assert wide_inputs(model, [layers["lm_head"]], SCHEMES["int8_w8a8"]).keys() == {layers["lm_head"]}
    assert wide_inputs(model, [layers["lm_head"]], SCHEMES["int8"]) == {}


@pytest.mark.parametrize("bits", [4, 8, 12, 16])
def test_a_row_with_a_nan_or_an_infinity_is_not_finite_alone(bits):
    x = torch.randn(4, 32)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    made = product(torch.randn(8, 32), bits=bits)(x)
    assert not made[[1, 2]].isfinite().any()
    assert made[[0, 3]].isfinite().all()


def test_hidden_states_are_read_once_and_forgotten():
    states = HiddenStates()
    x = torch.randn(3, 8)
    first = states.numbers(x, None, 16256)
    assert states.numbers(x, None, 16256) is first
    assert states.numbers(x.clone(), None, 16256) is not first
    states.forget()
    assert states._read is None


TOLD_APART = {"int8": 2e-2, "int8_w8a8": 2e-2, "int4": 5e-2, "fp8": 0.2, "nvfp4": 5e-2}
"""Nats; bfloat16 activations round at other places in a forward of all tokens."""


@pytest.mark.parametrize("quantization", sorted(SCHEMES))
def test_the_sampler_draws_with_the_quantised_base_and_leaves_every_bit(quantization, caplog):
    policy = make_engine(rollout={"quantization": quantization})
    before = state(policy.model)
    with caplog.at_level(logging.INFO):
        made = completions(policy, ask(), SAMPLING)
    layers = 21 if SCHEMES[quantization].floating else 22  # without the head
    assert f"{quantization}: {layers} linear layers in" in caplog.text
    assert same(state(policy.model), before)
    assert not any("forward" in vars(module) for module in policy.model.modules())
    assert policy.take_metrics() == {}
    for place, prompt in enumerate(ask()):
        with policy.applied(), torch.no_grad():
            logits = policy.model(torch.tensor([[*prompt.token_ids, *made[place].token_ids]])).logits[0]
        logps = (logits[len(prompt.token_ids) - 1 : -1].float() / SAMPLING.temperature).log_softmax(-1)
        drawn_logps = logps.gather(1, torch.tensor(made[place].token_ids)[:, None])[:, 0]
        assert drawn_logps.tolist() == pytest.approx(made[place].logprobs, abs=TOLD_APART[quantization])


def test_the_distance_to_the_trainers_policy():
    """Of a random model, the KL divergence in nats a token over all positions of the prompts."""
    found = {}
    for quantization in SCHEMES:
        policy = make_engine(adapted(dropout=0.0), rollout={"quantization": quantization})
        policy.model.eval()
        ids = torch.arange(3, 35).view(1, -1)
        with torch.no_grad():
            trainer = policy.model(ids).logits.log_softmax(-1)
            with policy.applied():
                sampler = policy.model(ids).logits.log_softmax(-1)
        found[quantization] = float((sampler.exp() * (sampler - trainer)).sum(-1).mean())
    assert 0 < found["int8"] <= 0.02
    assert 0 < found["int8_w8a8"] <= 0.1
    assert found["int8_w8a8"] < found["int4"] <= 1.0
    assert 0 < found["fp8"] < found["nvfp4"] <= 1.0


def test_the_adapter_counts_in_its_own_precision():
    """An update that int8 weights would round away moves the sampler as it moves the trainer."""
    model = adapted(moved=False, dropout=0.0).eval()
    ways = {True: QuantisedBase(model, "int8"), False: RolloutMerge(model)}
    ids = torch.arange(3, 19).view(1, -1)
    moves = {}
    with torch.no_grad():
        for quantised in (False, True):
            with ways[quantised].applied():
                before = model(ids).logits
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(2e-4)
            with ways[quantised].applied():
                moves[quantised] = model(ids).logits - before
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.zero_()
    assert float((moves[True] - moves[False]).norm() / moves[False].norm()) < 0.2


def test_noise_on_the_norms_works_over_the_quantised_base():
    model = adapted()
    policy = make_engine(
        model, rollout={"quantization": "int8"}, noise=NoiseInjector(model, ["norm"], [], seed=5, relative=False)
    )
    clean = drawn(policy)
    policy.publish(Weights(version=3, sigma=0.3))
    noisy = drawn(policy)
    assert policy.take_metrics()["aqn/sigma_realized"] == pytest.approx(0.3, rel=0.2)
    assert noisy != clean
    assert drawn(policy) == noisy
    policy.publish(Weights(version=4))
    assert drawn(policy) == clean


def test_an_evaluation_is_of_the_base_as_it_is_trained_above():
    quantised = make_engine(rollout={"quantization": "int8_w8a8"})
    plain = make_engine()
    asked = ask()
    ends = frozenset({2})
    drawn(quantised)
    of_one, of_other = (completions(engine.evaluating(ends, None), asked, SAMPLING) for engine in (quantised, plain))
    assert of_one == of_other


def test_what_is_quantised_and_what_is_refused():
    layers = quantisable(adapted(), "int8")
    assert len(layers) == 22
    assert not any("lora" in name for module in layers for name, _ in module.named_parameters())
    trained = get_peft_model(tiny(), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    assert len(quantisable(trained, "int8")) == 21  # the head is trained
    dora = get_peft_model(tiny(), LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    with pytest.raises(UserError, match=r"quantization int8: model\.layers\.0\.self_attn\.q_proj is Linear on Linear"):
        quantisable(dora, "int8")


def test_a_model_that_would_stay_mostly_as_it_is_is_refused():
    with pytest.raises(
        UserError, match=r"int8: .*experts.* is of no linear layer, and would stay as it is; write none"
    ):
        quantisable(tiny("qwen3_moe"), "int8")


def test_a_head_with_an_adapter_keeps_8_bits_too():
    model = get_peft_model(tiny(), LoraConfig(r=4, target_modules=["q_proj", "lm_head"])).eval()
    base = QuantisedBase(model, "int4")
    with base.applied(), torch.no_grad():
        model(torch.arange(3, 9).view(1, -1))
    assert [type(product) for product in base.layers.products].count(Int8Product) == 1
    assert type(base.layers.products[-1]) is Int8Product


def test_a_weight_that_is_quantised_in_blocks_is_the_same(monkeypatch):
    torch.manual_seed(0)
    weight, x = torch.randn(50, 64), torch.randn(5, 64)
    whole = {bits: product(weight, bits=bits)(x) for bits in (4, 8, 12, 16)}
    monkeypatch.setattr(quantised, "BLOCK", 7 * 64)
    assert all(torch.equal(product(weight, bits=bits)(x), made) for bits, made in whole.items())


def test_no_rows_are_no_error():
    assert all(product(torch.randn(8, 32), bits=bits)(torch.empty(0, 32)).shape == (0, 8) for bits in (4, 16))


def test_weights_that_are_not_here_whole_are_refused():
    with pytest.raises(UserError, match="int8: without vLLM there are no products of such weights on meta"):
        quantisable(tiny().to("meta"), "int8")
    spread = tiny()
    spread.lm_head.weight = torch.nn.Parameter(torch.empty(0))  # as ZeRO-3 leaves it
    with pytest.raises(UserError, match="int8: the weights are split over the devices"):
        quantisable(spread, "int8")
    with pytest.raises(UserError, match="int4: a layer has 80 inputs, which are no whole groups of 32; write int8"):
        quantisable(tiny(hidden_size=80, head_dim=16), "int4")


def test_a_model_of_images_is_refused():
    class Processor:
        image_processor = None

    with pytest.raises(UserError, match="quantization int8: is of models of text alone"):
        TorchPolicyEngine(adapted(), TorchRules(
            rollout=RolloutConfig(quantization="int8"), processing=Processor(),
            generation_config=GenerationConfig(pad_token_id=0, eos_token_id=2), generation_kwargs={},
        ))  # fmt: skip


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_what_a_copy_takes_is_what_plan_counts(name):
    layer, head, scheme = torch.nn.Linear(192, 48), torch.nn.Linear(96, 80), SCHEMES[name]
    wide = {layer: torch.arange(32), head: torch.arange(16)} if name == "int8_w8a8" else {}
    made = QuantisedLayers([layer, head], head, scheme, wide)
    counted = scheme.copied_bytes(192 * 48, 48, 96 * 80, 80)
    assert made.nbytes == counted + (48 * 32 + 80 * 16 if wide else 0)


def test_each_scheme_can_be_asked_for():
    named = set(get_args(get_type_hints(RolloutConfig)["quantization"]))
    assert named == set(get_args(Quantisation)) == {"none", *SCHEMES}
    assert by_size(SCHEMES) == ["int8", "int4"]
    assert by_size(["nvfp4", "fp8"]) == ["fp8", "nvfp4"]
