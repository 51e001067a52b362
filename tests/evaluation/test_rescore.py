"""--rescore: verdicts made again from what is stored, with the model gone, finished or not."""

from __future__ import annotations

import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from perl.base.errors import UserError
from perl.config.evaluation import parse
from perl.eval import main
from perl.evaluation.run import evaluate
from perl.evaluation.store import Store, locked
from tests.evaluation.conftest import read
from tests.workers.test_worker import make_adapter


@pytest.fixture
def finished(config, tiny, tmp_path) -> Path:
    """Results of a model and an adapter that are no longer there; two stored verdicts are not today's."""
    model = shutil.copytree(tiny, tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "run" / "checkpoint-4")
    folder = tmp_path / "out"
    settings = replace(config, model=str(model), adapter=["base", str(adapter)], result_dir=str(folder))
    evaluate(replace(settings, n=2, max_samples=6))
    shutil.rmtree(model)
    shutil.rmtree(tmp_path / "run")
    return folder


def spoil(samples: Path, count: int) -> None:
    """Give the first rows the verdict of rules that found everything correct."""
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    for line in lines[:count]:
        line |= {"score": 1.0, "reason": "correct", "extracted": line["gold"], "scores": {"flexible": 1.0}}
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_verdicts_are_made_anew_and_summaries_follow(finished, capsys):
    expected = read(finished / "base"), json.loads((finished / "base" / "sums" / "summary.json").read_text())
    assert sum(row["score"] for row in expected[0].values()) < 8
    spoil(finished / "base" / "sums" / "samples.jsonl", 6)
    run = json.loads((finished / "base" / "sums" / "run.json").read_text())
    (finished / "base" / "sums" / "run.json").write_text(json.dumps(run | {"grading_hash": "of old"}))
    capsys.readouterr()
    assert main(["--rescore", "--result_dir", str(finished)]) == 0
    shown = capsys.readouterr().out
    wrong = sum(row["score"] == 0.0 for row in list(expected[0].values())[:6])
    assert f"base/sums: 12 completions graded again, {wrong} verdicts changed" in shown
    assert "checkpoint-4/sums: 12 completions graded again, 0 verdicts changed" in shown
    assert read(finished / "base") == expected[0]
    assert json.loads((finished / "base" / "sums" / "run.json").read_text()) == run
    summary = json.loads((finished / "base" / "sums" / "summary.json").read_text())
    assert summary.pop("rescored")["changed"] == wrong
    assert summary == expected[1]
    assert json.loads((finished / "base" / "summary.json").read_text())["sums"]["rescored"]["changed"] == wrong
    assert json.loads((finished / "sweep.json").read_text())["candidates"][0]["metrics"]["sums"] == summary["metrics"]


def test_an_unfinished_evaluation_is_graded_as_far_as_it_is(finished, capsys):
    folder = finished / "checkpoint-4" / "sums"
    (folder / "summary.json").unlink()
    data = (folder / "samples.jsonl").read_bytes()
    (folder / "samples.jsonl").write_bytes(data[:-20])
    spoil(finished / "base" / "sums" / "samples.jsonl", 1)
    assert main(["--rescore", "--result_dir", str(finished / "checkpoint-4")]) == 0
    shown = capsys.readouterr().out
    assert "sums: 11 completions graded again" in shown
    assert "not finished" in shown
    assert (folder / "samples.jsonl").read_bytes() == data[: data[:-1].rfind(b"\n") + 1]


def test_a_folder_that_an_evaluation_writes_to_is_left_alone(finished):
    before = (finished / "base" / "sums" / "samples.jsonl").read_bytes()
    spoil(finished / "base" / "sums" / "samples.jsonl", 6)
    spoilt = (finished / "base" / "sums" / "samples.jsonl").read_bytes()
    with (
        locked(finished / "base"),
        pytest.raises(UserError, match="base: another evaluation is writing here"),
    ):
        main(["--rescore", "--result_dir", str(finished)])
    assert (finished / "base" / "sums" / "samples.jsonl").read_bytes() == spoilt != before


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """A limit on the size of files stands in for the disk."""
    store = Store(tmp_path, {})
    store.append([{"key": "a", "sample": 0, "score": 0.0}])
    before = store.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match="File too large; it stays as it was"):
            store.replace([{"key": "a", "sample": n, "score": 1.0} for n in range(100)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_nothing_to_grade_is_one_line(tmp_path):
    assert parse(["--rescore"]).model == ""
    with pytest.raises(UserError, match="holds no results to grade"):
        main(["--rescore", "--result_dir", str(tmp_path)])


def test_rows_of_other_rules_are_noticed(tmp_path, caplog):
    Store(tmp_path, {"a": 1, "grading_hash": "old"})
    assert Store(tmp_path, {"a": 1, "grading_hash": "new"}).grading_hash == "old"
    assert "--rescore grades all of it again" in caplog.text
