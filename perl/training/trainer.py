"""TRL's GRPOTrainer with AQN around its rollouts and no padding in its update. Only this file knows TRL's internals.

One update of GRPO (arXiv 2402.03300), and where this class adds to it:

    prompts -> _generate_single_turn      completions   + noise while `generate` runs, adapter merged, dropout off
            -> _calculate_rewards         rewards
            -> _generate_and_score_…      advantages    + old log-probabilities of the noisy policy, on request
            -> compute_loss, optimizer    adapter       + the adapter method's own optimizer
    log, _save_checkpoint                               + aqn/… metrics; the rollouts still owed to an update

`with self.clock(…)` marks the phases that perl/training/metrics.py measures; what is in none is the update.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import unwrap_model_for_generation

from perl.adapters import Adapter
from perl.config.schema import NoiseConfig, PeftConfig, RolloutConfig
from perl.noise.injector import NoiseInjector
from perl.noise.schedule import stage_at
from perl.training.behaviour import BehaviourPolicy, Rollout
from perl.training.metrics import StepClock, model_size, sequences
from perl.training.microbatches import MEAN_OVER_ROWS, SCALE, SUM_OVER_TOKENS, TOKENS, Dealer, equal_rewards
from perl.training.mismatch import Mismatch, importance_ratio
from perl.training.packing import enable_packing, log_probs
from perl.training.proof import DrawnRows, rows_of_lists

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
        if self.continuous_batching_config is not None:
            self.continuous_batching_config.return_logprobs = True  # for the proof and the metrics of mismatch
        self.noise_config = noise
        self.noise: NoiseInjector | None = None
        if noise.enabled:
            assert noise.seed is not None
            self.noise = NoiseInjector(self._policy(), noise.target_modules, noise.exclude_patterns, noise.seed)
        self.clock = StepClock(model_size(self.model), self.accelerator.gather, self._log_step)  # type: ignore[arg-type]
        self.add_callback(self.clock)
        self.packs, self.dealer = self._plan_update()
        self._no_advantage: torch.Tensor | None = None
        self.mismatch = Mismatch()
        self._loss_inputs: dict[str, Any] = {}
        self._rollout: Rollout | None = None
        self.behaviour = BehaviourPolicy(
            self._policy(),
            self.rollout_config,
            self.noise,
            self._logps_of_drawn,
            seed=self.args.seed,
            rank=self.args.process_index,
        )

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
        rollout = self._begin_rollout(num_generations)
        with self.clock("rollout"), self.behaviour.in_generate(rollout):
            completion_ids, logps = super()._generate_single_turn(
                prompt_ids, images, fields, num_generations, *args, **kwargs
            )
            logps = self.behaviour.logps if logps is None else logps
            if logps is not None and self.behaviour.proof_is_due(rollout):  # not `generate`, which proves itself
                self._prove_other_engine(rollout, prompt_ids, completion_ids, logps)
        if (error := self.behaviour.merge.rounding_error) is not None:
            self._metrics["train" if self.model.training else "eval"]["rollout/merge_rounding_error"].append(error)
        if not (self.use_vllm and self.args.vllm_mode == "server"):  # whose devices are not ours
            lengths = [len(p) + len(c) for p, c in zip(prompt_ids, completion_ids, strict=True)]
            self.clock.count_forward(sequences(lengths))
        return completion_ids, logps

    def _begin_rollout(self, group_size: int) -> Rollout:
        training, step = self.model.training, self.state.global_step
        sigma = stage_at(step, self.state.max_steps, self.noise_config).sigma if training else 0.0
        count = self._rollout.count + 1 if self._rollout and self._rollout.step == step else 0
        self._rollout = Rollout(step, count, group_size, sigma, prove=training)
        return self._rollout

    @torch.no_grad()
    def _prove_other_engine(self, rollout: Rollout, prompts: list, completions: list, logps: list) -> None:
        """vLLM and continuous batching do not draw in `generate`; their log-probabilities are held against the
        trainer's."""
        itemsize, scaled = self._vllm_numbers() if self.use_vllm else (self.model.dtype.itemsize, True)
        if self.temperature != 1.0 and not scaled:
            log.info("rollouts: not proved, the vLLM server runs without --logprobs-mode processed_logprobs")
            self.behaviour.skip_proof(rollout)
            return
        whole = self.top_p == 1.0 and not self.top_k and not self.min_p and self.repetition_penalty == 1.0
        whole = whole and not self.args.generation_kwargs  # which may truncate as well
        rows = rows_of_lists(prompts, completions, self.accelerator.device)
        with self._unwrapped() as policy, self.behaviour.sampling(rollout):
            sampler = rows.of_lists(logps)
            self.behaviour.prove(rollout, policy, rows, sampler, comparable=whole, itemsize=itemsize)

    def _vllm_numbers(self) -> tuple[int, bool]:
        """Bytes of a weight in vLLM, which chooses its own dtype, and whether its log-probabilities are those after
        temperature, as TRL asks for where it starts vLLM itself. Every process must come here."""
        if self.args.vllm_mode == "colocate":
            return self.vllm_generation.llm.llm_engine.model_config.dtype.itemsize, True
        itemsize, scaled = 0, False
        if self.accelerator.is_main_process:  # the one with a client
            server = self.vllm_generation.vllm_client.get_server_info()["model_config"]
            itemsize = getattr(torch, server["dtype"].removeprefix("torch.")).itemsize
            scaled = server["logprobs_mode"] == "processed_logprobs"
        itemsize, scaled = self._of_all_processes([itemsize, int(scaled)]).amax(dim=0).tolist()
        return itemsize, bool(scaled)

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
        assert self._rollout is not None
        with self.clock("old_logps"), self._unwrapped() as policy, self.behaviour.sampling(self._rollout):
            logps, _, _ = self._get_per_token_logps_and_entropies(
                policy,
                torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], dim=1),
                torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], dim=1),
                rollout["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return logps

    def _logps_of_drawn(self, policy: Any, rows: DrawnRows) -> torch.Tensor:
        """Log-probabilities of the drawn tokens by a forward pass of `policy` as it is, float32 [tokens]."""
        size = self.args.per_device_train_batch_size
        logps, _, _ = self._get_per_token_logps_and_entropies(
            policy, rows.input_ids, rows.attention_mask, rows.width, batch_size=size
        )
        return logps[rows.drawn].float()

    def _unwrapped(self) -> contextlib.AbstractContextManager[Any]:
        """The policy without its wrappers, ZeRO-3's weights gathered."""
        return unwrap_model_for_generation(
            self.model_wrapped,  # type: ignore[arg-type]
            self.accelerator,
            gather_deepspeed3_params=self.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,  # type: ignore[arg-type]
        )

    def _policy(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    # Update

    def _plan_update(self) -> tuple[bool, Dealer]:
        """Whether micro-batches are packed, and how their rows are dealt; a line says why where they are not."""
        policy = self._policy()
        if self.aux_loss_enabled or self.args.torch_compile:
            padded = "the router's auxiliary loss" if self.aux_loss_enabled else "torch_compile wants one shape"
        else:
            padded = enable_packing(policy)
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
        if training:
            self._meet_sampler(torch.cat(logps))
        return (
            torch.cat(logps),
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(aux_losses).mean() if inputs.get("compute_aux_loss") else None,
        )

    def _meet_sampler(self, logps: torch.Tensor) -> None:
        """Hold the loss's log-probabilities (or the old ones, where the policy has changed since) against the sampler's
        own, and weight the loss by their ratio, on request: both for no further pass."""
        inputs = self._loss_inputs
        if (sampler := inputs.get("sampling_per_token_logps")) is None:
            return
        old = inputs.get("old_per_token_logps", logps).detach()
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        self.mismatch.add(old, sampler, mask)
        level = self.rollout_config.importance_correction
        if level != "none" and self.rollout_config.engine == "fast":
            bounds = self.args.vllm_importance_sampling_clip_min, self.args.vllm_importance_sampling_clip_max
            inputs["importance_sampling_ratio"] = importance_ratio(old, sampler, mask, level, *bounds)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        self._loss_inputs = inputs
        theirs = self.use_vllm, self.vllm_importance_sampling_correction
        if self.rollout_config.engine == "fast" and self.rollout_config.importance_correction != "none":
            self.use_vllm = self.vllm_importance_sampling_correction = True  # TRL weights the loss for vLLM alone
        try:
            return self._scaled_loss(model, inputs)
        finally:
            self.use_vllm, self.vllm_importance_sampling_correction = theirs
            self._loss_inputs = {}

    def _scaled_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
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
        if self.model.training and self.rollout_config.engine != "generate":
            logs |= self.mismatch.take(self.accelerator.reduce, self.accelerator.device)  # type: ignore[arg-type]
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
