"""The evaluator's benchmark: what it compares, by hand, and its part without an engine from the command line."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from benchmarks.evaluator.__main__ import main
from benchmarks.evaluator.generation import share_of_equal
from benchmarks.evaluator.grading import gsm8k_rows, math_rows
from benchmarks.evaluator.lm_eval import Answer, compare_answers, our_answers, their_answers, write_task
from benchmarks.evaluator.ours import Run
from benchmarks.evaluator.raw import Turn
from perl.grading import Grader
from perl.prompts import build_messages
from perl.records import Problem
from perl.tasks import TASKS

ROOT = Path(__file__).parents[2]
GSM8K = {"question": "How many?", "answer": "She has 4 * 300 = <<4*300=1200>>1200 eggs.\n#### 1,200"}
MATH = {"problem": "Half of one?", "answer": "\\frac{1}{2}", "solution": "It is $\\boxed{\\frac{1}{2}}$."}


def answer(text, strict, flexible):
    return Answer(text, {"strict": strict, "flexible": flexible})


def test_verdicts_are_compared_where_completions_are_equal():
    ours = {0: answer("a", True, True), 1: answer("b", False, True), 2: answer("c", True, True), 3: answer("d", 0, 0)}
    theirs = ours | {1: answer("b", True, True), 2: answer("x", False, False)}
    assert compare_answers(ours, theirs) == {
        "rows": 4,
        "equal_completions": 0.75,
        "equal_strict": 0.6667,  # of rows 0, 1 and 3 the middle one differs
        "accuracy_strict": 0.5,
        "equal_flexible": 1.0,
        "accuracy_flexible": 0.75,
    }
    with pytest.raises(AssertionError, match="different problems"):
        compare_answers(ours, {0: ours[0]})


def test_both_sides_samples_are_read_by_problem(tmp_path):
    record = {"source": "test.jsonl:2", "completion": "#### 3", "scores": {"strict": 1.0, "flexible": 0.0}}
    assert our_answers([record]) == {1: answer("#### 3", True, False)}
    row = {"doc_id": 1, "resps": [["#### 3"]]}
    lines = [
        row | {"filter": "strict-match", "exact_match": 1.0},
        row | {"filter": "flexible-extract", "exact_match": 0},
    ]
    file = tmp_path / "samples_gsm8k.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert their_answers(file) == {1: answer("#### 3", True, False)}


def test_lm_eval_asks_in_our_words(tmp_path):
    write_task(tmp_path / "task", "gsm8k", tmp_path / "test.jsonl", 64)
    task = yaml.safe_load((tmp_path / "task" / "gsm8k.yaml").read_text())
    problem = Problem(task="gsm8k", question="How many?", gold="1200")
    asked = build_messages(problem, TASKS["gsm8k"].style)[0]["content"]
    assert task["doc_to_text"].replace("{{question}}", "How many?") == asked
    assert task["generation_kwargs"]["max_gen_toks"] == 64
    assert (task["num_fewshot"], "fewshot_config" in task) == (0, False)
    examples = tmp_path / "examples.jsonl"
    examples.write_text(json.dumps({"question": "One?", "answer": "#### 1"}))
    write_task(tmp_path / "other", "gsm8k", tmp_path / "test.jsonl", 64, examples)
    task = yaml.safe_load((tmp_path / "other" / "gsm8k.yaml").read_text())
    shown = {"sampler": "first_n", "samples": [{"question": "One?", "answer": "#### 1"}]}
    assert (task["num_fewshot"], task["fewshot_config"]) == (1, shown)


def test_rows_of_raw_engines_are_found_again():
    row = [SimpleNamespace(key="k", index=index) for index in range(4)]
    run = Run(1.0, {}, [{"key": "k", "sample": n, "completion": str(n)} for n in (3, 1, 0, 2)])
    halves = [(row[0::2], Turn(1.0, 2, ["0", "2"])), (row[1::2], Turn(1.0, 2, ["1", "other"]))]
    assert share_of_equal(run, halves) == 0.75


def test_graded_texts_hold_what_their_names_say():
    rows = gsm8k_rows([GSM8K])
    assert rows[0] == ("She has 4 * 300 = 1200 eggs.\n#### 1,200", "1200")
    with Grader() as grader:
        grades = grader.grade(TASKS["gsm8k"].rubric, [text for text, _ in rows], [gold for _, gold in rows])
    assert [grade.score for grade in grades] == [1.0, 0.0, 1.0, 1.0, 0.0]  # as it is, wrong, sentence, box, cut off
    other = MATH | {"answer": "3", "solution": "So $\\boxed{3}$."}
    assert [gold for _, gold in math_rows([MATH, other])] == ["\\frac{1}{2}", "3", "3", "\\frac{1}{2}"]


def test_grading_from_the_command_line(tmp_path):
    for name, row in (("gsm8k/test.jsonl", GSM8K), ("bench/math500.jsonl", MATH)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    command = [
        "-m",
        "benchmarks.evaluator",
        "--only",
        "grading",
        "--pairs",
        "1",
        "--output",
        str(tmp_path / "it.json"),
        "--data",
    ]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path)], cwd=ROOT, timeout=300, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "it.json").read_text())
    assert result["benchmark"] == "evaluator"
    assert result["grading_per_s"] > 0
    assert result["math_ratio"] > 0


def test_without_vllm_it_says_what_to_install(monkeypatch, capsys):
    """It made lm-eval's environment, and ended with a traceback."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["evaluator", "--only", "lm_eval"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "vLLM is not installed here; `make .venv/.installed-full` installs it" in capsys.readouterr().err
