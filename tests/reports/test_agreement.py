"""Two trainings compared: how their curves are aligned, the errors by hand, the test on seeds, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from perl.__main__ import main
from perl.base.errors import UserError
from perl.reports.agreement import LIMITS, compare_runs, welch
from perl.reports.agreement_page import sides
from perl.reports.curves import Curves
from perl.reports.training_run import facts, read_training_run
from perl.tools.compare import split
from tests.reports.conftest import logged, record, write_results, write_training

DATA = Path(__file__).parent / "data"
CONSOLE = DATA / "verl_console.log"


def curves(reward=(), name="run", k: int | None = 1, prompts: int | None = 8, first=1, every=1, **metrics) -> Curves:
    """A run that logs each list's values from step `first` on."""
    values = {"reward": reward} | {metric.replace("__", "/"): found for metric, found in metrics.items()}
    by_step = {m: {first + every * i: v for i, v in enumerate(found)} for m, found in values.items() if len(found)}
    return Curves(
        source=Path(name), format="perl", metrics=by_step, logged_as={m: m for m in by_step},
        steps_per_rollout=None if k is None else Fraction(k), prompts_per_rollout=prompts,
    )  # fmt: skip


def compared(a, b, **options):
    return compare_runs({"A": a if isinstance(a, list) else [a], "B": b if isinstance(b, list) else [b]}, **options)


def metric(comparison, name="reward"):
    return next(found for found in comparison.metrics if found.name == name)


def test_the_errors_by_hand():
    """|0.3 - 0.25| + |0.5 - 0.55| + |0.8 - 0.7| = 0.2 over 3 values, and over 0.25 + 0.55 + 0.7 = 1.5."""
    a, b = curves([0.25, 0.55, 0.7], loss=[1.0, 2.0, 1.0]), curves([0.3, 0.5, 0.8], loss=[1.02, 1.98, 1.02])
    found = compared(a, b)
    reward, loss = metric(found), metric(found, "loss")
    assert (reward.mean_a, reward.mean_b) == pytest.approx((0.5, 1.6 / 3))
    assert (reward.absolute, reward.relative) == pytest.approx((0.2 / 3, 0.2 / 1.5))
    assert (reward.limit, reward.judged_by, reward.verdict) == (0.04, "relative", "outside")
    assert (loss.absolute, loss.relative) == pytest.approx((0.02, 0.06 / 4))
    assert (loss.limit, loss.judged_by, loss.verdict) == (0.02, "relative", "within")
    assert not found.within
    assert compared(a, b, limits={"reward": 0.134, "loss": 0.02}).within
    absolute = metric(compared(a, b, limits={"reward": 0.067}, error="absolute"))
    assert (absolute.judged_by, absolute.verdict) == ("absolute", "within")


def test_a_loss_around_zero_is_judged_by_the_absolute_error_and_says_so():
    a, b = curves([0.5, 0.5], loss=[-0.004, 0.004]), curves([0.5, 0.5], loss=[0.004, -0.004])
    loss = metric(compared(a, b), "loss")
    assert loss.absolute == pytest.approx(0.008)
    assert loss.relative == pytest.approx(2.0)
    assert (loss.judged_by, loss.verdict) == ("absolute", "within")
    (note,) = loss.notes
    assert note == (
        "loss: A's curve changes its sign, where a relative error says nothing: the absolute MAE is held against 0.02;"
        " both curves span only 0.008, so that this can hardly fail: look at them"
    )
    small = metric(compared(curves([0.004, 0.006]), curves([0.05, 0.07])))
    assert (small.judged_by, small.verdict) == ("absolute", "outside")  # 0.055 of 0.04
    assert "is near zero (its mean size is 0.005)" in small.notes[0]
    zero = metric(compared(curves([0.0, 0.0]), curves([0.0, 0.01])))
    assert (zero.relative, zero.verdict) == (None, "within")


def test_nan_is_outside_any_limit():
    found = compared(curves([0.5, 0.5, 0.5]), curves([0.5, float("nan"), 0.5]))
    assert metric(found).verdict == "outside"
    assert metric(found).notes == ["reward: 1 of 3 values are NaN, infinite or null, which is outside any limit"]
    assert json.loads(json.dumps(found.as_json()))["metrics"][0]["absolute"] is None


