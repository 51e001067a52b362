"""How a training's engine drives vLLM: a stand-in for vLLM keeps what it is asked. The real one draws in
tests/training/test_other_engines.py."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from perl.base.errors import UserError
from perl.engines import vllm_policy, vllm_sync
from perl.engines.vllm_policy import Sharing, VLLMPolicyEngine
from perl.records import Completion, Prompt, Sampling, Weights

OPTIONS: dict[str, Any] = {"tensor_parallel_size": 1, "enable_sleep_mode": False}
ONE = SimpleNamespace(process_index=0, local_process_index=0, num_processes=1, wait_for_everyone=lambda: None)
END = 7


@dataclass
class Parameters:
    """Its SamplingParams, as far as they are looked at."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    seed: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    detokenize: bool = True
    output_kind: str = ""
    logprobs: int | None = None
    ignore_eos: bool = False
    stop: Any = None
    structured_outputs: Any = None
    n: int = 1


class LLM:
    """vllm.LLM and its LLMEngine in one. A request ends in the step after it was added, with the token 5 and END."""

    def __init__(self, **options: Any):
        self.options, self.calls = options, []
        self.requests: dict[str, Any] = {}
        self.llm_engine = self
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=32, dtype=torch.bfloat16),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
        )

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            words = [*args, *(f"{key} {value}" for key, value in kwargs.items())]
            self.calls.append(" ".join(map(str, [name, *words])))
            return name == "reset_prefix_cache"

        return call

    def add_request(self, request_id: str, prompt: Any, parameters: Parameters, lora_request: Any) -> None:
        self.requests[request_id] = (prompt, parameters, lora_request)
        self.calls.append("request")

    def step(self) -> list[Any]:
        done, self.requests = self.requests, {}
        rows = [{5: SimpleNamespace(logprob=-1.0), 6: SimpleNamespace(logprob=-0.5)}, {END: SimpleNamespace(logprob=0)}]
        output = SimpleNamespace(token_ids=[5, END], logprobs=rows, finish_reason="stop", stop_reason=None)
        return [SimpleNamespace(request_id=name, finished=True, outputs=[output]) for name in done]


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, Parameters
    inner: Any = ModuleType("vllm.sampling_params")
    inner.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    inner.StructuredOutputsParams = lambda **given: given
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", inner)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))  # put back afterwards
    monkeypatch.setattr(vllm_sync, "_model_refuses", lambda options: None)
    monkeypatch.setattr(vllm_sync, "odd_layer", lambda model: None)


def load(sync: Any, llm: Any, model: Any, gather: Any) -> None:
    llm.calls.append("load")
    sync.adapter = "adapter"


def engine_of(monkeypatch, options: Any = None, reason: str | None = None, **given: Any) -> VLLMPolicyEngine:
    monkeypatch.setattr(vllm_sync.VLLMSync, "load", load)
    monkeypatch.setattr(vllm_sync, "cannot_serve", lambda config: reason)
    more: dict[str, Any] = {"generation_kwargs": {}, "regex": None, "noise": None, "processes": ONE} | given
    return VLLMPolicyEngine(
        SimpleNamespace(name_or_path="base"),
        SimpleNamespace(to_dict=lambda: {"r": 4}),  # type: ignore[arg-type]
        OPTIONS | (options or {}),
        gather=nullcontext,
        eos_token_ids=[END],
        seed=1,
        **more,
    )


def prompts(count: int = 2, length: int = 3, **sampling: Any) -> list[Prompt]:
    return [Prompt(token_ids=(1,) * length, seed=i, sampling=Sampling(**sampling)) for i in range(count)]


def parameters_of(engine: Any, prompt: Prompt) -> Parameters:
    return Parameters(**engine._fields(prompt))


def test_it_is_started_as_trl_starts_it_and_serves_the_adapter(monkeypatch):
    given = {"gpu_memory_utilization": 0.2, "max_model_len": 96, "max_num_seqs": 8, "model_impl": "vllm"}
    engine = engine_of(monkeypatch, given)
    options = dict(engine.llm.options)
    assert 0 <= options.pop("seed") < 2**31
    assert options == OPTIONS | given | {
        "model": "base",
        "distributed_executor_backend": "external_launcher",
        "max_num_batched_tokens": 4096,
        "logprobs_mode": "processed_logprobs",
        "enable_lora": True,
        "max_lora_rank": 8,
    }
    assert engine_of(monkeypatch, reason="vLLM does not").llm.options.get("enable_lora") is None
    assert (engine.itemsize, engine.max_num_seqs) == (2, 4)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")


