"""vLLM in a worker of a training: it draws with the policy that the trainer has sent, and tells what it holds.

Both ends hash what vLLM serves of a policy, in one form: A and the scaled B of each layer in the engine's dtype, and
the norms that get noise, with it. The engine's are read from the memory that it multiplies by. The rest of the base,
which vLLM packs on a CPU, is hashed as the files that it is loaded from, at each start (about 1.5 s a GB); what it
computes is compared by log-probabilities (perl.training.passes).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from perl import device
from perl.adapters.delivery import ADAPTER, add_tensor, from_bytes
from perl.base.errors import UserError
from perl.device.sharding import Gather, whole
from perl.engines.quantised import Quantisation
from perl.engines.vllm import cpu_options, import_vllm
from perl.engines.vllm_policy import BATCHED_TOKENS, LOGPROBS, DrawingVLLM, further_fields, start_policy
from perl.engines.vllm_sync import VLLMSync, noise_of_engine, own_name
from perl.models.folders import content_hash, load_config
from perl.noise.injector import NoiseInjector
from perl.records import Weights

SPLIT_KV = "VLLM_CPU_ATTN_SPLIT_KV"
"""Variable: whether a CPU divides a long row among its threads, by what else there is in the batch."""
MATRICES = (f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight")


class VLLMCopy(DrawingVLLM):
    """Holds a policy that was sent. Without a prefix cache: a piece is computed from its prompts alone.

    Args:
        model: folder of the base.
        peft_config: of the adapter.
        options: of the vllm.LLM, by its names.
        dtype: that it computes in, as the trainer does.
        generation_kwargs, regex, eos_token_ids: as VLLMPolicyEngine has them.
        noise: `outline` of the trainer's, or None.
        quantization: of its base.

    Raises:
        UserError: vLLM can't serve the adapter or be given the noise, has too little memory, or can't heed
            `generation_kwargs`.
    """

    def __init__(
        self,
        model: str,
        peft_config: Any,
        options: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        generation_kwargs: Mapping[str, Any],
        regex: str | None,
        noise: NoiseInjector | None,
        eos_token_ids: Collection[int],
        quantization: Quantisation = "none",
    ):
        os.environ.setdefault(SPLIT_KV, "0")
        import_vllm()
        further = further_fields(generation_kwargs, regex)
        self.peft_config, self.dtype, self.sync = peft_config, dtype, VLLMSync(peft_config)
        self.base = content_hash(Path(model))
        started_with: dict[str, Any] = {
            "model": model,
            "dtype": str(dtype).removeprefix("torch."),
            "max_num_batched_tokens": BATCHED_TOKENS,
            "logprobs_mode": LOGPROBS,
            "enable_prefix_caching": False,
            **options,
            **cpu_options(load_config(model), options["max_model_len"], False),
        }
        if device.detect().kind == "cpu":  # which other workers share
            del started_with["gpu_memory_utilization"]
        served = self.sync.options(started_with, None)
        if self.sync.reason is not None:
            raise UserError(f"--config.rollout.engine vllm: {self.sync.reason}; use --config.rollout.engine fast")
        llm = start_policy(served, self.sync, quantization)
        on_engine = None if noise is None else noise_of_engine(llm, noise)
        super().__init__(llm, lambda: self.sync.adapter, further, on_engine, eos_token_ids)

    @contextlib.contextmanager
    def holding(self, weights: Weights, name: str, payload: tuple[bytes, list[float]]) -> Iterator[str]:
        """Inside, it draws with the policy that was sent; gives the digest of what it holds.

        Args:
            name: that no other policy has.
        """
        tensors = from_bytes(payload[0])
        self.sync.serve(self.llm, lambda folder: self._save(tensors, folder), f"-{name}")
        self.weights = weights
        if self.noise is not None:
            self.noise.rms[:] = payload[1]
        with self.noisy():
            yield self._held(tensors)

    def close(self) -> None:
        self.engine.engine_core.shutdown()

    def _save(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        """In PEFT's files."""
        from safetensors.torch import save_file

        named = {name.replace(f".{ADAPTER}.", "."): tensor for name, tensor in tensors.items()}
        save_file(named, folder / "adapter_model.safetensors")
        self.peft_config.save_pretrained(str(folder))

    def _held(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """The digest of what the engine serves.

        Args:
            tensors: that were sent; of them the names and the shapes are read, not what is in them.
        """
        ((model,),) = self.llm.apply_model(lambda model: [model])
        rename, held = getattr(model, "hf_to_vllm_mapper", None), matrices_of(model, self.sync.adapter.lora_int_id)
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        first, second = MATRICES
        for full in sorted(name for name in tensors if name.endswith(first)):
            module = full.removesuffix(first)
            name = own_name(module)
            renamed = name if rename is None else (rename.map_name(f"{name}.weight") or "").removesuffix(".weight")
            pair = held.pop(name, None) or held.pop(renamed, None)
            if pair is None:
                raise UserError(
                    f"--config.rollout.engine vllm: what vLLM holds of the adapter of {name} can't be read; use"
                    " --config.rollout.engine fast"
                )
            a, b = (tensors[module + end].shape for end in (first, second))
            found[name] = pair[0][: a[0], : a[1]], pair[1][: b[0], : b[1]]
        found |= {name: pair for name, pair in held.items() if pair[0].any()}  # of which nothing was sent
        return _digest(self.base, found, self.noise)


def matrices_of(model: Any, lora: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A [most ranks, in] and the scaled B [out, most ranks] of each layer that vLLM's `model` can serve one on, by
    vLLM's name for it, as they are in the memory that it multiplies by.

    Args:
        lora: number of a LoRARequest that it serves.
    """
    manager = model.lora_manager
    slot, found = manager.lora_index_to_id.index(lora), {}
    for name, module in manager.modules.items():
        a, b = module.lora_a_stacked, module.lora_b_stacked
        pairs = [(a, b)] if isinstance(a, torch.Tensor) else list(zip(a, b, strict=True))
        parts = manager.packed_modules.get(name, [name])
        if len(parts) == len(pairs) and all(matrix.dim() == 4 for pair in pairs for matrix in pair):
            found |= {part: (a[slot, 0], b[slot, 0]) for part, (a, b) in zip(parts, pairs, strict=True)}
    return found


@dataclass(frozen=True, slots=True)
class HeldByVLLM:
    """The digest of what an engine of this dtype holds (perl.training.pool.Held)."""

    dtype: torch.dtype
    base: str
    """content_hash of its folder."""

    def begin(self, policy: Any, gathered: Gather) -> None:
        pass

    def __call__(self, policy: Any, noise: NoiseInjector | None, weights: Weights) -> str:
        return sent_digest(policy, self.base, noise, weights, self.dtype)


def sent_digest(policy: Any, base: str, noise: NoiseInjector | None, weights: Weights, dtype: torch.dtype) -> str:
    """Of what an engine of this dtype holds that has the policy as it is now, with the noise of `weights`. Every rank
    must come here where the policy is split.

    Args:
        policy: with plain LoRA on linear layers; not wrapped by DDP or DeepSpeed.
        base: content_hash of its folder.
    """
    from peft.tuners.lora import Linear

    found = {}
    for name, layer in policy.named_modules():
        if isinstance(layer, Linear) and ADAPTER in layer.lora_A:
            a, b = (whole(matrices[ADAPTER].weight).cpu().to(dtype) for matrices in (layer.lora_A, layer.lora_B))  # type: ignore[arg-type]
            found[own_name(name)] = a, b * layer.scaling[ADAPTER]
    if noise is None:
        return _digest(base, found, None)
    copies = noise.on(
        nn.Module(), [_with_weight(whole(weight).to("cpu", dtype, copy=True)) for _, weight in noise.held()]
    )
    with copies.applied(weights.sigma, (weights.version, weights.draw)):
        noise.realized_sigma = copies.realized_sigma  # in the engine's dtype
        return _digest(base, found, copies)


def outline(noise: NoiseInjector) -> NoiseInjector:
    """The same noise on layers of the same shapes that hold nothing, for another process."""
    shapes = [tuple(getattr(weight, "ds_shape", weight.shape)) for _, weight in noise.held()]  # ZeRO-3's own is (0,)
    return noise.on(nn.Module(), [_with_weight(torch.empty(shape, device="meta")) for shape in shapes])


def _with_weight(weight: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


@torch.no_grad()
def _digest(base: str, matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]], noise: NoiseInjector | None) -> str:
    hashed = hashlib.sha256(base.encode())
    for name, (a, b) in sorted(matrices.items()):
        add_tensor(hashed, f"{name} A", a)
        add_tensor(hashed, f"{name} B", b)
    for name, weight in () if noise is None else noise.held():
        add_tensor(hashed, own_name(name), weight)
    return hashed.hexdigest()
