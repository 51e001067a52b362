"""Inputs that are taken with a line in the log."""

import logging

import pytest

from perl.config.schema import DatasetConfig
from perl.training.setup import Limits, build_dataset
from tests.reliability.place import Place
from tests.tiny import tiny_tokenizer


@pytest.fixture
def lines(tmp_path, monkeypatch, caplog):
    """The log of a data set that is built, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)

    def of(data: str, completion: int = 8, **settings) -> list[str]:
        config = DatasetConfig(dataset_name_or_path=data, **settings)
        build_dataset(config, tiny_tokenizer(), limits=Limits(30, 512), completion=completion)
        return [record.getMessage() for record in caplog.records]

    return of


def test_repeated_prompts(lines, tmp_path):
    row = {"question": "What is 1 + 3 ?", "answer": "#### 4"}
    said = lines(Place(tmp_path).rows(row, row, row, {"question": "What is 2 ?", "answer": "#### 2"}))
    assert "data.jsonl: 2 of 4 prompts are repeats of others: each is drawn as often as it stands there" in said


def test_prompts_over_the_limit(lines, tmp_path):
    place = Place(tmp_path)
    long = {"question": "What is 1 + 2 + 3 + 4 + 5 + 6 ?", "answer": "#### 21"}
    said = lines(place.rows({"question": "What is 1 ?", "answer": "#### 1"}, long), max_prompt_length=14)
    assert "1 of 2 prompts are longer than 14 tokens: dropped" in said


def test_completions_beyond_the_models_context(lines, tmp_path):
    said = lines(Place(tmp_path).sums(), completion=505)
    assert (
        "--config.training.max_completion_length 505: with the longest prompt (13 tokens) more than the 512 tokens that"
        " the model was made for (max_position_embeddings)"
    ) in said


def test_no_line_where_nothing_is_odd(lines, tmp_path):
    assert not [line for line in lines(Place(tmp_path).sums()) if "repeats" in line or "max_position" in line]
