"""Reading problems: every schema, every format, which task grades a row, and what is said when it cannot be told."""

import csv
import json
import logging
from pathlib import Path

import numpy
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from perl.base.errors import UserError
from perl.grading import Grader
from perl.models.folders import require_adapter, resolve_model
from perl.prompts import build_messages
from perl.records import Problem
from perl.scoring.samples import folder_names
from perl.tasks import TASKS, data_name, failing_references, load_problems, training_split

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not there")

GSM8K = {"question": " How many eggs? ", "answer": "9 * 120 = <<9*120=1080>>1,080 eggs\n#### 1,080"}
DAPO = {"prompt": " Find $x$.\n", "solution": "105263157894736848", "data_source": "math_dapo"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "How many eggs?\nSay #### first."}],
    "reward_model": {"style": "rule", "ground_truth": "1080"},
}
BENCH = {"problem": "Find $x$.", "answer": "\\frac{1}{2}"}


ASK = {"role": "user", "content": "What is 2 + 3?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}


def write(folder: Path, rows: list[dict], name: str = "rows.jsonl") -> str:
    path = folder / name
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            for row in rows:
                writer.writerow({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()})
    return str(path)


def load_one(folder: Path, row: dict, **options) -> Problem:
    (problem,) = load_problems(write(folder, [row]), **options)
    return problem


def test_an_answer_goes_before_its_solution(tmp_path):
    row = {"prompt": "What is 2 + 2?", "solution": "Two and two are \\boxed{4}.", "answer": "4"}
    problem = load_one(tmp_path, row)
    assert (problem.question, problem.gold) == ("What is 2 + 2?", "4")


@pytest.mark.parametrize("prompt", ['{"a": 1, "op": "double"}', "[2, 3]", "[]", '[{"a": 1}]'])
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_prompt_that_is_json_is_a_text(tmp_path, suffix, prompt):
    (problem,) = load_problems(write(tmp_path, [{"prompt": prompt, "answer": "2"}], f"rows.{suffix}"))
    assert (problem.question, problem.messages) == (prompt, None)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv"])
@pytest.mark.parametrize(
    ("row", "task", "question", "gold"),
    [
        (GSM8K, "gsm8k", "How many eggs?", "1080"),
        (DAPO, "dapo-math", "Find $x$.", "105263157894736848"),
        (VERL, "gsm8k", "", "1080"),
        (BENCH, "math", "Find $x$.", "\\frac{1}{2}"),
        (BENCH | {"source": "aime24"}, "aime24", "Find $x$.", "\\frac{1}{2}"),
    ],
    ids=["gsm8k", "dapo", "verl", "bench", "bench of known source"],
)
def test_schemas_in_every_format(tmp_path, suffix, row, task, question, gold):
    (problem,) = load_problems(write(tmp_path, [row], f"rows.{suffix}"))
    assert (problem.task, problem.question, problem.gold) == (task, question, gold)
    assert problem.source == f"rows.{suffix}:1"
    assert (problem.messages is not None) == (row is VERL)


@pytest.mark.parametrize(
    ("prompt", "answer", "task", "ready_made"),
    [
        ("How many eggs?", "... #### 18", "gsm8k", False),
        ("How many eggs? Write #### before the answer.", "18", "gsm8k", True),
        ("Find $x$. Write Answer: $x$", "18", "dapo-math", True),
        ("Find $x$, in a \\boxed{}", "18", "math", True),
        ("Find $x$.", 18, "math", False),
    ],
)
def test_the_guides_schema_is_graded_by_the_form_it_asks_for(tmp_path, prompt, answer, task, ready_made):
    problem = load_one(tmp_path, {"prompt": prompt, "answer": answer})
    assert (problem.task, problem.gold) == (task, "18")
    if ready_made:
        assert problem.messages == ({"role": "user", "content": prompt},)
    else:
        assert problem.question == prompt


def test_an_explicit_task_wins(tmp_path):
    row = {"problem": "How many?", "answer": 1080}
    assert load_one(tmp_path, row, task="gsm8k").task == "gsm8k"
    with pytest.raises(UserError, match="unknown task 'gsm'; did you mean 'gsm8k'"):
        load_one(tmp_path, row, task="gsm")


@pytest.mark.parametrize(
    ("task", "stored", "gold"),
    [
        ("gsm8k", "so\n#### 1,080", "1080"),
        ("gsm8k", "#### -3", "-3"),
        ("gsm8k", "$18", "18"),
        ("gsm8k", 18.0, "18"),
        ("dapo-math", "12345678901234567890123", "12345678901234567890123"),
        ("dapo-math", 12345678901234567890123, "12345678901234567890123"),
        ("dapo-math", " -366 ", "-366"),
        ("aime24", "025", "25"),
        ("amc23", 27.0, "27"),
        ("amc23", "27.0", "27"),
        ("math500", "0.15", "0.15"),
        ("math500", "10,\\!080", "10,\\!080"),
        ("math500", "58,500", "58,500"),
    ],
)
def test_golds(tmp_path, task, stored, gold):
    assert load_one(tmp_path, {"problem": "?", "answer": stored}, task=task).gold == gold


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (True, "must be a text or a number, not True"),
        (["18"], "must be a text or a number"),
        ("  ", "gold answer is empty"),
    ],
)
def test_what_is_no_gold(tmp_path, stored, message):
    with pytest.raises(UserError, match=rf"rows\.jsonl:1: .*{message}"):
        load_one(tmp_path, {"problem": "?", "answer": stored})


