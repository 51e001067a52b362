"""Two trainings compared: how their curves are aligned, the errors by hand, several seeds, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from perl.__main__ import main
from perl.base.errors import UserError
from perl.reports.agreement import LIMITS, compare_runs
from perl.reports.agreement_page import sides
from perl.reports.curves import Curves
from perl.reports.training_run import facts, read_training_run
from perl.tools.compare import print_trainings, split
from tests.reports.conftest import logged, record, write_results, write_training

DATA = Path(__file__).parent / "data"
CONSOLE = DATA / "verl_console.log"


def curves(reward=(), name="run", k: int | None = 1, first=1, every=1, **metrics) -> Curves:
    """A run that logs each list's values from step `first` on."""
    values = {"reward": reward} | {metric.replace("__", "/"): found for metric, found in metrics.items()}
    by_step = {m: {first + every * i: v for i, v in enumerate(found)} for m, found in values.items() if len(found)}
    return Curves(source=Path(name), format="perl", metrics=by_step, updates=k)


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
    ours = curves(k=4, loss=[1, 2, 3, 4, 5, 6, 7, 8, 90], timing__step=[3, 1, 1, 1, 3, 1, 1, 1, 3])
    ours.metrics["reward"] = {1: 0.25, 5: 0.75, 9: 0.5}
    verl = curves([0.25, 0.75, 0.5, 0.5], loss=[2.5, 6.5, 1, 1], timing__step=[6, 6, 6, 6])
    result = compared(verl, ours)
    reward, loss, time = metric(result), metric(result, "loss"), metric(result, "timing/step")
    assert (reward.steps, reward.absolute) == ([1, 2, 3], 0.0)
    assert (loss.steps, loss.absolute) == ([1, 2], 0.0)  # means of 1 to 4 and of 5 to 8
    assert (time.steps, time.absolute) == ([1, 2], 0.0)  # 3 + 1 + 1 + 1 seconds
    assert "run has steps 1 to 4, of which 3 values up to step 3 are compared" in result.notes


def test_logs_of_ten_steps_meet_logs_of_each():
    """Four updates a rollout, logged every ten: 20 optimizer steps, five rollouts, are the smallest common part."""
    ours = curves([0.1, 0.2, 0.3, 0.4], k=4, first=10, every=10)
    each = curves([0.1, 0.2, 0.1, 0.2, 0.15, 0.3, 0.4, 0.3, 0.4, 0.35])
    result = metric(compared(each, ours))
    assert (result.steps, result.absolute) == ([5, 10], pytest.approx(0.0))
    assert result.curve_a == pytest.approx([0.15, 0.35])


def test_a_lost_line_and_a_log_that_starts_later():
    """Step 3 of B is lost, and A was resumed at 2: nothing moves, and 2, 4 and 5 are compared."""
    a, b = curves([0.2, 0.3, 0.4, 0.5], first=2), curves([0.1, 0.2, 0.3, 0.4, 0.5])
    del b.metrics["reward"][3]
    result = compared(a, b)
    assert (metric(result).steps, metric(result).absolute) == ([2, 4, 5], 0.0)
    assert "run has steps 1 to 5, of which 3 values up to step 5 are compared" in result.notes


def test_what_does_not_tell_its_rollouts_is_noted():
    unknown = curves([0.5] * 4, k=None, name="other")
    note = "other: nothing there tells how many optimizer steps are made from one rollout; one is assumed"
    assert note in compared(curves([0.5] * 4), unknown).notes
    assert note not in compared(curves([0.5] * 4), curves([0.5] * 4)).notes


def test_a_limit_that_is_not_checked_is_told():
    found = compared(curves([0.5] * 2, loss=[0.5] * 2), curves(loss=[0.5] * 2, name="other"))
    assert found.notes[0] == "reward is not compared: other did not log it"
    late = curves([0.5] * 2, loss=[0.5] * 2)
    late.metrics["reward"] = {9: 0.5, 10: 0.5}
    assert (
        "reward is not compared: the logs share no steps of it"
        in compared(curves([0.5] * 2, loss=[0.5] * 2), late).notes
    )


def test_nothing_to_compare():
    with pytest.raises(UserError, match=r"no common metric: run has reward; run has loss"):
        compared(curves([0.5]), curves(loss=[0.5]))
    with pytest.raises(UserError, match=r"share no steps to compare: run has steps 1 to 2; run has steps 11 to 12$"):
        compared(curves([0.5] * 2), curves([0.5] * 2, first=11))
    with pytest.raises(UserError, match=r"--window 100 may be longer than what they share: write less$"):
        compared(curves([0.5] * 6), curves([0.5] * 6), window=100)


def test_several_seeds_a_side():
    """The sides' curves are their means. Two runs of A are 0.2 apart, two of B 0.4."""
    a = [curves([0.4, 0.6]), curves([0.6, 0.4])]
    b = [curves([0.3, 0.7]), curves([0.7, 0.3])]
    result = compared(a, b)
    assert metric(result).curve_b == pytest.approx([0.5, 0.5])
    assert metric(result).absolute == pytest.approx(0.0)
    note = "reward: two runs of one side have an MAE of 60.00 %: a smaller limit needs more seeds"
    assert metric(result).notes == [note]
    assert result.notes[0] == "loss is not compared: run did not log it"
    assert not [note for note in result.notes if "one run a side" in note]
    assert compared(curves([0.5]), curves([0.4])).notes[1].startswith("one run a side: with another sampling seed")


