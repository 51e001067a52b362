"""Engines complete prompts: Engine.stream(prompts) -> completions. None of them knows of training.

ENGINES names them. Each module is imported when its engine is built, so that `import perl.engines` costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from perl.engines.base import Engine, LoadedEngine, PolicyEngine

__all__ = ["ENGINES", "Engine", "LoadedEngine", "PolicyEngine"]


def _hf(model_path: str, **options) -> LoadedEngine:
    from perl.engines.hf import HFEngine

    return HFEngine(model_path, **options)


def _vllm(model_path: str, *, quantization: str = "none", **options) -> LoadedEngine:
    if quantization != "none":
        from perl.engines.vllm_quantised import QuantisedVLLMEngine

        return QuantisedVLLMEngine(model_path, quantization=quantization, **options)
    from perl.engines.vllm import VLLMEngine

    return VLLMEngine(model_path, **options)


ENGINES: dict[str, Callable[..., LoadedEngine]] = {
    "hf": _hf,
    "vllm": _vllm,
}
"""Builders by name, each `build(model_path, *, dtype="auto", max_model_len=None, tp_size=1) -> LoadedEngine`.

    model_path: folder with config.json, safetensors and tokenizer files.
    dtype: "auto" (what the checkpoint is stored in, float32 on a CPU), "float32", "bfloat16" or "float16".
    max_model_len: most tokens of prompt and completion together; None: what the model's configuration allows.
    tp_size: devices that one copy of the model is spread over ("hf": 1).
    ends: tokens that end a completion besides the model's own.
    quantization: "none", or of perl.engines.quantised.SCHEMES: the model's linear layers, below a served adapter.
"hf" also takes max_batch_tokens, a bound on its key-value cache (perl.engines.decoder.Decoder).
"""
