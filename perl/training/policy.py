"""The policy that is trained, and the ways to its weights.

TRL's trainer holds the model, and accelerate wraps it when the training begins: `wrapped` is what the loss calls,
`bare` the model of transformers or PEFT inside.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from trl.models.utils import (
    disable_gradient_checkpointing,
    prepare_deepspeed,
    prepare_fsdp,
    unwrap_model_for_generation,
)
from trl.trainer.utils import add_fused_lm_head, use_adapter

from perl.device.sharding import resharded


class Policy:
    """
    Args:
        trainer: the PerlGRPOTrainer that holds the model.
        refers: the loss or the reward needs a reference. Where all weights are trained it is loaded here.
    """

    def __init__(self, trainer: Any, refers: bool):
        self.trainer, self.refers = trainer, refers
        self.base_model = self._load_reference() if refers and trainer.adapter_config.type == "none" else None
        """The reference, where it is a model of its own."""

    @property
    def wrapped(self) -> Any:
        return self.trainer.model

    @property
    def bare(self) -> Any:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    @property
    def dtype(self) -> torch.dtype:
        """That it computes in."""
        return self.trainer.compute_dtype()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Any]:
        """`bare`, ZeRO-3's and FSDP's weights gathered as TRL gathers them to generate."""
        trainer = self.trainer
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
                generation_kwargs=trainer.generation_kwargs,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ) as policy,
            trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
        ):
            yield policy

    @contextlib.contextmanager
    def whole(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """ZeRO-3's and FSDP1's parameters, gathered to be read."""
        trainer = self.trainer
        with (
            trainer._dist.gather_params(parameters),
            trainer._dist.summon_full_params(trainer.model_wrapped, writeback=False),
        ):
            yield

    @contextlib.contextmanager
    def reference(self) -> Iterator[Any]:
        """The model that the run began with: one of its own, or the policy with the adapter that it began with."""
        if self.base_model is not None:
            yield self.base_model
            return
        policy = self.bare
        with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
            yield self.wrapped

    @contextlib.contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside it the base alone computes. PEFT stops training what it switches off, and goes on with what it finds
        when it switches that on again: FSDP2's shards are to be there both times."""
        with resharded(self.bare), use_adapter(self.bare, adapter_name=None), resharded(self.bare):
            yield

    def without_checkpointing(self) -> contextlib.AbstractContextManager[Any]:
        """Inside it no forward of the policy keeps anything for a backward."""
        return disable_gradient_checkpointing(self.wrapped, self.trainer.args.gradient_checkpointing_kwargs)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return self.trainer.accelerator.autocast()

    def _load_reference(self) -> Any:
        """The model once more, of the same configuration, prepared as TRL prepares its own."""
        trainer, policy = self.trainer, self.bare
        reference = type(policy).from_pretrained(
            policy.config.name_or_path,
            dtype=policy.dtype,
            attn_implementation=policy.config._attn_implementation,
            config=copy.deepcopy(policy.config),
        )
        add_fused_lm_head(reference, trainer.temperature, trainer.args.cast_lm_head_to_fp32)
        if trainer.is_deepspeed_enabled:
            return prepare_deepspeed(reference, trainer.accelerator)
        if trainer.is_fsdp_enabled:
            return prepare_fsdp(reference, trainer.accelerator)
        return trainer.accelerator.prepare_model(reference, evaluation_mode=True)