def test_a_rollout_of_four_updates_meets_verls_step():
    """Ours: the reward where it sampled, loss and times at each update, of which the third rollout has but one."""
    ours = curves(
        k=4, loss=[1, 2, 3, 4, 5, 6, 7, 8, 90], timing__step=[3, 1, 1, 1, 3, 1, 1, 1, 3],
        perf__throughput=[100, 300, 300, 300, 200, 600, 600, 600, 0],
    )  # fmt: skip
    ours.metrics["reward"] = {1: 0.25, 5: 0.75, 9: 0.5}
    ours.logged_as["reward"] = "reward"
    verl = curves([0.25, 0.75, 0.5, 0.5], loss=[2.5, 6.5, 1, 1], timing__step=[6, 6, 6, 6], perf__throughput=[200] * 4)
    found = compared(verl, ours)
    assert found.axis.name == "rollout"
    reward, loss, time = metric(found), metric(found, "loss"), metric(found, "timing/step")
    assert (reward.spans, reward.absolute) == (3, 0.0)
    assert (loss.spans, loss.absolute) == (2, 0.0)  # means of 1 to 4 and of 5 to 8
    assert (time.spans, time.absolute) == (2, 0.0)  # 3 + 1 + 1 + 1 seconds
    # 100·3 + 300·3 tokens in 6 s are 200 tokens/s, 200·3 + 600·3 in 6 s are 400
    assert found.throughput == {"a": 200.0, "b": 300.0, "ratio": 1.5, "start": 0, "end": 2}
    assert any("run has rollouts 1 to 4, of which 1 to 3 are compared" in note for note in found.notes)


def test_throughput_is_that_of_the_first_four_rollouts():
    a, b = (curves([0.5] * 6, perf__throughput=values) for values in ([10, 20, 30, 40, 99, 99], [5, 5, 5, 5, 0, 0]))
    assert compared(a, b).throughput == {"a": 25.0, "b": 5.0, "ratio": 0.2, "start": 0, "end": 4}
    assert compared(a, curves([0.5])).throughput is None


def test_logs_of_ten_steps_meet_logs_of_each():
    """Four updates a rollout: a log of ten steps holds rollouts 1 to 3, then 4 to 5, then 6 to 8, then 9 to 10."""
    ours = curves([0.1, 0.2, 0.3, 0.4], k=4, first=10, every=10)
    each = curves([0.1] * 3 + [0.2] * 2 + [0.3] * 3 + [0.4] * 2)
    found = compared(each, ours)
    assert (metric(found).spans, metric(found).absolute) == (4, pytest.approx(0.0))
    assert (found.start, found.end) == (0, 10)
    assert "each value is the mean of 2 to 3 rollouts, which the logs have in common" in found.notes


def test_a_lost_line_and_a_log_that_starts_later():
    """Rollout 3 of B is lost, and A was resumed at 2: nothing moves, and 2, 4 and 5 are compared."""
    a, b = curves([0.2, 0.3, 0.4, 0.5], first=2), curves([0.1, 0.2, 0.3, 0.4, 0.5])
    del b.metrics["reward"][3]
    found = compared(a, b)
    assert (metric(found).spans, metric(found).absolute, found.start, found.end) == (3, 0.0, 1, 5)
    assert "run has rollouts 1 to 5, of which 2 to 5 are compared" in found.notes
    assert "1 rollouts between 2 and 5 are not in all logs, and left out" in found.notes


def test_runs_with_other_rollouts_are_aligned_by_prompts():
    """A draws 8 prompts a rollout, B 16: two of A's rollouts stand at one of B's."""
    a, b = curves([0.1, 0.3, 0.5, 0.7], timing__step=[1] * 4), curves([0.2, 0.6], prompts=16, timing__step=[2] * 2)
    found = compared(a, b)
    assert (found.axis.name, found.axis.why, found.end) == ("prompt", "prompts per rollout: A 8, B 16", 32)
    assert (metric(found).spans, metric(found).absolute) == (2, pytest.approx(0.0))
    assert [m.name for m in found.metrics] == ["reward"]  # rollouts of another size take another time
    assert metric(compared(a, b, align="rollouts")).absolute == pytest.approx(0.2)  # |0.2-0.1|, |0.6-0.3|


def test_what_does_not_tell_its_rollouts_is_asked_about():
    known, unknown = curves([0.5] * 4), curves([0.5] * 4, k=None, prompts=None, name="other")
    with pytest.raises(UserError, match=r"B other: nothing there tells .*; write --steps_per_rollout"):
        compared(known, unknown)
    both = compared(unknown, curves([0.5], k=None, name="third"))
    assert both.axis.name == "step"
    assert "holds for equal batch settings only" in both.axis.why
    assert compared(known, unknown, align="steps").axis.name == "step"
    with pytest.raises(UserError, match=r"--align prompts: .*\(A 8, B unknown\); write --prompts_per_rollout"):
        compared(known, curves([0.5], prompts=None), align="prompts")
    assert "A 8, B unknown; they are taken to be equal" in compared(known, curves([0.5], prompts=None)).axis.why


