"""TRL's GRPOTrainer with perl's passes through the policy: what it, the reference and the critic say of completions.

    _get_per_token_logps_and_entropies    TRL's name for such a pass: packed rows here, or TRL's own of padded ones
    _score                                of a batch by a model, with entropies where it is the loss's
    _reference_logps, _noisy_logps, _values    of a generation batch, before its updates

This file, trainer.py and trl_patches.py alone know TRL's internals.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing, unwrap_model_for_generation
from trl.trainer.utils import use_adapter

from perl.config.training import TrainingConfig
from perl.noise.injector import NoiseInjector
from perl.runs.adapter_trainer import AdapterTrainer
from perl.runs.metrics import StepClock
from perl.runs.vision import images_of, in_chunks
from perl.training.critic import Critic
from perl.training.loss import TokenLogProbs
from perl.training.microbatches import UpdatePlan
from perl.training.packing import log_probs
from perl.training.rollout import Weights, sampling_weights


class PolicyPasses(AdapterTrainer, GRPOTrainer):
    """What PerlGRPOTrainer is made of.

    Attributes:
        plan: whether micro-batches are packed.
        clock: what a pass takes and computes is counted there.
        noise: on the policy's norms, while it samples.
        critic: None where the algorithm has none.
    """

    args: TrainingConfig
    model: Any
    plan: UpdatePlan
    clock: StepClock
    noise: NoiseInjector | None
    critic: Critic | None

    def _policy(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def _of_all_processes(self, numbers: list) -> torch.Tensor:
        """[processes, numbers]: the same numbers of every process."""
        return self.accelerator.gather(torch.tensor([numbers], device=self.accelerator.device))  # type: ignore[return-value]

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[Any]:
        """The policy without its wrappers, ZeRO-3's and FSDP's weights gathered as TRL gathers them to generate."""
        with (
            unwrap_model_for_generation(
                self.model_wrapped,  # type: ignore[arg-type]
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=None if self.use_vllm else self.generation_kwargs,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,  # type: ignore[arg-type]
            ) as policy,
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            yield policy

    @contextlib.contextmanager
    def _whole(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """ZeRO-3's and FSDP1's parameters, gathered to be read."""
        with (
            self._dist.gather_params(parameters),
            self._dist.summon_full_params(self.model_wrapped, writeback=False),
        ):
            yield

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **inputs: Any,
    ):
        if isinstance(model, TokenLogProbs):  # of `_compute_loss`, computed already
            return model
        training = torch.is_grad_enabled()  # the loss's own pass
        parts = []
        with contextlib.nullcontext() if training else self.clock("old_logps"), self.accelerator.autocast():
            size = batch_size or len(input_ids)
            further = in_chunks(inputs | {"compute_entropy": compute_entropy}, len(input_ids), size)
            for ids, mask, fields in zip(input_ids.split(size), attention_mask.split(size), further, strict=True):
                part, work = log_probs(
                    model,
                    ids,
                    mask,
                    logits_to_keep,
                    functools.partial(self._padded, model, fields),
                    pack_rows=self.plan.packed,
                    compute_entropy=compute_entropy,
                    kernel=self.plan.kernel,
                )
                parts.append(part)
                (self.clock.count_update if training else self.clock.count_forward)(work)
        logps, entropies, aux_losses = zip(*parts, strict=True)
        return TokenLogProbs(
            torch.cat(logps),
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(aux_losses).mean() if inputs.get("compute_aux_loss") else None,
        )

    def _padded(self, model: Any, fields: dict[str, Any], ids: torch.Tensor, mask: torch.Tensor, width: int):
        """TRL's own forward, of these columns."""
        if "num_images" in fields:
            image: Any = self._image_pad_token_id
            fields = fields | {"mm_token_type_ids": ids.eq(image).int()}
        return super()._get_per_token_logps_and_entropies(model, ids, mask, width, **fields)

    def _score(self, model: Any, inputs: dict[str, Any]) -> TokenLogProbs:
        """What the loss's own forward pass says of the completions of a micro-batch."""
        return self._get_per_token_logps_and_entropies(
            model,
            *tokens_of(inputs),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **images_of(inputs),
        )

    def _logps(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """Of the completions of a generation batch by `model`, [rows, tokens], in nats; where no gradient is taken."""
        kwargs: Any = self.args.gradient_checkpointing_kwargs
        with disable_gradient_checkpointing(self.model, kwargs):  # type: ignore[arg-type]
            return self._get_per_token_logps_and_entropies(
                model, *tokens_of(batch), batch_size=self.args.per_device_train_batch_size, **images_of(batch)
            ).logps

    @torch.no_grad()
    def _reference_logps(self, batch: dict[str, Any], wanted: bool) -> torch.Tensor | None:
        """Of the completions by the reference policy, [rows, tokens], in nats: TRL's, or, where they are `wanted` and
        it has no need of them, computed as it does; else None."""
        if "ref_per_token_logps" in batch or not wanted:
            return batch.get("ref_per_token_logps")
        if self.ref_model is not None:
            return self._logps(self.ref_model, batch)
        policy = self._policy()
        with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
            return self._logps(self.model, batch)

    @torch.no_grad()
    def _noisy_logps(self, batch: dict[str, Any], weights: Weights) -> torch.Tensor:
        """Of the completions by the noisy policy that sampled them with `weights`, float32 [rows, tokens], in nats."""
        with (
            self.clock("old_logps"),
            self._gathered() as policy,
            sampling_weights(policy, self.noise, weights),
        ):
            return self._logps(policy, batch)

    def _score_and_value(self, model: Any, inputs: dict[str, Any]) -> tuple[TokenLogProbs, torch.Tensor]:
        """`_score`, and the critic's values, float32 [rows, tokens], of one pass."""
        assert self.critic is not None
        with self.accelerator.autocast():
            logps, entropies, values, work = self.critic.score(model, *tokens_of(inputs))
        self.clock.count_update(work)
        return TokenLogProbs(logps, entropies, None), values

    def _values(self, batch: dict[str, Any]) -> torch.Tensor | None:
        """The critic's values of a generation batch before its updates, float32 [rows, tokens]; there is no noise. None
        without a critic."""
        if self.critic is None:
            return None
        kwargs: Any = self.args.gradient_checkpointing_kwargs
        unchecked = disable_gradient_checkpointing(self.model, kwargs)  # type: ignore[arg-type]
        with self.clock("old_logps"), unchecked, self.accelerator.autocast():
            values, work = self.critic.values(self.model, *tokens_of(batch), self.args.per_device_train_batch_size)
        self.clock.count_forward(work)
        return values


def tokens_of(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Token ids and mask, int64 [rows, prompt width + completion width], and the completion width."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return ids, mask, batch["completion_ids"].size(1)
