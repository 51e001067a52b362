"""trained_problems.json: what a run writes down of its data, and what is read of it next to an adapter."""

import json

import pytest

from perl.base.errors import UserError
from perl.records import Problem
from perl.tasks import load_problems, source_of
from perl.tasks.trained import TRAINED_PROBLEMS, problem_hash, read_trained, write_trained


def test_a_problem_is_its_question_messages_and_gold():
    one = Problem(task="gsm8k", question="1 + 2 ?", gold="3", source="a.jsonl:1")
    assert problem_hash(one) == problem_hash(Problem(task="math", question="1 + 2 ?", gold="3", source="b.jsonl:7"))
    assert problem_hash(one) != problem_hash(Problem(task="gsm8k", question="1 + 2 ?", gold="4"))
    assert len(problem_hash(one)) == 16


def test_a_run_that_goes_on_keeps_the_problems_of_the_run_before(tmp_path):
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    write_trained(tmp_path / "first", "gsm8k", None, ["b", "a", "a"], None)
    write_trained(tmp_path / "second", "math", "train", ["c"], str(tmp_path / "first" / "checkpoint-2"))
    write_trained(tmp_path / "third", "math", "train", ["c"], str(tmp_path / "older" / "checkpoint-2"))
    read = {name: json.loads((tmp_path / name / TRAINED_PROBLEMS).read_text()) for name in ("first", "second", "third")}
    assert read["first"] == {"dataset": "gsm8k", "split": None, "problems": ["a", "b"]}
    assert read["second"] == {"dataset": "math", "split": "train", "problems": ["a", "b", "c"]}
    assert read["third"]["problems"] == ["c"]
    assert [file.name for file in (tmp_path / "first").iterdir()] == [TRAINED_PROBLEMS]


def test_an_adapter_without_its_runs_folder_tells_nothing(tmp_path):
    (tmp_path / "adapter").mkdir()
    assert read_trained(tmp_path / "adapter") is None


def test_a_relative_path_counts_from_where_the_training_was_started(tmp_path, monkeypatch):
    run, data = tmp_path / "elsewhere" / "run", tmp_path / "work" / "data"
    for folder in (run / "adapter", data):
        folder.mkdir(parents=True)
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text(json.dumps({"question": "1 + 2 ?", "answer": "#### 3"}) + "\n")
    (run / "config.yaml").write_text("dataset: {dataset_name_or_path: data, split: null}\n")
    (run / "environment.json").write_text(json.dumps({"folder": str(tmp_path / "work")}))
    monkeypatch.chdir(tmp_path)
    trained = read_trained(run / "adapter")
    assert trained is not None
    assert trained.problems is None
    assert trained.source == (str(data / "train.jsonl"),) == source_of("work/data/train.jsonl", None)
    assert source_of("work/data", None) == (str(data / "test.jsonl"),)
    assert len(load_problems("work/data")) == 1


@pytest.mark.parametrize("damaged", ["[1]", '{"folder": 5, "problems": 5}', "[" * 100_000, '"a"', "{"])
def test_files_that_are_damaged_count_as_not_there_with_one_line(tmp_path, caplog, damaged):
    run, data = tmp_path / "run", tmp_path / "train.jsonl"
    (run / "adapter").mkdir(parents=True)
    data.write_text(json.dumps({"question": "1 + 2 ?", "answer": "#### 3"}) + "\n")
    (run / "config.yaml").write_text(f"dataset: {{dataset_name_or_path: {data}, split: null}}\n")
    for name in ("environment.json", TRAINED_PROBLEMS):
        (run / name).write_text(damaged)
    trained = read_trained(run / "adapter")
    assert trained is not None
    assert (trained.problems, trained.source) == (None, (str(data),))
    for name in ("environment.json", TRAINED_PROBLEMS):
        assert [line for line in caplog.messages if f"{name} is not readable" in line and "\n" not in line]
    write_trained(tmp_path, "gsm8k", None, ["a"], str(run / "adapter"))
    assert json.loads((tmp_path / TRAINED_PROBLEMS).read_text())["problems"] == ["a"]


def test_the_source_of_a_task_is_its_place_on_the_hub():
    assert source_of("dapo-math", None) == source_of("open-r1/DAPO-Math-17k-Processed", "train")
    assert source_of("gsm8k", "train") != source_of("gsm8k", None) == source_of("openai/gsm8k", "test")
    with pytest.raises(UserError):
        source_of("gsm9k", None)