def test_a_limit_that_is_not_checked_is_told():
    found = compared(curves([0.5] * 2, loss=[0.5] * 2), curves(loss=[0.5] * 2, name="other"))
    assert found.notes[0] == "reward is not compared: other did not log it"
    late = curves([0.5] * 2, loss=[0.5] * 2)
    late.metrics["reward"] = {9: 0.5, 10: 0.5}
    assert (
        "reward is not compared: the logs share no rollouts of it"
        in compared(curves([0.5] * 2, loss=[0.5] * 2), late).notes
    )


def test_nothing_to_compare():
    with pytest.raises(UserError, match=r"no common metric: run has reward; run has loss"):
        compared(curves([0.5]), curves(loss=[0.5]))
    with pytest.raises(UserError, match=r"share no rollouts to compare: run has 1 to 2; run has 11 to 12$"):
        compared(curves([0.5] * 2), curves([0.5] * 2, first=11))
    with pytest.raises(UserError, match=r"--window 100 may be longer than what they share: write less$"):
        compared(curves([0.5] * 6), curves([0.5] * 6), window=100)


def test_welchs_t_by_hand():
    """Means 2 and 5, variances 1 and 4 of three: error √(5/3), t = 3/√(5/3) = 2.3238, and by Satterthwaite
    (5/3)² / ((1/3)²/2 + (4/3)²/2) = 2.9412 degrees of freedom. p and interval are those of
    scipy 1.17.1's ttest_ind([3, 5, 7], [1, 2, 3], equal_var=False), and of a second such pair."""
    difference, low, high, p = welch([1, 2, 3], [3, 5, 7])
    assert difference == 3
    assert p == pytest.approx(0.10447888668472192, rel=1e-9)
    assert (low, high) == pytest.approx((-1.1553995031825055, 7.1553995031825055), rel=1e-9)
    _, low, high, p = welch([0.61, 0.57], [0.52, 0.49, 0.55, 0.5])
    assert p == pytest.approx(0.0921473380222925, rel=1e-9)
    assert (low, high) == pytest.approx((-0.18115814181322681, 0.031158141813226917), rel=1e-9)
    assert welch([1, 1], [1, 1]) == (0, 0, 0, 1.0)
    assert welch([1, 1], [2, 2]) == (1, 1, 1, 0.0)


def test_several_seeds_a_side():
    """The sides' curves are their means; the test is on each run's own mean."""
    a = [curves([0.4, 0.6]), curves([0.6, 0.4])]  # mean curve 0.5, 0.5; own means 0.5 and 0.5
    b = [curves([0.3, 0.7]), curves([0.7, 0.3])]
    found = metric(compared(a, b))
    assert found.absolute == pytest.approx(0.0)
    assert found.seeds is not None
    assert (found.seeds.a, found.seeds.b) == (pytest.approx([0.5, 0.5]), pytest.approx([0.5, 0.5]))
    assert found.seeds.between == pytest.approx(0.3)  # 0.2 in A, 0.4 in B
    far = [curves([0.9, 0.9]), curves([0.91, 0.91])]
    near = [curves([0.905, 0.905]), curves([0.906, 0.906]), curves([0.907, 0.907])]
    wide = [curves([0.2, 0.2]), curves([0.9, 0.9])]
    tests = [metric(compared(side, other)).seeds for side, other in ((far, near), (near, wide), (near, [*a]))]
    assert [test and test.verdict for test in tests] == ["undecided", "undecided", "different"]
    close = [curves([0.9, 0.9]), curves([0.901, 0.901]), curves([0.902, 0.902])]
    found = compared(near, close)
    assert metric(found).seeds.verdict == "equal"  # type: ignore[union-attr]
    assert found.notes == ["loss is not compared: run did not log it"]
    assert compared(near, close[0]).notes[1:] == ["a test on seeds needs at least two runs on each side"]
    assert compared(curves([0.5]), curves([0.4])).notes[1].startswith("one run a side: with another sampling seed")


