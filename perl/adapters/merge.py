"""Merge an adapter into its base, check that the result is what PEFT computes, and write it whole or not at all.

    base logits, PEFT's logits  ->  merged in float32: equal to PEFT's?  ->  rounding error  ->  written, loaded
    again: still equal?

Weights are merged module by module in float32, whatever the method: PEFT's own `merge` does the arithmetic. The model
itself stays in the dtype it is stored in, one copy at a time (see probe.py for how the logits are had in float32).
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.adapters.applied import trained_above
from perl.adapters.layers import ACCEPTED_ROUNDING_ERROR, AdaptedLayer, CannotMerge, RoundingError
from perl.adapters.other_methods import float32_norms
from perl.adapters.probe import float32_logits, probe_tokens
from perl.base.errors import UserError, lookup
from perl.base.files import read_json
from perl.engines.base import DTYPES
from perl.models.few_bits import described, fields_of
from perl.models.folders import (
    ADAPTER_WEIGHTS,
    INDEX,
    Checkpoint,
    content_hash,
    copy_side_files,
    load_config,
    load_model,
    require_adapter,
    require_whole_weights,
    written_whole,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LOGIT_TOLERANCE = 1e-4
"""Largest difference of float32 logits, as a share of the largest logit, that counts as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What was merged, how exactly, and what it cost. Stands in the output's merge.json and in summary.json."""

    base_hash: str
    adapter_hash: str
    method: str
    """PEFT's name of the method ("LORA")."""
    tensors: int
    """How many weights the adapter changes."""
    dtype: str
    """What the merged model is written in; its config.json says so."""
    rounding_dtype: str
    """The dtype that `rounding_error` speaks of: the one asked for, the base's own under auto."""
    rounding_error: float
    """Relative rounding error of the update: ||round(merged) - merged|| / ||merged - base||, Frobenius norms over all
    changed weights, `merged` in float32 and round() to `rounding_dtype`. 0: nothing of the update is lost; 1: as if the
    adapter had not been there."""
    effect: float
    """Largest difference between PEFT's logits and the base's on the probe prompt."""
    exact_error: float
    """Largest difference between the logits merged in float32 and PEFT's."""
    written_error: float
    """Largest difference between the logits of the written model and PEFT's: rounding's cost where it counts."""
    note: str = ""
    """Why the dtype is not the base's, when it is not."""
    trained_above: str = ""
    """How the base was quantised that the adapter was trained above, "4 bits (bitsandbytes, nf4)", where it was and the
    adapter lies in its run's folder. It is merged into float weights all the same."""
    asked: str = ""
    """The dtype that was asked for, "auto" among them."""


