"""TRL's GRPOTrainer with AQN around its rollouts and no padding in its update. This file, passes.py
(the passes through the policy) and trl_patches.py alone know TRL's internals.

One update of GRPO (arXiv 2402.03300), in the order in which TRL calls these methods, and where each thing is done:

    prompts -> _generate_single_turn      completions   rollout.RolloutPolicy: noise, merged adapter, decode loop
                                                        (DAPO: dynamic_sampling, before `_generate_…`: rewards too)
            -> _calculate_rewards         rewards       loss.equal_rewards: which groups have no advantage
            -> _generate_and_score_…      advantages    KL in the reward; perl.algorithms, or TRL's; + old
                                                        log-probabilities of the noisy policy, on request
            -> _prepare_inputs            micro-batches microbatches.MicroBatcher
            -> _compute_loss              loss          passes: log-probabilities; loss: ratio, KL; TRL's loss; with a
                                                        critic: its values, of the same pass, and their loss
    _evaluate                             val-core/…    validation.Validation: between a step's log and its checkpoint
    log, _save_own                                      measurements, aqn/…; process_state: rollouts still to be used

`with self.clock(…)` marks the phases that perl/runs/metrics.py measures; what is in none is the update.
"""

from __future__ import annotations

import contextlib
import logging
import math
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer
from transformers.integrations import is_deepspeed_zero3_enabled

from perl.adapters import Adapter
from perl.algorithms import ALGORITHMS
from perl.algorithms.algorithm import Scored
from perl.algorithms.grpo import group_relative
from perl.algorithms.kl import KLCoefficient, kl_divergence, token_rewards
from perl.algorithms.ppo import generalized
from perl.base.errors import UserError
from perl.config.schema import AlgorithmConfig, CriticConfig, NoiseConfig, PeftConfig, RolloutConfig
from perl.engines.sequence import left_pad
from perl.noise.callback import NoiseStage
from perl.noise.injector import NoiseInjector
from perl.noise.schedule import Adapted
from perl.noise.size import size_metrics, size_warning
from perl.prompts import truncated
from perl.records import Sampling
from perl.rewards.functions import GradeEarly
from perl.runs.adapter_trainer import WriteCard
from perl.runs.metrics import StepClock, add_step, model_size, sequences
from perl.runs.nonfinite import Rewarded, require_finite_weights, save_batch
from perl.runs.process_state import RolloutState
from perl.runs.vision import rollout_images, trl_fields
from perl.training.critic import Critic, prepare_own_base
from perl.training.dynamic_sampling import Collected, DynamicSampling, Hooks, Judged, as_batch, compared_reward
from perl.training.loss import (
    TOLERANCE,
    SamplerDifference,
    TokenLogProbs,
    add_up_tokens,
    each_equal,
    equal_rewards,
    importance_ratio,
    pad_right,
    require_same_policy,
    warn_of_ratio,
)
from perl.training.measurements import Measurements
from perl.training.microbatches import SCALE, TOKENS, UpdatePlan, plan_update
from perl.training.packing import enable_packing
from perl.training.passes import PolicyPasses
from perl.training.prompt_stream import PromptStream
from perl.training.rollout import (
    Completions,
    RolloutPolicy,
    RolloutRequest,
    Sampler,
    Weights,
    rollout_seeds,
    sampling_of,
    sampling_weights,
)
from perl.training.trl_patches import on_this_process_alone, reference_kept, reference_loaded_like, vllm_started_by
from perl.training.validation import Validation
from perl.training.vllm_sampler import VLLMSampler
from perl.training.vllm_sync import VLLMSync

log = logging.getLogger(__name__)

COMPARED_ROWS = 4
"""Completions of each process that sampler and trainer are compared on before the first optimizer step."""


