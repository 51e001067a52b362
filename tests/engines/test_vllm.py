"""A real vLLM engine, in a process of its own: three starts (base model, merged model, LoRA alongside it) serve all."""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from perl.adapters import ADAPTERS
from perl.adapters.merge import merge_adapter
from perl.base.errors import UserError
from perl.config.schema import PeftConfig
from perl.device import Devices
from perl.engines import ENGINES
from perl.engines.vllm import INSTALL, lora_rank, require_vllm, resolve_dtype
from perl.records import Completion, Prompt, Sampling
from tests.engines.models import completions
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[2]
SAMPLED = Sampling(temperature=1.0, max_new_tokens=30)
GREEDY = Sampling(temperature=0.0, max_new_tokens=30)
CONTEXT = 64
METHODS = ("rslora", "pissa", "milora", "milora_plus")


def make_prompts(count: int = 300) -> list[Prompt]:
    """More than the engine works on at once, lengths 5 to 40, some prompts with several seeds."""
    numbers = random.Random(0)
    bodies = [tuple(numbers.randrange(6, 24) for _ in range(numbers.randrange(5, 41))) for _ in range(count // 2)]
    return [Prompt(token_ids=bodies[i % len(bodies)], seed=numbers.getrandbits(63)) for i in range(count)]


def make_adapter(base: Path, folder: Path, seed: int = 1, method: Any = "lora") -> Path:
    """An adapter as training leaves it: the method's start, and B moved away from it."""
    config, adapter = PeftConfig(type=method, r=4, lora_alpha=8, target_modules="all-linear"), ADAPTERS[method]
    built: Any = adapter.build(config)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), built)
    if adapter.start is not None:
        adapter.start(model, config, lambda parameters: nullcontext())
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data += torch.randn_like(parameter) * 0.5
    model.save_pretrained(folder)
    return folder


