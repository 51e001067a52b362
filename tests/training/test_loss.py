"""The loss's parts by hand, and against the formulas of TRL."""

import math

import pytest
import torch
from trl import GRPOTrainer

from perl.algorithms.grpo import equal_groups, weighted_sum
from perl.config.load import parse
from perl.training.loss import (
    EntropyBonus,
    LossInputs,
    LossSettings,
    Update,
    entropy_threshold,
    importance_ratio,
    off_policy_mask,
    policy_loss,
    vespo,
)

pytestmark = pytest.mark.numeric

LOG = math.log


def inputs(**columns):
    """Two rows; the second token of the second row is the environment's."""
    given = {
        "policy": torch.tensor([[LOG(0.6), LOG(0.2)], [LOG(0.9), LOG(0.5)]]),
        "old": torch.tensor([[LOG(0.5), LOG(0.4)], [LOG(0.3), LOG(0.1)]]),
        "mask": torch.tensor([[True, True], [True, False]]),
        "advantages": torch.tensor([[1.0], [-2.0]]),
    }
    return LossInputs(**(given | columns))


def value(settings, one=None, **update):
    outputs = policy_loss(
        one or inputs(), settings, Update(**({"rows": 2, "tokens": 3.0, "micro_batches": 1} | update))
    )
    return outputs.loss.item(), outputs.metrics


def test_the_clipped_loss_of_each_token_and_how_it_is_added_up():
    """Ratios 1.2, 0.5 and 3.0; within 0.2: 1.2, 0.8 and 1.2. -min: -1.2, -0.5 and 6, as 3.0 is worse for -2."""
    for loss_type, expected in {
        "grpo": ((-1.2 - 0.5) / 2 + 6.0) / 2,
        "dapo": (-1.2 - 0.5 + 6.0) / 3,
        "dr_grpo": (-1.2 - 0.5 + 6.0) / (2 * 4),
        "luspo": (-1.2 - 0.5 + 6.0) / 2,
        "bnpo": (-1.2 - 0.5 + 6.0) / 3,
    }.items():
        loss, metrics = value(LossSettings(loss_type=loss_type, longest=4))
        assert loss == pytest.approx(expected, rel=1e-5), loss_type
        assert metrics["clip_ratio/high_mean"].values.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("low", "high", "weights"),
    [(None, 1.5, [1.2, 0.5, 1.5]), (0.8, 1.5, [1.2, 0.8, 1.5]), (1.0, 1.0, [1.0, 1.0, 1.0])],
)
def test_cispo_with_verls_lower_bound(low, high, weights):
    """verl's compute_policy_loss_cispo: -clamp(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high) A log p, no gradient
    through the clamp, mean over the tokens. Ratios 1.2, 0.5 and 3. Held at 1 it is verl's gpg."""
    policy = torch.tensor([[LOG(0.6), LOG(0.2)], [LOG(0.9), 0.0]], requires_grad=True)
    one = inputs(policy=policy)
    settings = LossSettings(loss_type="cispo", epsilon_high=high, cispo_min_ratio=low)
    loss = policy_loss(one, settings, Update(rows=2, tokens=3.0, micro_batches=1)).loss
    factors = [w * a for w, a in zip(weights, [1.0, 1.0, -2.0], strict=True)]
    logs = [LOG(0.6), LOG(0.2), LOG(0.9)]
    assert loss.item() == pytest.approx(-sum(f * log for f, log in zip(factors, logs, strict=True)) / 3)
    (gradient,) = torch.autograd.grad(loss, policy)
    assert gradient.flatten().tolist() == pytest.approx([*(-f / 3 for f in factors), 0.0])


def test_a_hole_in_the_mask_changes_nothing_of_any_loss():
    """A token that the policy did not draw, whatever its numbers are: e^400 is infinite in float32."""
    wild = {
        "policy": torch.tensor([[LOG(0.6), LOG(0.2)], [LOG(0.9), -500.0]], requires_grad=True),
        "old": torch.tensor([[LOG(0.5), LOG(0.4)], [LOG(0.3), -900.0]]),
        "sampler": torch.tensor([[LOG(0.5), LOG(0.4)], [LOG(0.3), 900.0]]),
        "reference": torch.tensor([[LOG(0.5), LOG(0.4)], [LOG(0.3), -3.0]]),
    }
    tame = {name: column.detach().clone() for name, column in wild.items()}
    for column in tame.values():
        column[1, 1] = 0.0
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"):
        for level in ("token", "sequence"):
            settings = LossSettings(
                loss_type=loss_type, level=level, beta=0.1, off_policy_threshold=0.5, correction="token"
            )
            outputs = policy_loss(inputs(**wild), settings, Update(rows=2, tokens=3.0, micro_batches=1))
            loss, metrics = outputs.loss, outputs.metrics
            (gradient,) = torch.autograd.grad(loss, wild["policy"])
            assert gradient.isfinite().all()
            assert gradient[1, 1] == 0.0
            expected, others = value(settings, inputs(**tame))
            assert loss.item() == pytest.approx(expected), (loss_type, level)
            for name, (values, counted) in metrics.items():
                assert torch.equal(values[counted], others[name].values[counted]), name