def test_a_window_averages_steps():
    result = metric(compared(curves([0.4, 0.6, 0.4, 0.6, 0.9]), curves([0.6, 0.4, 0.6, 0.4, 0.1]), window=2))
    assert (result.steps, result.absolute) == ([2, 4], pytest.approx(0.0))


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
    assert f"A: {CONSOLE} (verl)" in said
    assert f"B: {run} (perl, 2 optimizer steps a rollout)" in said
    assert "reward 0.344 0.344 0.01 2.91 % within 4 %" in " ".join(said.split())
    assert "perf/throughput 801 900" in " ".join(said.split())
    assert "loss: A's curve changes its sign" in said
    assert "one run a side" in said
    assert said.rstrip().splitlines()[-2] == "Within the limits: reward and loss"
    assert (tmp_path / "page.html").is_file()
    assert main(["compare", str(CONSOLE), str(run), "--json", "--reward_limit", "0.02"]) == 1
    made = json.loads(capsys.readouterr().out)
    assert (made["within"], made["verdict"]) == (False, "Outside the limits: reward")
    assert made["runs"]["A"] == [{"source": str(CONSOLE), "format": "verl", "updates": 1}]
    reward = made["metrics"][0]
    assert (reward["name"], reward["steps"]) == ("reward", [1, 2, 3, 4])
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
    assert "reward: two runs of one side have an MAE of 1.11 %" in said
    assert "one run a side" not in said
    assert main(["compare", a, f"{tmp_path}/b,3"]) == 0  # a comma in the name of what exists
    with pytest.raises(UserError, match="an empty name between commas"):
        main(["compare", f"{a},", f"{tmp_path}/b1"])
    with pytest.raises(UserError, match=r"B .*a2: is given twice, also as A"):
        main(["compare", a, f"{tmp_path}/a2"])


def test_a_metric_whose_name_reads_as_markup_is_shown_as_it_is(capsys):
    scores = {name: {1: 0.5} for name in ("val-core/x[/data]", "val-core/x[hard]")}
    run = replace(curves([0.5]), scores=scores)
    print_trainings(compared(run, run), {"A": [run], "B": [run]}, Console(width=200))
    said = capsys.readouterr().out
    assert all(name in said for name in scores)


def test_scores_of_validations_are_compared_where_both_have_them():
    """A: two steps a rollout, validated before the training and after steps 2, 3 and 4; B: one, after 0, 1 and 2."""
    core = "val-core/openai/gsm8k/acc/mean@1"
    a = replace(curves([0.5, 0.5, 0.6, 0.6], k=2), scores={core: {0: 0.2, 2: 0.3, 3: 0.9, 4: 0.5}})
    b = replace(curves([0.5, 0.6]), scores={core: {0: 0.2, 1: 0.4, 2: 0.5}, "val-core/other/acc/mean@1": {0: 1.0}})
    found = compared(a, b)
    score = metric(found, core)
    assert (score.steps, score.limit) == ([0, 1, 2], None)
    assert (score.mean_a, score.mean_b, score.absolute) == pytest.approx((1.0 / 3, 1.1 / 3, 0.1 / 3))
    assert not [m for m in found.metrics if "other" in m.name]
    lines = sides(score, {"A": [a], "B": [b]})
    assert [line.points for line in lines] == [[(0, 0.2), (1, 0.3), (2, 0.5)], [(0, 0.2), (1, 0.4), (2, 0.5)]]


def test_a_training_by_rewards_against_a_fine_tuning_says_so():
    notes = compared(curves([0.5, 0.6], loss=[1.0, 1.0]), curves(loss=[1.0, 1.0])).notes
    (said,) = [note for note in notes if "of two kinds" in note]
    assert "one was trained by rewards (GRPO, PPO), the other one logs none (supervised fine-tuning)" in said
    assert not [n for n in compared(curves([0.5], loss=[1.0]), curves([0.5], loss=[1.0])).notes if "two kinds" in n]


def test_mistakes_are_one_line(tmp_path):
    run = str(write_run(tmp_path / "run", [0.5, 0.5]))
    other = str(write_run(tmp_path / "other", [0.5, 0.5]))
    result = tmp_path / "result"
    write_results(result / "gsm8k", [record("0-0")])
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        ([run], "missing: B; see --help"),
        ([run, str(tmp_path / "none")], r"^B .*none: no such file"),
        ([run, str(tmp_path / "empty")], r"^B .*empty: no log of a training"),
        ([run, other, "--window", "0"], r"^--window 0: write 1 or more"),
        ([run, other, "--window", "3"], r"share no steps"),
        ([run, other, "--reward_limit", "0"], r"^--reward_limit 0: write a fraction above 0"),
        ([run, other, "--output", str(tmp_path / "no" / "page.html")], r"page.html: No such file"),
        ([str(result), run], r"^B .*run: is no evaluation, and the other one is"),
        ([run, str(result)], r"^A .*run: is no evaluation, and the other one is"),
        ([str(result), str(result), "--output", "x.html"], r"^--output is for trainings"),
        ([f"{result},{result}", str(result)], r"several folders a side are for trainings"),
    ):
        with pytest.raises(UserError, match=said) as error:
            main(["compare", *arguments])
        assert "\n" not in str(error.value)


def test_a_page_that_can_not_be_written_leaves_the_table(tmp_path, capsys):
    runs = [str(write_run(tmp_path / name, [0.5, 0.5])) for name in ("a", "b")]
    with pytest.raises(UserError, match=r"page.html: No such file"):
        main(["compare", *runs, "--output", str(tmp_path / "no" / "page.html")])
    assert "Within the limits: reward" in capsys.readouterr().out


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
