"""vLLM that does not start for want of memory: its own line about it, and which flags there are, in one line."""

from __future__ import annotations

import os
import re

from perl import device
from perl.base.errors import UserError

CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"
"""Variable: GiB of KV cache on a CPU, whole ones. While it is set, vLLM does not read gpu_memory_utilization there."""
OF_EVALUATOR = ("--gpu_memory_utilization", "--max_model_len", "raise --tp_size, or write --enforce_eager")
OF_TRAINING = (
    "--config.training.vllm_gpu_memory_utilization",
    "--config.training.vllm_max_model_length",
    "raise --config.training.vllm_tensor_parallel_size",
)
SHORT = re.compile(
    r".*(?:Free memory on device|No available memory|KV\s+cache is needed|Available memory on node|out of memory"
    r"|Error in memory profiling).*",
    re.IGNORECASE,
)
"""What vLLM 0.18 to 0.31 (v1/worker/utils.py, v1/core/kv_cache_utils.py, v1/worker/cpu_worker.py), vllm-ascend's worker
and torch say."""


def explain(error: BaseException, training: bool = False) -> UserError | None:
    """The UserError for an engine that did not start, with the evaluator's flags or a training's; None where memory is
    not the reason."""
    if (match := SHORT.search(str(error))) is None:
        return None
    line = ". ".join(" ".join(match[0].split()).split(". ")[:3]).rstrip(".")
    share, length, others = OF_TRAINING if training else OF_EVALUATOR
    if device.detect().kind == "cpu" and os.environ.get(CPU_CACHE):
        share = CPU_CACHE
    return UserError(
        f"vLLM does not start: {line}; lower or raise {share}, lower {length}, {others}, or end what else uses the"
        " device"
    )
