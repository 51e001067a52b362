"""Benchmarks that train the same thing in several ways: what they work out of the runs, and one run of each."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from benchmarks import adapter_paths, algorithms, aqn, quantised_training, real, reward_curves, staleness
from benchmarks._learning import (
    Arm,
    Start,
    flags_of,
    is_there,
    learn_all,
    markdown,
    paired_test,
    panels,
    quickstart_start,
    real_start,
    write_between,
)
from perl.base.errors import UserError
from perl.base.files import add_row, read_rows
from perl.models.folders import load_model
from perl.tools.quickstart import BASE_FOLDER, DATA_FOLDER
from perl.tools.stages import ROOT
from tests.evaluation.test_run import wait_for


def test_paired_test():
    """t of 1, 2, 3 is 2 / (1 / sqrt(3)) = 3.46; with two degrees of freedom p = 1 - t / sqrt(t^2 + 2)."""
    t = 2 * math.sqrt(3)
    assert paired_test([1, 2, 3]) == pytest.approx((2, 1 - t / math.sqrt(t * t + 2)))
    assert paired_test([0, 0]) == (0, 1)
    assert paired_test([0.5, 0.5]) == (0.5, 0)
    mean, p = paired_test([4])
    assert mean == 4
    assert math.isnan(p)


def flags_by_name(arm: Arm, start: Start) -> dict[str, str]:
    flags = flags_of(arm.settings(start))
    return dict(zip(flags[::2], flags[1::2], strict=True))


def test_noise_fits_the_weights_of_the_model():
    quickstart = quickstart_start(1)
    pretrained = replace(quickstart, sigma=0.005, sigma_relative=0.02)
    assert flags_of(aqn.ARMS["none"].settings(pretrained)) == ["--config.noise_injection.enabled", "false"]
    for start, arm, first, last in (
        (quickstart, "linear, clean", "0.05", "0.0005"),
        (quickstart, "relative, noisy", "0.05", "0.0005"),
        (pretrained, "exponential, clean", "0.005", "5e-05"),
        (pretrained, "relative, clean", "0.02", "0.0002"),
    ):
        found = flags_by_name(aqn.ARMS[arm], start)
        assert found["--config.noise_injection.sigma_start"] == first
        assert found["--config.noise_injection.sigma_end"] == last
        assert found["--config.noise_injection.old_logps"] == arm.split(", ")[1]


def row(arm, seed, accuracy, reward):
    return {
        "model": "quickstart",
        "arm": arm,
        "seed": seed,
        "accuracy": accuracy,
        "pass@8": 1.0,
        "reward": reward,
        "entropy": [9.0] * 5 + [0.25] * 10,
    }


def test_table_of_aqn_compares_with_no_noise_at_the_same_seed():
    """Accuracy 52 and 54 against 50 and 50: 3 points more, t = 3 / (sqrt(2) / sqrt(2)) = 3, p = 2 (1/2 - atan(3) / pi);
    Student's t of one degree of freedom is 12.706 at 95 %."""
    rows = [row("none", 1, 0.50, [0.0, 0.5]), row("none", 2, 0.50, [0.0, 0.5])]
    rows += [row("linear, clean", 2, 0.54, [0.5, 1.0]), row("linear, clean", 1, 0.52, [0.5, 1.0])]
    heads = [str(n) for n in range(8)]
    none, linear = aqn.table(rows, heads).splitlines()[2:]
    assert none == "| none | 2 | 50.0 ± 0.0 | 100.0 ± 0.0 | 0.250 ± 0.000 | 0.250 ± 0.000 |  |  |"
    p = 1 - 2 * math.atan(3) / math.pi
    assert (
        f"| 53.0 ± 12.7 | 100.0 ± 0.0 | 0.750 ± 0.000 | 0.250 ± 0.000 | +3.0 ({p:.3f}) | +0.500 (< 0.001) |" in linear
    )


