"""An engine that does not start for want of memory: vLLM's own messages, its own functions and its own engine on a CPU,
each answered with a flag and a value."""

from __future__ import annotations

import importlib.util
import os
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from perl.base.errors import UserError
from perl.engines import ENGINES
from perl.engines.vllm_memory import Start, advice, explain
from tests.tiny import save_tiny, tiny_tokenizer

ON_80_GIB = Start(share=0.9, eager=False, total_gib=80)
EAGER = Start(share=0.9, eager=True, total_gib=80)
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


@pytest.mark.parametrize(
    ("said", "start", "line"),
    [
        (
            TAKEN,
            ON_80_GIB,
            "9.1 of 80.0 GiB are free, and it takes 0.9 of all; write --gpu_memory_utilization 0.11, or end what else"
            " uses the device",
        ),
        (TAKEN.replace("cuda:0 ", ""), EAGER, "--gpu_memory_utilization 0.11,"),
        (
            TAKEN.replace("9.1/", "1.2/"),
            ON_80_GIB,
            "another process holds the device: end it, or choose another device",
        ),
        (
            SHORT,  # 0.9 + 4 / 80 = 0.95
            ON_80_GIB,
            "one sequence of 32768 tokens needs 8.0 GiB of KV cache, 4.0 are left for it; write"
            " --gpu_memory_utilization 0.95 (now 0.9), or --max_model_len 16384 (completions that reach it are cut), or"
            " --enforce_eager (no memory for captured graphs)",
        ),
        (SHORT, Start(share=0.95, eager=True, total_gib=80), "4.0 are left for it; write --max_model_len 16384 ("),
        (f"Worker failed with error '{SHORT}', please check the stack trace above", EAGER, "--max_model_len 16384"),
        (
            NONE_LEFT,
            ON_80_GIB,
            "weights and activations leave nothing of its share of the device (now 0.9) for the KV cache; write"
            " --gpu_memory_utilization 0.95 (now 0.9), or --enforce_eager (no memory for captured graphs), or a larger"
            " --tp_size",
        ),
        (NONE_LEFT, Start(share=0.3, eager=True, total_gib=80), "--gpu_memory_utilization 0.9 (now 0.3), or a larger"),
        (
            CUDA,
            EAGER,
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB"
            " is free; write --gpu_memory_utilization 0.80 (now 0.9), or a larger --tp_size",
        ),
        (NPU, ON_80_GIB, "already allocated); write --gpu_memory_utilization 0.80 (now 0.9), or --enforce_eager"),
        (SAMPLER, EAGER, "warming up sampler with 256 dummy requests. Please"),
        (
            "Error in memory profiling. Initial free memory 60.2 GiB, current free memory 70.4 GiB. This happens when",
            EAGER,
            "(60.2 GiB free, then 70.4); the same command again",
        ),
    ],
)
def test_the_flag_and_its_value(said, start, line):
    assert line in (found := advice(said, start) or "")
    assert "\n" not in found


def test_another_error_is_left_alone():
    assert advice("User-specified max_model_len (4096) is greater than the derived max_model_len (512)", EAGER) is None
    assert explain(ValueError("The model's memory layout is not available"), 0.9, False, False) is None


def test_an_allocation_that_torch_refuses_is_explained():
    error = explain(torch.OutOfMemoryError(CUDA), 0.92, eager=True, fixed_cache=False)
    assert str(error).startswith("vLLM does not start: CUDA out of memory. Tried to allocate 2.00 GiB.")


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
        "write --gpu_memory_utilization 0.25,": lambda: request_memory(
            device, SimpleNamespace(gpu_memory_utilization=0.9)
        ),
        "0.95 (now 0.9), or a larger --tp_size": lambda: check(0, lambda: gib, 4096, lambda free: 0),
        "write --gpu_memory_utilization 0.93 (now 0.9), or --max_model_len 1365 ": lambda: check(
            gib, lambda: 3 * gib, 4096, lambda free: 1365
        ),
    }
    for line, raise_it in raising.items():
        with pytest.raises(ValueError) as error:
            raise_it()
        assert line in (advice(str(error.value), EAGER) or "")


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
    assert cache == (  # a block of 128 tokens stays free
        "vLLM does not start: one sequence of 65536 tokens needs 2.0 GiB of KV cache, 1.0 are left for it; write"
        " VLLM_CPU_KVCACHE_SPACE=2 in the environment, or --max_model_len 32640 (completions that reach it are cut)"
    )
    assert re.search(r"without a KV cache it already uses [\d.]+ GiB.*write --gpu_memory_utilization 0\.\d\d ", share)
