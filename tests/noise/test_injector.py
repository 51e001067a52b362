"""Noise on a tiny Qwen2: where it lands, how large it is, and that nothing of it stays."""

import pytest
import torch
from torch import nn

from perl.base.errors import UserError
from perl.noise.injector import NoiseInjector, find_targets
from tests.tiny import tiny_model

pytestmark = pytest.mark.numeric


def guide_injector(model, seed=0):
    return NoiseInjector(model, ["post_attention_layernorm"], ["input_layernorm"], seed, relative=False)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_only_the_chosen_norms_change_and_every_bit_returns():
    model = tiny_model()
    before = state(model)
    injector = guide_injector(model)
    with injector.applied(0.05, draw=(0, 0)):
        during = state(model)
    changed = {name for name in before if not torch.equal(before[name], during[name])}
    assert changed == {f"model.layers.{i}.post_attention_layernorm.weight" for i in range(2)}
    after = state(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_exception_inside_leaves_clean_weights():
    model = tiny_model(dtype=torch.bfloat16)
    before = state(model)
    with pytest.raises(RuntimeError, match="out of memory"), guide_injector(model).applied(0.05, draw=(0, 0)):
        raise RuntimeError("out of memory")
    assert all(torch.equal(before[name], tensor) for name, tensor in state(model).items())


def test_size_is_sigma():
    model = tiny_model(hidden_size=2048, layers=4)  # 8,192 noisy numbers: the standard error of their RMS is 0.8 %
    injector = guide_injector(model)
    for sigma in (0.05, 0.0005):
        with injector.applied(sigma, draw=(1, 0)):
            noise = torch.cat([t.weight.detach() - 1.0 for t in injector.targets])
        assert noise.square().mean().sqrt().item() == pytest.approx(sigma, rel=0.04)
        assert noise.mean().item() == pytest.approx(0.0, abs=4 * sigma / 8192**0.5)
        assert injector.realized_sigma == pytest.approx(sigma, rel=0.04)


def test_bfloat16_eats_small_noise_and_the_realized_sigma_says_so():
    # Around 1 the neighbours in bfloat16 are 1/256 below and 1/128 above: 0.0005 hardly ever reaches halfway.
    injector = guide_injector(tiny_model(dtype=torch.bfloat16, hidden_size=2048))
    with injector.applied(0.0005, draw=(0, 0)):
        pass
    assert injector.realized_sigma < 0.0003
    with injector.applied(0.05, draw=(0, 0)):
        pass
    assert injector.realized_sigma == pytest.approx(0.05, rel=0.05)


def test_draws_are_reproducible_by_seed_and_rollout_and_differ_otherwise():
    def noise(seed, draw):
        injector = guide_injector(tiny_model(), seed)
        with injector.applied(0.1, draw):
            return injector.targets[0].weight.detach().clone()

    assert torch.equal(noise(7, (3, 1)), noise(7, (3, 1)))
    assert not torch.equal(noise(7, (3, 1)), noise(7, (3, 2)))
    assert not torch.equal(noise(7, (3, 1)), noise(7, (4, 1)))
    assert not torch.equal(noise(7, (3, 1)), noise(8, (3, 1)))


def test_two_layers_get_different_noise():
    injector = guide_injector(tiny_model())
    with injector.applied(0.1, draw=(0, 0)):
        first, second = (target.weight.detach().clone() for target in injector.targets)
    assert not torch.equal(first, second)


def test_sigma_zero_changes_nothing():
    model = tiny_model()
    before = state(model)
    with guide_injector(model).applied(0.0, draw=(0, 0)):
        assert all(torch.equal(before[name], tensor) for name, tensor in state(model).items())


def test_noise_moves_the_distribution_more_with_a_larger_sigma():
    model = tiny_model(scale=4.0)
    injector = guide_injector(model)
    ids = torch.arange(16).view(1, 16)
    with torch.no_grad():
        clean = model(ids).logits.log_softmax(-1)
        kl = []
        for sigma in (0.0, 0.01, 0.1, 1.0):
            with injector.applied(sigma, draw=(0, 0)):
                noisy = model(ids).logits.log_softmax(-1)
            kl.append((clean.exp() * (clean - noisy)).sum(-1).mean().item())
    assert kl[0] == 0.0
    assert 0 < kl[1] < kl[2] < kl[3]


QERL = ["input_layernorm", "post_attention_layernorm"]
READ = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}


@pytest.mark.parametrize("norm", QERL)
def test_the_projections_behind_a_norm_share_its_noise(norm):
    """As QeRL merges it (arXiv 2510.11696, equations 9 to 12): all of them read the same hidden states, and each
    computes as if row i of its weights were multiplied by 1 + z_i / w_i. In the first layer the norm's own input is
    clean."""
    model = tiny_model(layers=1).eval()
    layer = model.model.layers[0]
    with torch.no_grad():
        getattr(layer, norm).weight.uniform_(0.2, 2.0)
    projections = {name: model.get_submodule(path) for path, name in projections_of(layer)}
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, module in projections.items():
        module.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: (inputs[0], output)}))

    def run():
        seen.clear()
        with torch.no_grad():
            model(torch.arange(6, 14).view(1, 8))
        return dict(seen)

    clean, weight = run(), getattr(layer, norm).weight.detach().clone()
    injector = NoiseInjector(model, [norm], [], seed=3, relative=False)
    with injector.applied(0.3, draw=(0, 0)):
        factor = getattr(layer, norm).weight.detach() / weight
        noisy = run()
    first, *others = READ[norm]
    assert not torch.equal(noisy[first][0], clean[first][0])
    assert all(noisy[name][0] is noisy[first][0] for name in others)
    for name in READ[norm]:
        of, x = projections[name], clean[name][0]
        expected = torch.nn.functional.linear(x, of.weight * factor, of.bias)
        torch.testing.assert_close(noisy[name][1], expected)


def projections_of(layer):
    for path, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            yield f"model.layers.0.{path}", path.rpartition(".")[2]


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_which_norms_qerls_paper_and_code_and_the_guide_choose(family):
    """Two layers. The code's class names would leave all of Qwen3 out; by name its norms of queries and of keys, which
    no other projection reads, are chosen too."""
    model = tiny_model(family)
    own = ["self_attn.q_norm", "self_attn.k_norm"] if family == "qwen3" else []

    def chosen(targets, without=()):
        return [target.name for target in find_targets(model, targets, without)]

    def of_layers(names):
        return [f"model.layers.{layer}.{name}" for layer in range(2) for name in names]

    assert chosen(QERL) == of_layers(QERL)
    assert chosen(["norm"]) == [*of_layers([*own, *QERL]), "model.norm"]
    assert chosen([*QERL, "model.norm"]) == [*of_layers(QERL), "model.norm"]
    assert chosen(["post_attention_layernorm"], ["input_layernorm"]) == of_layers(QERL[1:])


def test_no_match_lists_the_norm_layers_there_are():
    with pytest.raises(UserError, match=r"input_layernorm, norm, post_attention_layernorm"):
        find_targets(tiny_model(), ["post_attention_norm"], [])


def test_excluding_everything_is_an_error():
    with pytest.raises(UserError, match="no norm layer"):
        find_targets(tiny_model(), ["layernorm"], ["layernorm"])


def test_a_linear_called_norm_is_not_a_norm():
    model = nn.ModuleDict({"post_attention_layernorm": nn.Linear(4, 4)})
    with pytest.raises(UserError, match="none"):
        find_targets(model, ["post_attention_layernorm"], [])