def scored(seed: int, avg: tuple[float, ...]) -> dict:
    """A run whose base, SFT and GRPO have these scores, sampled and greedy."""
    stages = {name: {"avg@8": value, "greedy": value / 2} for name, value in zip(real.STAGES, avg, strict=True)}
    return {**stages, "grpo_over_sft": {"avg@8": [0.1, 0.05, 0.15], "greedy": [0.05, -0.01, 0.11]}, "wall_s": 2910.0,
            "seed": seed, "settings": {"seed": seed}}  # fmt: skip


def test_table_of_pretrained_runs_has_a_row_for_each_seed():
    rows = real.replaced([scored(1, (0.0, 0.1, 0.15)), scored(2, (0.0, 0.1, 0.2))], scored(1, (0.0625, 0.1, 0.2)))
    assert [row["seed"] for row in rows] == [1, 2]
    first, _ = real.table(rows, real.ENGLISH).splitlines()[2:]
    assert first == ("| 1 | 6.2 | 10.0 | 20.0 | +10.0 [+5.0, +15.0] | 3.1 | 5.0 | 10.0 | +5.0 [-1.0, +11.0] | 48 |")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "name finished folders of `python -m perl real`, or write --draw"),
        (["nowhere"], "nowhere: no result.json in it; name a folder of `python -m perl real` that has finished"),
    ],
)
def test_a_folder_that_has_not_finished_is_one_line(words, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["real", *words])
    with pytest.raises(SystemExit) as ended:
        real.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"real: error: {told}"


