"""The page of a training apart from the browser: what is read, computed, drawn, and which folders it is made from."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path

import pytest

from perl.__main__ import main
from perl.base.errors import UserError
from perl.records import clock
from perl.reports import charts, embed, figures
from perl.reports.charts import Bars, Line
from perl.reports.page import render
from perl.reports.sources import read_material
from perl.reports.training_run import TrainingRun, facts, read_training_run, settings, time_in_steps
from perl.tools.report import compared
from tests.reports.conftest import CONFIG, logged, record, write_results, write_training

ROOT = Path(__file__).parents[2]
WRONG = {"score": 0.0, "scores": {"flexible": 0.0}, "extracted": "17", "reason": "wrong"}


def drawn(chart: str, kind: str, name: str) -> list[ET.Element]:
    return [e for e in ET.fromstring(chart).iter(kind) if name in e.get("class", "").split()]


def number(element: ET.Element, name: str) -> float:
    return float(element.get(name, "nan"))


def run_of(rows: list[dict]) -> TrainingRun:
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    metrics = {name: [row.get(name) for row in rows] for name in names}
    return TrainingRun(
        folder=Path("runs/mine"), steps=[r["step"] for r in rows], metrics=metrics, config={}, environment={}
    )


# Reading


def test_each_step_counts_once_and_the_later_row_is_taken(tmp_path, caplog):
    """Step 2 is trained again after a resume; the summary at the end and an evaluation's row are no steps."""
    rows = [
        logged(1, reward=0.25), logged(2, reward=0.3, entropy=0.9), {"step": 2, "eval_reward": 0.9},
        logged(2, reward=0.5, entropy=None), logged(3, reward=0.75), {"step": 3, "train_loss": 0.1, "aqn/sigma": 0.01},
    ]  # fmt: skip
    write_training(tmp_path / "run", rows)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('NaN\n{"step": 4, "reward": NaN}\n{"step": 5, "rew')
    run = read_training_run(tmp_path / "run")
    assert run.steps == [1, 2, 3, 4]
    assert run.metrics["reward"] == [0.25, 0.5, 0.75, None]
    assert run.points("entropy") == [(1, 0.4), (3, 0.4)]
    assert run.points("reward") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert "train_loss" not in run.metrics
    assert run.points("no such metric") == []
    assert "2 broken lines left out" in caplog.text


def test_a_run_without_its_configuration_is_shown_all_the_same(tmp_path, caplog):
    write_training(tmp_path / "run", [logged(1)])
    (tmp_path / "run" / "environment.json").unlink()
    (tmp_path / "run" / "config.yaml").write_text("- no\n- mapping\n")
    page = render(read_material([tmp_path / "run"]))
    assert "<h1>run</h1>" in page
    assert len(caplog.messages) == 2
    assert "config.yaml is left out: no mapping" in caplog.text
    assert "environment.json is left out: No such file" in caplog.text


# Computing


def test_a_run_in_a_few_numbers():
    """20 logs: the first two rewards are 0.1 and 0.3, the last two 0.7 and 0.8; 40 steps of which every second is
    logged, 2 s each, so 80 s."""
    rewards = [0.1, 0.3, *[0.5] * 16, 0.7, 0.8]
    rows = [
        logged(2 * i + 2, reward=reward, **{"perf/throughput": 900.0 + i, "perf/max_memory_allocated_gb": 30.0 + i})
        for i, reward in enumerate(rewards)
    ]
    assert facts(run_of(rows)) == {
        "steps": "40",
        "reward, first and last tenth": "0.200 → 0.750",
        "truncated, last tenth": "25.0 %",
        "time in steps": "0:01:20",
        "tokens/s a device": "910",  # 909.5
        "most memory": "49.0 GB",
    }
    assert facts(run_of([{"step": 7, "reward": 0.5}])) == {
        "steps": "7",
        "reward, first and last tenth": "0.500 → 0.500",
    }


