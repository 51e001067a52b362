"""The benchmarks of training at tiny shapes: they force the same lengths on every side and end in their JSON line."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import critic_bound, reward_curves, scaling, soak
from benchmarks._workload import EOS, FIRST_MARKER, FIRST_WORD, VOCABULARY, ForcedLengths, Workload, draw_lengths
from benchmarks.train_step import flat_groups

ROOT = Path(__file__).parents[2]
SHAPE = ["--prompts", "2", "--group_size", "4", "--prompt_length", "9", "--mean", "6", "--longest", "12"]


def run_module(name, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=ROOT,
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def run_here(module, monkeypatch, capfd, *arguments):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    module.main()
    return json.loads(capfd.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_rollout():
    result = run_module("rollout", "--pairs", "1", "--no-peers", *SHAPE)
    assert result["benchmark"] == "rollout"
    assert result["ratio"] == pytest.approx(result["trl_s"] / result["ours_s"], rel=0.01)
    assert 2 * 8 <= result["tokens"] <= 12 * 8
    assert result["ours_peak_mb"] > result["ours_added_mb"] >= 0


@pytest.mark.slow
def test_validation():
    """The benchmark itself compares the two sides' rows."""
    small = ["--rows", "6", "--n", "2", "--temperature", "1", "--max_new_tokens", "9"]
    result = run_module("validation", "--pairs", "1", *small)
    assert result["rows"] == 12
    assert 12 <= result["tokens"] <= 12 * 9
    assert result["ratio"] > 0


@pytest.mark.slow
@pytest.mark.npu
def test_rollout_on_an_npu(run_npu):
    command = [sys.executable, "-m", "benchmarks.rollout", "--pairs", "1", "--no-peers", *SHAPE]
    command += ["--dtype", "bfloat16", "--merge_adapter", "false", "--capture_graphs", "true"]
    result = json.loads(run_npu(command, devices=1).stdout.splitlines()[-1])
    assert result["ratio"] > 0
    model_mb = 28.2e6 * 2 / 2**20  # of the device, not of the process
    for side in ("trl", "ours"):
        assert model_mb < result[f"{side}_peak_mb"] < 2 * model_mb
        assert 0 < result[f"{side}_added_mb"] < result[f"{side}_peak_mb"]


@pytest.mark.slow
def test_train_step():
    result = run_module("train_step", "--pairs", "2", "--micro_batch", "4", "--zero_shares", "0", "0.5", *SHAPE)
    first, second = result["by_zero_share"]
    assert result["ratio"] == first["ratio"] > 0
    assert second["zero_share"] == 0.5
    for side in ("trl", "ours"):
        assert first[f"{side}_rollout_s"] + first[f"{side}_update_s"] == pytest.approx(first[f"{side}_wall_s"], rel=0.2)


@pytest.mark.slow
def test_scaling(monkeypatch, capfd):
    result = run_here(
        scaling, monkeypatch, capfd, *["--groups", "1", "2", "--lengths", "4", "8", "--prompt_length", "9"]
    )
    shapes = [(row["prompts"], row["group_size"], row["length"]) for row in result["table"]]
    assert shapes == [(4, 1, 4), (4, 2, 4), (1, 8, 4), (1, 8, 8)]
    assert all(0 < row["bandwidth_share"] < 1 for row in result["table"])


@pytest.mark.slow
def test_reward_curves(monkeypatch, capfd):
    result = run_here(reward_curves, monkeypatch, capfd, "--seeds", "2", "--steps", "2")
    assert result["between_trl_seeds"] > 0  # the sampling seed reaches each sampler
    assert result["between_our_seeds"] > 0
    assert 0.2 < result["trl_mean"] < 0.8


def test_forced_lengths_follow_rows_that_move():
    work = Workload(prompts=[[2000, 2001], [3000, 3001]], group_size=2, lengths=[2, 4, 3, 5], longest=5)
    force = ForcedLengths(work)

    def allowed(rows):
        scores = force(torch.tensor(rows), torch.zeros(len(rows), VOCABULARY))
        return [row.isfinite().nonzero()[:, 0].tolist() for row in scores]

    first = allowed([[2000, 2001], [2000, 2001], [3000, 3001], [3000, 3001]])
    assert first == [[FIRST_MARKER + i] for i in range(4)]
    moved = allowed([[3000, 3001, FIRST_MARKER + 2], [2000, 2001, FIRST_MARKER]])
    assert moved[0][0] == FIRST_WORD
    assert len(moved[0]) == VOCABULARY - FIRST_WORD
    assert moved[1] == [EOS]  # two tokens long
    assert allowed([[3000, 3001, FIRST_MARKER + 2, 5000]]) == [[EOS]]  # three


def test_lengths_are_drawn_with_their_mean():
    assert draw_lengths("equal", 3, 65, 192) == [65, 65, 65]
    drawn = draw_lengths("lognormal", 4000, 65, 10_000)
    assert sum(drawn) / len(drawn) == pytest.approx(65, rel=0.03)
    assert max(draw_lengths("lognormal", 4000, 65, 192)) == 192


def test_groups_with_zero_advantage_come_to_their_share():
    assert flat_groups(0.4, 5, 4) == [1, 2, 1, 2, 2]
    assert flat_groups(0.0, 3, 4) == [0, 0, 0]
    assert flat_groups(1.0, 2, 4) == [4, 4]