def test_a_float_that_lost_digits_is_refused(tmp_path):
    path = write(tmp_path, [{"problem": "?", "answer": 1.2345678901234567e22}], "rows.parquet")
    with pytest.raises(UserError, match="has lost digits"):
        load_problems(path)


def test_splits_of_a_folder(tmp_path):
    write(tmp_path, [GSM8K] * 3, "train.jsonl")
    write(tmp_path, [GSM8K], "test-00000-of-00002.parquet")
    write(tmp_path, [GSM8K], "test-00001-of-00002.parquet")
    assert len(load_problems(str(tmp_path), "train")) == 3
    assert len(load_problems(str(tmp_path))) == 2
    assert len(load_problems(str(tmp_path), "train", limit=2)) == 2
    with pytest.raises(UserError, match=r"no file of split 'validation'; splits there: .*train"):
        load_problems(str(tmp_path), "validation")


def test_a_single_file_has_no_splits(tmp_path):
    """It was read whole, and its results told the split that was asked for."""
    for name in ("test.jsonl", "test-00000-of-00001.jsonl", "all.jsonl"):
        (tmp_path / name).write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
    assert len(load_problems(str(tmp_path / "test.jsonl"), "test", task="gsm8k")) == 1
    assert len(load_problems(str(tmp_path / "test-00000-of-00001.jsonl"), "test", task="gsm8k")) == 1
    with pytest.raises(UserError, match=r"all\.jsonl: is one file, which has no split 'test'; leave the split out"):
        load_problems(str(tmp_path / "all.jsonl"), "test", task="gsm8k")


def test_training_never_takes_the_test_split_by_itself(tmp_path):
    assert [training_split(name) for name in ("gsm8k", "openai/gsm8k", "dapo-math", "some/set")] == ["train"] * 4
    assert training_split(str(tmp_path)) == "train"
    assert training_split(write(tmp_path, [GSM8K])) is None
    for bench in ("math500", "aime24", "HuggingFaceH4/aime_2024"):
        with pytest.raises(UserError, match="bench without a training split"):
            training_split(bench)