def test_the_time_of_steps_that_were_logged_unevenly():
    assert time_in_steps([(10, 2.0), (20, 1.0), (25, 4.0)], 10) == 20 + 10 + 20
    assert time_in_steps([(1, 2.0), (10, 1.0)], 10) == 2 + 9
    assert time_in_steps([(1010, 2.0), (1020, 1.0)], 10) == 20 + 10  # gone on in another folder
    assert time_in_steps([(1010, 2.0)], 10) == 20
    assert time_in_steps([(100, 2.0), (101, 1.0)], None) == 200 + 1  # by epochs
    assert [clock(seconds) for seconds in (59.6, 3599, 36_061)] == ["0:01:00", "0:59:59", "10:01:01"]


def test_the_noise_of_a_run_that_held_a_kl_divergence():
    run = run_of([{"step": 1, "reward": 0.5, "aqn/sigma": 0.05, "aqn/sigma_relative": 0.05, "aqn/kl": 2e-5}])
    titles = [figure.title for figure in figures.of_training(run)]
    assert titles == ["Noise of the rollouts (AQN)", "Noisy and clean policy"]


def test_a_run_with_workers_shows_who_waits_how_fast_each_is_and_how_far_they_are_apart():
    names = "trainer_waited", "workers_idle", "staleness", "staleness_max", "queue"
    names = *names, "tokens_per_s", "tokens_per_s_min", "tokens_per_s_max"
    drawn = ["rollout/logp_mismatch", "rollout/engine_mismatch", "rollout/logp_kl"]
    metrics = [*(f"pool/{name}" for name in names), *drawn]
    run = run_of([{"step": 1, "reward": 0.5} | dict.fromkeys(metrics, 0.5)])
    assert [line.metric for line in figures.shown_lines(run)] == ["reward", *metrics]
    titles = ["Waiting", "Age of the policy that drew", "Queue", "Speed of the workers", "Sampler and trainer", "Drift"]
    assert [figure.title for figure in figures.of_training(run)] == titles


def test_settings_say_what_the_training_was_made_with(tmp_path):
    write_training(tmp_path / "run", [logged(1)], packages={"torch": "2.10.0", "trl": "1.16.0"}, git_commit=None)
    assert settings(read_training_run(tmp_path / "run")) == {
        "model": "models/tiny",
        "dataset": "gsm8k",
        "algorithm": "GRPO",
        "completions a step": "24 (batch 4 × accumulation 2 × processes 3)",
        "seed": "3",
        "device": "npu",
        "processes": "3",
        "command": "perl/train.py --recipe 'my own.yaml'",
        "versions": "torch 2.10.0, trl 1.16.0",
    }


def test_the_running_mean_narrows_at_the_ends():
    assert charts.running_mean([1.0, 2.0, 6.0, 4.0, 5.0], 3) == [1.0, 3.0, 4.0, 5.0, 5.0]
    assert charts.running_mean([1.0, 2.0, 6.0, 4.0, 5.0], 1) == [1.0, 2.0, 6.0, 4.0, 5.0]
    assert charts.running_mean([1.0, 2.0, 6.0, 4.0, 5.0], 5)[2] == pytest.approx(3.6)
    assert [charts.window(count) for count in (1, 39, 40, 60, 2000)] == [1, 1, 3, 5, 133]


def test_the_script_gets_the_values_that_are_drawn():
    rows = [logged(10, reward=1 / 3), logged(20, reward=None, **{"rewards/format/mean": 0.25})]
    run = run_of(rows)
    shown = figures.shown_lines(run)
    assert [line.metric for line in shown] == [
        "reward", "rewards/accuracy/mean", "rewards/format/mean", "completions/mean_length", "entropy", "aqn/sigma",
        "aqn/sigma_realized", "timing/step", "timing/rollout", "timing/update", "rollout/logp_mismatch", "grad_norm",
    ]  # fmt: skip
    columns = embed.columns(shown[:3])
    assert columns == {
        "step": [10, 20],
        "values": {
            "reward": [0.33333, None], "rewards/accuracy/mean": [0.5, 0.5], "rewards/format/mean": [None, 0.25],
        },
    }  # fmt: skip
    titles = [figure.title for figure in figures.of_training(run)]
    assert titles == [
        "Reward by function", "Completion length", "Entropy", "Noise of the rollouts (AQN)", "Step time",
        "Sampler and trainer", "Gradient norm",
    ]  # fmt: skip
    assert figures.of_training(run_of([{"step": 1, "reward": 0.5}])) == []