def test_a_window_averages_rollouts():
    found = compared(curves([0.4, 0.6, 0.4, 0.6, 0.9]), curves([0.6, 0.4, 0.6, 0.4, 0.1]), window=2)
    assert (metric(found).spans, metric(found).absolute, found.end) == (2, pytest.approx(0.0), 4)


def write_run(folder: Path, rewards, k: int = 1, **changes) -> Path:
    """A run of ours of 128 prompts a rollout; the reward stands where it sampled."""
    batch = {"per_device_train_batch_size": 160, "gradient_accumulation_steps": 4 // k, "num_generations": 5}
    rows = [
        {name: value for name, value in logged(i + 1, loss=0.001, **changes).items() if name != "reward" or i % k == 0}
        | ({"reward": rewards[i // k]} if i % k == 0 else {})
        for i in range(len(rewards) * k)
    ]
    write_training(folder, rows, {"training": batch | {"steps_per_generation": 4}}, num_processes=1)
    return folder


def test_the_command_with_verls_log(tmp_path, capsys):
    """verl's four steps of 0.25, 0.3125, 0.375, 0.4375 against four rollouts of two updates each: off by 0.01 each, of
    a mean of 0.34375."""
    run = write_run(tmp_path / "run", [0.26, 0.3025, 0.385, 0.4275], k=2)
    assert main(["compare", str(CONSOLE), str(run), "--output", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out
    assert f"A: {CONSOLE} (verl)" in said.replace("\n", "")
    assert "aligned by rollout, rollouts 1 to 4 (prompts per rollout: A 128, B 128)" in said
    assert "reward 0.344 0.344 0.01 2.91 % within 4 %" in " ".join(said.split())
    assert "throughput, mean over rollouts 1 to 4: A 801.4, B 900.0 tokens/s a device, ratio B / A 1.123" in said
    assert "loss: A's curve changes its sign" in said
    assert "one run a side" in said
    assert said.rstrip().splitlines()[-2] == "Within the limits: reward and loss"
    assert (tmp_path / "page.html").is_file()
    assert main(["compare", str(CONSOLE), str(run), "--json", "--reward_limit", "0.02"]) == 1
    made = json.loads(capsys.readouterr().out)
    assert (made["within"], made["verdict"]) == (False, "Outside the limits: reward")
    assert made["runs"]["A"] == [
        {"source": str(CONSOLE), "format": "verl", "steps_per_rollout": 1.0, "prompts_per_rollout": 128}
    ]
    assert made["axis"] == {"name": "rollout", "why": "prompts per rollout: A 128, B 128"}
    reward = made["metrics"][0]
    assert (reward["name"], reward["logged_as"]) == ("reward", ["critic/score/mean", "reward"])
    assert reward["relative"] == pytest.approx(0.01 / 0.34375)


def test_names_that_together_are_longer_than_one_may_be():
    """Whether a path of the whole text exists could not be asked: File name too long."""
    names = ["a" * 200, "b" * 200]
    assert split(",".join(names), "A") == [Path(name) for name in names]


def test_the_command_with_seeds(tmp_path, capsys):
    for name, shift in {"a1": 0.0, "a2": 0.01, "b1": 0.0, "b2": 0.01, "b,3": 0.005}.items():
        write_run(tmp_path / name, [0.5 + shift, 0.6 - shift, 0.7])
    a = f"{tmp_path}/a1,{tmp_path}/a2"
    assert main(["compare", a, f"{tmp_path}/b1,{tmp_path}/b2"]) == 0
    said = capsys.readouterr().out
    assert "reward, test on seeds (Welch's t on the means of 2 and 2 runs): B - A +0.00 %" in said
    assert "one run a side" not in said
    assert main(["compare", a, f"{tmp_path}/b,3"]) == 0  # a comma in the name of what exists
    with pytest.raises(UserError, match="an empty name between commas"):
        main(["compare", f"{a},", f"{tmp_path}/b1"])
    with pytest.raises(UserError, match=r"B .*a2: is given twice, also as A"):
        main(["compare", a, f"{tmp_path}/a2"])


def test_scores_of_validations_are_compared_where_both_have_them():
    """A: two steps a rollout, validated before the training and after steps 2, 3 and 4; B: one, after 0, 1 and 2."""
    core = "val-core/openai/gsm8k/acc/mean@1"
    a = replace(curves([0.5, 0.5, 0.6, 0.6], k=2), scores={core: {0: 0.2, 2: 0.3, 3: 0.9, 4: 0.5}})
    b = replace(curves([0.5, 0.6]), scores={core: {0: 0.2, 1: 0.4, 2: 0.5}, "val-core/other/acc/mean@1": {0: 1.0}})
    found = compared(a, b)
    score = metric(found, core)
    assert (score.spans, score.limit) == (3, None)
    assert (score.mean_a, score.mean_b, score.absolute) == pytest.approx((1.0 / 3, 1.1 / 3, 0.1 / 3))
    assert (
        f"{core}: compared where all runs were validated, after rollouts 0, 1, 2 (0: before the first)" in found.notes
    )
    assert not [m for m in found.metrics if "other" in m.name]
    lines = sides(score, {"A": [a], "B": [b]}, found.axis)
    assert [line.points for line in lines] == [[(0, 0.2), (1, 0.3), (2, 0.5)], [(0, 0.2), (1, 0.4), (2, 0.5)]]
    by_prompts = metric(compared(replace(a, prompts_per_rollout=16), replace(b, scores={core: {0: 0.2, 2: 0.4}})), core)
    assert by_prompts.spans == 2  # after prompts 0 and 16: a rollout of A, two of B


def test_a_training_by_rewards_against_a_fine_tuning_says_so():
    notes = compared(curves([0.5, 0.6], loss=[1.0, 1.0]), curves(loss=[1.0, 1.0])).notes
    (said,) = [note for note in notes if "of two kinds" in note]
    assert "A was trained by rewards (GRPO, PPO), B logs none (supervised fine-tuning)" in said
    assert not [n for n in compared(curves([0.5], loss=[1.0]), curves([0.5], loss=[1.0])).notes if "two kinds" in n]


def test_mistakes_are_one_line(tmp_path):
    run = str(write_run(tmp_path / "run", [0.5, 0.5]))
    other = str(write_run(tmp_path / "other", [0.5, 0.5]))
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": [{"step": s, "loss": 0.002, "reward": 0.5} for s in (10, 20)]}))
    result = tmp_path / "result"
    write_results(result / "gsm8k", [record("0-0")])
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        ([run], "arguments are required: B"),
        ([run, str(tmp_path / "none")], r"^B .*none: no such file"),
        ([run, str(tmp_path / "empty")], r"^B .*empty: no log of a training"),
        ([run, str(state)], r"^B .*trainer_state.json: nothing there tells how many optimizer steps"),
        ([run, str(state), "--steps_per_rollout", "x"], r"^--steps_per_rollout x: write one number"),
        ([run, str(state), "--steps_per_rollout", "2"], r"run says 1; write 1,4"),
        ([run, other, "--prompts_per_rollout", "1.5"], r"^--prompts_per_rollout 1.5: write one number"),
        ([run, other, "--window", "0"], r"^--window 0: write 1 or more"),
        ([run, other, "--window", "3"], r"share no rollouts|share no prompts"),
        ([run, other, "--reward_limit", "0"], r"^--reward_limit 0: write a fraction above 0"),
        ([run, other, "--output", str(tmp_path / "no" / "page.html")], r"page.html: No such file"),
        ([str(result), run], r"^B .*run: is a training, and the other one an evaluation"),
        ([run, str(result)], r"^A .*run: is a training, and the other one an evaluation"),
        ([str(result), str(result), "--output", "x.html"], r"^--output is for trainings"),
        ([f"{result},{result}", str(result)], r"several folders a side are for trainings"),
    ):
        with pytest.raises(UserError, match=said) as error:
            main(["compare", *arguments])
        assert "\n" not in str(error.value)
    assert main(["compare", run, str(state), "--steps_per_rollout", "1,5"]) == 0
    assert main(["compare", str(state), run, "--align", "rollouts", "--steps_per_rollout", "5,1"]) == 0


def test_evaluations_as_json(tmp_path, capsys):
    for name in ("a", "b"):
        write_results(tmp_path / name / "gsm8k", [record("0-0"), record("1-0")])
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["datasets"]["gsm8k"]["problems"] == 2


def test_a_report_shows_the_steps_that_did_not_sample(tmp_path):
    """Rows without a reward were left out: the time of a rollout counted for the steps after it too."""
    write_run(tmp_path / "run", [0.5, 0.6], k=4)
    run = read_training_run(tmp_path / "run")
    assert run.steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run.points("reward") == [(1, 0.5), (5, 0.6)]
    assert len(run.points("loss")) == 8
    assert facts(run)["steps"] == "8"


def test_the_limits_are_the_guides():
    assert LIMITS == {"reward": 0.04, "loss": 0.02}
