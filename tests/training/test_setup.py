"""What a training run reads before the model is loaded."""

import json
import signal
from typing import Any

import pytest

from perl import prompts
from perl.base.errors import UserError
from perl.config.schema import DatasetConfig
from perl.prompts import ChatTemplate, encode, truncated
from perl.runs.setup import build_dataset
from tests.tiny import tiny_tokenizer


def test_a_folder_is_trained_on_by_its_train_file(tmp_path):
    """The evaluator takes the test file of the same folder."""
    for split, gold in (("train", 3), ("test", 4)):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "What is 1 + 2 ?", "answer": f"#### {gold}"}))
    dataset = build_dataset(DatasetConfig(dataset_name_or_path=str(tmp_path)), ChatTemplate(tiny_tokenizer()))
    assert dataset["gold"] == ["3"]
    dataset = build_dataset(
        DatasetConfig(dataset_name_or_path=str(tmp_path), split="test"), ChatTemplate(tiny_tokenizer())
    )
    assert dataset["gold"] == ["4"]


def test_the_log_names_the_task_that_rows_were_taken_for_and_why(tmp_path, caplog):
    """A prompt and a bare number say nothing of their form: they are graded by math-verify, which the user must see."""
    caplog.set_level("INFO")
    rows = [{"prompt": f"What is 1 + {i} ?", "answer": 1 + i} for i in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = build_dataset(
        DatasetConfig(dataset_name_or_path=str(tmp_path / "sums.jsonl")), ChatTemplate(tiny_tokenizer())
    )
    assert dataset["task"] == ["math"] * 3
    assert "sums.jsonl: 3 rows are graded as task math: neither prompt nor answer holds ####" in caplog.text
    assert "--config.dataset.task" in caplog.text


def test_a_task_that_was_asked_for_is_not_explained(tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "What is 1 + 2 ?", "answer": "#### 3"}))
    config = DatasetConfig(dataset_name_or_path=str(tmp_path / "sums.jsonl"), task="gsm8k")
    build_dataset(config, ChatTemplate(tiny_tokenizer()))
    assert "graded as" not in caplog.text


def sums(folder, name, *numbers, **columns):
    rows = [{"question": f"What is {n} + 1 ?", "answer": f"#### {n + 1}"} | columns for n in numbers]
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def built(*files, **fields):
    return build_dataset(DatasetConfig(dataset_name_or_path=list(files), **fields), ChatTemplate(tiny_tokenizer()))


def test_a_list_of_files_is_read_in_its_order(tmp_path, caplog):
    caplog.set_level("INFO")
    files = [
        sums(tmp_path, "a/train.jsonl", 1, 2),
        sums(tmp_path, "b/train.jsonl", 3, answer="4", data_source="math_dapo"),
    ]
    dataset = built(*files)
    assert dataset["gold"] == ["2", "3", "4"]
    assert dataset["task"] == ["gsm8k", "gsm8k", "dapo-math"]
    assert f"{files[0]}: 2 rows are graded as task gsm8k: their answers hold ####" in caplog.text
    assert f"{files[1]}: 1 rows are graded as task dapo-math: their data_source is math_dapo" in caplog.text
    assert f"3 prompts from {files[0]}, {files[1]}" in caplog.text


def test_the_first_rows_of_a_list(tmp_path, caplog):
    caplog.set_level("INFO")
    files = [sums(tmp_path, name, 1, 2) for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    assert len(built(*files, example_numbers=3)) == 3
    assert f"{files[2]} is not read: example_numbers 3 is reached before" in caplog.text


def test_a_list_that_is_none(tmp_path):
    for named, written in (("a.jsonl,b.jsonl", ["a.jsonl", "b.jsonl"]), ('["a.jsonl",3]', ["a.jsonl", "3"])):
        with pytest.raises(UserError) as several:
            build_dataset(DatasetConfig(dataset_name_or_path=named), ChatTemplate(tiny_tokenizer()))
        assert str(several.value).endswith(f"several data sets are a list; write '{json.dumps(written)}'")
    with pytest.raises(UserError, match="dataset_name_or_path is empty"):
        built()
    file = sums(tmp_path, "a,b.jsonl", 1)
    assert len(build_dataset(DatasetConfig(dataset_name_or_path=file), ChatTemplate(tiny_tokenizer()))) == 1


def test_rows_that_no_task_grades_keep_their_prompt(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"prompt": "What is 1 + 2 ?"}))
    config = DatasetConfig(dataset_name_or_path=str(file))
    row: Any = build_dataset(config, ChatTemplate(tiny_tokenizer()), graded=False)[0]
    assert row["prompt"] == [{"role": "user", "content": "What is 1 + 2 ?"}]
    assert (row["gold"], row["task"]) == (None, "")
    assert json.loads(row["row"]) == {
        "where": "own.jsonl:1", "data_source": "", "ground_truth": None, "extra_info": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("side", "limit", "left"),
    [("left", 3, [3, 4, 5]), ("right", 3, [1, 2, 3]), ("middle", 3, [1, 4, 5]), ("middle", 4, [1, 2, 4, 5])]
    + [(side, limit, [1, 2, 3, 4, 5]) for side in ("left", "right", "middle") for limit in (5, 6)]
    + [("middle", 1, [5]), ("right", 1, [1])],
)
def test_where_a_prompt_is_cut(side, limit, left):
    """verl's postprocess_data, by hand: middle keeps limit // 2 at the left."""
    assert truncated([1, 2, 3, 4, 5], limit, side) == left


def test_a_chat_template_that_never_ends_is_one_line_and_leaves_the_timer(monkeypatch):
    monkeypatch.setattr(prompts, "TEMPLATE_LIMIT_S", 0.5)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(UserError, match=r": the chat template takes more than 0\.5 s for a prompt; correct chat_templ"):
        encode(tiny_tokenizer(endless), [{"role": "user", "content": "1"}])
    assert encode(tiny_tokenizer(), [{"role": "user", "content": "1"}])
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)) == (before, (0.0, 0.0))


def test_the_tokenizer_says_nothing_of_rows_that_are_dropped(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(
        "transformers.tokenization_utils_base.logger.warning", lambda text, *args, **kwargs: said.append(text)
    )
    rows = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "1 + 1? " * 40, "answer": "#### 2"}]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 100
    config = DatasetConfig(dataset_name_or_path=str(tmp_path / "sums.jsonl"), max_prompt_length=100)
    assert len(build_dataset(config, ChatTemplate(tokenizer))) == 1
    assert said == []
    tokenizer(rows[1]["question"])
    assert ["Token indices" in text for text in said] == [True]