# Drawing


def test_a_curve_stands_on_its_axes():
    """Axis labels 0 to 1 are at most three characters, so the plot begins at 14 + 6.6 · 3 = 33.8 and ends at 406; its
    height is 30 to 164."""
    line = Line("reward", "reward", [(0, 0.0), (50, 0.5), (100, 1.0)])
    chart = charts.trend([line], "Reward", unit="reward", span=(0.0, 1.0))
    (path,) = drawn(chart, "path", "line")
    assert path.get("d") == "M33.8 164.0L219.9 97.0L406.0 30.0"
    labels = [e.text for e in ET.fromstring(chart).iter("text")]
    assert labels == [
        "reward", None, "0", "0.2", "0.4", "0.6", "0.8", "1", "0", "20", "40", "60", "80", "100", "optimizer step",
    ]  # fmt: skip
    svg = ET.fromstring(chart)
    assert json.loads(svg.get("data-plot", "")) == [0, 100, pytest.approx(33.8), 406]
    assert json.loads(svg.get("data-metrics", "")) == ["reward"]
    assert svg.get("aria-label") == "Reward (reward). reward: 0 at step 0, 1 at step 100"
    assert drawn(chart, "path", "raw") == []


def test_many_logs_are_drawn_thin_behind_their_mean():
    points = [(i, float(i % 2)) for i in range(400)]
    chart = charts.trend([Line("a", "a", points)], "A", unit="a")
    (raw,), (line,) = drawn(chart, "path", "dense"), drawn(chart, "path", "line")
    assert len(raw.get("d", "").split("L")) == len(line.get("d", "").split("L")) == 400
    heights = [float(pair.split()[1]) for pair in line.get("d", "")[1:].split("L")]
    assert all(abs(height - 97) < 4 for height in heights[20:-20])  # 0.5, in the middle of 30 to 164
    assert drawn(charts.trend([Line("a", "a", points)], "A", unit="a", smooth=False), "path", "raw") == []


@pytest.mark.parametrize(("points", "labels"), [([(5, 0.0)], ["0", "0.2"]), ([(1, 1e-13), (2, 3e-13)], ["0"])])
def test_one_step_and_tiny_values_have_an_axis_too(points, labels):
    chart = charts.trend([Line("a", "a", points)], "A", unit="nats", span=(0.0,))
    found = [e.text for e in ET.fromstring(chart).iter("text")]
    assert found[2 : 2 + len(labels)] == labels
    assert len(set(found[2:])) == len(found[2:])
    assert "nan" not in chart


def test_the_last_label_stays_inside():
    chart = charts.trend([Line("a", "a", [(1, 0.0), (2000, 1.0)])], "A", unit="a")
    (last,) = [e for e in ET.fromstring(chart).iter("text") if e.text == "2,000"]
    assert number(last, "x") == 420 - 3.5 * 5


def test_bars_before_and_after_stand_on_one_axis():
    """ "before" is six characters: bars begin at 14 + 6.6 · 6 = 53.6 and reach 270 at 100 %, 216.4 units."""
    rows = [
        charts.estimate("before", {"value": 0.25, "low": 0.0, "high": 0.5}, "bar before"),
        charts.estimate("after", {"value": 1.0, "low": 0.75, "high": 1.0}),
    ]
    chart = charts.bars([Bars("<b>, greedy", rows), Bars("other", rows[:1])], "Scores with 95 % intervals")
    before, after = drawn(chart, "rect", "before")[0], drawn(chart, "rect", "first")[0]
    assert (number(before, "x"), number(before, "width")) == (53.6, 54.1)
    assert (number(after, "x"), number(after, "width")) == (53.6, 216.4)
    whiskers = drawn(chart, "line", "interval")
    assert [(number(w, "x1"), number(w, "x2")) for w in whiskers[:4:3]] == [(53.6, 161.8), (215.9, 270)]
    texts = [e.text for e in ET.fromstring(chart).iter("text")]
    assert texts[:5] == ["<b>, greedy", "before", "25.0 % (0.0 to 50.0)", "after", "100.0 % (75.0 to 100.0)"]
    assert texts[-3:] == ["0 %", "50 %", "100 %"]