def test_importance_ratio_by_hand():
    old = torch.log(torch.tensor([[0.5, 0.2, 0.9]]))
    sampler = torch.log(torch.tensor([[0.25, 0.4, 0.1]]))
    mask = torch.tensor([[True, True, False]])
    for mode, bounds, expected in (
        ("token", (None, 3.0), [2.0, 0.5, 1.0]),
        ("token", (0.8, 1.5), [1.5, 0.8, 1.0]),
        ("token_mask", (0.8, 1.5), [0.0, 0.0, 1.0]),
        ("token_mask", (None, None), [2.0, 0.5, 1.0]),
        ("sequence", (None, 3.0), [1.0]),
        ("sequence", (None, 0.7), [0.7]),
        ("sequence_mask", (None, 0.7), [0.0]),
    ):
        assert importance_ratio(old, sampler, mask, mode, *bounds).tolist() == [pytest.approx(expected)], mode
    nan = torch.tensor([[math.nan, LOG(0.4), 0.0]])  # a token of which vLLM gives no number
    assert importance_ratio(old, nan, mask, "token", None, 3.0).tolist() == [pytest.approx([1.0, 0.5, 1.0])]


def test_the_correction_for_a_long_completion_that_noise_has_moved():
    """KL 0.001 a token over 8,192 of them: the ratio of the whole completion is nearly 0 or beyond the bound, that of
    each token about 1 (TRL's default would leave a fortieth of the rows)."""
    generator = torch.Generator().manual_seed(0)
    apart = torch.randn(64, 8192, generator=generator) * math.sqrt(0.002) - 0.001
    mask, nothing = torch.ones(64, 8192, dtype=torch.bool), torch.zeros(64, 8192)
    assert importance_ratio(apart, nothing, mask, "sequence_mask", None, 3.0).mean() < 0.3
    assert importance_ratio(apart, nothing, mask, "token", None, 3.0).mean() == pytest.approx(1.0, abs=0.01)


def test_weights_and_masks_are_those_of_trl():
    generator = torch.Generator().manual_seed(1)
    policy, old, sampler = (-torch.rand(6, 5, generator=generator) for _ in range(3))
    mask = torch.rand(6, 5, generator=generator) > 0.3
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [-0.2], [-3.0], [0.0]])
    one = LossInputs(policy=policy, old=old, mask=mask, advantages=advantages, sampler=sampler)
    theirs = GRPOTrainer.get_off_policy_mask(advantages, policy, sampler, mask, 0.05)
    assert 0 < theirs.sum() < 6
    assert torch.equal(off_policy_mask(one, 0.05), theirs.float())
    ratio = importance_ratio(old, sampler, mask, "token", None, 3.0)
    phi = GRPOTrainer.get_gamma_weights(advantages, policy - old, mask, ratio, 2.0, 3.0, 3.0, 2.0)
    settings = LossSettings(loss_type="vespo", correction="token")
    _, shown = vespo(one, policy - old, settings)
    torch.testing.assert_close(shown["vespo/phi_seq_mean"], phi)


def test_equal_rewards_are_found_exactly():
    nan = float("nan")
    rewards = torch.tensor([[1.0, 1.0]] * 8 + [[1.0, 1.0]] * 7 + [[1.0, 0.0]] + [[nan, nan]] * 8)
    weights = torch.tensor([1.0, 0.2])
    assert equal_groups(weighted_sum(rewards, weights).view(-1, 8)).tolist() == [True, False, True]
    # What it is for: in floating point the mean of eight 1.2 is not 1.2.
    total = (rewards[:8] * weights).sum(dim=1)
    assert ((total - total.mean()) / (total.std() + 1e-4)).abs().max() > 1e-3


