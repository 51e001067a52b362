"""How large noise is for its weights, computed by hand."""

import pytest
import torch

from perl.base.errors import UserError
from perl.config.schema import NoiseConfig
from perl.noise.injector import NoiseInjector
from perl.noise.size import size_metrics, size_warning
from tests.tiny import tiny_model

pytestmark = pytest.mark.numeric

NAMES = ["model.layers.0.post_attention_layernorm", "model.layers.1.post_attention_layernorm"]


def scaled_model(*sizes, **kwargs):
    """Half of each layer's norm weights are 1.4 * size, half 0.2 * size: their RMS is size (1.96 + 0.04 = 2)."""
    model = tiny_model(layers=len(sizes), **kwargs)
    for size, layer in zip(sizes, model.model.layers, strict=True):
        weight = layer.post_attention_layernorm.weight
        with torch.no_grad():
            weight[0::2], weight[1::2] = 1.4 * size, 0.2 * size
    return model


def injector_of(model, relative=False):
    made = NoiseInjector(model, ["post_attention_layernorm"], [], 0, relative)
    made.measure()
    return made


def test_rms_of_each_layers_clean_weights():
    assert injector_of(scaled_model(0.25, 2.0)).rms == pytest.approx([0.25, 2.0])


def test_relative_sigma_is_the_mean_over_layers_and_the_largest():
    # 0.05 / 0.25 = 0.2 and 0.05 / 2 = 0.025
    injector = injector_of(scaled_model(0.25, 2.0))
    expected = {"aqn/sigma_relative": 0.1125, "aqn/sigma_relative_max": 0.2}
    assert size_metrics(injector.sigmas(0.05), injector.rms) == pytest.approx(expected)
    relative = injector_of(scaled_model(0.25, 2.0), relative=True)
    expected = {"aqn/sigma_relative": 0.05, "aqn/sigma_relative_max": 0.05}
    assert size_metrics(relative.sigmas(0.05), relative.rms) == pytest.approx(expected)


def test_before_measuring_and_for_weights_of_zero_there_is_no_relative_sigma():
    assert size_metrics([0.1, 0.1], []) == {}
    assert size_metrics([0.1, 0.1], [1.0, 0.0]) == {}
    assert size_warning(NoiseConfig(), NAMES, [1.0, 0.0]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relative_noise_is_scaled_by_each_layer_and_every_bit_returns(dtype):
    model = scaled_model(0.25, 2.0, hidden_size=2048, dtype=dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    injector = injector_of(model, relative=True)
    with injector.applied(0.1, draw=(0, 0)):
        for target, size in zip(injector.targets, (0.25, 2.0), strict=True):
            added = target.weight.detach().float() - before[f"{target.name}.weight"].float()
            # 2,048 numbers: the standard error of their RMS is 1.6 %
            assert added.square().mean().sqrt().item() == pytest.approx(0.1 * size, rel=0.07)
    assert injector.realized_sigma == pytest.approx(0.1, rel=0.07)  # in units of sigma
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_relative_noise_on_weights_of_size_one_is_the_absolute_noise():
    drawn = []
    for relative in (False, True):
        injector = injector_of(tiny_model(), relative)
        with injector.applied(0.1, draw=(2, 0)):
            drawn.append(injector.targets[0].weight.detach().clone())
    assert torch.equal(*drawn)


def test_relative_noise_on_weights_of_zero_is_refused():
    with pytest.raises(UserError, match=r"all weights of model\.layers\.1\.post_attention_layernorm are 0"):
        injector_of(scaled_model(1.0, 0.0), relative=True)


def test_the_warning_names_the_size_and_what_to_write():
    said = size_warning(NoiseConfig(sigma_start=0.05), NAMES, [0.23, 0.23])
    assert said == (
        "noise_injection: post_attention_layernorm weights of this model have an RMS of 0.23: sigma_start 0.05 is"
        " 0.22 of it, which can silence the reward; write --config.noise_injection.sigma_start 0.0046 or"
        " --config.noise_injection.relative true"
    )


def test_the_warning_shows_how_far_layers_differ():
    # 0.05 / 0.2 and 0.05 / 0.4: 0.1875 on average, of 0.05 / 0.1875 = 0.267
    said = size_warning(NoiseConfig(sigma_start=0.05), NAMES, [0.2, 0.4])
    assert said is not None
    assert "an RMS of 0.27 (0.2 to 0.4 by layer): sigma_start 0.05 is 0.19 of it" in said
    assert "sigma_start 0.0053 " in said  # 0.02 * 0.267


def test_the_warning_proposes_an_end_too_where_the_start_would_fall_under_it():
    said = size_warning(NoiseConfig(sigma_start=0.05), NAMES, [0.01, 0.01])
    assert said is not None
    assert "sigma_start 0.0002 --config.noise_injection.sigma_end 2e-06 or" in said
    adaptive = size_warning(NoiseConfig(sigma_start=0.05, schedule="target_kl"), NAMES, [0.01, 0.01])
    assert adaptive is not None
    assert "sigma_end" not in adaptive


def test_the_warning_for_relative_noise():
    said = size_warning(NoiseConfig(sigma_start=0.5, relative=True), NAMES, [0.2, 0.4])
    assert said == (
        "noise_injection.relative: sigma_start is 0.5 of the RMS of post_attention_layernorm weights, which can silence"
        " the reward; write --config.noise_injection.sigma_start 0.02"
    )
    assert size_warning(NoiseConfig(sigma_start=0.05, relative=True), NAMES, [0.2, 0.4]) is None


def test_no_warning_up_to_a_tenth():
    assert size_warning(NoiseConfig(sigma_start=0.1), NAMES, [1.0, 1.0]) is None
    assert size_warning(NoiseConfig(sigma_start=0.11), NAMES, [1.0, 1.0]) is not None
    assert size_warning(NoiseConfig(sigma_start=0.0), NAMES, [1.0, 1.0]) is None