# Which folders a page is made from


def quickstart_folder(folder: Path) -> Path:
    """A training, and 10 problems scored before (the first 2 right) and after (all but the first right), greedily and
    with 2 samples each."""
    for stage, right, own in (("before", range(2), {}), ("after", range(1, 10), {"adapter": "train/adapter"})):
        for how, n in (("greedy", 1), ("sampled", 2)):
            rows = [
                record(f"{i:016x}-0", s, completion=f"{stage} {i}", **({} if i in right else WRONG))
                for i in range(10)
                for s in range(n)
            ]
            sampling = {"temperature": float(n - 1)}
            write_results(folder / stage / how / "test", rows, n, sampling=sampling, adapter_hash=None, **own)
    write_training(folder / "train", [logged(step, reward=step / 4) for step in (1, 2, 3, 4)])
    return folder


def test_an_adapter_is_compared_with_the_base_that_is_quantised_as_its_own_was(tmp_path):
    rows = [record(f"{i:016x}-0") for i in range(6)]
    write_results(tmp_path / "base" / "test", rows, 1)
    write_results(tmp_path / "base_int8" / "test", rows, 1, quantization="int8")
    adapter = {"adapter": "train/adapter", "adapter_hash": "a"}
    for name, quantization in (("float", None), ("int8", "int8"), ("int4", "int4")):
        write_results(tmp_path / name / "test", rows, 1, quantization=quantization, **adapter)
    material = compared(read_material([tmp_path]))
    assert [run.label for run in material.runs] == ["base", "base_int8", "float", "int4", "int8"]
    assert material.pairs == {2: 0, 4: 1}  # and none of int4


def test_the_quickstarts_folder_is_one_page(tmp_path):
    material = compared(read_material([quickstart_folder(tmp_path / "run")]))
    assert [run.label for run in material.runs] == ["before/greedy", "before/sampled", "after/greedy", "after/sampled"]
    assert (material.label, material.pairs) == ("evaluation", {2: 0, 3: 1})
    assert material.training is not None
    assert material.training.folder == tmp_path / "run" / "train"
    for after in material.runs[2:]:
        assert after.comparison is not None
        paired = after.comparison.datasets["test"]
        assert (paired.problems, paired.better, paired.worse, paired.equal) == (10, 8, 1, 1)
        assert next(iter(paired.metrics.values())).value == pytest.approx(0.7)
    text = render(material)
    assert "<h1>tiny: GRPO with DoRA and AQN</h1>" in text
    assert '<p class="kind">Training and evaluations · run</p>' in text
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", text) == [
        "Result", "Training", "Scores", "Compared with tiny", "Samples", "How it was made",
    ]  # fmt: skip
    assert "Problem by problem: after/greedy with before/greedy; after/sampled with before/sampled." in text


def test_a_page_names_the_algorithm_and_draws_what_it_logs(tmp_path):
    made = CONFIG | {
        "algorithm": {"name": "reinforce_plus_plus", "dynamic_sampling": False, "kl_in_reward": 0.1},
        "critic": {"lr": 1e-3, "r": 8, "warmup_steps": 2, "value_clip": 0.5},
    }
    run = tmp_path / "run"
    write_training(run, [logged(1, kl_in_reward=0.01), logged(2, kl_in_reward=0.02)], made)
    material = compared(read_material([run]))
    assert "<h1>tiny: REINFORCE++ with DoRA and AQN</h1>" in render(material)
    assert material.training is not None
    assert settings(material.training)["algorithm"] == "REINFORCE++"
    titles = [figure.title for figure in figures.of_training(material.training)]
    assert "KL divergence" in titles
    of_critic = {"Explained variance of the critic", "Value loss of the critic"}
    assert not (of_critic | {"Dynamic sampling"}) & set(titles)
    of_ppo = {"critic/vf_loss": 0.1, "critic/explained_variance": -0.5, "dapo/rollout_tokens_per_used_token": 1.5}
    write_training(tmp_path / "ppo", [logged(1, **of_ppo)], made | {"algorithm": {"name": "ppo"}})
    ppo = read_training_run(tmp_path / "ppo")
    assert of_critic | {"Dynamic sampling"} < {figure.title for figure in figures.of_training(ppo)}