@pytest.mark.parametrize(
    ("name", "says"),
    [("a" * 5000, "unknown data set 'aaa"), (f"./{'a' * 5000}", "aaa: no such file or folder")],
)
def test_a_name_that_is_too_long_for_a_file_is_one_line(name, says):
    for read in (load_problems, lambda name: load_problems(name, "train")):
        with pytest.raises(UserError, match=says):
            read(name)
    assert training_split("./" + "a" * 5000) is None
    assert folder_names([name, name]) == ["a" * 5000] * 2
    with pytest.raises(UserError, match="no such folder"):
        resolve_model(name)
    with pytest.raises(UserError, match="no such folder"):
        require_adapter(Path(name))


def test_a_name_that_the_hub_does_not_take_is_one_line():
    with pytest.raises(UserError, match=r"^a/bbb.*: not a name that the hub gives a data set; write owner/name$"):
        load_problems("a/" + "b" * 5000)


def test_a_prepared_prompt_keeps_its_wording(tmp_path):
    problem = load_one(tmp_path, VERL)
    assert build_messages(problem, TASKS["gsm8k"].style) == VERL["prompt"]


def test_templates():
    def ask(task: str) -> str:
        problem = Problem(task=task, question="Why {x}?", gold="1")
        return build_messages(problem, TASKS[task].style)[-1]["content"]

    assert ask("gsm8k") == 'Why {x}? Let\'s think step by step and output the final answer after "####".'
    assert ask("dapo-math") == (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer:"
        " $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhy {x}?\n\nRemember to put your"
        ' answer on its own line after "Answer:".'
    )
    assert ask("aime24") == "Why {x}?\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "label": "b", "note": None}, "no known schema has the columns text, label; known: verl: prompt"),
        ({"question": "", "answer": "#### 1"}, "the question is empty"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "list of {role, content} messages"),
        ({"prompt": [], "answer": "1"}, "empty list of messages"),
        ({"prompt": [ASK, CALLED], "answer": "1"}, "message 1 of prompt has tool_calls, which would be lost; write"),
        (VERL | {"data_source": "my/own"}, "data_source 'my/own' names no task; say which one"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, row, message):
    with pytest.raises(UserError) as caught:
        load_one(tmp_path, row)
    assert message in str(caught.value)
    assert str(caught.value).startswith("rows.jsonl:1: ")


def test_fields_of_tools_that_hold_nothing(tmp_path):
    """As Parquet has them where another message, of another set that was joined, has some."""
    empty = {"tool_calls": [], "tool_call_id": None, "name": "Anna"}  # which hardly a template words
    file = tmp_path / "rows.parquet"
    pandas.DataFrame([{"prompt": [ASK | empty], "answer": "5"}]).to_parquet(file)
    (problem,) = load_problems(str(file), graded=False)
    assert problem.messages == (ASK,)


OWN = VERL | {"data_source": "my/own"}


@pytest.mark.parametrize(
    ("row", "task", "gold", "ground_truth", "why"),
    [
        (VERL, "gsm8k", "1080", "1080", "their data_source is openai/gsm8k"),
        (OWN, "", "1080", "1080", "their data_source my/own is none of ours, and the reward is your own"),
        (OWN | {"reward_model": {"ground_truth": ["a", 1]}}, "", "", ["a", 1], "my/own is none of ours"),
        (OWN | {"reward_model": {"ground_truth": True}}, "", "", True, "my/own is none of ours"),
        (OWN | {"reward_model": {"ground_truth": ""}}, "", "", "", "my/own is none of ours"),
        ({"prompt": "How many?"}, "", "", None, "they have no answer, and the reward is your own"),
        ({"prompt": "How many?", "answer": None}, "", "", None, "they have no answer"),
        ({"question": "How many?"}, "", "", None, "they have no answer"),
        ({"prompt": VERL["prompt"]}, "gsm8k", "", None, "prompt or answer holds ####"),
        ({"prompt": "How many?", "data_source": "openai/gsm8k"}, "gsm8k", "", None, "their data_source is"),
        ({"prompt": "How many?", "answer": 3}, "math", "3", "3", "neither prompt nor answer holds"),
    ],
)
def test_rows_that_only_a_reward_of_ones_own_scores(tmp_path, caplog, row, task, gold, ground_truth, why):
    caplog.set_level(logging.INFO)
    problem = load_one(tmp_path, row, graded=False)
    assert (problem.task, problem.gold, problem.ground_truth) == (task, gold, ground_truth)
    assert f"rows.jsonl: 1 rows are graded {f'as task {task}' if task else 'by no task'}: " in caplog.text
    assert why in caplog.text


