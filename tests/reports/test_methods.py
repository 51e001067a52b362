"""The comparison of a sweep's trainings, from folders written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perl.base.errors import UserError
from perl.reports.methods import GREEDY, SAMPLED, Place, Run, as_json, compare, curve_of
from tests.reports.conftest import logged, record, write_results, write_training

PROBLEMS = 8
PLACES = [Place("test", SAMPLED), Place("test", GREEDY)]
WRONG = {"score": 0.0, "scores": {"flexible": 0.0}, "extracted": "17", "reason": "wrong"}


def scored(folder: Path, right: int) -> None:
    """Of PROBLEMS problems so many are right, sampled twice and greedily."""
    for kind, n in ((SAMPLED, 2), (GREEDY, 1)):
        rows = [
            record(f"{i:016x}-0", sample, **({} if i < right else WRONG))
            for i in range(PROBLEMS)
            for sample in range(n)
        ]
        write_results(folder / kind / "test", rows, n)


def finished(folder: Path, method: str, seed: int, right: int, rewards: list[float]) -> Run:
    run = Run(values={"peft.type": method}, seed=seed, model="models/tiny", folder=folder / method / f"seed_{seed}")
    write_training(run.train, [logged(step, reward=value) for step, value in enumerate(rewards, start=1)])
    scored(run.folder, right)
    run.note(trained=True, finished=True)
    return run


def made(folder: Path) -> list[Run]:
    """lora with 2, 3 and 4 of 8 right; miss with 8 always, its seed 3 failed."""
    runs = [finished(folder, "lora", seed, right, [0.1, 0.1 * seed]) for seed, right in ((1, 2), (2, 3), (3, 4))]
    runs += [finished(folder, "miss", seed, 8, [0.2, 0.4]) for seed in (1, 2)]
    runs.append(Run(values={"peft.type": "miss"}, seed=3, model="models/tiny", folder=folder / "miss" / "seed_3"))
    runs[-1].note(trained=False, error="training ended with exit code 1")
    scored(folder / "base", 2)
    return runs


def test_means_over_seeds_and_changes_over_the_seeds_that_both_have(tmp_path):
    found = compare(made(tmp_path), {"models/tiny": tmp_path / "base"}, ["test"], "mine.yaml", ["peft.type"], 2)
    lora, miss = found.settings
    assert found.bases["models/tiny"][PLACES[0]].value == 0.25
    assert (list(lora.finished), list(miss.finished)) == ([1, 2, 3], [1, 2])
    for place in PLACES:
        assert lora.scores[place].value == pytest.approx(3 / 8)
        assert miss.scores[place].value == 1.0
        # Against lora's seeds 1 and 2 alone: (6/8 + 5/8) / 2. Two seeds: a reach of 12.7062 * 0.0625 over seeds.
        assert miss.changes[place].value == pytest.approx(11 / 16)
        assert miss.changes[place].value - miss.changes[place].low >= 12.7062 * 0.0625
        assert miss.changes[place].verdict == "none"
    assert not lora.changes
    assert found.runs["peft.type=lora seed 2"] == dict.fromkeys(PLACES, 3 / 8)
    assert "peft.type=miss seed 3" not in found.runs
    assert lora.curve is not None
    assert lora.curve.points == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2))]
    assert lora.curve.band == [(1, 0.1, 0.1), (2, pytest.approx(0.1), pytest.approx(0.3))]
    assert lora.step_time == 2.0  # `logged` says so


def test_the_json_says_what_the_comparison_holds(tmp_path):
    found = compare(made(tmp_path), {"models/tiny": tmp_path / "base"}, ["test"], "mine.yaml", ["peft.type"], 2)
    plain = json.loads(json.dumps(as_json(found)))
    assert plain["base"]["models/tiny"]["test"]["greedy"]["value"] == 0.25
    lora, miss = plain["settings"]
    assert (lora["values"], lora["seeds"], lora["last_reward"]) == ({"peft.type": "lora"}, [1, 2, 3], 0.2)
    assert miss["change_from_first"]["test"]["sampled"]["value"] == pytest.approx(11 / 16)
    assert [run["finished"] for run in plain["runs"]] == [True] * 5 + [False]
    assert plain["runs"][-1]["error"] == "training ended with exit code 1"
    assert plain["runs"][0]["scores"] == {"test": {"sampled": 0.25, "greedy": 0.25}}


def test_nothing_finished_yet_is_no_error(tmp_path):
    run = Run(values={}, seed=1, model="m", folder=tmp_path / "run")
    found = compare([run], {"m": tmp_path / "base"}, ["test"], "mine.yaml", [], 2)
    assert (found.bases, found.runs, found.settings[0].scores) == ({}, {}, {})


def test_scores_on_other_problems_are_not_compared(tmp_path):
    one = finished(tmp_path, "lora", 1, 2, [0.1])
    other = finished(tmp_path, "miss", 1, 2, [0.1])
    file = other.folder / SAMPLED / "test" / "samples.jsonl"
    file.write_text(file.read_text().replace("0000000000000000-0", "ffffffffffffffff-0"))
    with pytest.raises(UserError, match=r"^runs of this folder were scored on other problems: the data has changed"):
        compare([one, other], {}, ["test"], "mine.yaml", ["peft.type"], 2)


def test_a_curve_holds_the_steps_that_all_seeds_logged():
    curve = curve_of([[(1, 0.0), (2, 0.5), (3, 1.0)], [(1, 1.0), (3, 0.0)]], "reward")
    assert curve is not None
    assert (curve.points, curve.band, curve.smoothed) == ([(1, 0.5), (3, 0.5)], [(1, 0.0, 1.0), (3, 0.0, 1.0)], 1)
    assert curve_of([[(1, 0.0)], []], "reward") is None
    assert curve_of([], "reward") is None


def test_the_last_part_of_a_curve_is_not_smoothed():
    """Of 100 logs the last ten, which a running mean would mix with those before."""
    logs = [[(step, height * (step > 90)) for step in range(1, 101)] for height in (1.0, 2.0)]
    curve = curve_of(logs, "reward")
    assert curve is not None
    assert (curve.last, curve.smoothed) == (1.5, 7)
