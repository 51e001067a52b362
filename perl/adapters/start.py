"""What a training that starts from a trained adapter trains: that one further, or a new one on a base that holds it.

In both cases TRL's reference policy (beta > 0) is what was loaded: of an adapter that is trained further it keeps a
frozen copy, named "ref"; of a new one it is the base, which then has the first adapter in its weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.adapters.merge import load_adapter, merge_adapter, read_report, warn_of_other_base
from perl.base.errors import UserError
from perl.config.adapter import FLAG
from perl.models.few_bits import is_4bit
from perl.models.folders import content_hash, require_adapter

if TYPE_CHECKING:
    import torch

OWN_FLAGS = {
    "--adapter_mode lora": f"{FLAG}_mode continue",
    "--adapter ": f"{FLAG} ",
    "--dtype ": "--config.model.dtype ",
    "--model ": "--config.model.model_name_or_path ",
}
"""What a training has in the place of the flags that errors of a merge name."""


@contextlib.contextmanager
def own_precision(model: Any, peft_config: Any, seed: int) -> Iterator[tuple[Any, Any]]:
    """(model, PEFT's configuration) for one of TRL's trainers to be made of inside. Above a base of 4 bits TRL would
    round the adapter to bfloat16, where updates are lost that are smaller than 1/512 of a weight: there the adapter is
    made here, in float32 as above any base, and TRL is not told of the bits.

    Args:
        peft_config: of a new adapter, or None.
        seed: of its random start, as TRL sets it.
    """
    if not is_4bit(model):
        yield model, peft_config
        return
    from peft import PeftModel, get_peft_model
    from transformers import set_seed

    if peft_config is not None:
        set_seed(seed)
        model = get_peft_model(model, peft_config)
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    base.is_loaded_in_4bit = False
    try:
        yield model, None
    finally:
        base.is_loaded_in_4bit = True


def continued(base: Any, adapter: Path) -> Any:
    """`base` wrapped in the adapter in `adapter`, whose weights are trained. A UserError for another base's adapter."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    warn_of_other_base(adapter, require_adapter(adapter, FLAG), Path(base.name_or_path), base.config)
    model = load_adapter(base, adapter, FLAG, trainable=True).train()
    if is_deepspeed_zero3_enabled():  # gathers weights of one dtype only, as TRL knows of new adapters
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(base.dtype)
    return model


def merge_into(model: Path, adapter: Path, output: Path, dtype: torch.dtype) -> None:
    """Write the model in `model` with the adapter in its weights to `output`, checked against what PEFT computes
    (perl.adapters.merge). Where that was done before, as in a run that goes on, nothing is written.

    Raises:
        UserError: another base's adapter, or one that changes nothing.
    """
    name = str(dtype).removeprefix("torch.")
    report = read_report(output)
    made_of = content_hash(model), content_hash(adapter), name
    if report and (report.base_hash, report.adapter_hash, report.dtype) == made_of:
        return
    try:
        with whole_weights():
            merge_adapter(model, adapter, output, name)
    except UserError as error:
        told = str(error)
        for flag, own in OWN_FLAGS.items():
            told = told.replace(flag, own)
        raise UserError(f"{FLAG}_mode merge: {told}") from error


@contextlib.contextmanager
def whole_weights() -> Iterator[None]:
    """Models that are loaded inside are not partitioned by ZeRO-3: one process alone loads them."""
    from transformers.integrations import deepspeed

    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if reference is not None and (config := reference()) is not None:
            deepspeed.set_hf_deepspeed_config(config)
