"""An engine that does not start for want of memory: vLLM's own messages, its own functions and its own engine on a CPU,
each answered with the flags."""

from __future__ import annotations

import importlib.util
import os
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from perl import device
from perl.base.errors import UserError
from perl.engines import ENGINES
from perl.engines.vllm_memory import CPU_CACHE, explain
from tests.tiny import save_tiny, tiny_tokenizer

TAKEN = (  # vLLM 0.31, and vllm-ascend 0.23 without the device's name
    "Free memory on device cuda:0 (9.1/80.0 GiB) on startup is less than desired GPU memory utilization"
    " (0.9, 72.0 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
SHORT = (
    "To serve at least one request with the model's max seq len (32768), (8.0 GiB KV cache is needed, which is larger"
    " than the available KV cache memory (4.0 GiB). Based on the available memory, the estimated maximum model length"
    " is 16384. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)
NONE_LEFT = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
)
CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is free."
    " Including non-PyTorch memory, this process has 77.90 GiB memory in use."
)
NPU = "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity; 58.20 GiB already allocated)"
SAMPLER = "CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try lowering …"
ON_CPU = (
    "Available memory on node 0 (3.1/62.0 GiB) on kv cache allocation is less than requested memory for kv (4.0 GiB)."
    " Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes."
)
MOVED = "Error in memory profiling. Initial free memory 60.2 GiB, current free memory 70.4 GiB. This happens when …"


EVALUATOR = (
    "; lower or raise --gpu_memory_utilization, lower --max_model_len, raise --tp_size, or write --enforce_eager, or"
    " end what else uses the device"
)


@pytest.fixture(autouse=True)
def no_cache_of_its_own(monkeypatch):
    monkeypatch.delenv(CPU_CACHE, raising=False)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (TAKEN, TAKEN[:-1]),
        (f"Traceback:\n  {TAKEN}\nmore", TAKEN[:-1]),
        (
            SHORT.replace("GiB KV cache", "GiB KV\n cache"),
            SHORT[:-1],
        ),
        (NONE_LEFT, NONE_LEFT[:-1]),
        (CUDA, CUDA.partition(" Including")[0][:-1]),
        (NPU, NPU),
        (SAMPLER, SAMPLER),
        (ON_CPU, ON_CPU[:-1]),
        (MOVED, MOVED),
    ],
)
def test_what_vllm_says_and_the_flags(said, line):
    assert str(explain(RuntimeError(said))) == f"vLLM does not start: {line}{EVALUATOR}"


def test_a_trainings_flags_and_the_variable_that_stands_for_the_share_on_a_cpu(monkeypatch):
    assert str(explain(RuntimeError(NPU), training=True)) == (
        f"vLLM does not start: {NPU}; lower or raise --config.training.vllm_gpu_memory_utilization, lower"
        " --config.training.vllm_max_model_length, raise --config.training.vllm_tensor_parallel_size, or end what else"
        " uses the device"
    )
    monkeypatch.setenv(CPU_CACHE, "1")
    monkeypatch.setattr(device, "detect", lambda: SimpleNamespace(kind="cpu"))
    assert f"lower or raise {CPU_CACHE}, lower --max_model_len" in str(explain(RuntimeError(SHORT)))


@pytest.mark.parametrize(
    "said",
    [
        "User-specified max_model_len (4096) is greater than the derived max_model_len (512)",
        "The model's memory layout is not available",
    ],
)
def test_another_error_is_left_alone(said):
    assert explain(ValueError(said)) is None


@pytest.mark.vllm
@pytest.mark.slow
def test_the_messages_of_the_installed_vllm_are_read():
    """Raised by the very functions that check an engine's memory at its start."""
    kv_cache_utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    from vllm.v1.worker.utils import request_memory

    gib = 2**30
    device = SimpleNamespace(device_="cuda:0", total_memory=80 * gib, free_memory=20 * gib)
    check = kv_cache_utils._check_enough_kv_cache_memory
    raising = {
        r"\(20\.0\d*/80\.0\d* GiB\) on startup is less than": lambda: request_memory(
            device, SimpleNamespace(gpu_memory_utilization=0.9)
        ),
        "No available memory": lambda: check(0, lambda: gib, 4096, lambda free: 0),
        r"maximum model length is 1365\..*; lower or": lambda: check(gib, lambda: 3 * gib, 4096, lambda free: 1365),
    }
    for line, raise_it in raising.items():
        with pytest.raises(ValueError) as error:
            raise_it()
        assert re.search(line, str(explain(error.value)))


def start_twice(large: str, small: str) -> list[str]:
    """What the engine says of a cache too small for one sequence, and of a share too small for itself (in a child)."""
    said = []
    for model, cache, options in ((large, "1", {}), (small, "", {"gpu_memory_utilization": 0.001})):
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = cache
        try:
            ENGINES["vllm"](model, enforce_eager=True, **options)
        except UserError as error:
            said.append(str(error))
    return said


def save_long(folder: Path) -> Path:
    """Its KV cache takes 32 KiB a token (8 layers, keys and values, 8 heads of 64, 4 bytes), 65,536 tokens 2 GiB."""
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=65536,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.vllm
@pytest.mark.slow
def test_a_real_engine_that_is_short_of_memory(tmp_path):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    models = save_long(tmp_path / "long"), save_tiny(tmp_path / "tiny")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        cache, share = pool.submit(start_twice, *map(str, models)).result(timeout=500)
    assert re.search(  # a block of 128 tokens stays free
        r"\(65536\), \(2\.0 GiB KV cache is needed.*model length is 32640\..*; lower or raise VLLM_CPU_KVCACHE_SPACE",
        cache,
    )
    assert re.search(r"Available memory on node .*; lower or raise --gpu_memory_utilization,", share)
