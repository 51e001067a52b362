"""Two real vLLM workers with a merged adapter: the rows of one worker, and not those of the base."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest

from perl.config.evaluation import EvalConfig
from perl.evaluation.run import evaluate
from perl.evaluation.weights import MERGED
from tests.engines.test_vllm import make_adapter
from tests.evaluation.conftest import Records, read


@pytest.fixture(scope="module")
def settings(config, tiny, tmp_path_factory) -> EvalConfig:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    adapter = make_adapter(tiny, tmp_path_factory.mktemp("adapter"))
    return replace(config, adapter=[str(adapter)], use_vllm=True, enforce_eager=True, gpu_memory_utilization=0.3)


@pytest.fixture(scope="module")
def two_workers(settings, tmp_path_factory) -> tuple[dict, Records]:
    folder = tmp_path_factory.mktemp("two")
    summary = evaluate(replace(settings, result_dir=str(folder), dp_size=2))["sums"]
    logs = [file.read_text() for file in sorted((folder / "logs").iterdir())]
    assert len(logs) == 2
    assert not (folder / MERGED).exists()
    return summary, read(folder)


@pytest.mark.vllm
@pytest.mark.slow
def test_two_vllm_workers_make_the_rows_of_one(settings, two_workers, tmp_path):
    evaluate(replace(settings, result_dir=str(tmp_path), n=4))
    one = read(tmp_path)
    assert len(one) == 160
    assert one.items() <= two_workers[1].items()


@pytest.mark.vllm
def test_summary_tells_how_it_was_made(two_workers, undisturbed):
    summary, rows = two_workers
    assert summary["engines"] == ["vllm"]
    assert summary["merge"]["method"] == "LORA"
    assert summary["merge"]["exact_error"] < 1e-3 < summary["merge"]["effect"]
    assert summary["adapter_hash"] == summary["merge"]["adapter_hash"]
    assert summary["generation"]["dp_size"] == 2
    assert (summary["generation"]["enforce_eager"], summary["generation"]["gpu_memory_utilization"]) == (True, 0.3)
    assert summary["generation"]["tokens"] == sum(row["tokens"] for row in rows.values())
    assert json.dumps(summary)
    assert {k: v["completion"] for k, v in rows.items()} != {k: v["completion"] for k, v in undisturbed.items()}