def test_too_little_memory_is_one_line_with_the_flags_of_a_training(monkeypatch):
    error = ValueError(
        "To serve at least one request with the model's max seq len (32768), (8.0 GiB KV cache is needed, which is"
        " larger than the available KV cache memory (4.0 GiB). Based on the available memory, the estimated maximum"
        " model length is 16384."
    )

    def fails(**options: Any) -> Any:
        raise error

    monkeypatch.setattr(sys.modules["vllm"], "LLM", fails)
    with pytest.raises(UserError) as raised:
        engine_of(monkeypatch, {"gpu_memory_utilization": 0.3})
    assert str(raised.value) == (
        f"vLLM does not start: {str(error)[:-1]}; lower or raise --config.training.vllm_gpu_memory_utilization, lower"
        " --config.training.vllm_max_model_length, raise --config.training.vllm_tensor_parallel_size, or end what else"
        " uses the device"
    )
    error = ValueError("another reason")
    with pytest.raises(ValueError, match="another reason"):
        engine_of(monkeypatch, {"gpu_memory_utilization": 0.3})


def test_a_completion_has_the_drawn_tokens_log_probabilities_and_its_request_the_adapter(monkeypatch):
    engine = engine_of(monkeypatch)
    engine.publish(Weights(version=0))
    asked: list[Any] = []
    add = engine.llm.add_request
    engine.llm.add_request = lambda *args, lora_request: (asked.append(lora_request), add(*args, lora_request))
    drawn = dict(engine.stream([*prompts(), None]))
    assert drawn == {i: Completion(token_ids=(5, END), finish_reason="stop") for i in range(2)}
    assert all(completion.logprobs == (-1.0, 0) for completion in drawn.values())
    assert asked == ["adapter", "adapter"]


def test_weights_are_given_once_a_version_and_the_prefix_cache_is_emptied(monkeypatch):
    engine = engine_of(monkeypatch)
    for version in (0, 0, 1):
        engine.publish(Weights(version=version))
        list(engine.stream(prompts(1)))
    given = ["load", "reset_prefix_cache", "request"]
    assert engine.llm.calls == [*given, "request", *given]
    engine.llm.reset_prefix_cache = lambda: False
    with pytest.raises(RuntimeError, match="prefix cache could not be emptied"):
        engine.publish(Weights(version=2))


@pytest.mark.parametrize(("reason", "level"), [(None, 1), ("vLLM does not", 2)])
def test_it_sleeps_but_for_its_rollouts_and_is_given_the_weights_again(monkeypatch, reason, level):
    """At level 2 vLLM throws away the base, which is sent then."""
    engine = engine_of(monkeypatch, {"enable_sleep_mode": True}, reason)
    sleep, drawn = f"sleep level {level}", ["wake_up tags ['kv_cache']", "request", f"sleep level {level}"]
    woken = ["wake_up tags ['weights']", "load", "reset_prefix_cache"]
    engine.publish(Weights(version=0))
    assert engine.llm.calls == [sleep, *woken]
    engine.publish(Weights(version=1))  # nothing was drawn: it is awake
    list(engine.stream(prompts(1)))
    assert engine.llm.calls[4:] == ["load", "reset_prefix_cache", *drawn]
    list(engine.evaluating(frozenset({END}), None).stream(prompts(1)))
    assert engine.llm.calls[9:] == [*woken, *drawn]


class Noise:
    """A NoiseInjector on the engine's weights, which writes down when."""

    realized_sigma = 0.3

    def __init__(self, calls: list[str]):
        self.calls = calls

    def applied(self, sigma: float, draw: Any) -> Any:
        calls = self.calls

        class Within:
            def __enter__(self) -> None:
                calls.append(f"noise {sigma} {draw}")

            def __exit__(self, *args: Any) -> None:
                calls.append("clean")

        return Within()


def test_noise_is_there_while_tokens_are_drawn_and_no_prompt_is_kept_across_it(monkeypatch):
    monkeypatch.setattr(vllm_policy, "noise_of_engine", lambda llm, noise: Noise(llm.calls))
    engine = engine_of(monkeypatch, noise=object())
    engine.publish(Weights(version=3, sigma=0.5, draw=2))
    engine.llm.calls.clear()
    list(engine.stream(prompts(1)))
    assert engine.llm.calls == ["noise 0.5 (3, 2)", "reset_prefix_cache", "request", "clean", "reset_prefix_cache"]
    engine.publish(Weights(version=3))
    engine.llm.calls.clear()
    list(engine.stream(prompts(1)))
    assert engine.llm.calls == ["request"]
    assert engine.take_metrics() == {"aqn/sigma_realized": 0.3}


def test_whoever_stops_reading_leaves_no_request_and_no_noise(monkeypatch):
    monkeypatch.setattr(vllm_policy, "noise_of_engine", lambda llm, noise: Noise(llm.calls))
    engine = engine_of(monkeypatch, noise=object())
    engine.publish(Weights(version=0, sigma=0.5))
    engine.llm.calls.clear()
    drawn: Any = engine.stream(prompts(2))
    next(drawn)
    drawn.close()
    assert engine.llm.calls[4:] == ["abort_request ['2']", "clean", "reset_prefix_cache"]


