"""The schedule target_kl: its targets, its controller's steps, and what it needs of a step."""

import math
from types import SimpleNamespace

import pytest

from perl.config.schema import NoiseConfig
from perl.noise.callback import NoiseStage
from perl.noise.schedule import Adapted, Stage, adapt, stage_at


def config(**changes):
    given = {"enabled": True, "schedule": "target_kl", "sigma_start": 0.1, "num_stages": 3}
    return NoiseConfig(**(given | {"target_kl_start": 0.04, "target_kl_end": 0.01} | changes))


def test_the_target_falls_exponentially_and_is_exact_at_both_ends():
    assert [stage_at(step, 3, config()) for step in (0, 2)] == [Stage(0, 0.1, 0.04), Stage(2, 0.1, 0.01)]
    assert stage_at(1, 3, config()).target_kl == pytest.approx(0.02)  # sqrt(0.04 * 0.01)
    assert stage_at(0, 3, config(num_stages=1)) == Stage(0, 0.1, 0.04)


def test_the_warmup_stage_has_neither_noise_nor_a_target():
    warm = config(warmup_stage=True)
    assert [stage_at(step, 3, warm).target_kl for step in range(3)] == [None, 0.04, 0.01]
    assert stage_at(0, 3, warm).sigma == 0.0


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.01, 0.1),
        (0.0225, 0.1 / 1.5),  # sqrt(0.01 / 0.0225) = 2 / 3
        (0.0064, 0.125),  # sqrt(0.01 / 0.0064) = 1.25
        (0.0025, 0.2),  # exactly the largest step
        (1e-6, 0.2),
        (0.0, 0.2),
        (4.0, 0.05),
        (math.inf, 0.05),
        (math.nan, 0.05),
    ],
)
def test_the_first_step_of_the_controller(kl, expected):
    assert adapt(Adapted(0.1), kl, 0.01, sigma_start=0.1).sigma == pytest.approx(expected)


def test_later_steps_weigh_what_was_measured_before():
    # 0.9 * 0.02 + 0.03 = 0.048 nats and 0.9 * 0.04 + 0.2^2 = 0.076: sqrt(0.03 * 0.076 / 0.048) = sqrt(0.0475)
    after = adapt(Adapted(0.2, kl=0.02, squares=0.04), 0.03, 0.03, sigma_start=0.1)
    assert (after.kl, after.squares) == pytest.approx((0.048, 0.076))
    assert after.sigma == pytest.approx(0.0475**0.5)


@pytest.mark.parametrize("kl", [0.1, 5.0, math.inf, math.nan])
def test_one_rollout_counts_as_ten_targets_at_most(kl):
    assert adapt(Adapted(0.2, kl=0.02, squares=0.04), kl, 0.01, sigma_start=0.1).kl == pytest.approx(0.9 * 0.02 + 0.1)


def test_sigma_stays_within_a_factor_100_of_the_first():
    assert adapt(Adapted(0.0015), 1.0, 0.01, sigma_start=0.1).sigma == pytest.approx(0.001)
    assert adapt(Adapted(7.5), 0.0, 0.01, sigma_start=0.1).sigma == pytest.approx(10.0)


def test_where_kl_is_proportional_to_the_square_the_target_is_met_as_soon_as_the_bounds_let_it():
    adapted = Adapted(0.1)
    seen = []
    for _ in range(5):
        kl = 0.3 * adapted.sigma**2  # 0.003 at first, three times the target
        seen.append(kl)
        adapted = adapt(adapted, kl, 0.001, sigma_start=0.1)
    assert seen == pytest.approx([0.003, 0.001, 0.001, 0.001, 0.001])


def run(noise, kls):
    """Sigma of each step, where step i measures kls[i]."""
    measured = iter(kls)
    stage = NoiseStage(noise, lambda: None, lambda: next(measured))
    sigmas = []
    for step in range(len(kls)):
        state = SimpleNamespace(global_step=step, max_steps=len(kls), is_world_process_zero=True)
        stage.on_step_begin(None, state, None)
        sigmas.append(stage.stage.sigma)
        stage.on_step_end(None, state, None)
    return sigmas


def test_each_measurement_sets_the_next_rollouts_sigma_and_none_leaves_it():
    # 0.16 is four times the target of 0.04
    assert run(config(), [0.16, None, 0.0025]) == pytest.approx([0.1, 0.05, 0.05])
    # 0.9 * 0.16 + 0.04 = 0.184 and 0.9 * 0.01 + 0.05^2 = 0.0115: sqrt(0.04 * 0.0115 / 0.184) = 0.05
    assert run(config(num_stages=1), [0.16, None, 0.04, 0.04]) == pytest.approx([0.1, 0.05, 0.05, 0.05])


def test_what_is_measured_without_noise_moves_nothing():
    # Rounding alone, in the warm-up stage, would double sigma.
    assert run(config(warmup_stage=True), [1e-9, 0.04, 0.01]) == pytest.approx([0.0, 0.1, 0.1])


def test_a_target_below_what_rounding_makes_gets_one_warning(caplog):
    assert run(config(num_stages=1), [1.0] * 60)[-1] == pytest.approx(0.001)
    assert caplog.text.count("sigma has fallen to its bound 0.001, as the KL divergence is 1 nats") == 1


def test_other_schedules_do_not_listen():
    assert run(config(schedule="linear", sigma_end=0.02), [9.0, 9.0, 9.0]) == pytest.approx([0.1, 0.06, 0.02])