def test_an_empty_cell_is_no_answer_where_nothing_is_graded(tmp_path):
    for column in ("prompt", "question", "problem"):
        (tmp_path / "rows.csv").write_text(f"{column},answer\nHow many?,\nSo?,3\n")
        one, other = load_problems(str(tmp_path / "rows.csv"), graded=False)
        assert (one.question, one.gold, one.task, one.ground_truth) == ("How many?", "", "", None)
        assert (other.gold, other.task) == ("3", "math")
        with pytest.raises(UserError, match=r"rows\.csv:1: the gold answer is empty"):
            load_problems(str(tmp_path / "rows.csv"))


@pytest.mark.parametrize("row", [{"prompt": "How many?"}, {"problem": "How many?"}, VERL | {"reward_model": {}}])
def test_rows_without_an_answer_can_not_be_graded(tmp_path, row):
    with pytest.raises(UserError, match=r"rows\.jsonl:1: there is no answer to grade by; add a column answer"):
        load_one(tmp_path, row)


def test_verls_columns_are_kept_for_its_rewards(tmp_path):
    problem = load_one(tmp_path, VERL | {"extra_info": {"index": 7, "split": "train"}})
    assert (problem.data_source, problem.extra_info) == ("openai/gsm8k", {"index": 7, "split": "train"})
    assert load_one(tmp_path, GSM8K).data_source == "openai/gsm8k"
    assert load_one(tmp_path, GSM8K).ground_truth == "1080"


def test_messages_as_pandas_writes_them(tmp_path):
    """An array of dicts, each of other keys."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "####?", "name": "me"}]
    rows = {"prompt": [numpy.array(messages, dtype=object)], "answer": ["3"], "ability": ["math"]}
    pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    (problem,) = load_problems(str(tmp_path / "rows.parquet"))
    assert problem.messages == tuple({name: m[name] for name in ("role", "content")} for m in messages)
    assert problem.task == "gsm8k"


def test_files_that_cannot_be_read(tmp_path):
    torn = tmp_path / "torn.jsonl"
    torn.write_text(json.dumps(GSM8K) + '\n{"question": "tor')
    with pytest.raises(UserError, match=r"torn\.jsonl:2: not valid json"):
        load_problems(str(torn))
    (tmp_path / "fake.parquet").write_text("no parquet")
    with pytest.raises(UserError, match=r"fake\.parquet: not a readable parquet"):
        load_problems(str(tmp_path / "fake.parquet"))
    (tmp_path / "latin.csv").write_bytes(b"question,answer\n\xff\xfe,1\n")
    with pytest.raises(UserError, match=r"latin\.csv: not readable as UTF-8"):
        load_problems(str(tmp_path / "latin.csv"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="no rows"):
        load_problems(str(tmp_path / "empty.jsonl"))
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    with pytest.raises(UserError, match="a row must be an object"):
        load_problems(str(tmp_path / "list.jsonl"))
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(UserError, match=r"\.txt is no data format; known: \.parquet"):
        load_problems(str(tmp_path / "rows.txt"))
    with pytest.raises(UserError, match="no such file"):
        load_problems(str(tmp_path / "absent.jsonl"))


def test_names_that_mean_nothing():
    with pytest.raises(UserError, match="did you mean 'gsm8k'"):
        load_problems("gsm8")
    with pytest.raises(UserError, match="no data set of its own; give a file"):
        load_problems("math")
    with pytest.raises(UserError, match="no split 'test'; splits: train"):
        load_problems("dapo-math", "test")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("GSM8K", "gsm8k"),
        ("Gsm8k", "gsm8k"),
        ("DAPO_Math", "dapo-math"),
        ("MATH-500", "math500"),
        ("OpenAI/GSM8K", "openai/gsm8k"),
        ("bytedtsinghua-sia/dapo-math-17k:default", "BytedTsinghua-SIA/DAPO-Math-17k:default"),
        ("gsm8k", "gsm8k"),
        ("gsm8", "gsm8"),
        ("some/Set", "some/Set"),
    ],
)
def test_a_data_set_is_found_whatever_its_case(written, name):
    assert data_name(written) == name


def test_a_folder_of_that_name_comes_before_another_case_of_a_task(monkeypatch, tmp_path):
    folder = tmp_path / "GSM8K"
    folder.mkdir()
    write(folder, [GSM8K, GSM8K], "train.jsonl")
    assert data_name(str(folder)) == str(folder)
    monkeypatch.chdir(tmp_path)
    assert data_name("GSM8K") == "GSM8K"
    assert len(load_problems("GSM8K", "train")) == 2
    assert training_split("GSM8K") == "train"


def test_a_task_in_another_case_is_trained_on_by_its_own_split():
    assert training_split("GSM8K") == "train"
    with pytest.raises(UserError, match="math500 is a bench without a training split"):
        training_split("Math500")


def test_offline_names_the_file_to_give(monkeypatch, tmp_path):
    """No connection (here: an endpoint that refuses it) is one line at once, without the hub's retries."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(UserError, match=r"cannot be reached .*for example path/to/gsm8k/test\.jsonl"):
        load_problems("gsm8k")
    with pytest.raises(UserError, match=r"some/set: the hub cannot be reached"):
        load_problems("some/set")