@dataclass(slots=True)
class Rollout:
    """What the hooks between a rollout and its micro-batches must know of it."""

    weights: Weights
    """That sampled."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of the data set, one for each completion."""
    collected: Collected | None = None
    """What dynamic sampling has chosen for TRL, sampled and rewarded; None without it."""
    rewards: torch.Tensor = field(init=False)
    """float [rows of all processes, functions], NaN where a function gave a row none."""
    unusable: bool = False
    """Whether a reward was not finite, so that no update is made of it."""
    after_rewards: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Of the clock: entered when the rewards are known, left when TRL has made its advantages of them."""


class PerlGRPOTrainer(PolicyPasses):
    """GRPO on a LoRA adapter or on all weights, sampled with noise on the norm weights.

    Args (besides GRPOTrainer's):
        adapter: the PEFT method.
        adapter_config: the group `peft` of the configuration.
        noise: the group `noise_injection`.
        algorithm: the group `algorithm`.
        critic: the group `critic`, read for an algorithm that has one.
        rollout: the group `rollout`.
        critic_base: the critic's own base model; None: it shares the policy's.
        truncate_prompts_to: prompts are cut to this many tokens; None leaves them.
        truncation: where they are cut ("left", "right", "middle").
        grade_early: asked for each completion as soon as it ends, while others are drawn.
        validation: what is asked for scores while the model trains.
        write_card: writes the model card into a folder that holds what was trained, given the log history; None: TRL's
            card.
        on_nonfinite: common.on_nonfinite.
    """

    def __init__(
        self,
        *args: Any,
        adapter: Adapter,
        adapter_config: PeftConfig,
        noise: NoiseConfig,
        algorithm: AlgorithmConfig,
        critic: CriticConfig,
        rollout: RolloutConfig,
        critic_base: Any = None,
        truncate_prompts_to: int | None = None,
        truncation: Any = "left",
        grade_early: GradeEarly | None = None,
        validation: Validation | None = None,
        write_card: WriteCard | None = None,
        on_nonfinite: Literal["stop", "skip"] = "stop",
        **kwargs: Any,
    ):
        wrapped = isinstance(kwargs.get("model"), PeftModel)  # its adapter is trained further
        peft_config = kwargs["model"].peft_config["default"] if wrapped else adapter.build(adapter_config)
        vllm_sync = VLLMSync(peft_config, kwargs["args"].seed)
        reference = reference_kept(kwargs["args"], algorithm.kl_in_reward > 0.0)
        with vllm_started_by(vllm_sync), reference, reference_loaded_like(kwargs["model"]):
            super().__init__(*args, peft_config=None if wrapped else peft_config, **kwargs)
        if self.accelerator.num_processes > 1 or not self.log_completions:
            self.log_multimodal = False  # TRL would send all images to every process, and hang where one has none
        self.start_adapter(adapter, adapter_config, write_card, on_nonfinite)
        self.truncate_prompts_to, self.truncation, self.grade_early = truncate_prompts_to, truncation, grade_early
        self.rollout_config, self.algorithm_config = rollout, algorithm
        self.algorithm, self.sampling_seed = ALGORITHMS[algorithm.name], self.args.seed
        self.group_size = self.args.num_generations or 1  # which TRL has set
        own_kl = algorithm.kl_estimator != "low_var_kl"  # TRL's loss has that one alone
        self.beta, self.own_beta = (0.0, self.args.beta) if own_kl else (self.args.beta, 0.0)
        self.kl_coefficient = KLCoefficient(
            algorithm.kl_in_reward, algorithm.kl_in_reward_target, algorithm.kl_in_reward_horizon
        )
        self.noise_config, self.noise = noise, self._noise_injector(noise)
        self.sampler = self._vllm_sampler(vllm_sync) if self.use_vllm else self._rollout_policy()
        if self.noise and noise.schedule == "target_kl":
            self._require_measurable_kl()
        self.plan = self._plan_update()
        self.critic: Critic | None = None
        if self.algorithm.critic:
            self.critic = self._make_critic(critic, critic_base)
        if self.ref_model is not None and self.plan.packed:
            enable_packing(self.accelerator.unwrap_model(self.ref_model))  # it scores the same micro-batches
        self.rollout = Rollout(Weights(-1, 0, 0.0))
        """The last one."""
        self.measured = Measurements(self.accelerator)
        self.clock = StepClock(model_size(self.model), self.accelerator.gather, self._log_step)  # type: ignore[arg-type]
        self.noise_stage = NoiseStage(noise, self._measure_weights, self._take_noise_kl)
        self.dynamic_sampling = self._dynamic_sampling() if algorithm.dynamic_sampling else None
        self.validation = validation
        if validation is not None:
            validation.setup.require_room(self.sampler.context)
        self.args.eval_on_start = validation is not None  # `_evaluate` before the first step, of a resumed run too
        # In this order at each event: the noise's stage is read by none of the others; the clock stops before scores;
        # which step is the last is known to the validation.
        for callback in (self.noise_stage if self.noise else None, self.clock, self.dynamic_sampling, validation):
            if callback is not None:
                self.add_callback(callback)

    # One update

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.rollout = rollout = Rollout(self.rollout.weights, inputs)
        if self.dynamic_sampling:
            rollout.collected = self._collect(self.dynamic_sampling)
            rollout.rows = rollout.collected.rows  # of the data loader's nothing is used
        with rollout.after_rewards:
            output: dict[str, Any] = super()._generate_and_score_completions(rollout.rows)
        if self.group_size == 1:
            self._metrics["train"].pop("frac_reward_zero_std", None)  # no group
        reference = self._reference_logps(output, bool(self.own_beta or self.kl_coefficient.value))
        rewards = self._weighted(rollout.rewards)
        output |= self._advantages(output, rewards, self._penalty(output, reference))
        if self.own_beta and reference is not None:
            output["ref_per_token_logps"] = reference
        self.measured.add_rollout(output, rewards)
        if self.noise and self.noise_config.old_logps == "noisy":
            output["old_per_token_logps"] = self._noisy_logps(output, rollout.weights)
        if rollout.unusable:
            output["advantages"] = torch.full_like(output["advantages"], math.nan)  # and so the loss
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        buffered = self._buffered_inputs
        with self.clock("prepare"):
            inputs = super()._prepare_inputs(generation_batch)
            fresh: Any = self._buffered_inputs
            if fresh is not buffered:  # a new generation batch
                left_out = self._of_all_processes([self.plan.batcher.share_left_out(fresh)])
                self._metrics["train"]["update/rows_left_out"].append(left_out.mean().item())
                self._buffered_inputs = self.plan.batcher.arrange(
                    fresh, lambda counts: self._of_all_processes(counts).amax(dim=0).tolist()
                )
                inputs = self._buffered_inputs[self._step % len(self._buffered_inputs)]
        self.clock.count_trained(inputs[TOKENS])
        return inputs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if self.critic is None:
            return self._policy_loss(inputs, self._score(model, inputs))
        scored, values = self._score_and_value(model, inputs)
        value_loss = self.critic.loss(values, inputs, inputs["completion_mask"], self._window_tokens(inputs))
        return self._policy_loss(inputs, scored) * self.critic.policy_learns(self.state.global_step) + value_loss

    def _policy_loss(self, inputs: dict[str, Any], scored: TokenLogProbs) -> torch.Tensor:
        if inputs[SCALE] == 0:  # no process has a row to compute here: it only takes part
            return (scored.logps * 0.0).sum()
        mask = inputs["completion_mask"]
        self.measured.add_update(scored.logps, inputs.get("old_per_token_logps", scored.logps), mask)
        loss = super()._compute_loss(scored, self._weigh(inputs, scored.logps))
        if self.own_beta:
            loss = loss + self.own_beta * self._kl_loss(inputs, scored.logps, mask)
        return loss * inputs[SCALE]

    # Rollout

    def _tokenize_prompts(self, prompts: list) -> tuple:
        prompt_ids, images, multimodal_fields = super()._tokenize_prompts(prompts)
        if self.truncate_prompts_to is not None:
            prompt_ids = [truncated(ids, self.truncate_prompts_to, self.truncation) for ids in prompt_ids]
        if images is not None:
            images = [row or [] for row in images]  # TRL's None for a row without one is more than a processor takes
        return prompt_ids, images, multimodal_fields

    def _generate_single_turn(self, prompt_ids: list, images: Any, fields: Any, num_generations: int, *args, **kwargs):
        if (chosen := self.rollout.collected) is not None:
            return chosen.completions.token_ids, chosen.completions.logprobs
        self.rollout.weights = weights = self._next_weights()
        draw, rank = (weights.step, weights.number), self.args.process_index
        seeds = rollout_seeds(self.sampling_seed, draw, len(prompt_ids), rank, num_generations)
        early = self._grade_early if self.grade_early and len(self.rollout.rows) == len(prompt_ids) else None
        request = RolloutRequest(
            prompt_ids=prompt_ids,
            seeds=seeds,
            sampling=self._sampling(),
            weights=weights,
            group_size=num_generations,
            on_finished=early,
            images=rollout_images(images, fields),
        )
        with self.clock("rollout"):
            completions = self.sampler.complete(request)
            self._compare_first(request, completions)
        self._count_rollout(
            [len(p) + len(c) for p, c in zip(prompt_ids, completions.token_ids, strict=True)], completions.metrics
        )
        return completions.token_ids, completions.logprobs

    def _next_weights(self) -> Weights:
        step, last = self.state.global_step, self.rollout.weights
        number = last.number + 1 if last.step == step else 0
        return Weights(step, number, self.noise_stage.stage.sigma if self.noise else 0.0)

    def _sampling(self) -> Sampling:
        """As the user's generation_kwargs leave it, where this process generates."""
        if not self.use_vllm:
            return sampling_of(self.generation_config)
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            max_new_tokens=self.max_completion_length or 256,  # None: set by GRPOConfig
        )

    @torch.no_grad()
    def _compare_first(self, request: RolloutRequest, completions: Completions) -> None:
        """Before the first optimizer step: are the sampler's log-probabilities those of the weights it should have
        had? Afterwards the loss compares them at no cost (`_weigh`)."""
        if self.measured.tolerance is not None:
            return
        mixed = 4 if self.accelerator.mixed_precision == "no" else 2  # what autocast computes in
        self.measured.tolerance = TOLERANCE[min(self.sampler.itemsize, mixed, self._policy().dtype.itemsize)]
        if why := self.sampler.not_comparable(request.sampling):
            log.info("rollouts: sampler and trainer are not compared: the sampler's log-probabilities are %s", why)
            self.measured.tolerance = math.inf
            return
        prompts = [list(ids) for ids in request.prompt_ids[:COMPARED_ROWS]]
        drawn = [torch.tensor(ids, device=self.accelerator.device) for ids in completions.token_ids[:COMPARED_ROWS]]
        ids, mask = left_pad(prompts, 0, self.accelerator.device)  # 0: any token, it is masked
        completion_mask = pad_sequence([torch.ones_like(row) for row in drawn], batch_first=True)
        with self._gathered() as policy, sampling_weights(policy, self.noise, request.weights):
            trainer, _, _ = self._get_per_token_logps_and_entropies(
                policy,
                torch.cat([ids, pad_sequence(drawn, batch_first=True)], dim=1),
                torch.cat([mask, completion_mask], dim=1),
                completion_mask.shape[1],
                batch_size=self.args.per_device_train_batch_size,
                **trl_fields([images and images() for images in request.images[:COMPARED_ROWS]]),
            )
        difference = SamplerDifference()
        difference.add(trainer, pad_right(completions.logprobs[:COMPARED_ROWS], trainer.device), completion_mask)
        found = difference.take(self.accelerator.reduce, trainer.device)  # type: ignore[arg-type]
        require_same_policy(found, self.measured.tolerance)
        if found is not None:
            log.info("rollouts: sampler and trainer agree: %.2g nats apart", found.absolute)

    def _count_rollout(self, lengths: list[int], metrics: dict[str, float]) -> None:
        """Of sequences of these lengths, prompts included."""
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        if not self.sampler.elsewhere:
            self.clock.count_forward(sequences(lengths))

    def _grade_early(self, place: int, token_ids: list[int]) -> None:
        self._start_grading(token_ids, self.rollout.rows[place])

    def _start_grading(self, token_ids: list[int], row: dict[str, Any]) -> Future[Any] | None:
        assert self.grade_early is not None
        tokenizer: Any = self.processing_class
        return self.grade_early(tokenizer.decode(token_ids, skip_special_tokens=True), row)  # decoded as TRL does

    # Dynamic sampling

    def _dynamic_sampling(self) -> DynamicSampling:
        args: Any = self.args
        epochs = None if args.max_steps > 0 else args.num_train_epochs
        stream = PromptStream(len(self.train_dataset), args.seed, epochs, self.shuffle_dataset)  # type: ignore[arg-type]
        hooks = Hooks(
            row=lambda position: self.train_dataset[stream.row(position)],  # type: ignore[index]
            tokenize=lambda row: list(self._tokenize_prompts([row["prompt"]])[0][0]),
            grade_early=self._start_grading if self.grade_early else None,
            judge=self._judge,
        )
        return DynamicSampling(
            stream,
            hooks,
            batch=args.generation_batch_size // self.num_generations,
            max_resample_factor=self.algorithm_config.max_resample_factor,
            seed=self.sampling_seed,
            equal_by=compared_reward(self.algorithm_config.dynamic_sampling_metric, self.reward_func_names),
            weights=self.reward_weights,
            window_done=lambda: self._step % (args.steps_per_generation * self.num_iterations) == 0,
        )

    def _collect(self, dynamic: DynamicSampling) -> Collected:
        """Prompts of the stream, sampled and rewarded until this process's part of the batch is full. Every process
        must come here."""
        self.rollout.weights = weights = self._next_weights()
        request = RolloutRequest(
            prompt_ids=[], seeds=[], sampling=self._sampling(), weights=weights, group_size=self.group_size
        )
        process = self.args.process_index, self.accelerator.num_processes
        with self.clock("rollout"):
            chosen = dynamic.collect(self.sampler, request, self._of_all_processes, *process)
            self._compare_first(replace(request, prompt_ids=chosen.prompt_ids, seeds=chosen.seeds), chosen.completions)
        self._count_rollout(chosen.drawn, chosen.completions.metrics)
        return chosen

    def _judge(self, row: dict[str, Any], token_ids: list[list[int]]) -> Judged:
        """The rewards of one group of this process, as TRL makes those of a batch."""
        with self.clock("reward"), on_this_process_alone():
            rewards = super()._calculate_rewards(*as_batch(row, token_ids, self.processing_class))
        extras = {name: list(values) for name, values in self._pending_extra_logs.items()}
        self._pending_extra_logs.clear()  # those of the groups that are chosen come back in `_calculate_rewards`
        return Judged(rewards.cpu(), extras)

    # Rewards and advantages

    def _calculate_rewards(self, inputs: list, prompts: list, completions: list, completion_ids: list):
        chosen = self.rollout.collected
        with self.clock("reward"):
            if chosen is None:
                rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids)
            else:
                self._pending_extra_logs.update(chosen.extras)
                rewards: Any = self.accelerator.gather(chosen.rewards.to(self.accelerator.device))
            rows = Rewarded(functions=self.reward_func_names, inputs=inputs, prompts=prompts, completions=completions)
            if not self.nonfinite.usable(self.state.global_step + 1, rewards, rows):
                self.rollout.unusable = True
                rewards = rewards.masked_fill(rewards.isinf(), math.nan)
        self.rollout.rewards = rewards
        self.rollout.after_rewards.enter_context(self.clock("advantages"))
        return rewards

    def _weighted(self, rewards: torch.Tensor) -> torch.Tensor:
        """float [rows of all processes]: the sums of the functions' rewards, NaN where a row has none."""
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        return total.masked_fill(rewards.isnan().all(dim=1), math.nan)

    def _without_advantage(self, rewards: torch.Tensor) -> torch.Tensor:
        """bool [rows]: this process's rows whose group has equal rewards."""
        together = self.multi_objective_aggregation == "sum_then_normalize"
        weights = self.reward_weights.to(rewards.device)
        equal = (equal_rewards if together else each_equal)(rewards, weights, self.group_size)
        return equal.chunk(self.accelerator.num_processes)[self.accelerator.process_index]

    @torch.no_grad()
    def _penalty(self, batch: dict[str, Any], reference: torch.Tensor | None) -> torch.Tensor | None:
        """What the KL divergence of the policy without noise takes from the reward of each token, [rows, tokens], 0
        where none is trained on; None where the reward has none."""
        coefficient = self.kl_coefficient
        if not coefficient.value or reference is None:
            return None
        policy = batch.get("old_per_token_logps")
        if policy is None:
            policy = self._logps(self.model, batch)
        mask = batch["completion_mask"]
        kl = kl_divergence(policy.float(), reference.float(), self.algorithm_config.kl_in_reward_estimator)
        kl = kl.masked_fill(~mask.bool(), 0.0)
        penalty = coefficient.value * kl
        mean = self.accelerator.gather(kl.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean().item()  # type: ignore[union-attr]
        self._metrics["train"]["kl_in_reward"].append(mean)
        self._metrics["train"]["kl_in_reward/coefficient"].append(coefficient.value)
        coefficient.adapt(mean, len(kl) * self.accelerator.num_processes)
        return penalty

    @torch.no_grad()
    def _advantages(
        self, batch: dict[str, Any], rewards: torch.Tensor, penalty: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Columns of a scored generation batch: `advantages`, [rows] or [rows, tokens], the algorithm's, or TRL's,
        exactly 0 where a group has equal rewards; and what a critic learns, where there is one.

        Args:
            rewards: float [rows of all processes].
            penalty: what is taken from the reward of each token.
        """
        trls = batch["advantages"]
        estimate = self.algorithm.advantages or (None if penalty is None else group_relative)
        if estimate is None:
            return {"advantages": trls.masked_fill(self._without_advantage(self.rollout.rewards), 0.0)}
        first = len(trls) * self.accelerator.process_index
        rewards = rewards[first : first + len(trls)]
        mask = batch["completion_mask"].bool()
        scored = Scored(
            rewards=rewards if penalty is None else rewards - penalty.sum(dim=1),
            token_rewards=token_rewards(rewards, mask, penalty),
            mask=mask,
            group_size=self.group_size,
            gather=self.accelerator.gather,  # type: ignore[arg-type]
            first=first,
            gamma=self.algorithm_config.gamma,
            lam=self.algorithm_config.lam,
            values=self._values(batch),
            scale=self.scale_rewards,  # type: ignore[arg-type]
        )
        with self.clock("advantages"):
            learned: dict[str, torch.Tensor] = {}
            if self.critic is not None:
                scored = replace(scored, generalized=generalized(scored))
                learned = self.critic.targets(scored)
            advantages = estimate(scored)
            shown = (
                advantages if advantages.ndim == 1 else (advantages * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            )
            everywhere: Any = self.accelerator.gather(shown)
            self._logs["advantages"].extend(everywhere.tolist())  # in the place of TRL's
        return {"advantages": advantages, **learned}

    # Loss

    def _weigh(self, inputs: dict[str, Any], logps: torch.Tensor) -> dict[str, Any]:
        """Compare the sampler's log-probabilities with the policy's that the ratio refers to, and weigh the advantages
        by the importance ratio, on request: both for no further pass."""
        if (sampler := inputs.get("sampling_per_token_logps")) is None:
            return inputs
        old = inputs.get("old_per_token_logps", logps).detach()
        mask = inputs["completion_mask"]
        clean = self.noise and self.rollout.weights.step == self.state.global_step  # `logps`, before an update
        noisy = self.rollout.weights.sigma != 0 and self.noise_config.old_logps != "noisy"
        self.measured.add_sampler(sampler, old, logps if clean else None, mask, noisy=noisy)
        level = self.rollout_config.importance_correction
        if level == "none" or self.use_vllm:  # for vLLM TRL does it
            return inputs
        bounds = self.args.vllm_importance_sampling_clip_min, self.args.vllm_importance_sampling_clip_max
        ratio = importance_ratio(old, sampler, mask, level, *bounds)
        if self.loss_type == "vespo":  # not linear in the advantage: it takes the ratio itself
            return inputs | {"importance_sampling_ratio": ratio}
        advantages = inputs["advantages"]
        return inputs | {"advantages": (advantages if advantages.ndim == 2 else advantages[:, None]) * ratio}

    def _kl_loss(self, inputs: dict[str, Any], logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The KL divergence in the loss of a micro-batch, as TRL adds its own up and logs it."""
        kl = kl_divergence(logps, inputs["ref_per_token_logps"], self.algorithm_config.kl_estimator)
        if self.args.use_bias_correction_kl:
            apart = logps - inputs.get("old_per_token_logps", logps.detach())
            if self.importance_sampling_level == "sequence":
                apart = ((apart * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0))[:, None]
            kl = kl * apart.exp()
        sums = self.accelerator.reduce(torch.stack([(kl.detach() * mask).sum(), mask.sum().float()]), reduction="sum")
        self._metrics["train"]["kl"].append((sums[0] / sums[1].clamp(min=1.0)).item())  # type: ignore[index]
        return add_up_tokens(
            kl,
            mask,
            self.loss_type,
            longest=self.max_completion_length or 1,
            micro_batches=self.current_gradient_accumulation_steps,
            window_tokens=self._window_tokens(inputs),
        )

    def _window_tokens(self, inputs: dict[str, Any]) -> torch.Tensor:
        """[]: tokens that count in an optimizer update, of a mean process."""
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        return tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation

    # Parts that __init__ makes

    def _noise_injector(self, config: NoiseConfig) -> NoiseInjector | None:
        if not config.enabled:
            return None
        assert config.seed is not None
        chosen = config.target_modules, config.exclude_patterns
        return NoiseInjector(self._policy(), *chosen, config.seed, config.relative)

    def _rollout_policy(self) -> Sampler:
        kwargs_of_user: Any = self.args.generation_kwargs or {}
        return RolloutPolicy(
            self._policy(),
            self.rollout_config,
            self.noise,
            self.generation_config,
            kwargs_of_user,
            self.continuous_batching_config,
            self.args.attention_kernels,
            self._gathered,
            self.compute_dtype(),
        )

    def _vllm_sampler(self, sync: VLLMSync) -> Sampler:
        return VLLMSampler(
            self.vllm_generation,
            sync,
            policy=self._policy(),
            gather=self._whole,
            of_all_processes=self._of_all_processes,
            generation_kwargs=self.args.generation_kwargs or {},  # type: ignore[arg-type]
            folder=Path(self.args.output_dir or ".") / "adapter_for_vllm",
            noise=self.noise,
        )

    def _plan_update(self) -> UpdatePlan:
        return plan_update(
            self._policy(),
            self.args,
            entropy_bonus=self._entropy_bonus_enabled,
            aux_loss=self.aux_loss_enabled,
            critic=self.algorithm.critic,
            size=model_size(self.model),
            autocast={"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision),
        )

    def _make_critic(self, config: CriticConfig, base: Any) -> Critic:
        if not self.plan.packed:
            raise UserError(
                f"--config.algorithm.name {self.algorithm_config.name}: the critic's values are computed in packed"
                " micro-batches, which this model can't have (the log says why); use --config.algorithm.name grpo"
            )
        dtype = self._policy().dtype if is_deepspeed_zero3_enabled() else torch.float32
        if base is not None:
            prepare_own_base(base, self.args, split=is_deepspeed_zero3_enabled() or self.is_fsdp_enabled)
            require_finite_weights(base, f"--config.critic.model_name_or_path {config.model_name_or_path}")
        critic = Critic(self._policy(), config, self.plan.kernel, dtype, base, self.args.seed)
        self.add_callback(critic.warm_up)
        return critic

    # Noise

    def _require_measurable_kl(self) -> None:
        if why := self.sampler.not_comparable(self._sampling()):
            raise UserError(
                f"--config.noise_injection.schedule target_kl: the KL divergence can't be measured, the sampler's"
                f" log-probabilities are {why}; write --config.noise_injection.schedule linear"
            )

    def _measure_weights(self) -> None:
        """How large are the weights that get noise? Relative noise is scaled by it; one warning where the noise is
        large for them."""
        assert self.noise is not None
        with self._whole([target.weight for target in self.noise.targets]):
            self.noise.measure()
        names = [target.name for target in self.noise.targets]
        if self.accelerator.is_main_process and (said := size_warning(self.noise_config, names, self.noise.rms)):
            log.warning("%s", said)

    def _take_noise_kl(self) -> float | None:
        """Measurements.take_noise_kl, which is logged."""

        def add_up(sums: torch.Tensor) -> torch.Tensor:
            return self._of_all_processes(sums.tolist()).sum(dim=0)

        kl = self.measured.take_noise_kl(add_up)
        if kl is not None:
            self._metrics["train"]["aqn/kl"].append(kl)
        return kl

    # Validation

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """transformers comes here before the first step, and between a step's log and its checkpoint where
        `Validation` has asked for it. The training's metrics, random numbers and rollouts are left as they are."""
        assert self.validation is not None
        found: dict[str, float] = {}
        if self.validation.due(self.state.global_step, self.state.max_steps):
            where = self.accelerator.device
            devices = [] if where.type == "cpu" else [where]
            with self.clock("validation"), torch.random.fork_rng(devices, device_type=where.type):
                found = self.validation.run(self.state.global_step, self.sampler, self._save_adapter)
            Trainer.log(self, dict(found))  # TRL's own would flush the metrics of the steps since its last
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    # Optimizer

    def create_optimizer(self, *args: Any, **kwargs: Any):
        optimizer = super().create_optimizer(*args, **kwargs)
        return optimizer if self.critic is None else self.critic.own_group(optimizer)

    def _clip_grad_norm(self, model: Any):
        """The critic's gradient is clipped by itself, so that it never shortens the policy's. DeepSpeed clips all that
        it trains together."""
        if self.critic is None or self.is_deepspeed_enabled:
            return super()._clip_grad_norm(model)
        return self.critic.clip_apart(self.accelerator, model, self.args.max_grad_norm)

    # Logging and checkpoints

    def _save_batch(self, folder: Path) -> None:
        """The rollout that the update is of (its last one, where it has several): what TRL logs of each completion, and
        the tensors of each micro-batch."""
        rank, logged = self.args.process_index, self._logs
        columns = {"prompt": logged["prompt"], "completion": logged["completion"], **logged["rewards"]}
        columns["advantage"] = logged["advantages"]
        count = len(logged["prompt"]) // self.accelerator.num_processes  # TRL logs those of all processes
        mine = [list(column)[count * rank : count * (rank + 1)] for column in columns.values()]
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*mine, strict=True)]
        buffered: Any = self._buffered_inputs or []
        tensors = {
            f"{index}.{name}": value
            for index, batch in enumerate(buffered)
            for name, value in batch.items()
            if isinstance(value, torch.Tensor)
        }
        save_batch(folder, rank, rows, tensors)

    def _save_adapter(self, folder: Path) -> None:
        """The adapter, or the model, and the tokenizer. Every process must come here."""
        self.save_model(str(folder), _internal_call=True)  # pushed to no hub

    def _log_step(self, metrics: dict[str, float]) -> None:
        add_step(self._metrics["train"], metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.noise:
            stage = self.noise_stage.stage
            logs |= {"aqn/sigma": stage.sigma, "aqn/stage": stage.index, "aqn/num_modules": len(self.noise.targets)}
            logs |= size_metrics(self.noise.sigmas(stage.sigma), self.noise.rms)
            logs |= {} if stage.target_kl is None else {"aqn/target_kl": stage.target_kl}
        logs |= self.measured.take()
        if ratios := self._metrics["train"].get("sampling/importance_sampling_ratio/mean"):
            warn_of_ratio(sum(ratios) / len(ratios), self.args.vllm_importance_sampling_mode)
        logs |= self.critic.take_metrics(self.accelerator) if self.critic else {}
        super().log(logs, start_time)

    def _run_state(self) -> dict[str, Any]:
        state = super()._run_state() | {"measured": self.measured.state(), "weights": list(self.rollout.weights)}
        if self.critic:
            state["critic"] = dict(vars(self.critic.measured))
        if self.noise:
            state["rms"] = self.noise.rms
        return state

    def _restore_run_state(self, state: dict[str, Any]) -> None:
        super()._restore_run_state(state)
        if self.noise and "rms" in state:  # of the weights as the run began; norms may be trained
            self.noise.rms[:] = state["rms"]
        if "measured" in state:
            self.measured.restore(state["measured"])
            self.rollout.weights = Weights(*state["weights"])
        if self.critic and "critic" in state:
            vars(self.critic.measured).update(state["critic"])

    def _rollout_state(self) -> RolloutState:
        window = self.args.steps_per_generation * self.num_iterations  # type: ignore[operator]  # set by GRPOConfig
        pending: Any = self._buffered_inputs
        return RolloutState(
            step=self._step,
            buffered_inputs=pending if self._step % window else None,
            settings=self._window_settings(),
            adapted=asdict(self.noise_stage.adapted) if self.noise_config.schedule == "target_kl" else None,
            kl_coefficient=self.kl_coefficient.value,
            stream=self.dynamic_sampling.stream.state() if self.dynamic_sampling else None,
        )

    def _restore_rollout(self, state: RolloutState) -> None:
        self._step = state.step
        self._buffered_inputs = state.buffered_inputs
        if state.kl_coefficient is not None and self.kl_coefficient.target is not None:
            self.kl_coefficient.value = state.kl_coefficient
        if state.adapted is not None:
            self.noise_stage.adapted = Adapted(**state.adapted)
        if self.dynamic_sampling and state.stream is not None:
            self.dynamic_sampling.stream.restore(state.stream)

    def _save_own(self, checkpoint: Path) -> None:
        super()._save_own(checkpoint)
        self.save_critic(checkpoint)

    def save_critic(self, folder: Path) -> None:
        """Every process must come here."""
        if self.critic is not None:
            self.critic.save(folder, self._whole, write=self.accelerator.is_main_process)

    def _window_settings(self) -> dict[str, int]:
        fields = "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations"
        return {field: getattr(self.args, field) for field in fields}

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.critic is not None and not self.is_deepspeed_enabled:
            self.critic.load(Path(checkpoint))  # DeepSpeed's own checkpoint holds all that is trained
        super()._load_optimizer_and_scheduler(checkpoint)
