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