def merge_adapter(model: Path, adapter: Path, output: Path, dtype: str = "auto") -> MergeReport:
    """Write to `output` the model in `model` with the adapter in `adapter` merged into it.

    Args:
        model: folder of the base: config.json and safetensors.
        adapter: folder of a PEFT adapter of any method that PEFT can merge.
        output: new folder, or one of an earlier merge, which is replaced.
        dtype: one of DTYPES; "auto" is the base's own dtype, or float32 where rounding to it would lose more than
            ACCEPTED_ROUNDING_ERROR of the update.

    Raises:
        UserError: no adapter, another base's adapter, an untrained one, or a method that cannot be merged.
        RuntimeError: the merged model does not compute what PEFT computes.
    """
    import torch

    lookup(dict.fromkeys(DTYPES), dtype, "dtype", "--dtype")
    config = require_adapter(adapter)
    base = load_config(model)
    require_floats(base, model)
    warn_of_other_base(adapter, config, model, base)
    checkpoint = Checkpoint(model)

    wrapped, tokens, peft_logits, effect = wrap(model, adapter)
    try:
        merged_logits = float32_logits(wrapped, tokens, merged=True)
    except CannotMerge as error:
        raise UserError(f"--adapter {adapter}: {error}; write another adapter") from error
    exact_error = require_equal(merged_logits, peft_logits, effect, "merged in float32")

    wanted = checkpoint.dtype() if dtype == "auto" else getattr(torch, dtype)
    tensors, rounding_error = measure(wrapped, checkpoint, wanted)
    written, note = choose_dtype(dtype, wanted, rounding_error)

    with written_whole(output) as folder:
        write_merged(wrapped, checkpoint, written, folder)
        copy_side_files(model, folder)
        note_dtype(folder / "config.json", _name(written))
        del wrapped
        written_logits = float32_logits(load_model(folder, local_files_only=True, dtype=written).eval(), tokens)
        written_error = require_equal(
            written_logits, peft_logits, effect, f"written in {_name(written)}", rounded=written.itemsize < 4
        )
        report = MergeReport(
            base_hash=content_hash(model),
            adapter_hash=content_hash(adapter),
            method=str(config.get("peft_type", "?")),
            tensors=tensors,
            dtype=_name(written),
            rounding_dtype=_name(wanted),
            rounding_error=rounding_error,
            effect=effect,
            exact_error=exact_error,
            written_error=written_error,
            note=note,
            trained_above=trained_above(adapter),
            asked=dtype,
        )
        (folder / "merge.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def adapter_effect(model: Path, adapter: Path) -> float:
    """Largest difference that `adapter` makes to the logits of `model` on the probe prompt. Raises as `merge_adapter`
    for an adapter that does not fit or changes nothing."""
    warn_of_other_base(adapter, require_adapter(adapter), model, load_config(model))
    return wrap(model, adapter)[-1]


def wrap(model: Path, adapter: Path) -> tuple[Any, torch.Tensor, torch.Tensor, float]:
    """The PeftModel, the probe's tokens, its logits for them in float32, and the adapter's effect on these."""
    base = load_model(model, local_files_only=True, dtype="auto").eval()
    tokens = probe_tokens(base.get_input_embeddings().num_embeddings)
    base_logits = float32_logits(base, tokens)
    wrapped = load_adapter(base, adapter)
    require_change_of_weights(wrapped, adapter)
    peft_logits = float32_logits(wrapped, tokens)
    return wrapped, tokens, peft_logits, require_effect(peft_logits, base_logits, adapter)


def read_report(folder: Path) -> MergeReport | None:
    """The report of an earlier merge in `folder`, or None."""
    file = folder / "merge.json"
    if not file.is_file():
        return None
    try:
        report = read_json(file, kind=MergeReport)
    except UserError as error:
        raise UserError(f"{file}: is not readable, or of an older version; merge again into a new folder") from error
    return report if math.isfinite(report.written_error) else None  # NaN: of before that was refused


def require_floats(base: Any, model: Path) -> None:
    """A UserError for a base that is stored quantised: the sum would be rounded to its few bits."""
    if fields := fields_of(base):
        raise UserError(
            f"--model {model}: is stored in {described(fields)}, and an adapter is merged into weights before they are"
            " quantised; name the model that it was made of, or leave the adapter unmerged (--adapter_mode lora)"
        )


def warn_of_other_base(adapter: Path, config: dict[str, Any], model: Path, base: Any) -> None:
    """Log one line when the adapter names a base of another name than `model` (paths may differ, names should not), and
    one when its run had its base in other bits than `base`, the PretrainedConfig of what it is put on."""
    above, here = trained_above(adapter), described(fields_of(base))
    if above and above != here:
        logger.warning(
            "%s was trained above a base in %s, and is put on %s in %s: its scores may differ",
            adapter, above, model, here or "floating-point weights",
        )  # fmt: skip
    named = str(config.get("base_model_name_or_path") or "")
    resolved = model.resolve()
    parts = {_plain(part) for part in (model.name, resolved.name, *resolved.parts[-4:])}
    # A hub's cache keeps Qwen/Qwen2.5-7B under models--Qwen--Qwen2.5-7B/snapshots/<commit>.
    name = _plain(Path(named).name)
    if named and not any(part == name or part.endswith(f"--{name}") for part in parts):
        logger.warning("the adapter was trained on %s, and is merged into %s: is that the same model?", named, model)


def _plain(name: str) -> str:
    """A folder's name without what ModelScope does to it (Qwen2___5-7B for Qwen2.5-7B)."""
    return name.replace("___", ".").lower()


def load_adapter(base: Any, adapter: Path, flag: str = "--adapter", trainable: bool = False) -> Any:
    """`base` wrapped in the adapter, adapter weights in float32, every one of them found in the file and no other.

    Raises a UserError, which names `flag`, for another base's adapter: other shapes, other modules, or other layers.
    """
    from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
    from peft.utils.save_and_load import load_peft_weights
    from safetensors import safe_open

    require_whole_weights(adapter, f"{flag} {adapter}")
    of_base = {id(p) for p in base.parameters()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = PeftModel.from_pretrained(base, str(adapter), is_trainable=trainable).eval()
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{flag} {adapter}: does not fit this base model: {reason}") from error

    with safe_open(adapter / ADAPTER_WEIGHTS, framework="pt") as file:
        stored = set(file.keys())
    expected = set(get_peft_model_state_dict(wrapped, save_embedding_layers=False))
    missing = sorted(expected - stored)
    extra = sorted(name for name in stored - expected if ".base_layer." not in name)
    if missing or extra:
        what = f"it lacks {missing[0]}" if missing else f"the base has no place for {extra[0]}"
        count = len(missing) + len(extra)
        raise UserError(f"{flag} {adapter}: belongs to another base model: {what} ({count} such weights)")
    for name, parameter in wrapped.named_parameters():
        if id(parameter) not in of_base and parameter.is_floating_point():
            if not parameter.isfinite().all():
                raise UserError(f"{flag} {adapter}: {name} holds NaN or infinity; write the adapter of an earlier step")
            parameter.data = parameter.data.float()
    if wrapped.active_peft_config.peft_type == "LN_TUNING":  # PEFT's layers are of the base's dtype
        set_peft_model_state_dict(wrapped, load_peft_weights(str(adapter), device="cpu"))
        float32_norms(wrapped)
    return wrapped


def merged_weights(wrapped: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """Each weight that the adapter may change: its name in the base model -> a function that merges it, in float32.

    They are functions so that no more than one merged weight need be in memory.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    def merged(layer: AdaptedLayer, part: str) -> torch.Tensor:
        return layer.merged()[part]

    def trained(parameter: torch.nn.Parameter) -> torch.Tensor:
        return parameter.data.float()

    all_biases = any(getattr(config, "bias", "none") == "all" for config in wrapped.peft_config.values())
    weights: dict[str, Callable[[], torch.Tensor]] = {}
    outer = None
    for name, module in wrapped.get_base_model().named_modules():
        if outer is not None and name.startswith(outer):
            continue
        if isinstance(module, BaseTunerLayer):
            outer = f"{name}."
            layer = AdaptedLayer(name.removesuffix(".token_adapter"), module)
            weights |= {f"{layer.name}.{part}": partial(merged, layer, part) for part in layer.weights()}
        elif isinstance(module, ModulesToSaveWrapper):
            outer = f"{name}."
            for part, parameter in module.modules_to_save[module.active_adapters[0]].named_parameters():
                weights[f"{name}.{part}"] = partial(trained, parameter)
        elif all_biases and getattr(module, "bias", None) is not None:
            weights[f"{name}.bias"] = partial(trained, module.bias)
    return weights


def measure(wrapped: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[int, float]:
    """How many weights change, and the relative rounding error to `dtype` (MergeReport.rounding_error)."""
    import torch

    count, error = 0, RoundingError()
    weights = merged_weights(wrapped)
    tied = tied_weights(wrapped, checkpoint)
    changed = [weights[name]() for name in tied if name in weights]
    together = len(changed) == 2 and torch.allclose(changed[0], changed[1], atol=1e-6)
    if together:
        del weights[tied[1]]
    for name, merge in weights.items():
        if (name in tied and not together) or name not in checkpoint:
            raise UserError(
                f"{checkpoint.folder}: the adapter changes {name}, which the base does not store by itself under that"
                " name (tied to another weight, or fused), and can't be merged; write --adapter_mode lora"
            )
        exact = merge()
        base = checkpoint.read(name).float()
        count += not torch.equal(exact, base)
        error.add(base, exact, dtype)
    return count, error.relative


def tied_weights(wrapped: Any, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Names of the input and the output embedding where the files hold one tensor for both, else nothing."""
    model = wrapped.get_base_model()
    names = {module: name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    if head is None or f"{names[head]}.weight" in checkpoint:
        return ()
    return f"{names[model.get_input_embeddings()]}.weight", f"{names[head]}.weight"


def choose_dtype(flag: str, wanted: torch.dtype, rounding_error: float) -> tuple[torch.dtype, str]:
    """The dtype to write, and a note when that needs explaining (also logged)."""
    import torch

    if rounding_error <= ACCEPTED_ROUNDING_ERROR:
        return wanted, ""
    loss = f"rounding the merged weights to {_name(wanted)} would lose {rounding_error:.0%} of the adapter's update"
    if flag == "auto":
        note = f"{loss}: written in float32 (--adapter_mode lora serves the adapter as it is)"
        logger.warning("%s", note)
        return torch.float32, note
    note = f"{loss}; written so, as {flag} is asked for (float32 keeps it)"
    logger.warning("%s", note)
    return wanted, note


def write_merged(wrapped: Any, checkpoint: Checkpoint, dtype: torch.dtype, folder: Path) -> None:
    """Write the base's files again with the merged weights in their places, shard by shard; when the base's own dtype
    is kept, all other tensors are the base's bit for bit."""
    from safetensors.torch import save_file

    same_dtype = checkpoint.dtype() == dtype
    merged = {checkpoint.stored(name): merge for name, merge in merged_weights(wrapped).items()}
    total = 0
    for shard, names in checkpoint.shards.items():
        tensors = {}
        for name in names:
            tensor = merged[name]() if name in merged else checkpoint.read(name)
            if tensor.is_floating_point() and (name in merged or not same_dtype):
                tensor = tensor.to(dtype)
            tensors[name] = tensor.contiguous()
            total += tensor.numel() * tensor.element_size()
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    if (checkpoint.folder / INDEX).is_file():
        index = read_json(checkpoint.folder / INDEX)
        index["metadata"] = (noted if isinstance(noted := index.get("metadata"), dict) else {}) | {"total_size": total}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def note_dtype(file: Path, dtype: str) -> None:
    """Have config.json say what the weights are stored in, where it says otherwise: whoever loads the model takes the
    dtype from there, and would round a float32 merge to the base's own."""
    config = read_json(file)
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]  # text_config, of an image model
    named = [(part, key) for part in parts for key in ("dtype", "torch_dtype") if part.get(key) not in (None, dtype)]
    for part, key in named:
        part[key] = dtype
    if named:
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def require_change_of_weights(wrapped: Any, adapter: Path) -> None:
    """A UserError for what is no other weights for all tokens: prompts that are learned, or aLoRA, whose probe would
    change nothing."""
    if not merged_weights(wrapped):
        method = str(wrapped.active_peft_config.peft_type.value)
        raise UserError(f"--adapter {adapter}: {method} changes no weights, and can't be merged; write another adapter")
    if getattr(wrapped.active_peft_config, "alora_invocation_tokens", None):
        raise UserError(
            f"--adapter {adapter}: acts after its alora_invocation_tokens alone, and can't be merged; write another one"
        )


def require_effect(peft_logits: torch.Tensor, base_logits: torch.Tensor, adapter: Path) -> float:
    """Largest difference that the adapter makes to the probe's logits, or a UserError when it makes none, or none that
    is a number."""
    effect = float((peft_logits - base_logits).abs().max())
    if not math.isfinite(effect):
        raise UserError(
            f"--adapter {adapter}: the logits without it or with it are NaN or infinite: a weight of the base is, or"
            " sums are too large; write another base or adapter"
        )
    if effect == 0.0:
        raise UserError(
            f"--adapter {adapter}: changes nothing (all its update is zero): it is untrained or empty;"
            " write the adapter of a later step"
        )
    return effect


def require_equal(
    logits: torch.Tensor, peft_logits: torch.Tensor, effect: float, what: str, *, rounded: bool = False
) -> float:
    """Largest difference from PEFT's logits; a RuntimeError unless it is within the arithmetic's tolerance (not asked
    of rounded weights) and small against the adapter's effect."""
    error = float((logits - peft_logits).abs().max())
    tolerance = LOGIT_TOLERANCE * max(1.0, float(peft_logits.abs().max()))
    small, equal = error <= effect / 2, error <= tolerance  # neither holds of NaN
    if rounded and not small:
        raise UserError(
            f"the model {what} differs from PEFT's by {error:.2g} where the adapter's whole effect is {effect:.2g}:"
            " write --dtype float32, or --adapter_mode lora"
        )
    if not rounded and not (equal and small):
        raise RuntimeError(
            f"the model {what} does not compute what PEFT's unmerged one does: logits differ by {error:.3g},"
            f" tolerance {tolerance:.3g}, the adapter's effect {effect:.3g}"
        )
    return error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