@pytest.mark.parametrize("module", [real, adapter_paths, algorithms, aqn, staleness, quantised_training])
def test_nothing_to_draw_is_one_line_and_the_pages_stay(module, tmp_path, monkeypatch, capsys):
    """Two emptied the tables, one ended with a traceback."""
    pages = {page: page.read_bytes() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
    monkeypatch.setattr(sys, "argv", ["draw", "--draw", "--output", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert f"--output {tmp_path / 'none.json'}: not there" in capsys.readouterr().err.splitlines()[-1]
    assert pages == {page: page.read_bytes() for page in pages}


def test_results_are_appended_and_read(tmp_path):
    file = tmp_path / "results" / "some.jsonl"
    assert read_rows(file) == []
    add_row(file, {"seed": 1})
    with file.open("a") as opened:
        opened.write('{"see')  # cut off by a kill
    assert read_rows(file) == [{"seed": 1}]
    add_row(file, {"seed": 2})
    assert read_rows(file) == [{"seed": 1}, {"seed": 2}]


def test_a_run_is_there_and_runs_of_other_lengths_are_refused(tmp_path):
    """A trial of two steps was taken for the run of sixty."""
    file = tmp_path / "some.jsonl"
    assert not is_there(file, {"model": "quickstart", "seed": 1}, 60)
    add_row(file, {"model": "quickstart", "seed": 1, "reward": [0.5, 0.6]})
    assert is_there(file, {"model": "quickstart", "seed": 1}, 2)
    assert not is_there(file, {"model": "quickstart", "seed": 2}, 2)
    assert not is_there(file, {"model": "smollm2", "seed": 1}, 40)
    with pytest.raises(UserError, match=r"holds runs of 2 steps, not 60; write another file, or --steps"):
        is_there(file, {"model": "quickstart", "seed": 2}, 60)


def test_a_page_without_the_marks_is_one_line(tmp_path):
    (tmp_path / "page.md").write_text("<!-- it:begin -->\n")
    with pytest.raises(UserError, match=r"page\.md: it needs the lines <!-- it:begin --> and <!-- it:end -->, once"):
        write_between(tmp_path / "page.md", "it", "text")


def test_a_run_with_other_settings_does_not_replace_a_seed():
    """One on eight problems took the place of the one on 300."""
    row = {"seed": 1, "settings": {"seed": 1, "data": "a", "held_out": None}}
    assert real.replaced([row], {"seed": 2, "settings": {"seed": 2, "data": "b", "held_out": None}})[0] == row
    with pytest.raises(UserError, match=r"^seed 1 is of a run with held_out 8, not None; write another --output$"):
        real.replaced([row], {"seed": 1, "settings": {"seed": 1, "data": "c", "held_out": 8}})


def test_where_aqn_starts_on_a_pretrained_model(tmp_path):
    (tmp_path / "sft" / "adapter").mkdir(parents=True)
    settings = {"engine": "hf", "model": "smollm2", "data": "hash", "sft_rows": 160, "sums": 600, "grpo_sums": 180}
    (tmp_path / "real.json").write_text(
        json.dumps({"seed": 3, "sft_steps": None, "grpo_steps": None, "held_out": None, **settings})
    )
    start = real_start(tmp_path)
    assert (start.model, start.how.seed, start.sigma, start.sigma_relative) == ("smollm2", 3, 0.005, 0.02)
    flags = dict(zip(start.flags[::2], start.flags[1::2], strict=True))
    assert flags["--config.peft.adapter"] == str(tmp_path / "sft" / "adapter")
    assert flags["--config.model.model_name_or_path"] == str(tmp_path / "model")


def test_one_seed_has_no_interval_in_the_table_of_aqn():
    """It said ± 0.0 and a p of nan."""
    (line,) = aqn.table([row("none", 1, 0.5, [0.5])], "abcdefgh").splitlines()[2:]
    assert line == "| none | 1 | 50.0 | 100.0 | 0.500 | 0.250 |  |  |"
    lines = aqn.table([row("none", 1, 0.5, [0.5]), row("linear, clean", 1, 0.6, [0.7])], "abcdefgh").splitlines()
    assert lines[3] == "| linear, clean | 1 | 60.0 | 100.0 | 0.700 | 0.250 | +10.0 | +0.200 |"


def test_table_of_staleness_compares_with_lag_0_of_the_same_noise_at_the_same_seed():
    """With noise accuracy 52 and 54 against 50 and 50, as above: p = 1 - 2 atan(3) / pi; 12.706 is Student's t. Without
    noise one seed, 60 against 62."""
    rows = [row("lag 0", seed, 0.50, [0.5]) for seed in (1, 2)]
    rows += [row("lag 8, token", 1, 0.52, [0.25]), row("lag 8, token", 2, 0.54, [0.25])]
    rows += [row("lag 0, no noise", 2, 0.62, [0.5]), row("lag 16, none, no noise", 2, 0.60, [0.5])]
    rows.append(row("lag 8, exact", 3, 0.70, [0.5]))  # of a seed without lag 0
    p = 1 - 2 * math.atan(3) / math.pi
    assert staleness.table(rows, "accuracy").splitlines()[2:] == [
        "| 0 | 50.0 ± 0.0 |  |  |  |",
        f"| 8 |  | 53.0 ± 12.7, +3.0 ({p:.3f}) |  | 70.0, n=1 |",
        "| 0, no noise | 62.0 |  |  |  |",
        "| 16, no noise | 60.0, -2.0 |  |  |  |",
    ]


def test_rewards_of_a_lag_stand_beside_those_of_lag_0_so_many_steps_late():
    """0, 1, 1, 1 two steps late is 0, 0, 0, 1."""
    rows = [row("lag 0", seed, 0.5, [0.0, 1.0, 1.0, 1.0]) for seed in (1, 2)]
    rows += [row("lag 2, none", seed, 0.5, [0.0, 0.0, 0.0, 0.0]) for seed in (1, 2)]
    assert staleness.table(rows, "reward").splitlines() == [
        "| lag | none | token | token_mask | exact | lag 0, late |",
        "|---|---|---|---|---|---|",
        "| 0 | 0.750 ± 0.000 |  |  |  |  |",
        "| 2 | 0.000 ± 0.000, -0.750 (< 0.001) |  |  |  | 0.250 ± 0.000, -0.500 (< 0.001) |",
    ]


def test_an_arm_of_the_study_is_a_lag_and_what_the_loss_makes_of_it():
    names = "rollout.piece_size", "rollout.workers", "rollout.lag", "rollout.importance_correction", "rollout.behaviour"
    for arm, values in {
        "lag 0": "16",
        "lag 8, none": "16 1 8 none",
        "lag 2, token_mask": "16 1 2 token_mask",
        "lag 4, exact": "16 1 4 token exact",
    }.items():
        flags = flags_of(staleness.ARMS[arm].settings(quickstart_start(1)))
        assert flags[1::2] == values.split()
        assert flags[::2] == [f"--config.{name}" for name in names[: len(values.split())]]
    without = flags_of(staleness.ARMS["lag 0, token, no noise"].settings(quickstart_start(1)))
    assert without[2:] == [
        "--config.rollout.importance_correction",
        "token",
        "--config.noise_injection.enabled",
        "false",
    ]
    assert len(staleness.ARMS) == len(staleness.ORDER) == 25


def test_an_arm_with_a_quantised_sampler():
    """29 of 3 x 4 x 3: without quantisation exact is token, without noise too token is none; without noise exact is
    none. What is asked first comes first."""
    arms = quantised_training.ARMS
    assert list(arms)[:4] == [
        "none, no noise, none",
        "none, linear, none",
        "none, linear, token",
        "int8, no noise, none",
    ]
    assert len(arms) == 29 + 4
    assert {str(arm) for arm in quantised_training.EVERY} - set(arms) == {
        "none, no noise, token",
        *(f"{quantization}, no noise, exact" for quantization in ("none", "int8", "int4")),
        *(f"none, {noise}, exact" for noise in ("linear", "exponential", "target_kl")),
    }
    assert [name for name in list(arms)[:23] if "exact" in name] == []
    start = quickstart_start(1)
    for name, same in (("none, no noise, none", "none"), ("none, target_kl, none", "target_kl, clean")):
        assert arms[name].settings(start) == aqn.ARMS[same].settings(start)
    for name, corrected, behaviour in (
        ("none, linear, token", "token", None),
        ("int8, no noise, none", "none", None),
        ("int4, linear, exact", "token", "exact"),
    ):
        flags = flags_by_name(arms[name], start)
        assert flags["--config.rollout.importance_correction"] == corrected
        assert flags.get("--config.rollout.behaviour") == behaviour
        assert flags.get("--config.rollout.quantization", "none") == name.split(",")[0]


def test_tables_of_quantised_samplers_compare_with_none_at_the_same_seed():
    """As above 53 over 50: p = 1 - 2 atan(3) / pi. The sampler has 1 and 2 points less than what
    is trained: t = 1.5 / (sqrt(1/2) / sqrt(2)) = 3 again."""
    kls = {"noise_kl": [], "quantization_kl": [], "tokens_per_s": 900.4, "linear_bytes": 4000, "embedding_bytes": 1500}
    rows = [row("none, no noise, none", seed, 0.5, [0.25]) for seed in (1, 2)]
    rows = [each | kls | {"quantization": "none", "sampler_accuracy": 0.5} for each in rows]
    drawn = kls | {"quantization": "int4", "noise_kl": [0.002] * 10 + [0.001] * 10, "quantization_kl": [0.01] * 20}
    rows.append(row("int4, linear, token", 1, 0.52, [0.5]) | drawn | {"sampler_accuracy": 0.51})
    rows.append(row("int4, linear, token", 2, 0.54, [0.5]) | drawn | {"sampler_accuracy": 0.52})
    rows.append(row("int4, linear, none", 2, 0.54, [0.5]) | drawn | {"sampler_accuracy": 0.52})
    p = 1 - 2 * math.atan(3) / math.pi
    assert quantised_training.table(rows, "accuracy").splitlines()[2:] == [
        "| none | no noise | 50.0 ± 0.0 |  |  |",
        f"| int4 | linear | 54.0, +4.0, n=1 | 53.0, +3.0 ({p:.3f}) |  |",
    ]
    assert quantised_training.policy_table(rows).splitlines()[2:] == [
        "| none, no noise | 100.0 ± 0.0 | 0.250 ± 0.000 |  |  |",
        "| int4, linear | 100.0, +0.0, n=1 | 0.250, +0.000, n=1 | 0.01→0.01 | 0.002→0.001 |",
    ]
    assert quantised_training.sampler_table(rows).splitlines()[2:] == [
        "| none | 2 | 50.0 ± 0.0 | +0.0 (1.000) | 900 | 4 | 2 |",
        f"| int4 | 3 | 51.5 ± 6.4 | -1.5 ({p:.3f}) | 900 | 4 | 2 |",
    ]


def test_what_a_setting_changes_is_averaged_over_the_arms_that_differ_in_nothing_else():
    """int4 has 2 points more without noise and 4 with linear at seed 1, and 0 and 2 at seed 2: 3 and 1, so t = 2 and
    p = 1 - 2 atan(2) / pi. Rewards are equal."""
    scores = {"none, no noise, none": (0.5, 0.5), "none, linear, none": (0.6, 0.6)}
    scores |= {"int4, no noise, none": (0.52, 0.5), "int4, linear, none": (0.64, 0.62)}
    rows = [row(arm, seed, both[seed - 1], [0.5, 0.7]) for arm, both in scores.items() for seed in (1, 2)]
    int4, linear = quantised_training.factors_table(rows).splitlines()[2:]
    assert int4 == f"| int4, uncorrected | +2.0 ({1 - 2 * math.atan(2) / math.pi:.3f}) | +0.000 (1.000) |"
    assert linear.startswith("| noise linear, uncorrected | +11.0 (")


def test_no_run_begins_once_the_stop_file_is_there(tmp_path, capsys):
    (tmp_path / "stop").touch()
    learn_all([quickstart_start(1)], aqn.ARMS, 2, tmp_path / "rows.jsonl", stop=tmp_path / "stop")
    assert capsys.readouterr().out == f"{tmp_path / 'stop'} is there: no other run begins\n"
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.slow
def test_a_run_that_was_killed_is_gone_on_with(tmp_path):
    """Two runs of fourteen steps, one of them killed behind its checkpoint of the tenth."""
    rows = {}
    for name in ("whole", "killed"):
        output, runs = tmp_path / f"{name}.jsonl", tmp_path / name
        command = [sys.executable, "-m", "benchmarks.staleness", "--arms", "lag 0", "--seeds", "1", "--steps", "14"]
        command += ["--output", str(output), "--runs", str(runs)]
        if name == "killed":
            with subprocess.Popen(command, start_new_session=True) as process:
                wait_for(lambda: any(runs.glob("*/checkpoint-10/trainer_state.json")), seconds=240)  # noqa: B023
                os.killpg(process.pid, signal.SIGKILL)
            assert not output.exists()
        assert subprocess.run(command, timeout=400).returncode == 0
        assert not [path for path in runs.iterdir() if path.is_dir()]
        (rows[name],) = read_rows(output)
    assert rows["whole"]["reward"] == rows["killed"]["reward"]
    assert rows["whole"]["accuracy"] == rows["killed"]["accuracy"]


def test_text_between_marks_is_replaced(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- it:begin -->\nold\n<!-- it:end -->\nafter\n")
    write_between(page, "it", markdown(["a", "b"], [["1", "2"]]))
    assert page.read_text() == ("before\n<!-- it:begin -->\n| a | b |\n|---|---|\n| 1 | 2 |\n<!-- it:end -->\nafter\n")


def test_curves_are_drawn_with_their_mean():
    """Two curves of three steps and their mean, thicker: x runs over the panel's 200 pixels, y over its 96, upwards."""
    drawn = panels({"one": [[0.0, 0.5, 1.0], [1.0, 0.5, 1.0]]}, mean=True)
    assert drawn.count("<polyline") == 3
    assert 'points="28.0,120.0 128.0,72.0 228.0,24.0"' in drawn
    assert 'points="28.0,72.0 128.0,72.0 228.0,24.0" fill="none" stroke="#c0392b" stroke-width="2"' in drawn


def test_agreement_counts_rows():
    one = {("a", 0): {"completion": "1", "score": 1.0}, ("b", 0): {"completion": "2", "score": 0.0}}
    other = {("b", 0): {"completion": "3", "score": 0.0}, ("a", 0): {"completion": "1", "score": 1.0}}
    assert adapter_paths.agreement(one, other) == {"equal_completions": 0.5, "equal_verdicts": 1.0}
    with pytest.raises(ValueError, match="1 rows are not in both"):
        adapter_paths.agreement(one, {("a", 0): one["a", 0]})


def test_table_of_ways_has_a_refused_one():
    scored = {"accuracy": 0.2333, "equal_completions": 0.9133, "equal_verdicts": 1.0, "tokens_per_s": 50.2}
    ways = {"one": scored | {"start_s": 8.63, "update_lost": 0.151}, "two": {"refused": "why"}}
    ways |= {"three": scored | {"start_s": 20.6, "update_lost": None}}
    assert adapter_paths.table(ways, "abcdefg").splitlines()[2:] == [
        "| one | 23.3 | 91.3 | 100.0 | 50 | 9 | 15.1 |",
        "| two |  |  |  |  |  |  |",
        "| three | 23.3 | 91.3 | 100.0 | 50 | 21 |  |",
    ]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "--model: name it, or --real"),
        (["--model", "nowhere"], "--model nowhere: not there"),
        (["--model", ".", "--adapter", ".", "--dataset", ".", "--ways", "vLLM"], "--ways: unknown: vLLM; known: "),
    ],
)
def test_mistakes_with_the_ways_of_an_adapter_are_one_line(flags, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["adapter_paths", *flags])
    with pytest.raises(SystemExit) as ended:
        adapter_paths.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_without_sft_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reward_curves", "--real", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        reward_curves.main()
    assert ended.value.code == 2
    assert "no real.json in it; name a folder of `python -m perl real`" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_both_trainers_take_the_second_stage_of_a_run(tmp_path):
    """Of the quickstart's base in the place of a pretrained one, each in a process of its own."""
    folder = tmp_path / "real"
    peft_model = get_peft_model(load_model(BASE_FOLDER), LoraConfig(r=4, target_modules="all-linear"))
    peft_model.save_pretrained(folder / "sft" / "adapter")
    (folder / "data").mkdir()
    (folder / "data" / "grpo.jsonl").write_bytes((DATA_FOLDER / "train.jsonl").read_bytes())
    settings = {"engine": "hf", "model": str(BASE_FOLDER), "data": "hash", "sft_rows": 1, "sums": 0, "grpo_sums": 0}
    settings |= {"seed": 3, "sft_steps": None, "grpo_steps": None, "held_out": None}
    (folder / "real.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "benchmarks.reward_curves", "--real", str(folder), "--steps", "2"]
    command += ["--output", str(tmp_path / "curves.json")]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    written = json.loads((tmp_path / "curves.json").read_text())
    assert {name: result[name] for name in written} == written
    assert result["seed"] == 3
    for side in ("trl", "ours"):
        assert len(result[side]["accuracy"]) == len(result[side]["step_s"]) == 2
        assert 0.2 < result[side]["accuracy"][0] < 0.8
    assert result["ratio"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("size", "refused"), [(1e-3, True), (0.1, False)])
def test_one_adapter_in_two_ways(size, refused, tmp_path):
    """Of an update of 1e-3 of the weights bfloat16 loses 38 %, and most of its effect: that merge is refused."""
    peft_model = get_peft_model(load_model(BASE_FOLDER), LoraConfig(r=4, target_modules="all-linear"))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=size)
    peft_model.save_pretrained(tmp_path / "adapter")
    problems = (DATA_FOLDER / "test.jsonl").read_text().splitlines(keepends=True)[:12]
    (tmp_path / "problems.jsonl").write_text("".join(problems))
    ways = ["transformers, float32", "transformers, bfloat16"]
    command = [sys.executable, "-m", "benchmarks.adapter_paths", "--model", str(BASE_FOLDER), "--ways", ";".join(ways)]
    command += ["--adapter", str(tmp_path / "adapter"), "--dataset", str(tmp_path / "problems.jsonl")]
    command += ["--max_new_tokens", "24", "--output", str(tmp_path / "ways.json")]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "ways.json").read_text())
    exact, rounded = (result["ways"][way] for way in ways)
    assert result["problems"] == 12
    assert (exact["equal_completions"], exact["equal_verdicts"], exact["update_lost"]) == (1, 1, 0)
    if refused:
        assert "the model written in bfloat16 differs from PEFT's" in rounded["refused"]
    else:
        assert 0 < rounded["update_lost"] < 0.1
        assert 0 <= rounded["equal_completions"] <= 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--arms", "none;lineer, clean"], "--arms: unknown: lineer, clean; known: none; linear, clean; "),
        (["--real", "nowhere"], "nowhere: no real.json in it; name a folder of `python -m perl real`"),
    ],
)
def test_mistakes_with_the_benchmark_of_aqn_are_one_line(flags, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["aqn", *flags])
    with pytest.raises(SystemExit) as ended:
        aqn.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_one_run_of_aqn_stands_in_the_results_and_is_not_repeated(tmp_path):
    command = [sys.executable, "-m", "benchmarks.aqn", "--arms", "linear, noisy", "--seeds", "3", "--steps", "2"]
    command += ["--output", str(tmp_path / "aqn.jsonl")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    (found,) = read_rows(tmp_path / "aqn.jsonl")
    assert (found["model"], found["arm"], found["seed"]) == ("quickstart", "linear, noisy", 3)
    assert len(found["reward"]) == 2
    assert found["sigma"] == [0.05, pytest.approx(0.0225)]
    assert 0.2 < found["accuracy"] < 0.8 < found["pass@8"]
    again = subprocess.run(command, cwd=ROOT, check=True, timeout=300, capture_output=True, text=True)
    assert again.stdout == ""
    assert len(read_rows(tmp_path / "aqn.jsonl")) == 1
    assert json.dumps(found).count(str(tmp_path)) == 0


@pytest.mark.slow
def test_one_run_of_the_study_stands_in_the_results(tmp_path):
    """With the CPU time of the trainer and of its worker."""
    command = [sys.executable, "-m", "benchmarks.staleness", "--arms", "lag 1, exact", "--seeds", "3", "--steps", "2"]
    subprocess.run([*command, "--output", str(tmp_path / "staleness.jsonl")], cwd=ROOT, check=True, timeout=300)
    (found,) = read_rows(tmp_path / "staleness.jsonl")
    assert [found[name] for name in ("arm", "lag", "correction", "noise")] == ["lag 1, exact", 1, "exact", True]
    assert len(found["reward"]) == len(found["logp_kl"]) == 2
    assert 0.2 < found["accuracy"] < 0.8
    assert found["cpu_s"] > 2


@pytest.mark.slow
def test_one_run_of_a_quantised_sampler_stands_in_the_results(tmp_path):
    command = [sys.executable, "-m", "benchmarks.quantised_training", "--seeds", "3", "--steps", "2"]
    command += ["--arms", "none, no noise, none;int4, linear, exact", "--output", str(tmp_path / "quantised.jsonl")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    none, int4 = read_rows(tmp_path / "quantised.jsonl")
    assert none["accuracy"] == pytest.approx(none["sampler_accuracy"], abs=2e-3)  # the same but for last bits
    assert none["pass@8"] == pytest.approx(none["sampler_pass@8"], abs=5e-3)
    assert (none["quantization_kl"], none["noise_kl"]) == ([], [])
    assert [int4[name] for name in ("quantization", "noise", "correction")] == ["int4", "linear", "exact"]
    assert len(int4["quantization_kl"]) == len(int4["noise_kl"]) == len(int4["reward"]) == 2
    assert 0.1 < int4["sampler_accuracy"] < 0.8
    assert int4["linear_bytes"] < none["linear_bytes"] / 4
    assert none["tokens_per_s"] > 10
    assert int4["embedding_bytes"] == none["embedding_bytes"]
