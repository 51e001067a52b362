"""trained_problems.json: what a run writes down of its data, and what is read of it next to an adapter."""

import json
from dataclasses import replace

import pytest

from perl.records import Problem
from perl.tasks import TASKS
from perl.tasks.trained import (
    TRAINED_PROBLEMS,
    asked_hash,
    count_trained,
    problem_hash,
    read_trained,
    trained_with,
    write_trained,
)


def test_a_problem_is_its_question_messages_and_gold():
    one = Problem(task="gsm8k", question="1 + 2 ?", gold="3", source="a.jsonl:1")
    assert problem_hash(one) == problem_hash(Problem(task="math", question="1 + 2 ?", gold="3", source="b.jsonl:7"))
    assert problem_hash(one) != problem_hash(Problem(task="gsm8k", question="1 + 2 ?", gold="4"))
    assert len(problem_hash(one)) == 16


def test_of_rows_for_an_environment_what_reset_alone_is_given_counts():
    """The words of a game may all have one prompt: they were one problem, and one cluster."""
    plain = Problem(task="", question="Play.", gold="")
    first, other = (replace(plain, columns={"word": word, "question": "Play."}) for word in ("apple", "grape"))
    assert problem_hash(first) != problem_hash(other)
    assert problem_hash(replace(plain, columns={"question": "Play.", "answer": "7"})) == problem_hash(plain)


@pytest.mark.parametrize("task", ["gsm8k", "dapo-math", "math"])
def test_a_bare_question_and_its_whole_prompt_are_one_problem(task):
    bare = Problem(task=task, question="How much is\n1 + 2 ?", gold="3")
    prompt = TASKS[task].style.template.replace("{question}", "How much is 1 +  2 ?\n")
    prepared = replace(bare, question="", messages=({"role": "user", "content": prompt},))
    assert asked_hash(bare) == asked_hash(prepared) != problem_hash(prepared)
    assert asked_hash(replace(prepared, gold="4")) != asked_hash(prepared) != asked_hash(replace(bare, images=(b"a",)))
    other = replace(prepared, messages=({"role": "system", "content": "Be brief."}, *(prepared.messages or ())))
    assert asked_hash(other) != asked_hash(prepared)
    scored = {f"{problem_hash(bare)}-0": bare, f"{problem_hash(bare)}-1": bare, f"{problem_hash(other)}-0": other}
    assert count_trained(scored, {asked_hash(prepared)}) == count_trained(scored, {problem_hash(bare)}) == 2


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


def test_the_base_that_a_run_begins_with_has_seen_nothing_of_it(tmp_path):
    write_trained(tmp_path, "gsm8k", None, ["a"])
    assert read_trained(tmp_path / "adapter") == {"a"}
    assert read_trained(tmp_path / "base") is None


@pytest.mark.parametrize("damaged", ["[1]", '{"problems": 5}', "[" * 100_000, '"a"', "{"])
def test_a_file_that_is_damaged_counts_as_not_there_with_one_line(tmp_path, caplog, damaged):
    run = tmp_path / "run"
    run.mkdir()
    (run / TRAINED_PROBLEMS).write_text(damaged)
    assert read_trained(run / "adapter") is None
    assert [line for line in caplog.messages if f"{TRAINED_PROBLEMS} is not readable" in line and "\n" not in line]
    write_trained(tmp_path, "gsm8k", None, ["a"], str(run / "adapter"))
    assert json.loads((tmp_path / TRAINED_PROBLEMS).read_text())["problems"] == ["a"]


@pytest.mark.parametrize("damaged", ["rollout: 5", "[1]", "rollout: [", "{}"])
def test_a_group_that_is_damaged_tells_nothing(tmp_path, damaged):
    (tmp_path / "config.yaml").write_text(damaged)
    assert trained_with(tmp_path / "adapter", "rollout") == trained_with(tmp_path / "none/adapter", "rollout") == {}
