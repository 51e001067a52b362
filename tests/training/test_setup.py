"""What a training run reads before the model is loaded."""

import json

from perl.config.schema import DatasetConfig
from perl.training.setup import build_dataset
from tests.tiny import tiny_tokenizer


def test_a_folder_is_trained_on_by_its_train_file(tmp_path):
    """The evaluator takes the test file of the same folder."""
    for split, gold in (("train", 3), ("test", 4)):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "What is 1 + 2 ?", "answer": f"#### {gold}"}))
    dataset = build_dataset(DatasetConfig(dataset_name_or_path=str(tmp_path)), tiny_tokenizer())
    assert dataset["gold"] == ["3"]
    dataset = build_dataset(DatasetConfig(dataset_name_or_path=str(tmp_path), split="test"), tiny_tokenizer())
    assert dataset["gold"] == ["4"]


def test_the_log_names_the_task_that_rows_were_taken_for_and_why(tmp_path, caplog):
    """A prompt and a bare number say nothing of their form: they are graded by math-verify, which the user must see."""
    caplog.set_level("INFO")
    rows = [{"prompt": f"What is 1 + {i} ?", "answer": 1 + i} for i in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = build_dataset(DatasetConfig(dataset_name_or_path=str(tmp_path / "sums.jsonl")), tiny_tokenizer())
    assert dataset["task"] == ["math"] * 3
    assert "sums.jsonl: 3 rows are graded as task math: neither prompt nor answer holds ####" in caplog.text
    assert "--config.dataset.task" in caplog.text


def test_a_task_that_was_asked_for_is_not_explained(tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "What is 1 + 2 ?", "answer": "#### 3"}))
    config = DatasetConfig(dataset_name_or_path=str(tmp_path / "sums.jsonl"), task="gsm8k")
    build_dataset(config, tiny_tokenizer())
    assert "graded as" not in caplog.text
