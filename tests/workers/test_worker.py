"""A worker's side of the protocol, with an engine in this process: weights change between batches, and nowhere else."""

from __future__ import annotations

import shutil
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from perl.adapters.merge import merge_adapter
from perl.engines import ENGINES
from perl.engines.hf import HFEngine
from perl.records import Prompt, Sampling
from perl.workers.worker import (
    EngineJob,
    Inbox,
    Ready,
    Request,
    RequestBatch,
    Restart,
    Result,
    WeightsSpec,
    WorkerEvent,
    computed_in,
    replace_weights,
)
from tests.tiny import save_tiny

SAMPLING = Sampling(temperature=1.0, max_new_tokens=12)
KEPT = []
"""Ends of pipes: a worker whose parent's end closes kills its process group."""
PROMPTS = [Prompt(token_ids=(4, 8 + i, 9), seed=i, sampling=SAMPLING) for i in range(12)]


def make_adapter(
    base: Path, folder: Path, seed: int = 1, std: float = 0.5, modules: str | list[str] = "all-linear"
) -> Path:
    """An adapter that changes what the model says."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=modules)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, std)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """A base, and it with two adapters, of which the second changes fewer weights."""
    folder = tmp_path_factory.mktemp("models")
    base = save_tiny(folder / "base", scale=8.0)
    merge_adapter(base, make_adapter(base, folder / "a"), folder / "merged_a")
    merge_adapter(base, make_adapter(base, folder / "b", 2, modules=["q_proj"]), folder / "merged_b")
    return [base, folder / "merged_a", folder / "merged_b"]


def through_worker(weights: list[WeightsSpec]) -> list[WorkerEvent]:
    """All requests with each weights in turn, everything sent at the beginning."""
    ours, theirs = Pipe()
    inbox = Inbox(theirs)
    for place, needed in enumerate(weights):
        ours.send(RequestBatch(needed, [Request((place, i), prompt) for i, prompt in enumerate(PROMPTS)]))
    ours.send(None)
    ready, *messages = EngineJob("hf", {}).serve(weights[0], inbox)
    assert isinstance(ready, Ready)
    KEPT.append(ours)
    return messages


def fresh(model: Path) -> list[tuple[int, ...]]:
    engine = ENGINES["hf"](str(model), dtype="float32")
    found = dict(engine.stream(PROMPTS))
    engine.close()
    return [found[i].token_ids for i in range(len(PROMPTS))]


def test_each_request_is_completed_with_its_own_weights(models):
    """Equal to a fresh engine on each folder, the base after the adapters too: nothing of them stays."""
    weights = [WeightsSpec(str(model), "float32") for model in (models[0], models[1], models[2], models[0])]
    messages = [message for message in through_worker(weights) if isinstance(message, Result)]
    assert len(messages) == 48
    got = {message.id: message.completion.token_ids for message in messages}
    for place, model in enumerate((models[0], models[1], models[2], models[0])):
        assert [got[place, i] for i in range(12)] == fresh(model)
    assert len({tuple(fresh(model)) for model in models}) == 3


def test_replaced_weights_are_a_fresh_engines_bit_for_bit(models):
    engine = HFEngine(str(models[1]), dtype="bfloat16")
    for model in (models[2], models[0]):
        assert engine.replace_weights(str(model)) is None
        other = HFEngine(str(model), dtype="bfloat16").model.state_dict()
        assert engine.model.state_dict().keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in engine.model.state_dict().items())


def test_auto_is_the_dtype_that_it_stands_for_also_when_the_model_is_gone(models, tmp_path):
    """On a CPU float32. A merged model is removed when its last row is done, and the next one may come later."""
    first, second = (shutil.copytree(models[place], tmp_path / str(place)) for place in (1, 2))

    class Engine:
        def replace_weights(self, model: str) -> str | None:
            return None

    held, needed = WeightsSpec(str(first), "auto"), WeightsSpec(str(second), "float32")
    assert computed_in(held) == "float32"
    shutil.rmtree(first)
    assert replace_weights(Engine(), held, needed) is None  # type: ignore[arg-type]


def test_another_dtype_and_another_shape_need_a_new_engine(models, tmp_path):
    first, second = WeightsSpec(str(models[0]), "float32"), WeightsSpec(str(models[1]), "bfloat16")
    *done, last = through_worker([first, second])
    assert len(done) == 12
    assert isinstance(last, Restart)
    assert last.weights == second
    assert "another dtype" in last.reason
    deeper = save_tiny(tmp_path / "deeper", layers=3)
    *_, last = through_worker([first, WeightsSpec(str(deeper), "float32")])
    assert isinstance(last, Restart)
    assert "does not store its weights under the names" in last.reason
    assert "layers.2" in last.reason
