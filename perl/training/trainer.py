"""TRL's GRPOTrainer with AQN around its rollouts and no padding in its update. Only this file knows TRL's internals.

One update of GRPO (arXiv 2402.03300), and where this class adds to it:

    prompts -> _generate_single_turn      completions   + noise while `generate` runs, adapter folded in, dropout off
            -> _calculate_rewards         rewards
            -> _generate_and_score_…      advantages    + old log-probabilities of the noisy policy, on request
            -> compute_loss, optimizer    adapter       + the adapter method's own optimizer
    log, _save_checkpoint                               + aqn/… metrics; the rollouts still owed to an update

`with self.clock(…)` marks the phases that perl/training/metrics.py measures; what is in none is the update.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import unwrap_model_for_generation

from perl.adapters import Adapter
from perl.adapters.fold import AdapterFold
from perl.config.schema import NoiseConfig, PeftConfig, RolloutConfig
from perl.noise.injector import NoiseInjector
from perl.noise.schedule import stage_at
from perl.training.metrics import StepClock, model_size, sequences
from perl.training.microbatches import MEAN_OVER_ROWS, SCALE, SUM_OVER_TOKENS, TOKENS, Dealer, equal_rewards
from perl.training.packing import enable_packing, log_probs, packing_unsupported
from perl.training.rollout import generate_fast, rollout_seeds

log = logging.getLogger(__name__)


class PerlGRPOTrainer(GRPOTrainer):
    """GRPO on a LoRA adapter, sampled with noise on the norm weights.

    Args (beside GRPOTrainer's):
        adapter: the PEFT method; its optimizer replaces the default one when it has its own.
        adapter_config: the group `peft` of the configuration.
        noise: the group `noise_injection`.
        rollout: the group `rollout`.
        truncate_prompts_to: prompts are cut on the left to this many tokens; None leaves them.
    """

    args: GRPOConfig
    model: Any

    def __init__(
        self,
        *args: Any,
        adapter: Adapter,
        adapter_config: PeftConfig,
        noise: NoiseConfig,
        rollout: RolloutConfig | None = None,
        truncate_prompts_to: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, peft_config=adapter.build(adapter_config), **kwargs)
        self.adapter, self.adapter_config = adapter, adapter_config
        self.truncate_prompts_to = truncate_prompts_to
        self.rollout_config = rollout or RolloutConfig()
        self.fold = AdapterFold(self._policy(), self.rollout_config.merge_adapter)
        self.noise_config = noise
        self.noise: NoiseInjector | None = None
        if noise.enabled:
            assert noise.seed is not None
            self.noise = NoiseInjector(self._policy(), noise.target_modules, noise.exclude_patterns, noise.seed)
        self.clock = StepClock(model_size(self.model), self.accelerator.gather, self._log_step)  # type: ignore[arg-type]
        self.add_callback(self.clock)
        self.packs, self.dealer = self._plan_update()
        self._no_advantage: torch.Tensor | None = None
        self._draw = (-1, 0)  # (global step, how many rollouts it has had): names the noise of a rollout

    # Rollout

    def _tokenize_prompts(self, prompts: list) -> tuple:
        prompt_ids, images, multimodal_fields = super()._tokenize_prompts(prompts)
        if self.truncate_prompts_to is not None:
            prompt_ids = [ids[-self.truncate_prompts_to :] for ids in prompt_ids]
        return prompt_ids, images, multimodal_fields

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        buffered = self._buffered_inputs
        with self.clock("prepare"):
            inputs = super()._prepare_inputs(generation_batch)
            if self._buffered_inputs is not buffered:  # a new generation batch
                left_out = self._of_all_processes([self.dealer.share_left_out(self._buffered_inputs)])
                self._metrics["train"]["update/rows_left_out"].append(left_out.mean().item())
                self._buffered_inputs = self.dealer.arrange(
                    self._buffered_inputs, lambda counts: self._of_all_processes(counts).amax(dim=0).tolist()
                )
                inputs = self._buffered_inputs[self._step % len(self._buffered_inputs)]
        if self.model.training:
            self.clock.count_trained(inputs[TOKENS])
        return inputs

    def _generate_single_turn(self, prompt_ids: list, images: Any, fields: Any, num_generations: int, *args, **kwargs):
        step, count = self._draw
        self._draw = (step, count + 1) if step == self.state.global_step else (self.state.global_step, 0)
        with self.clock("rollout"), self._generate_as_behaviour_policy(num_generations):
            completion_ids, logps = super()._generate_single_turn(
                prompt_ids, images, fields, num_generations, *args, **kwargs
            )
        if self.fold.share_lost is not None:
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["rollout/merge_share_lost"].append(self.fold.share_lost)
        if not (self.use_vllm and self.args.vllm_mode == "server"):  # whose devices are not ours
            lengths = [len(p) + len(c) for p, c in zip(prompt_ids, completion_ids, strict=True)]
            self.clock.count_forward(sequences(lengths))
        return completion_ids, logps

    @contextlib.contextmanager
    def _generate_as_behaviour_policy(self, group_size: int) -> Iterator[None]:
        """`generate` runs as the behaviour policy. It is wrapped, rather than its caller, because TRL gathers the
        weights of ZeRO-3 right around it: what is added to a weight outside that context is not seen inside."""
        policy = self._policy()
        own = vars(policy).get("generate")  # FSDP2 registers one on the instance, which must come back

        def restore() -> None:
            vars(policy).pop("generate", None)
            if own is not None:
                policy.generate = own

        def generate(**kwargs: Any):
            restore()
            with self._behaviour_policy(), self.fold.applied():
                return self._complete(policy, group_size, **kwargs)

        policy.generate = generate
        try:
            yield
        finally:
            restore()

    def _complete(self, policy: Any, group_size: int, **inputs: Any) -> torch.Tensor:
        """Prompts and completions, by the engine that `rollout.engine` names."""
        if self.rollout_config.engine != "fast":
            return policy.generate(**inputs)
        rows, rank = len(inputs["input_ids"]), self.accelerator.process_index
        return generate_fast(
            policy,
            inputs["input_ids"],
            inputs["attention_mask"],
            inputs["generation_config"],
            rollout_seeds(self.args.seed, self._draw, rows, rank, group_size),
            int(self.rollout_config.max_batch_tokens),
        )

    @contextlib.contextmanager
    def _behaviour_policy(self) -> Iterator[None]:
        """The policy that samples: this rollout's noise on the norm weights, and no dropout (TRL samples in training
        mode, with lora_dropout at work, while the loss's ratio takes sampler and learner for the same policy)."""
        policy, training = self._policy(), self.model.training
        sigma = self._sigma() if training else 0.0
        policy.eval()
        try:
            with self.noise.applied(sigma, self._draw) if self.noise else contextlib.nullcontext():
                yield
        finally:
            policy.train(training)

    def _calculate_rewards(self, *args: Any, **kwargs: Any):
        with self.clock("reward"):
            rewards = super()._calculate_rewards(*args, **kwargs)
        if self.multi_objective_aggregation == "sum_then_normalize":
            group_size = (self.num_generations if self.model.training else self.num_generations_eval) or 1
            rows = len(rewards) // self.accelerator.num_processes
            mine = slice(rows * self.accelerator.process_index, rows * (self.accelerator.process_index + 1))
            self._no_advantage = equal_rewards(rewards, self.reward_weights.to(rewards.device), group_size)[mine]
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._no_advantage is not None:
            output["advantages"] = output["advantages"].masked_fill(self._no_advantage, 0.0)
        if self.noise and self.model.training:
            self._metrics["train"]["aqn/sigma_realized"].append(self.noise.realized_sigma)
            if self.noise_config.old_logps == "noisy":
                output["old_per_token_logps"] = self._behaviour_logps(output)
        return output

    @torch.no_grad()
    def _behaviour_logps(self, rollout: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities of the sampled tokens under the noisy policy, (batch, completion length), float32."""
        with (
            self.clock("old_logps"),
            unwrap_model_for_generation(
                self.model_wrapped,  # type: ignore[arg-type]
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,  # type: ignore[arg-type]
            ) as policy,
            self._behaviour_policy(),
        ):
            logps, _, _ = self._get_per_token_logps_and_entropies(
                policy,
                torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], dim=1),
                torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], dim=1),
                rollout["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return logps

    def _policy(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def _sigma(self) -> float:
        return stage_at(self.state.global_step, self.state.max_steps, self.noise_config).sigma

    # Update

    def _plan_update(self) -> tuple[bool, Dealer]:
        """Whether micro-batches are packed, and how their rows are dealt; a line says why where they are not."""
        policy = self._policy()
        padded = packing_unsupported(policy)
        if self.aux_loss_enabled or self.args.torch_compile:
            padded = "the router's auxiliary loss" if self.aux_loss_enabled else "torch_compile wants one shape"
        if padded is None:
            enable_packing(policy)
        fixed = None
        if self.loss_type not in (*MEAN_OVER_ROWS, *SUM_OVER_TOKENS):
            fixed = f"loss_type {self.loss_type}"
        elif self.top_entropy_quantile < 1.0:
            fixed = "top_entropy_quantile below 1"
        elif self._entropy_bonus_enabled or self.aux_loss_enabled:
            fixed = "the entropy bonus" if self._entropy_bonus_enabled else "the router's auxiliary loss"
        if padded and self.accelerator.is_main_process:
            log.info("micro-batches are padded, not packed: %s", padded)
        if fixed and self.accelerator.is_main_process:
            log.info("micro-batches have the rows that TRL gives them: %s depends on their make-up", fixed)
        dealer = Dealer(
            loss_type=self.loss_type,
            accumulation=self.args.gradient_accumulation_steps,
            leave_out_zero=self.beta == 0.0,
            group=padded is None,
            fixed=fixed,
        )
        return padded is None, dealer

    def _of_all_processes(self, numbers: list) -> torch.Tensor:
        """[processes, numbers]: the same numbers of every process."""
        return self.accelerator.gather(torch.tensor([numbers], device=self.accelerator.device))  # type: ignore[return-value]

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
        theirs = super()._get_per_token_logps_and_entropies

        def padded(ids: torch.Tensor, mask: torch.Tensor, width: int):
            return theirs(model, ids, mask, width, compute_entropy=compute_entropy, **inputs)

        training = torch.is_grad_enabled()  # the loss's own pass
        parts = []
        with contextlib.nullcontext() if training else self.clock("old_logps"), self.accelerator.autocast():
            size = batch_size or len(input_ids)
            for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
                part, work = log_probs(
                    model, ids, mask, logits_to_keep, padded, pack_rows=self.packs, compute_entropy=compute_entropy
                )
                parts.append(part)
                (self.clock.count_update if training else self.clock.count_forward)(work)
        logps, entropies, aux_losses = zip(*parts, strict=True)
        return (
            torch.cat(logps),
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(aux_losses).mean() if inputs.get("compute_aux_loss") else None,
        )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        logged = {name: len(values) for name, values in self._metrics["train"].items()}
        loss = super()._compute_loss(model, inputs) * inputs[SCALE]
        if inputs[SCALE] == 0:  # no row of any process: these zeros say nothing
            for name, values in self._metrics["train"].items():
                del values[logged.get(name, 0) :]
        return loss

    def create_optimizer(self, *args: Any, **kwargs: Any):
        if self.optimizer is None and self.adapter.optimizer is not None:
            optimizer_class, optimizer_kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = self.adapter.optimizer(self.model, self.adapter_config, optimizer_class, optimizer_kwargs)
        return super().create_optimizer(*args, **kwargs)

    # Logging and checkpoints

    def _log_step(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if "memory" in name or "hbm" in name:
                self._metrics["train"][name] = [value]  # a peak: the last of the logged steps
            else:
                self._metrics["train"][name].append(value)  # mean over the logged steps

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.noise and self.model.training:
            # Logged after the step counter moved on: the stage is that of the step that was just taken.
            stage = stage_at(max(self.state.global_step - 1, 0), self.state.max_steps, self.noise_config)
            logs |= {"aqn/sigma": stage.sigma, "aqn/stage": stage.index, "aqn/num_modules": len(self.noise.targets)}
        super().log(logs, start_time)

    def _rollout_state_file(self, checkpoint: str | Path) -> Path:
        return Path(checkpoint) / f"rollout_state_{self.args.process_index}.pt"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Adds what TRL forgets: its position in the generation batch and the rollouts that later updates still use
        (num_iterations or steps_per_generation above gradient_accumulation_steps). Without them a resumed run samples
        again and is another run."""
        super()._save_checkpoint(model, trial)
        window = (self.args.steps_per_generation or 1) * self.num_iterations
        owed = self._buffered_inputs if self._step % window else None
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        torch.save({"step": self._step, "buffered_inputs": owed}, self._rollout_state_file(checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (file := self._rollout_state_file(checkpoint)).exists():
            state = torch.load(file, map_location=self.accelerator.device, weights_only=True)
            self._step, self._buffered_inputs = state["step"], state["buffered_inputs"]
