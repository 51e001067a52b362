"""Inputs that are taken with a line in the log."""

import logging

import pytest
import torch
from safetensors.torch import load_file

from perl.config.schema import DatasetConfig
from perl.models.folders import load_model
from perl.prompts import ChatTemplate
from perl.runs.setup import ModelLimits, build_dataset
from perl.training.grpo import train
from tests.reliability.place import Place, field
from tests.tiny import tiny_tokenizer


@pytest.fixture
def lines(tmp_path, monkeypatch, caplog):
    """The log of a data set that is built, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)

    def of(data: str, completion: int = 8, **settings) -> list[str]:
        config = DatasetConfig(dataset_name_or_path=data, **settings)
        build_dataset(config, ChatTemplate(tiny_tokenizer()), limits=ModelLimits(30, 512, None), completion=completion)
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


def test_a_tokenizer_without_a_pad_token(tmp_path, monkeypatch):
    """Its end-of-sequence token pads, and a step is trained."""
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path)
    model = place.model(tokenizer_config_json=field(pad_token=None))
    run = train(place.train(None, model__model_name_or_path=model, training__max_steps=1))
    assert (run / "adapter" / "adapter_model.safetensors").is_file()


def test_a_head_of_its_own_goes_before_a_configuration_that_ties_it(tmp_path):
    model = Place(tmp_path).model(config_json=field(tie_word_embeddings=True))
    loaded = load_model(tmp_path / model)
    stored = load_file(tmp_path / model / "model.safetensors")
    assert torch.equal(loaded.lm_head.weight, stored["lm_head.weight"])
    assert torch.equal(loaded.model.embed_tokens.weight, stored["model.embed_tokens.weight"])