def test_folders_are_given_in_any_way(tmp_path):
    folder = quickstart_folder(tmp_path / "run")
    given = [folder / "train", folder / "after" / "sampled", folder / "before" / "sampled", folder / "train"]
    material = compared(read_material(given))
    assert ([run.label for run in material.runs], material.pairs) == (["before/sampled", "after/sampled"], {1: 0})
    assert (material.folder, material.training is not None) == (folder / "train", True)
    alone = compared(read_material([folder / "after" / "sampled"]))
    assert ([run.label for run in alone.runs], alone.training, alone.pairs, alone.label) == ([""], None, {}, "")
    other = compared(read_material([folder / "before" / "greedy", folder / "after" / "sampled" / "test"]))
    assert other.pairs == {}  # sampled in another way
    both = compared(read_material([folder / "before" / "sampled" / "test", folder / "after" / "sampled" / "test"]))
    assert both.pairs == {1: 0}
    bare = render(read_material([folder / "train"]))
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", bare) == ["Training", "How it was made"]
    assert len(bare) < 60_000


def test_problems_with_another_prompt_are_shown_with_it(tmp_path):
    for name, prompt in (("a", "Is 1 even?"), ("b", "Say: is 1 even?")):
        write_results(tmp_path / name / "gsm8k", [record("0-0", prompt=prompt)])
    material = read_material([tmp_path / "a", tmp_path / "b"])
    pieces = [json.loads(zlib.decompress(base64.b64decode(piece))) for piece in embed.pieces(material.runs)]
    assert [piece["problems"]["prompt"] for piece in pieces if "problems" in piece] == [
        ["Is 1 even?"],
        ["Say: is 1 even?"],
    ]
    assert [piece["samples"]["problem"] for piece in pieces if "samples" in piece] == [[0], [1]]


def test_mistakes_are_one_line(tmp_path):
    write_training(tmp_path / "one", [logged(1)])
    write_training(tmp_path / "two" / "train", [logged(1)])
    write_training(tmp_path / "empty", [{"step": 1, "train_loss": 0.5}])
    for folders, message in (
        (["none"], "DIR: no such folder"),
        (["one", "two"], "one page shows one training, and here are 2"),
        (["empty"], "no step is logged there yet"),
        (["one", "one/metrics.jsonl"], "DIR: no such folder"),
    ):
        with pytest.raises(UserError, match=message):
            main(["report", *(str(tmp_path / folder) for folder in folders)])
    (tmp_path / "nothing").mkdir()
    command = [sys.executable, "-m", "perl", "report", str(tmp_path / "nothing")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(r"error: \S+: no results in \S+/nothing; .*\n", ended.stderr)


# Validation


def test_validations_are_a_chart_and_their_samples_no_evaluation(tmp_path):
    """Before the first step, and after a step that was logged by itself; verl's name is the metric's."""
    name = "val-core/openai/gsm8k/acc/mean@4"
    rows = [
        {"step": 0, name: 0.25},
        logged(1),
        logged(2),
        {"step": 2, name: 0.5, "val-aux/openai/gsm8k/truncated": 0.0},
    ]
    write_training(tmp_path / "run", rows)
    write_results(tmp_path / "run" / "validation" / "step-2" / "gsm8k", [record("a")])
    material = read_material([tmp_path / "run"])
    assert material.runs == []
    run = material.training
    assert run is not None
    assert (run.steps, run.points(name)) == ([0, 1, 2], [(0, 0.25), (2, 0.5)])
    assert [step for step, _ in run.points("reward")] == [1, 2]
    first, *_ = figures.of_training(run)
    assert first.title == "Validation"
    assert "openai/gsm8k: 0.25 at step 0, 0.5 at step 2" in first.chart
    assert name in [line.metric for line in figures.shown_lines(run)]
    assert len(read_material([tmp_path / "run", tmp_path / "run" / "validation" / "step-2"]).runs) == 1