def test_p_value_counts_all_divisions():
    # 20 ways to choose 3 of 6; only the sides themselves and their mirror image are as far apart
    assert reward_curves.p_value([0.1, 0.2, 0.3], [0.7, 0.8, 0.9]) == pytest.approx(2 / 20)
    assert reward_curves.p_value([0.5, 0.5], [0.5, 0.5]) == 1.0


def test_the_samplers_are_compared_with_trls_own_seeds():
    near = reward_curves.judge([[0.1, 0.3], [0.3, 0.5]], [[0.2, 0.4], [0.2, 0.5]])
    assert near["between_trl_seeds"] == 0.2
    assert near["between_samplers"] == 0.025


@pytest.mark.slow
def test_memory_is_what_was_planned():
    result = run_module("memory_plan", "--shapes", "checkpointing")
    assert result["benchmark"] == "memory_plan"
    assert result["ratio"] == pytest.approx(1, abs=0.15)


def soak_step(number, at, rss, processes=1):
    return soak.Step(number, at, 0.5, rss, processes)


def test_soak_finds_the_slope_the_slowdown_and_the_lost_step():
    """1 MB in 100 steps; the last hundred take 1.1 s, the others 1 s; step 250 is lost and 300 is there twice. The
    step behind a checkpoint takes a minute, and does not count."""
    steps, at = [], 0.0
    for number in range(1, 501):
        at += 60.0 if number % 100 == 1 else 1.0 if number <= 400 else 1.1
        steps.append(soak_step(number, at, 900 + number / 100))
    found = soak.result(steps, 500, warm_up=100)
    assert found["lost"] == found["doubled"] == 0
    assert (found["steps"], found["rss_mb_per_100_steps"]) == (500, 1.0)
    assert (found["rss_mb_first"], found["rss_mb_last"]) == (901.0, 905.0)
    assert (found["step_s_first"], found["step_s_last"], found["last_over_first"]) == (1.0, 1.1, 1.1)
    found = soak.result([*steps[:249], *steps[250:300], *steps[299:]], 500, warm_up=100)
    assert (found["steps"], found["lost"], found["doubled"]) == (499, 1, 1)
    assert soak.result(steps[:150], 500, warm_up=100)["last_over_first"] is None  # too early to tell
    assert soak.result(steps[:50], 500, warm_up=100)["rss_mb_first"] is None


def test_soak_does_not_count_a_process_that_starts_as_growth():
    """1 MB in 100 steps, and a process of 67 MB from step 300 on."""
    steps = [soak_step(n, n, 900 + n / 100 + (67 if n >= 300 else 0), 2 if n >= 300 else 1) for n in range(1, 501)]
    assert soak.result(steps, 500, warm_up=100)["rss_mb_per_100_steps"] == 1.0


def logged(seconds, begin=1000.0, **values):
    """Rows of steps that took so many seconds, one after the other."""
    ends = itertools.accumulate(seconds, initial=begin)
    next(ends)
    return [
        {"step": 101 + i, "loss": 0.5, "reward": i / 8, "time": end, "timing/step": each, "perf/throughput": each}
        | values
        for i, (each, end) in enumerate(zip(seconds, ends, strict=True))
    ]


def test_soak_compares_the_same_steps_of_an_old_and_a_young_process():
    """Neither the first ten steps count nor the last, nor one in which a process is suspended."""
    old, young = logged([9.0] * 10 + [1.5, 1.5, 1.25, 1.5] + [9.0]), logged([1.0] * 15)
    assert soak.compare(old, young, [], []) == [1.5, 1.5, 1.25, 1.5]
    # The old one was suspended in the 12th step, which went from 1091.5 to 1093, the young one in the 14th.
    assert soak.compare(old, young, [900.0, 1092.0], [1013.5]) == [1.5, 1.25]


def test_soak_refuses_a_young_process_that_does_other_work():
    old = logged([1.0] * 12)
    with pytest.raises(RuntimeError, match=r"^step 101: reward is 0.0 in the old process and 0.5 in the young one; "):
        soak.compare(old, logged([1.0] * 12, reward=0.5), [], [])


@pytest.mark.slow
def test_soak_of_an_old_and_a_young_process():
    """Both make the same twenty steps: the benchmark refuses others."""
    result = run_module("soak", "--steps", "20", "--every", "20")
    assert (result["steps"], result["lost"], result["doubled"]) == (20, 0, 0)
    assert 0 < result["compared_steps"] <= 9
    assert result["old_over_young"] > 0


@pytest.mark.slow
def test_soak():
    result = run_module("soak", "--steps", "3")
    assert (result["steps"], result["lost"], result["doubled"]) == (3, 0, 0)
    assert result["rss_mb_last"] > 100
    assert result["old_over_young"] is None  # there is no checkpoint


def test_what_a_critic_can_explain_at_best_by_hand():
    completions = [(5, 6, 2), (5, 7, 2), (5, 6, 2), (8,)]
    found = critic_bound.estimates(completions, [1.0, 0.0, 1.0, 0.0])
    # before the first token the others' mean: 1/3, 2/3, 1/3, 2/3; behind 5 those of two; behind 5 6 of one, 5 7 of none
    assert found == [
        pytest.approx([1 / 3, 0.5, 1.0]),
        pytest.approx([2 / 3, 1.0, 1.0]),
        pytest.approx([1 / 3, 0.5, 1.0]),
        pytest.approx([2 / 3]),
    ]
    assert critic_bound.explained([(1.0, 1.0), (0.0, 0.0)]) == 1.0
    assert critic_bound.explained([(1.0, 0.3), (0.0, 0.3)]) == pytest.approx(0.0)
    assert critic_bound.until([4, 2, 9], 2) == (4, 2)
