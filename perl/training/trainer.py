"""TRL's GRPOTrainer with AQN around its rollouts and no padding in its update. This file and passes.py, the passes
through the policy, alone know TRL's internals.

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
    log, _save_own                                      measurements, aqn/…; rollout_state: rollouts still to be used

`with self.clock(…)` marks the phases that perl/training/metrics.py measures; what is in none is the update.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import send_to_device
from peft import PeftModel
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.data_utils import is_conversational
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from perl.adapters import Adapter
from perl.algorithms import ALGORITHMS
from perl.algorithms.algorithm import Scored
from perl.algorithms.grpo import group_relative
from perl.algorithms.kl import KLCoefficient, kl_divergence, token_rewards
from perl.config.schema import AlgorithmConfig, CriticConfig, NoiseConfig, PeftConfig, RolloutConfig
from perl.config.training import TrainingConfig
from perl.engines.sequence import left_pad
from perl.errors import UserError
from perl.noise.callback import NoiseStage
from perl.noise.injector import NoiseInjector
from perl.noise.schedule import Adapted
from perl.noise.size import size_metrics, size_warning
from perl.prompts import truncated
from perl.records import Sampling
from perl.rewards import GradeEarly
from perl.training import rollout_state
from perl.training.adapter_trainer import WriteCard
from perl.training.critic import Critic, prepare_own_base
from perl.training.dynamic_sampling import Collected, Collection, Cost, DynamicSampling, Hooks, Judged, collected, draw
from perl.training.loss import (
    TOLERANCE,
    SamplerDifference,
    TokenLogProbs,
    add_up_tokens,
    equal_rewards,
    importance_ratio,
    pad_right,
    require_same_policy,
)
from perl.training.measurements import Measurements
from perl.training.metrics import StepClock, add_step, model_size, sequences
from perl.training.microbatches import SCALE, TOKENS, UpdatePlan, plan_update
from perl.training.packing import enable_packing
from perl.training.passes import PolicyPasses, tokens_of
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
from perl.training.validation import Validation
from perl.training.vision import rollout_images, trl_fields
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
    no_advantage: torch.Tensor | None = None
    """bool [rows]: this process's rows whose group has equal rewards; None where TRL does not sum rewards."""
    rewards: torch.Tensor | None = None
    """float [rows of all processes]: weighted sums, NaN where a row has none."""
    after_rewards: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Entered when the rewards are known, left when the advantages are."""


class PerlGRPOTrainer(PolicyPasses):
    """GRPO on a LoRA adapter or on all weights, sampled with noise on the norm weights.

    Args (besides GRPOTrainer's):
        adapter: the PEFT method.
        adapter_config: the group `peft` of the configuration.
        noise: the group `noise_injection`.
        algorithm: the group `algorithm`.
        critic: the group `critic`, for an algorithm that has one.
        critic_base: the critic's own base model; None: it shares the policy's.
        rollout: the group `rollout`.
        truncate_prompts_to: prompts are cut to this many tokens; None leaves them.
        truncation: where they are cut ("left", "right", "middle").
        grade_early: asked for each completion as soon as it ends, while others are drawn.
        validation: what is asked for scores while the model trains.
        write_card: writes the model card into a folder that holds what was trained, given the log history; None: TRL's
            card.
    """

    def __init__(
        self,
        *args: Any,
        adapter: Adapter,
        adapter_config: PeftConfig,
        noise: NoiseConfig,
        algorithm: AlgorithmConfig | None = None,
        critic: CriticConfig | None = None,
        critic_base: Any = None,
        rollout: RolloutConfig | None = None,
        truncate_prompts_to: int | None = None,
        truncation: Any = "left",
        grade_early: GradeEarly | None = None,
        validation: Validation | None = None,
        write_card: WriteCard | None = None,
        **kwargs: Any,
    ):
        wrapped = isinstance(kwargs.get("model"), PeftModel)  # its adapter is trained further
        peft_config = kwargs["model"].peft_config["default"] if wrapped else adapter.build(adapter_config)
        vllm_sync = VLLMSync(peft_config)
        self.algorithm_config = algorithm or AlgorithmConfig()
        reference = _reference_kept(kwargs["args"], self.algorithm_config.kl_in_reward > 0.0)
        with _vllm_started_by(vllm_sync), reference, _reference_loaded_like(kwargs["model"]):
            super().__init__(*args, peft_config=None if wrapped else peft_config, **kwargs)
        if self.accelerator.num_processes > 1 or not self.log_completions:
            self.log_multimodal = False  # TRL would send all images to every process, and hang where one has none
        self.adapter, self.adapter_config, self.write_card = adapter, adapter_config, write_card
        self.truncate_prompts_to, self.truncation, self.grade_early = truncate_prompts_to, truncation, grade_early
        self.rollout_config = rollout or RolloutConfig()
        self.algorithm, self.sampling_seed = ALGORITHMS[self.algorithm_config.name], self.args.seed
        own_kl = self.algorithm_config.kl_estimator != "low_var_kl"  # TRL's loss has that one alone
        self.beta, self.own_beta = (0.0, self.args.beta) if own_kl else (self.args.beta, 0.0)
        self.kl_coefficient = KLCoefficient(
            self.algorithm_config.kl_in_reward,
            self.algorithm_config.kl_in_reward_target,
            self.algorithm_config.kl_in_reward_horizon,
        )
        self.noise_config, self.noise = noise, self._noise_injector(noise)
        self.sampler = self._vllm_sampler(vllm_sync) if self.use_vllm else self._rollout_policy()
        if self.noise and noise.schedule == "target_kl":
            self._require_measurable_kl()
        self.plan = self._plan_update()
        self.critic: Critic | None = None
        if self.algorithm.critic:
            self.critic = self._make_critic(critic or CriticConfig(), critic_base)
        if self.ref_model is not None and self.plan.packed:
            enable_packing(self.accelerator.unwrap_model(self.ref_model))  # it scores the same micro-batches
        self.rollout = Rollout(Weights(-1, 0, 0.0))
        """The last one."""
        self.measured = Measurements(self.accelerator)
        self.clock = StepClock(model_size(self.model), self.accelerator.gather, self._log_step)  # type: ignore[arg-type]
        self.noise_stage = NoiseStage(noise, self._measure_weights, self._take_noise_kl)
        self.dynamic_sampling = self._dynamic_sampling() if self.algorithm_config.dynamic_sampling else None
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
        if self.dynamic_sampling and self.model.training:
            rollout.collected = self._collect(self.dynamic_sampling)
            rollout.rows = rollout.collected.rows  # of the data loader's nothing is used
        with rollout.after_rewards:
            output: dict[str, Any] = super()._generate_and_score_completions(rollout.rows)
        reference = self._reference_logps(output, bool(self.own_beta or self.kl_coefficient.value))
        output["advantages"] = self._advantages(output, self._penalty(output, reference))
        if self.own_beta and reference is not None:
            output["ref_per_token_logps"] = reference
        if self.model.training and rollout.rewards is not None:
            self.measured.add_rollout(output, rollout.rewards)
        if self.sampler.noise and self.model.training:
            self._metrics["train"]["aqn/sigma_realized"].append(self.sampler.noise.realized_sigma)
            if self.noise_config.old_logps == "noisy":
                output["old_per_token_logps"] = self._noisy_logps(output, rollout.weights)
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
        if self.model.training:
            self.clock.count_trained(inputs[TOKENS])
        return inputs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        scored, value_loss = self._score_by_both(model, inputs) if self.critic else (self._score(model, inputs), 0.0)
        if inputs[SCALE] == 0:  # no process has a row to compute here: it only takes part
            return (scored.logps * 0.0).sum() + value_loss
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        self.measured.add_update(scored.logps, inputs.get("old_per_token_logps", scored.logps), mask)
        loss = super()._compute_loss(scored, self._weigh(inputs, scored.logps))
        if self.own_beta:
            loss = loss + self.own_beta * self._kl_loss(inputs, scored.logps, mask)
        loss = loss * inputs[SCALE]
        return loss if self.critic is None else loss * self.critic.policy_learns(self.state.global_step) + value_loss

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
        return Weights(step, number, self.noise_stage.stage.sigma if self.noise and self.model.training else 0.0)

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
        if not self.model.training or self.measured.tolerance is not None:
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
            self._metrics["train" if self.model.training else "eval"][name].append(value)
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
        return DynamicSampling(
            PromptStream(len(self.train_dataset), args.seed, epochs, self.shuffle_dataset),  # type: ignore[arg-type]
            args.generation_batch_size // self.num_generations,
            self.algorithm_config.max_resample_factor,
            lambda: self._step % (args.steps_per_generation * self.num_iterations) == 0,
        )

    def _collect(self, dynamic: DynamicSampling) -> Collected:
        """Prompts of the stream, sampled and rewarded until this process's part of the batch is full. Every process
        must come here."""
        self.rollout.weights = weights = self._next_weights()
        size = self._group_size()
        positions, needed, most = dynamic.begin(self.args.process_index, self.accelerator.num_processes)
        hooks = Hooks(
            row=lambda position: self.train_dataset[dynamic.stream.row(position)],  # type: ignore[index]
            tokenize=self._tokenize_row,
            grade_early=self._start_grading if self.grade_early else None,
            judge=self._judge,
        )
        collection = Collection(
            positions,
            hooks,
            needed=needed,
            most=most,
            size=size,
            seed=self.sampling_seed,
            equal_by=self._equal_by(),
            weights=self.reward_weights,
        )
        request = RolloutRequest(prompt_ids=[], seeds=[], sampling=self._sampling(), weights=weights, group_size=size)
        with self.clock("rollout"):
            tokens, metrics = draw(
                collection, self.sampler, request, lambda count: int(self._of_all_processes([count]).max())
            )
            chosen = collected(collection.chosen(), metrics)
            self._compare_first(replace(request, prompt_ids=chosen.prompt_ids, seeds=chosen.seeds), chosen.completions)
        lengths = [len(group.prompt_ids) + len(ids) for group in collection.groups for ids in group.token_ids]
        self._count_rollout(lengths, metrics)
        mine = Cost.of(collection, collection.chosen(), tokens, self.reward_weights)
        cost = dynamic.end(self._of_all_processes([float(number) for number in mine]))
        for name, value in cost.metrics(dynamic.batch).items():
            self._metrics["train"][name].append(value)
        return chosen

    def _equal_by(self) -> int | None:
        """Which reward function must differ within a group; None: the weighted sum of all."""
        asked, names = self.algorithm_config.dynamic_sampling_metric, self.reward_func_names
        if asked is None:
            return names.index("accuracy") if "accuracy" in names else None
        return None if asked == "sum" else names.index(asked.rpartition(":")[2])

    def _tokenize_row(self, row: dict[str, Any]) -> list[int]:
        return list(self._tokenize_prompts([row["prompt"]])[0][0])

    def _judge(self, row: dict[str, Any], token_ids: list[list[int]]) -> Judged:
        """The rewards of one group of this process, as TRL makes those of a batch."""
        count, tokenizer = len(token_ids), cast("Any", self.processing_class)
        texts: list[Any] = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        if is_conversational({"prompt": row["prompt"]}):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        with self.clock("reward"), _on_this_process_alone():
            rewards = super()._calculate_rewards([row] * count, [row["prompt"]] * count, texts, token_ids)
        extras = {name: list(values) for name, values in self._pending_extra_logs.items()}
        self._pending_extra_logs.clear()  # those of the groups that are chosen come back in `_calculate_rewards`
        return Judged(rewards.cpu(), extras)

    # Rewards and advantages

    def _calculate_rewards(self, *args: Any, **kwargs: Any):
        chosen = self.rollout.collected
        with self.clock("reward"):
            if chosen is None:
                rewards = super()._calculate_rewards(*args, **kwargs)
            else:
                self._pending_extra_logs.update(chosen.extras)
                rewards: Any = self.accelerator.gather(chosen.rewards.to(self.accelerator.device))
        if self.multi_objective_aggregation == "sum_then_normalize":
            rows = len(rewards) // self.accelerator.num_processes
            mine = slice(rows * self.accelerator.process_index, rows * (self.accelerator.process_index + 1))
            equal = equal_rewards(rewards, self.reward_weights.to(rewards.device), self._group_size())
            self.rollout.no_advantage = equal[mine]
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        self.rollout.rewards = total.masked_fill(rewards.isnan().all(dim=1), math.nan)
        self.rollout.after_rewards.enter_context(self.clock("advantages"))
        return rewards

    def _group_size(self) -> int:
        return (self.num_generations if self.model.training else self.num_generations_eval) or 1

    @torch.no_grad()
    def _penalty(self, batch: dict[str, Any], reference: torch.Tensor | None) -> torch.Tensor | None:
        """What the KL divergence of the policy without noise takes from the reward of each token, [rows, tokens], 0
        where none is trained on; None where the reward has none."""
        coefficient = self.kl_coefficient
        if not coefficient.value or reference is None or self.rollout.rewards is None:
            return None
        policy = batch.get("old_per_token_logps")
        if policy is None:
            policy = self._logps(self.model, batch)
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        kl = kl_divergence(policy.float(), reference.float(), self.algorithm_config.kl_in_reward_estimator)
        kl = kl.masked_fill(~mask.bool(), 0.0)
        penalty = coefficient.value * kl
        if self.model.training:
            mean = self.accelerator.gather(kl.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean().item()  # type: ignore[union-attr]
            self._metrics["train"]["kl_in_reward"].append(mean)
            self._metrics["train"]["kl_in_reward/coefficient"].append(coefficient.value)
            coefficient.adapt(mean, len(kl) * self.accelerator.num_processes)
        return penalty

    @torch.no_grad()
    def _advantages(self, batch: dict[str, Any], penalty: torch.Tensor | None) -> torch.Tensor:
        """Of a scored generation batch, [rows] or [rows, tokens]: the algorithm's, or TRL's, exactly 0 where a group
        has equal rewards.

        Args:
            penalty: what is taken from the reward of each token.
        """
        trls, rollout = batch["advantages"], self.rollout
        estimate = self.algorithm.advantages or (None if penalty is None else group_relative)
        if self.critic is not None:
            estimate = functools.partial(self.critic.judge, batch, self._values(batch))
        if estimate is None or rollout.rewards is None:
            return trls if rollout.no_advantage is None else trls.masked_fill(rollout.no_advantage, 0.0)
        first = len(trls) * self.accelerator.process_index
        rewards = rollout.rewards[first : first + len(trls)]
        mask = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
        scored = Scored(
            rewards=rewards if penalty is None else rewards - penalty.sum(dim=1),
            token_rewards=token_rewards(rewards, mask, penalty),
            mask=mask,
            group_size=self._group_size(),
            gather=self.accelerator.gather,  # type: ignore[arg-type]
            first=first,
            gamma=self.algorithm_config.gamma,
            lam=self.algorithm_config.lam,
            scale=self.scale_rewards,  # type: ignore[arg-type]
        )
        with self.clock("advantages"):
            advantages = estimate(scored)
            shown = (
                advantages if advantages.ndim == 1 else (advantages * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            )
            everywhere: Any = self.accelerator.gather(shown)
            self._logs["advantages"].extend(everywhere.tolist())  # in the place of TRL's
        return advantages

    # Loss

    def _score_by_both(self, model: Any, inputs: dict[str, Any]) -> tuple[TokenLogProbs, torch.Tensor]:
        """`_score`, and the critic's loss, of one pass."""
        assert self.critic is not None
        with self.accelerator.autocast():
            logps, entropies, values, work = self.critic.score(model, *tokens_of(inputs))
        self.clock.count_update(work)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        value_loss = self.critic.loss(values, inputs, mask, self._window_tokens(inputs))
        return TokenLogProbs(logps, entropies, None), value_loss

    def _weigh(self, inputs: dict[str, Any], logps: torch.Tensor) -> dict[str, Any]:
        """Compare the sampler's log-probabilities with the policy's that the ratio refers to, and weigh the advantages
        by the importance ratio, on request: both for no further pass."""
        if (sampler := inputs.get("sampling_per_token_logps")) is None:
            return inputs
        old = inputs.get("old_per_token_logps", logps).detach()
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        clean = self.noise and self.rollout.weights.step == self.state.global_step  # `logps`, before an update
        self.measured.add_sampler(sampler, old, logps if clean else None, mask)
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

    def _save_adapter(self, folder: Path) -> None:
        """The adapter, or the model, and the tokenizer. Every process must come here."""
        self.save_model(str(folder), _internal_call=True)  # pushed to no hub

    def _log_step(self, metrics: dict[str, float]) -> None:
        add_step(self._metrics["train"], metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.model.training:
            if self.noise:
                stage = self.noise_stage.stage
                logs |= {"aqn/sigma": stage.sigma, "aqn/stage": stage.index, "aqn/num_modules": len(self.noise.targets)}
                logs |= size_metrics(self.noise.sigmas(stage.sigma), self.noise.rms)
                logs |= {} if stage.target_kl is None else {"aqn/target_kl": stage.target_kl}
            noisy = self.rollout.weights.sigma != 0 and self.noise_config.old_logps != "noisy"
            logs |= self.measured.take(noisy)
            logs |= self.critic.take_metrics(self.accelerator) if self.critic else {}
        super().log(logs, start_time)

    def _run_state(self) -> dict[str, Any]:
        state = super()._run_state() | {"measured": self.measured.state(), "weights": list(self.rollout.weights)}
        if self.critic:
            state["critic"] = dict(vars(self.critic.measured))
        if self.noise:
            state["rms"] = self.noise.rms
        return state

    def _restore_run_state(self, checkpoint: Path) -> dict[str, Any] | None:
        state = super()._restore_run_state(checkpoint) or {}
        if self.noise and "rms" in state:  # of the weights as the run began; norms may be trained
            self.noise.rms[:] = state["rms"]
        if "measured" in state:
            self.measured.restore(state["measured"])
            self.rollout.weights = Weights(*state["weights"])
        if self.critic and "critic" in state:
            vars(self.critic.measured).update(state["critic"])
        return state

    def _save_own(self, checkpoint: Path) -> None:
        super()._save_own(checkpoint)
        window = self.args.steps_per_generation * self.num_iterations  # type: ignore[operator]  # set by GRPOConfig
        pending: Any = self._buffered_inputs
        state = rollout_state.RolloutState(
            step=self._step,
            buffered_inputs=pending if self._step % window else None,
            processes=self.accelerator.num_processes,
            settings=self._window_settings(),
            adapted=asdict(self.noise_stage.adapted) if self.noise_config.schedule == "target_kl" else None,
            kl_coefficient=self.kl_coefficient.value,
            stream=self.dynamic_sampling.stream.state() if self.dynamic_sampling else None,
        )
        self.save_critic(checkpoint)
        rollout_state.save(checkpoint, self.args.process_index, state)

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
        if checkpoint is None:
            return
        processes = self.accelerator.num_processes
        state = rollout_state.load(checkpoint, self.args.process_index, processes, self._window_settings())
        if state is not None:
            self._step = state.step
            self._buffered_inputs = send_to_device(state.buffered_inputs, self.accelerator.device)
            if state.kl_coefficient is not None and self.kl_coefficient.target is not None:
                self.kl_coefficient.value = state.kl_coefficient
            if state.adapted is not None:
                self.noise_stage.adapted = Adapted(**state.adapted)
            if self.dynamic_sampling and state.stream is not None:
                self.dynamic_sampling.stream.restore(state.stream)


# TRL's own, replaced for a moment


@contextlib.contextmanager
def _vllm_started_by(sync: VLLMSync) -> Iterator[None]:
    """The engine that TRL starts inside is the one of `sync`. TRL has no LLM where vLLM is not installed."""
    theirs = getattr(vllm_generation, "LLM", None)
    setattr(vllm_generation, "LLM", sync.start)  # noqa: B010
    try:
        yield
    finally:
        setattr(vllm_generation, "LLM", theirs)  # noqa: B010


@contextlib.contextmanager
def _reference_loaded_like(model: Any) -> Iterator[None]:
    """Where all weights of `model` are trained TRL loads the reference of beta > 0 inside. It is loaded as `model` was:
    of the same configuration, and to the CPU; TRL's own would be spread over several NPUs."""
    theirs = grpo_trainer.create_model_from_path

    def load(folder: str, *, dtype: torch.dtype, attn_implementation: str, **_: Any) -> Any:
        own = {"dtype": dtype, "attn_implementation": attn_implementation, "config": copy.deepcopy(model.config)}
        return type(model).from_pretrained(folder, **own)

    setattr(grpo_trainer, "create_model_from_path", load)  # noqa: B010
    try:
        yield
    finally:
        setattr(grpo_trainer, "create_model_from_path", theirs)  # noqa: B010


@contextlib.contextmanager
def _reference_kept(args: TrainingConfig, wanted: bool) -> Iterator[None]:
    """TRL keeps a reference policy where the loss has a KL divergence: with beta above 0 while it is made."""
    beta = args.beta
    args.beta = 1.0 if wanted and beta == 0.0 else beta
    try:
        yield
    finally:
        args.beta = beta


@contextlib.contextmanager
def _on_this_process_alone() -> Iterator[None]:
    """TRL's `_calculate_rewards` gathers nothing inside."""
    theirs = grpo_trainer.gather
    setattr(grpo_trainer, "gather", lambda rewards: rewards)  # noqa: B010
    try:
        yield
    finally:
        setattr(grpo_trainer, "gather", theirs)  # noqa: B010