def test_the_entropy_that_a_share_of_the_tokens_reaches():
    entropies = torch.tensor([[0.1, 0.9, 0.5], [0.3, 7.0, 0.7]])
    mask = torch.tensor([[True, True, True], [True, False, True]])
    threshold = entropy_threshold(entropies, mask, 0.4, lambda local: local)  # of 0.1, 0.3, 0.5, 0.7, 0.9
    assert threshold.item() == pytest.approx(0.58)
    nothing = entropy_threshold(entropies, torch.zeros_like(mask), 0.4, lambda local: local)
    assert not (entropies >= nothing).any()


@pytest.mark.parametrize("share", [0.0, 0.2, 0.37, 0.8])
def test_the_threshold_is_torchs_quantile_and_knows_no_limit(share):
    entropies = torch.rand(3, 1001, generator=torch.Generator().manual_seed(2))
    mask = torch.rand(3, 1001, generator=torch.Generator().manual_seed(3)) > 0.3
    assert entropy_threshold(entropies, mask, share, lambda local: local) == torch.quantile(entropies[mask], 1 - share)
    many = torch.arange(2**24 + 9, dtype=torch.float32).flip(0)[None]  # torch.quantile refuses so many
    threshold = entropy_threshold(many, torch.ones_like(many, dtype=torch.bool), share, lambda local: local)
    assert threshold == pytest.approx((1 - share) * (2**24 + 8), rel=1e-6)


def test_the_entropy_bonus_follows_its_target():
    bonus = EntropyBonus(coefficient=0.1, target=0.5, delta=0.05, bounds=(0.0, 0.12))
    entropies, mask = torch.tensor([[0.2, 0.6]]), torch.tensor([[True, True]])
    assert bonus.loss(entropies, mask, 2).item() == 0.0  # nothing was measured before
    bonus.end_of_update(lambda sums: sums)
    assert (bonus.last, bonus.coefficient) == (pytest.approx(0.4), pytest.approx(0.12))
    assert bonus.loss(entropies, mask, 2).item() == pytest.approx(-0.12 * 0.4 / 2)
    bonus.loss(entropies * 4, mask, 2)
    bonus.end_of_update(lambda sums: sums)
    assert (bonus.last, bonus.coefficient) == (pytest.approx(1.0), pytest.approx(0.07))
    assert bonus.loss(entropies, mask, 2).item() == 0.0
    assert bonus.state() == [pytest.approx(1.0), pytest.approx(0.07)][::-1]
    assert EntropyBonus(coefficient=0.1).loss(entropies, mask, 1).item() == pytest.approx(-0.04)


def test_the_entropy_bonus_waits_for_no_device():
    """On a device without numbers any wait is an error."""
    bonus = EntropyBonus(coefficient=0.1, target=0.5, delta=0.05, bounds=(0.0, 0.12))
    entropies = torch.ones(1, 2, device="meta")
    for _ in range(2):
        bonus.loss(entropies, entropies > 0, 2)
        bonus.end_of_update(lambda sums: sums)


@pytest.mark.parametrize(("estimator", "weighed"), [("mse", False), ("k1", True), ("low_var_kl", True)])
def test_the_expected_gradient_of_the_kl_term_is_that_of_the_kl_divergence(estimator, weighed):
    """Over three tokens, with TRL's default of use_bias_correction_kl: k2 has it by itself, k1 and k3 by the ratio."""
    training = parse(["--config.training.beta", "1", "--config.algorithm.kl_estimator", estimator]).build(1).training
    settings = LossSettings.of(training, estimator, "none")
    assert settings.bias_corrected_kl == weighed
    theta = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    reference = torch.tensor([0.0, 0.5, -0.6]).log_softmax(0)
    policy = theta.log_softmax(0)
    (true,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), theta)
    expected = torch.zeros(3)
    for token in range(3):
        drawn = theta.log_softmax(0)[token].view(1, 1)
        columns = {"policy": drawn, "old": drawn.detach(), "reference": reference[token].view(1, 1)}
        one = LossInputs(**columns, mask=torch.ones(1, 1, dtype=torch.bool), advantages=torch.zeros(1, 1))
        loss = policy_loss(one, settings, Update(rows=1, tokens=1.0, micro_batches=1)).loss
        expected += policy[token].exp().detach() * torch.autograd.grad(loss, theta)[0]
    torch.testing.assert_close(expected, true)
