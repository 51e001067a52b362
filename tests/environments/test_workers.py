"""Conversations that the workers of a training have: the run is the same bit for bit without workers, with one or two,
however long the tools take, with a worker that is killed, and when it is resumed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from perl.base.errors import RankError, UserError
from perl.environments.tools import EnvironmentSource, ToolUse
from perl.workers.rollouts import RolloutJob
from tests.environments.scripted import Scripted, byte_tokenizer, rows_of, talking, text_completion
from tests.environments.training import fields_of
from tests.environments.working import conversations_of, make_place, train
from tests.quantised import needs_int8
from tests.ranks import reports

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


def require_same(one: Any, other: Any) -> None:
    assert conversations_of(one[1]) == conversations_of(other[1])
    assert all(torch.equal(weight, other[0][name]) for name, weight in one[0].items())


def test_the_run_is_the_same_without_workers_and_with_two(place, tmp_path):
    alone = train(place, tmp_path / "alone")
    two = train(place, tmp_path / "two", rollout={"workers": 2})
    require_same(alone, two)
    for name in ("tools/call_frequency", "tools/failure_frequency", "turns/mean", "environment/failure_frequency"):
        assert [row[name] for row in two[2]] == [row[name] for row in alone[2]]
    assert two[2][0]["turns/mean"] > 1
    assert two[2][0]["tools/failure_frequency"] > 0
    assert all(row["rollout/engine_mismatch"] < 1e-4 for row in two[2])


@pytest.mark.slow
def test_the_run_is_the_same_with_a_lag_a_worker_that_is_killed_and_a_resumed_one(place, tmp_path):
    lag = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3}
    one = train(place, tmp_path / "one", rollout={"workers": 1, "lag": 2}, **lag)
    killed = train(place, tmp_path / "killed", kill=True, rollout={"workers": 2, "lag": 2}, **lag)
    require_same(one, killed)
    assert [row["pool/staleness"] for row in one[2]] == [0.0, 1.0, 2.0, 2.0, 2.0]
    resumed = train(
        place, tmp_path / "one", str(tmp_path / "one/checkpoint-3"), rollout={"workers": 2, "lag": 2}, **lag
    )
    assert conversations_of(resumed[1]) == conversations_of(one[1])[-len(conversations_of(resumed[1])) :]
    assert all(torch.equal(weight, resumed[0][name]) for name, weight in one[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["dora", "none"])  # all of them: tests/training/test_pool.py
def test_so_it_is_with_other_methods(place, tmp_path, adapter):
    settings = {"adapter": adapter, "max_steps": 2} | ({"learning_rate": 1e-3} if adapter == "none" else {})
    two = train(place, tmp_path / "two", rollout={"workers": 2}, **settings)
    require_same(train(place, tmp_path / "alone", **settings), two)
    assert two[2][0]["turns/mean"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dapo", "ppo", "remax"])
def test_so_it_is_with_other_algorithms(place, tmp_path, algorithm):
    settings = {"max_steps": 2} | fields_of(algorithm)
    two = train(place, tmp_path / "two", rollout={"workers": 2}, **settings)
    require_same(train(place, tmp_path / "alone", **settings), two)
    assert two[2][0]["turns/mean"] > 1
    assert all(row["rollout/engine_mismatch"] < 1e-4 for row in two[2])


@needs_int8
@pytest.mark.slow
def test_so_it_is_with_a_quantised_base(place, tmp_path):
    quantised = {"quantization": "int8_w8a8"}
    two = train(place, tmp_path / "two", rollout={"workers": 2} | quantised, max_steps=2)
    require_same(train(place, tmp_path / "alone", rollout=quantised, max_steps=2), two)
    assert two[2][0]["turns/mean"] > 1
    assert all(row["rollout/quantization_kl"] > 1e-5 for row in two[2])


@pytest.mark.slow
def test_the_newest_policy_converses_as_answers_come(place, tmp_path):
    """Nothing is held back, so that the run does not repeat; its rows are what was drawn."""
    rollout = {"workers": 2, "max_staleness": 2, "piece_size": None}
    _, batches, logged = train(place, tmp_path, rollout=rollout, max_steps=5)
    assert all(row["rollout/engine_mismatch"] < 1e-4 for row in logged)
    assert all(row["pool/staleness_max"] <= 2 for row in logged)
    assert max(row.turns for batch in batches for row in batch.rows) > 1


def test_an_environment_of_a_worker_rewards_and_says_what_it_adds(place, tmp_path):
    seen = []

    def reward(environment_rewards: list[float], completion_lengths: list[int], **others: Any) -> list[float]:
        assert "environments" not in others
        seen.extend(zip(environment_rewards, completion_lengths, strict=True))
        return environment_rewards

    settings = {"environment": {"factory": f"{place}/tools.py:Sums"}, "rewards": [reward], "max_steps": 1}
    _, (batch,), _ = train(place, tmp_path, rollout={"workers": 1}, **settings)
    assert [row.environment_reward for row in batch.rows] == [row.outcomes.count(False) / 10 for row in batch.rows]
    assert sorted(seen) == sorted((row.environment_reward, len(row.token_ids)) for row in batch.rows)
    assert all(row.row["prompt"][-1]["content"].endswith(" ?") for row in batch.rows)


def test_a_row_leaves_its_worker_without_an_environment_that_comes_too_late():
    """It might hold a lock, which no pipe takes, and its worker would end of it."""
    release, came = threading.Event(), threading.Event()

    class Late:
        def __init__(self):
            release.wait(60)
            came.set()

    tokenizer = byte_tokenizer("qwen2_5")
    source = EnvironmentSource(make=lambda: ToolUse({}, Late()))
    conversations = talking(tokenizer, source=source, tool_timeout_s=0.1)
    given = dict.fromkeys((each.name for each in fields(RolloutJob)), None)
    job = RolloutJob(**given | {"newest": False})  # type: ignore[arg-type]
    engine: Any = Scripted(lambda prompt: text_completion(tokenizer, "5", "<|im_end|>"))
    feed: Any = rows_of(conversations, 2)
    talked = list(job._conversed(conversations, engine, feed))
    release.set()
    assert came.wait(60)
    assert sorted(place for place, _ in talked) == [0, 1]
    assert [row.failure for _, row in talked] == ["no answer within 0.1 s (environment.tool_timeout_s)"] * 2
    assert [row.environment for _, row in talked] == [None, None]


@pytest.mark.slow
def test_two_processes_have_what_one_has(place, tmp_path):
    alone = train(place, tmp_path / "alone", max_steps=2)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file"]
    launcher += [str(ROOT / "scripts/accelerate/cpu.yaml"), "-m", "tests.environments.working"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([*launcher, str(place), str(tmp_path)], cwd=ROOT, env=env, check=True, timeout=300)
    (first, weights), (second, others) = reports(tmp_path)
    expected = {f"{each[0]}-{each[1]}": each for each in json.loads(json.dumps(conversations_of(alone[1][:1])))}
    assert {key: (first | second)[key] for key in expected} == expected  # before the first update, which two divide
    assert weights == others


@pytest.mark.slow
def test_a_tool_that_ends_its_worker_ends_the_run_in_one_line(place, tmp_path):
    with pytest.raises((UserError, RankError), match="exit code 7") as caught:
        train(place, tmp_path, environment={"tools": [f"{place}/tools.py:end_worker"]}, rollout={"workers": 2})
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_worker_that_starts_again_does_not_take_other_tools(place, tmp_path):
    """A user goes on writing the file while the run draws."""
    tools = tmp_path / "tools.py"
    tools.write_text((place / "tools.py").read_text())

    class Writes(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            tools.write_text(tools.read_text().replace("return a + b", "return a - b"))

    settings = {"environment": {"tools": [f"{tools}:add"]}, "rollout": {"workers": 1}, "callbacks": [Writes()]}
    with pytest.raises(UserError, match=f"{tools} is not what it was when the workers began") as caught:
        train(place, tmp_path / "run", kill=True, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_in_workers_converses_alike_with_one_and_with_two(place, tmp_path):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    vllm = {"engine": "vllm", "use_vllm": True, "vllm_max_model_length": 160, "max_steps": 2}
    one = train(place, tmp_path / "one", rollout={"workers": 1, "lag": 1}, **vllm)
    require_same(one, train(place, tmp_path / "two", rollout={"workers": 2, "lag": 1}, **vllm))
    assert all(row["rollout/engine_mismatch"] < 1e-3 for row in one[2])
    assert one[2][0]["turns/mean"] > 1


@pytest.mark.ray
@pytest.mark.slow
def test_over_ray_a_run_is_that_of_processes(place, tmp_path):
    """With a quantised base: what is drawn over Ray with neither is compared in tests/training/test_pool_ray.py."""
    pytest.importorskip("ray")
    from benchmarks._nodes import ray_cluster

    quantised = {"quantization": "fp8"}
    processes = train(place, tmp_path / "processes", rollout={"workers": 1} | quantised)
    assert all(row["rollout/quantization_kl"] > 1e-5 for row in processes[2])
    with ray_cluster({"num_cpus": 2}) as cluster:
        over_ray = {"workers": 2, "executor": "ray", "ray_address": cluster.address}
        require_same(processes, train(place, tmp_path / "ray", rollout=over_ray | quantised))