def test_the_users_fields_go_before_the_runs_but_for_seeds_and_shorter_lengths(monkeypatch):
    (prompt,) = prompts(1, temperature=0.6, max_new_tokens=20)
    plain = parameters_of(engine_of(monkeypatch), prompt)
    assert (plain.temperature, plain.max_tokens, plain.seed, plain.logprobs) == (0.6, 20, 0, 0)
    assert (plain.stop_token_ids, plain.detokenize) == ([END], False)
    assert parameters_of(engine_of(monkeypatch), prompts(1, length=20)[0]).max_tokens == 12  # of 32
    given = {"temperature": 0.3, "max_tokens": 4, "seed": 9, "stop": ["x"], "stop_token_ids": [3]}
    chosen = parameters_of(engine_of(monkeypatch, generation_kwargs=given), prompt)
    assert (chosen.temperature, chosen.max_tokens, chosen.seed) == (0.3, 4, 0)
    assert (chosen.stop, chosen.detokenize, chosen.stop_token_ids) == (["x"], True, [3, END])
    endless = engine_of(monkeypatch, generation_kwargs={"ignore_eos": True, "max_tokens": 64})
    assert (parameters_of(endless, prompt).stop_token_ids, parameters_of(endless, prompt).max_tokens) == ([], 20)


def test_completions_match_the_regex_before_structured_outputs(monkeypatch, caplog):
    (prompt,) = prompts(1)
    of_kwargs = {"structured_outputs": {"choice": ["a"]}}
    engine = engine_of(monkeypatch, generation_kwargs=of_kwargs)
    assert parameters_of(engine, prompt).structured_outputs == {"choice": ["a"]}
    engine = engine_of(monkeypatch, generation_kwargs=of_kwargs, regex="[0-9]+")
    assert parameters_of(engine, prompt).structured_outputs == {"regex": "[0-9]+"}
    assert "vllm_structured_outputs_regex takes its place" in caplog.text
    assert engine.not_comparable(Sampling()) == "of a truncated distribution"
    assert engine_of(monkeypatch).not_comparable(Sampling()) is None


@pytest.mark.parametrize(
    ("given", "said"), [({"n": 2}, "n has no place in a rollout"), ({"do_sample": True}, "do_sample")]
)
def test_what_no_rollout_can_heed_is_one_line(monkeypatch, given, said):
    with pytest.raises(UserError, match=rf"^--config.training.generation_kwargs: [^\n]*{said}[^\n]*$"):
        engine_of(monkeypatch, generation_kwargs=given)


def test_the_evaluators_rules_leave_out_what_is_of_rollouts(monkeypatch):
    engine = engine_of(monkeypatch, generation_kwargs={"temperature": 0.3}, regex="[0-9]+")
    evaluator = engine.evaluating(frozenset({3, 4}), 10)
    chosen = parameters_of(evaluator, prompts(1, temperature=0.8, max_new_tokens=20)[0])
    assert (chosen.temperature, chosen.max_tokens, chosen.stop_token_ids) == (0.8, 7, [3, 4])
    assert (chosen.structured_outputs, chosen.logprobs) == (None, None)
    engine.publish(Weights(version=0))
    assert len(dict(evaluator.stream(prompts(2)))) == 2
    evaluator.close()
    assert len(dict(engine.stream(prompts(2)))) == 2


def test_processes_that_share_an_engine_draw_for_all_of_them(monkeypatch):
    """The second of two, whose prompts are the last three."""
    made: list[Any] = []
    monkeypatch.setattr(torch.distributed, "new_subgroups_by_enumeration", lambda ranks: (made.append(ranks), None))
    theirs = prompts(2, length=5)

    def gather(parts: list[Any], own: Any, group: Any) -> None:
        parts[:] = [theirs, own]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    waited: list[int] = []
    second = SimpleNamespace(
        process_index=3, local_process_index=3, num_processes=4, wait_for_everyone=lambda: waited.append(1)
    )
    engine = engine_of(monkeypatch, {"tensor_parallel_size": 2}, processes=second)
    assert made == [[[0, 1], [2, 3]]]
    assert os.environ["RANK"] == "3"
    first = engine_of(
        monkeypatch, {"tensor_parallel_size": 2}, processes=SimpleNamespace(**{**vars(second), "process_index": 2})
    )
    assert engine.llm.options["seed"] == first.llm.options["seed"] != engine_of(monkeypatch).llm.options["seed"]
    engine.publish(Weights(version=0))
    engine.llm.calls.clear()
    waited.clear()
    assert sorted(place for place, _ in engine.stream(prompts(3))) == [0, 1, 2]
    assert engine.llm.calls == ["request"] * 5
    assert waited == [1]
    assert engine.llm.calls.clear() is None
    assert list(engine.stream([])) == []
    assert engine.llm.calls == ["request"] * 2


def test_a_number_of_processes_that_an_engine_can_not_be_shared_by_is_one_line(monkeypatch):
    three = SimpleNamespace(process_index=0, local_process_index=0, num_processes=3)
    with pytest.raises(UserError, match=r"^--config.training.vllm_tensor_parallel_size 2: does not divide the 3 proc"):
        Sharing(three, 2)
