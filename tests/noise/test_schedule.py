"""Values of the decay, computed by hand."""

import math
import shlex
from pathlib import Path

import pytest

from perl.config.load import parse
from perl.config.schema import NoiseConfig
from perl.noise.injector import NoiseInjector
from perl.noise.schedule import SCHEDULES, Stage, stage_at
from tests.tiny import tiny_model


def config(**changes):
    return NoiseConfig(**changes)


def test_guide_defaults_over_100_steps():
    # Ten stages of ten steps; sigma falls by (0.05 - 0.0005) / 9 = 0.0055 a stage.
    assert stage_at(0, 100, config()) == Stage(0, 0.05)
    assert stage_at(9, 100, config()).index == 0
    assert stage_at(10, 100, config()).sigma == pytest.approx(0.0445)
    assert stage_at(49, 100, config()).sigma == pytest.approx(0.05 - 4 * 0.0055)
    assert stage_at(90, 100, config()) == Stage(9, 0.0005)
    assert stage_at(99, 100, config()) == Stage(9, 0.0005)


def test_progress_one_stays_in_the_last_stage():
    assert stage_at(100, 100, config()) == Stage(9, 0.0005)


def test_stage_boundaries_are_exact():
    # 0.29 * 100 is 28.999999999999996 in floating point; step 29 of 100 with 100 stages is stage 29.
    assert stage_at(29, 100, config(num_stages=100)).index == 29


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_one_stage_is_sigma_start_and_two_are_both_ends(schedule):
    assert stage_at(5, 10, config(num_stages=1, schedule=schedule)) == Stage(0, 0.05)
    assert stage_at(4, 10, config(num_stages=2, schedule=schedule)) == Stage(0, 0.05)
    assert stage_at(5, 10, config(num_stages=2, schedule=schedule)) == Stage(1, 0.0005)


@pytest.mark.parametrize(
    ("schedule", "middle"),
    [
        ("linear", 0.505),
        ("exponential", 0.1),  # sqrt(1 * 0.01)
        ("cosine", 0.505),
        ("logarithmic", 1 - 0.99 * math.log(1 + 0.5 * (math.e - 1))),
    ],
)
def test_middle_of_three_stages(schedule, middle):
    three = config(sigma_start=1.0, sigma_end=0.01, num_stages=3, schedule=schedule)
    assert stage_at(1, 3, three).sigma == pytest.approx(middle)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_sigma_never_rises(schedule):
    sigmas = [stage_at(step, 200, config(num_stages=20, schedule=schedule)).sigma for step in range(200)]
    assert sigmas == sorted(sigmas, reverse=True)
    assert (sigmas[0], sigmas[-1]) == (0.05, 0.0005)


def test_warmup_stage_is_silent_and_the_rest_decay_from_start_to_end():
    warm = config(num_stages=4, warmup_stage=True, sigma_start=0.3, sigma_end=0.1)
    assert [stage_at(step, 4, warm).sigma for step in range(4)] == pytest.approx([0.0, 0.3, 0.2, 0.1])


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_warmup_with_one_noisy_stage_does_not_divide_by_zero(schedule):
    # QeRL's released form divides by num_stages - 2.
    warm = config(num_stages=2, warmup_stage=True, schedule=schedule)
    assert [stage_at(step, 2, warm).sigma for step in range(2)] == [0.0, 0.05]
    assert stage_at(0, 1, config(num_stages=1, warmup_stage=True, schedule=schedule)).sigma == 0.0


def test_qerls_sequence_number_for_number():
    """The released code's list, 0.01 * (0.0001 / 0.01)^(i / 8) = 10^(-2 - i / 4) for i from 0 to 8, behind a stage of
    0. Of 600 steps each stage has 60, as Algorithm 1 of the paper deals them out: k = floor((step - 1) / 60)."""
    qerl = config(sigma_start=1e-2, sigma_end=1e-4, num_stages=10, schedule="exponential", warmup_stage=True)
    listed = [0, 1e-2, 5.623413e-3, 3.162278e-3, 1.778279e-3, 1e-3, 5.623413e-4, 3.162278e-4, 1.778279e-4, 1e-4]
    for step in range(1, 601):
        stage = stage_at(step - 1, 600, qerl)
        assert stage.index == (step - 1) // 60
        assert stage.sigma == pytest.approx(listed[stage.index], rel=1e-6)


def test_the_commands_of_the_guide_to_aqn_are_qerls():
    """The last two of docs/aqn.md, on Qwen2 of two layers."""
    lines = (Path(__file__).parents[2] / "docs" / "aqn.md").read_text(encoding="utf-8").splitlines()
    commands = [shlex.split(line)[2:] for line in lines if line.startswith("bash ") and "warmup_stage true" in line]
    paper, code = (parse([*words, "--config.noise_injection.enabled", "true"]).build() for words in commands)
    assert [stage_at(step, 10, paper.noise_injection).sigma for step in (0, 1, 9)] == [0, 0.01, 0.0005]
    assert stage_at(5, 10, paper.noise_injection).sigma == pytest.approx(0.01 * 0.05 ** (4 / 8))
    assert [stage_at(step, 10, code.noise_injection).sigma for step in (0, 1, 9)] == [0, 0.01, 0.0001]
    chosen = [NoiseInjector.of(tiny_model(), group.noise_injection).targets for group in (paper, code)]
    assert [len(targets) for targets in chosen] == [4, 5]
    assert (paper.noise_injection.old_logps, code.noise_injection.old_logps) == ("noisy", "clean")


def test_qerls_equation_8_as_printed_stops_above_sigma_end():
    """sigma_start * (sigma_end / sigma_start)^((k - 1) / (K - 1)) for stages k from 1 to K - 1, with Table 4's range: a
    last exponent of 8/9. It is the code's schedule with that last value as sigma_end."""
    printed = [0, 1e-2, *(1e-2 * 0.05 ** (k / 9) for k in range(1, 9))]
    assert printed[-1] == pytest.approx(6.9750e-4, rel=1e-4)
    same = config(sigma_start=1e-2, sigma_end=printed[-1], schedule="exponential", warmup_stage=True)
    assert [stage_at(step, 10, same).sigma for step in range(10)] == pytest.approx(printed)


def test_fewer_steps_than_stages_skips_stages():
    assert [stage_at(step, 3, config()).index for step in range(3)] == [0, 3, 6]
