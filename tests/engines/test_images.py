"""Prompts with images, completed by the model's own generate and by vLLM."""

import importlib.util

import pytest
import torch

from perl.base.errors import UserError
from perl.engines.hf import HFEngine
from perl.engines.vllm import require_torchvision
from perl.models.images import fitted
from perl.models.pixels import image_arguments, image_inputs
from perl.prompts import encode
from perl.records import Prompt, Sampling, row_seed
from tests.engines.models import completions
from tests.tiny import geometry_rows, save_tiny_vision

GREEDY = Sampling(temperature=0.0, max_new_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_vision(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def engine(folder):
    engine = HFEngine(str(folder))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts(engine):
    """Of one image, two, none, one."""
    made = []
    for number, row in enumerate(geometry_rows([1, 2, 0, 1])):
        files = tuple(image["bytes"] for image in row["images"])
        messages = fitted(row["prompt"], files, True, "a:1")
        ids = tuple(encode(engine.processing, messages, files))
        made.append(Prompt(token_ids=ids, seed=row_seed(0, str(number), 0), images=files))
    return made


def completed(engine, prompts, sampling):
    found = completions(engine, prompts, sampling)
    return [found[place].content_ids for place in range(len(prompts))]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, max_new_tokens=12)], ids=["greedy", "sampled"])
def test_neighbours_change_no_completion(engine, prompts, sampling):
    together = completed(engine, prompts, sampling)
    assert together == [completed(engine, [prompt], sampling)[0] for prompt in prompts]
    assert completed(engine, prompts[::-1], sampling) == together[::-1]


def test_they_are_what_transformers_generates(engine, prompts):
    for prompt, ours in zip(prompts, completed(engine, prompts, GREEDY), strict=True):
        ids = torch.tensor([prompt.token_ids])
        images = [image_inputs(engine.processing, prompt.images) if prompt.images else None]
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        arguments |= image_arguments(images, ids, engine.model.config)
        output = engine.model.generate(**arguments, max_new_tokens=12, do_sample=False)
        theirs = output[0, ids.shape[1] :].tolist()
        assert list(ours) == [token for token in theirs if token not in engine.eos_token_ids]


def test_another_image_gets_another_completion(engine, prompts):
    first, _, _, last = prompts
    other = Prompt(token_ids=first.token_ids, seed=first.seed, images=last.images)
    sampling = Sampling(temperature=1.0, max_new_tokens=12)
    assert completed(engine, [first], sampling) != completed(engine, [other], sampling)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_vllm_without_torchvision_is_one_line():
    with pytest.raises(UserError, match=r"^--use_vllm: vLLM takes images with torchvision alone, which is not install"):
        require_torchvision()


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="vLLM takes images with torchvision")
def test_vllm_completes_them_alike(folder, engine, prompts):
    from perl.engines.vllm import VLLMEngine

    other = VLLMEngine(str(folder), max_model_len=512, enforce_eager=True)
    try:
        assert completed(other, prompts, GREEDY) == completed(engine, prompts, GREEDY)
    finally:
        other.close()