def in_vllm(model: str, adapter: str, other: str, merged: list[str], of_methods: Mapping[str, str]) -> dict[str, Any]:
    """Everything that the tests look at (runs in the child)."""
    prompts = make_prompts()
    order = random.Random(1).sample(range(len(prompts)), len(prompts))
    found: dict[str, Any] = {}
    engine: Any = ENGINES["vllm"](model, max_model_len=CONTEXT, enforce_eager=False)  # as on an accelerator
    found["slots"] = engine.max_num_seqs
    found["compiled"] = [not engine.engine.vllm_config.model_config.enforce_eager]
    found["sampled"] = completions(engine, prompts, SAMPLED)
    shuffled = completions(engine, [prompts[i] for i in order], SAMPLED)
    found["shuffled"] = {order[place]: completion for place, completion in shuffled.items()}
    found["alone"] = {i: completions(engine, [prompts[i]], SAMPLED)[0] for i in (0, 7)}
    found["greedy"] = completions(engine, prompts[:40], GREEDY)
    greedy, sampled = replace(prompts[0], sampling=GREEDY), replace(prompts[0], sampling=SAMPLED)
    mixed: list[Prompt | None] = [greedy, None, sampled, None, None]
    found["mixed"] = dict(engine.stream(iter(mixed)))
    try:
        completions(engine, [Prompt(token_ids=(7,) * CONTEXT, seed=1)], GREEDY)
    except UserError as error:
        found["overlong"] = str(error)
    found["replaced"] = []
    for folder in (*merged, model):
        assert engine.replace_weights(folder) is None
        found["replaced"].append(completions(engine, prompts[:40], SAMPLED))
    found["in_vain"] = engine.replace_weights(model)
    engine.close()
    engine.close()
    engine = ENGINES["vllm"](merged[0], max_model_len=CONTEXT)
    found["compiled"].append(not engine.engine.vllm_config.model_config.enforce_eager)
    found["fresh"] = completions(engine, prompts[:40], SAMPLED)
    engine.close()
    engine = ENGINES["vllm"](model, max_model_len=CONTEXT, adapters=[adapter, other, *of_methods.values()])
    for name, folder in {"lora": adapter, "other_lora": other, "no_lora": None, **of_methods}.items():
        found[name] = completions(engine, [replace(prompt, adapter=folder) for prompt in prompts[:40]], GREEDY)
    engine.close()
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), scale=8.0)


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    return make_adapter(base, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def other(base, tmp_path_factory) -> Path:
    return make_adapter(base, tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture(scope="module")
def of_methods(base, tmp_path_factory) -> dict[str, Path]:
    """Methods whose adapter is LoRA to vLLM, each another one: by its scale, its rank, or what it starts from."""
    folder = tmp_path_factory.mktemp("methods")
    return {method: make_adapter(base, folder / method, 3, method) for method in METHODS}


@pytest.fixture(scope="module")
def merged(base, adapter, other, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("merged")
    for source in (adapter, other):
        merge_adapter(base, source, folder / source.name)
    return [folder / adapter.name, folder / other.name]


@pytest.fixture(scope="module")
def found(base, adapter, other, merged, of_methods) -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        folders = {method: str(folder) for method, folder in of_methods.items()}
        return pool.submit(in_vllm, str(base), str(adapter), str(other), list(map(str, merged)), folders).result(
            timeout=600
        )


def with_transformers(model: Path) -> dict[int, Completion]:
    engine = ENGINES["hf"](str(model), dtype="float32", max_model_len=CONTEXT)
    return completions(engine, make_prompts()[:40], GREEDY)


@pytest.mark.vllm
@pytest.mark.slow
def test_order_and_neighbours_change_no_row(found):
    assert len(found["sampled"]) == 300 > found["slots"]
    assert found["shuffled"] == found["sampled"]
    assert found["alone"] == {i: found["sampled"][i] for i in (0, 7)}
    prompts = make_prompts()
    pairs = [(i, i + 150) for i in range(150)]  # the same prompt with another seed
    assert all(prompts[i].token_ids == prompts[j].token_ids for i, j in pairs)
    assert sum(found["sampled"][i] != found["sampled"][j] for i, j in pairs) > 100


@pytest.mark.vllm
@pytest.mark.slow
def test_completions_end_at_the_end_of_sequence_or_at_the_limit(found, base):
    end = AutoModelForCausalLM.from_pretrained(base).config.eos_token_id
    prompts = make_prompts()
    reasons = set()
    for index, completion in found["sampled"].items():
        reasons.add(completion.finish_reason)
        limit = min(30, CONTEXT - len(prompts[index].token_ids))
        assert end not in completion.content_ids
        assert (completion.token_ids[-1] == end) == (completion.finish_reason == "stop")
        assert (len(completion.token_ids) == limit) >= (completion.finish_reason == "length")
    assert reasons == {"stop", "length"}


@pytest.mark.vllm
@pytest.mark.slow
def test_a_cpu_compiles_on_request_alone(found):
    assert found["compiled"] == [True, False]


@pytest.mark.vllm
@pytest.mark.slow
def test_greedy_equals_transformers(found, base):
    assert found["greedy"] == with_transformers(base)


@pytest.mark.vllm
@pytest.mark.slow
def test_no_adapter_is_dropped(found, merged):
    """LoRA served alongside the base gives what the merged model gives, and not what the base gives; one adapter after
    another, and then none."""
    for name, model in zip(("lora", "other_lora"), merged, strict=True):
        assert found[name] == with_transformers(model)
        assert sum(found[name][i] != found["greedy"][i] for i in range(40)) > 30
    assert found["no_lora"] == found["greedy"]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_methods_that_are_lora_to_vllm(method, found, base, of_methods, tmp_path):
    """Unmerged in vLLM, and merged in transformers: the same tokens, which are not the base's."""
    merge_adapter(base, of_methods[method], tmp_path / "merged")
    assert found[method] == with_transformers(tmp_path / "merged")
    assert sum(found[method][i] != found["greedy"][i] for i in range(40)) > 30


@pytest.mark.vllm
@pytest.mark.slow
def test_replaced_weights_give_what_a_fresh_engine_gives(found):
    """One adapter's weights after another's, and the base's after both: nothing of the earlier ones stays."""
    first, second, base_again = found["replaced"]
    assert first == found["fresh"]
    assert base_again == {i: found["sampled"][i] for i in range(40)}
    assert sum(first[i] != second[i] for i in range(40)) > 30
    assert sum(first[i] != base_again[i] for i in range(40)) > 30


@pytest.mark.vllm
@pytest.mark.slow
def test_weights_that_change_nothing_did_not_arrive(found):
    assert "did not arrive" in found["in_vain"]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_feed_mixes_sampling_and_may_pause(found):
    assert found["mixed"][0] == found["greedy"][0]
    assert found["mixed"][1] == found["sampled"][0]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_prompt_that_fills_the_context_is_an_error(found):
    assert "64 tokens" in found["overlong"]


@pytest.mark.parametrize("kind", ["npu", "cuda", "cpu"])
def test_without_vllm_the_error_says_what_to_install_there(monkeypatch, kind):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("perl.engines.vllm.device.detect", lambda: Devices(kind, 1))
    with pytest.raises(UserError) as caught:
        require_vllm()
    assert str(caught.value) == f"--use_vllm: vllm is not installed; {INSTALL[kind]}, or leave the flag out"
    for file in re.findall(r"\S+\.(?:txt|sh)", INSTALL[kind]):
        assert (ROOT / file).is_file()
    if kind == "cpu":
        assert INSTALL[kind].split()[-1] in (ROOT / "Makefile").read_text()
    if kind == "cuda":
        assert all(f"`{INSTALL[kind]}`" in (ROOT / page).read_text() for page in ("README.md", "README_zh.md"))


def test_auto_dtype_keeps_float32_on_a_cpu(base):
    config = AutoModelForCausalLM.from_pretrained(base).config
    assert resolve_dtype("auto", config) == "float32"
    assert resolve_dtype("bfloat16", config) == "bfloat16"


def test_only_plain_lora_is_served(base, adapter, tmp_path):
    assert lora_rank(str(adapter)) == 8  # the smallest that vLLM knows
    config = (adapter / "adapter_config.json").read_text()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((adapter / name).read_bytes())
    changes = {
        ('"use_dora": false', '"use_dora": true'): "does not serve DoRA",
        ('"alpha_pattern": {}', '"alpha_pattern": {"q_proj": 2}'): "plain LoRA only, without alpha_pattern",
    }
    for change, said in changes.items():
        (tmp_path / "adapter_config.json").write_text(config.replace(*change))
        with pytest.raises(UserError, match=said):
            lora_rank(str(tmp_path))
