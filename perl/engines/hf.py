"""The transformers backend: load a model from a folder and complete prompts with it on one device."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from perl import device
from perl.base.errors import UserError, lookup
from perl.engines.base import Feed, room_of
from perl.engines.decoder import Decoder
from perl.engines.linear import prepacked
from perl.engines.sampling import validate
from perl.engines.sequence import Sequence
from perl.models.folders import Checkpoint, eos_token_ids, load_config, load_model
from perl.models.images import load_processing, tokenizer_of
from perl.models.pixels import make_images
from perl.records import Completion, Prompt, Sampling

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class HFEngine:
    """A transformers model on this process's first device. See `perl.engines.Engine` for what it promises."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        tp_size: int = 1,
        max_batch_tokens: int | None = None,
    ):
        """Load the model. Arguments as in `perl.engines.ENGINES`; max_batch_tokens as in `decoder.Decoder`.

        Raises:
            UserError: no model at `model_path`, unknown dtype, a context longer than the model's, tp_size above 1.
        """
        if tp_size != 1:
            raise UserError(
                f"--tp_size {tp_size}: the transformers backend keeps a model on one device; add --use_vllm"
            )
        if max_batch_tokens is not None and max_batch_tokens < 1:
            raise UserError(f"max_batch_tokens: {max_batch_tokens} is not possible; write 1 or more")
        config = load_config(model_path)
        self.max_model_len = _context(config, max_model_len, model_path)
        self.processing: Any = load_processing(model_path)
        self.tokenizer: Any = tokenizer_of(self.processing)
        self.model: Any = load_model(model_path, dtype=_dtype(dtype, config))
        self.model.eval().to(device.torch_device())
        self.eos_token_ids = eos_token_ids(model_path, config, self.tokenizer)
        self.decoder: Any = Decoder(
            self.model,
            eos_token_ids=self.eos_token_ids,
            pad_token_id=pad_token_id(self.tokenizer, self.eos_token_ids),
            max_batch_tokens=max_batch_tokens,
        )
        self.max_num_seqs = self.decoder.max_num_seqs

    def stream(self, feed: Feed) -> Iterator[tuple[int, Completion]]:
        """Rows drawn from one distribution are decoded together; where another one comes, those under way end first.
        See `Engine.stream`."""
        stretches = Stretches(feed)
        with prepacked(self.model):
            while (sampling := stretches.begin()) is not None:
                validate(sampling)
                first = stretches.taken
                for sequence in self.decoder.run(self._sequences(stretches), sampling):
                    yield first + sequence.index, sequence.completion()

    def _sequences(self, stretch: Stretches) -> Iterator[Sequence | None]:
        """The sequences of one stretch."""
        for prompt in stretch:
            if prompt is None:
                yield None
                continue
            max_new_tokens = room_of(prompt, self.max_model_len)
            if prompt.adapter is not None:
                raise UserError(f"{prompt.adapter}: transformers serves no adapter alongside a model; merge it")
            images = make_images(self.processing, prompt.images)
            yield Sequence(prompt.token_ids, prompt.seed, max_new_tokens, images=images)

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
        self.model = self.decoder = None
        gc.collect()
        device.empty_cache()


class Stretches:
    """A feed cut where the distribution that is sampled from changes. `begin` a stretch, then iterate over it."""

    def __init__(self, feed: Feed):
        self._source = iter(feed)
        self._next: Prompt | None = None
        """Read, and not given yet."""
        self._current: Sampling | None = None
        self.taken = 0
        """Prompts given so far."""

    def begin(self) -> Sampling | None:
        """Sampling of the next stretch, waiting for it; None at the end of the feed."""
        while self._next is None:
            try:
                self._next = next(self._source)
            except StopIteration:
                return None
        self._current = self._next.sampling
        return self._current

    def __iter__(self) -> Stretches:
        return self

    def __next__(self) -> Prompt | None:
        """A prompt of this stretch, or None when there is nothing at the moment."""
        if self._next is None:
            self._next = next(self._source)
        if self._next is None:
            return None
        assert self._current is not None
        if self._next.sampling.distribution != self._current.distribution:
            raise StopIteration
        prompt, self._next = self._next, None
        self.taken += 1
        return prompt


def pad_token_id(tokenizer: Any, eos: frozenset[int]) -> int:
    """A token to fill masked places with; which one changes nothing."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(eos, default=0)


def _dtype(name: str, config: Any) -> torch.dtype:
    """The torch dtype for `name`; "auto" is the checkpoint's own, and float32 where the device computes in that."""
    if name != "auto":
        return lookup(DTYPES, name, "dtype", "--dtype")
    best = device.default_dtype()
    return best if best == torch.float32 else getattr(config, "dtype", None) or best


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