def test_golds_that_fail_their_own_verifier_are_reported(caplog):
    rows = [Problem(task="gsm8k", question="?", gold=gold, source=f"rows:{gold}") for gold in ("18", "eighteen", "-5")]
    rows.append(Problem(task="math500", question="?", gold="\\frac{1}{2}"))
    with Grader() as grader, caplog.at_level(logging.WARNING):
        assert [problem.gold for problem in failing_references(rows, grader)] == ["eighteen"]
        assert "1 of 4 gold answers do not pass their own verifier: rows:eighteen ('eighteen')" in caplog.text
        caplog.clear()
        assert failing_references(rows[:1], grader) == []
        assert caplog.text == ""


@needs_shared
@pytest.mark.parametrize(
    ("file", "rows", "task"),
    [
        ("gsm8k/train.jsonl", 7473, "gsm8k"),
        ("gsm8k/test.jsonl", 1319, "gsm8k"),
        ("dapo_math/processed_en_2000.jsonl", 2000, "dapo-math"),
        ("dapo_math/processed_cn_300.jsonl", 300, "dapo-math"),
        ("dapo_math/original_1000.jsonl", 1000, "dapo-math"),
        ("bench/math500.jsonl", 500, "math500"),
        ("bench/aime24.jsonl", 30, "aime24"),
        ("bench/aime25.jsonl", 30, "aime25"),
        ("bench/amc23.jsonl", 40, "amc23"),
    ],
)
def test_every_gold_of_the_real_data_passes_its_own_verifier(file, rows, task):
    problems = load_problems(str(SHARED / file))
    assert len(problems) == rows
    assert {problem.task for problem in problems} == {task}
    assert all(problem.question == problem.question.strip() for problem in problems)
    with Grader() as grader:
        assert failing_references(problems, grader) == []


@needs_shared
def test_the_dapo_template_is_the_sources():
    path = SHARED / "dapo_math" / "processed_en_2000.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row, problem in zip(rows, load_problems(str(path)), strict=True):
        asked = build_messages(problem, TASKS["dapo-math"].style)[0]["content"]
        assert "".join(asked.split()) == "".join(row["source_prompt"][0]["content"].split())
