"""The transformers backend: load a model from a folder and complete prompts with it on one device."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from perl import device
from perl.base.errors import UserError, lookup
from perl.engines.base import DTYPES, resolve_dtype
from perl.engines.linear import prepacked
from perl.engines.quantised import Quantisation
from perl.engines.quantised_base import QuantisedBase, quantisable
from perl.engines.torch_engine import TorchEngine
from perl.models.folders import Checkpoint, eos_token_ids, load_config, load_model
from perl.models.images import load_processing, tokenizer_of

logger = logging.getLogger(__name__)


class HFEngine(TorchEngine):
    """A transformers model on this process's first device. See `perl.engines.Engine` for what it promises."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        tp_size: int = 1,
        max_batch_tokens: int | None = None,
        ends: Collection[int] = (),
        quantization: Quantisation = "none",
    ):
        """Load the model. Arguments as in `perl.engines.ENGINES`; max_batch_tokens as in `decoder.Decoder`.

        Raises:
            UserError: no model at `model_path`, unknown dtype, a context longer than the model's, tp_size above 1,
                layers that cannot be quantised.
        """
        if tp_size != 1:
            raise UserError(
                f"--tp_size {tp_size}: the transformers backend keeps a model on one device; add --use_vllm"
            )
        if max_batch_tokens is not None and max_batch_tokens < 1:
            raise UserError(f"max_batch_tokens: {max_batch_tokens} is not possible; write 1 or more")
        config = load_config(model_path)
        context = _context(config, max_model_len, model_path)
        processing = load_processing(model_path)
        self.tokenizer: Any = tokenizer_of(processing)
        lookup(dict.fromkeys(DTYPES), dtype, "dtype", "--dtype")
        model = load_model(model_path, dtype=resolve_dtype(dtype, config))
        model.eval().to(device.torch_device())
        applied = functools.partial(prepacked, model)
        if quantization != "none":
            quantisable(model, quantization, "--quantization", "--use_vllm")  # a mistake is told here
            applied = functools.partial(_quantised, model, quantization)
        eos, pad = {*eos_token_ids(model_path, config, self.tokenizer), *ends}, self.tokenizer.pad_token_id
        super().__init__(
            model,
            processing,
            eos_token_ids=eos,
            context=context,
            applied=applied,
            pad_token_id=min(eos, default=0) if pad is None else pad,  # which token fills masked places changes nothing
            max_batch_tokens=max_batch_tokens,
            capture=device.captures_by_default(),
            kernel=device.paged_attention("auto"),
        )

    def replace_weights(self, model_path: str) -> str | None:
        """Copy tensor by tensor, in place. See `perl.engines.Engine`."""
        checkpoint = Checkpoint(Path(model_path))
        state = self.model.state_dict()
        state = {checkpoint.stored(name): tensor for name, tensor in state.items()}
        strange = next((name for name in checkpoint.location if name not in state), None)
        stored = {state[name].data_ptr() for name in checkpoint.location if name in state}
        missing = next((name for name, tensor in state.items() if tensor.data_ptr() not in stored), None)
        if strange or missing:  # transformers renames or fuses on loading
            return f"{model_path} does not store its weights under the names that the model has ({strange or missing})"
        with torch.no_grad():
            for name in checkpoint.location:
                state[name].copy_(checkpoint.read(name))
        return None

    def close(self) -> None:
        self.model = self.decoder = self.applied = None
        gc.collect()
        device.empty_cache()


@contextlib.contextmanager
def _quantised(model: Any, quantization: str) -> Iterator[None]:
    """Inside, the model computes with quantised copies of its weights, made here: those may be others each time."""
    with QuantisedBase(model, quantization, "--quantization", "--use_vllm").applied():
        yield


def _context(config: Any, wanted: int | None, model_path: str) -> int:
    """Most tokens of prompt and completion together."""
    allowed = getattr(config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        if allowed is None:
            raise UserError(f"{model_path}: the configuration names no max_position_embeddings; give --max_model_len")
        return allowed
    if wanted < 2 or (allowed is not None and wanted > allowed):
        raise UserError(f"--max_model_len {wanted}: {model_path} takes 2 to {allowed} tokens")
    return wanted
