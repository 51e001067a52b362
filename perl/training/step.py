"""A step of GRPO (arXiv 2402.03300) and its kin, from top to bottom.

    batch   publish the policy -> trajectories, sampled and scored -> what policy, reference and critic say of them
            -> advantages -> micro-batches
    loss    a micro-batch -> log-probabilities of its tokens -> ratio, surrogate, KL -> a scalar

transformers' Trainer calls `batch` once a generation batch, `loss` once a micro-batch, and does the rest: backward,
clipping, the optimizer, schedules, checkpoints (perl.training.trainer).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from perl.algorithms import ALGORITHMS
from perl.algorithms.algorithm import Algorithm, Scored
from perl.algorithms.grpo import equal_groups, group_relative, normalized_by_function, weighted_sum
from perl.algorithms.kl import KLCoefficient, kl_divergence, token_rewards
from perl.algorithms.ppo import generalized
from perl.config.derived import correction_of
from perl.engines.base import PolicyEngine
from perl.records import Trajectory, Weights
from perl.runs.metrics import StepClock
from perl.runs.nonfinite import NonFinite
from perl.training.batch import Batch, Cycle, Dealer, MicroBatch
from perl.training.collect import Collector
from perl.training.critic import Critic
from perl.training.loss import (
    EntropyBonus,
    LossInputs,
    LossOutputs,
    LossSettings,
    Update,
    entropy_threshold,
    policy_loss,
)
from perl.training.metrics import (
    Metrics,
    completions_of,
    logged_by_rewards,
    rollout_metrics,
)
from perl.training.packing import Reader
from perl.training.passes import Passes, SamplerCheck, Samplers
from perl.training.pool import PoolLost
from perl.training.processes import Processes

if TYPE_CHECKING:
    from perl.config.load import Config
    from perl.config.training import TrainingConfig
    from perl.noise.callback import NoiseStage
    from perl.training.policy import Policy

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Step:
    """Its parts, and what goes on from one generation batch to the next."""

    config: Config
    policy: Policy
    engine: PolicyEngine
    collector: Collector
    samplers: Samplers
    comparison: SamplerCheck
    passes: Passes
    dealer: Dealer
    critic: Critic | None
    metrics: Metrics
    nonfinite: NonFinite
    processes: Processes
    clock: StepClock
    noise_stage: NoiseStage
    router_coefficient: float = 0.0
    """Of the auxiliary loss of a mixture of experts' router."""
    weights: Weights = field(default_factory=lambda: Weights(version=-1))
    """That were published last."""
    args: TrainingConfig = field(init=False)
    algorithm: Algorithm = field(init=False)
    settings: LossSettings = field(init=False)
    noisy_old: bool = field(init=False)
    """The ratio refers to the policy with its noise (noise_injection.old_logps)."""
    cycle: Cycle = field(init=False)
    kl_coefficient: KLCoefficient = field(init=False)
    entropy_bonus: EntropyBonus | None = field(init=False)

    def __post_init__(self) -> None:
        args, algorithm, noise = self.config.training, self.config.algorithm, self.config.noise_injection
        self.args, self.algorithm = args, ALGORITHMS[algorithm.name]
        self.settings = LossSettings.of(args, algorithm.kl_estimator, correction_of(self.config.rollout))
        self.noisy_old = noise.enabled and noise.old_logps == "noisy"
        self.cycle = Cycle.of(args)
        self.kl_coefficient = KLCoefficient(
            algorithm.kl_in_reward, algorithm.kl_in_reward_target, algorithm.kl_in_reward_horizon
        )
        self.entropy_bonus = EntropyBonus.of(args)

    # A generation batch

    def batch(self, step: int, left: int) -> tuple[Batch, list[MicroBatch]]:
        """The next generation batch, sampled by the policy after `step` optimizer steps, of `left` that the run will
        draw with it: its rows prompt by prompt, and as the micro-batches of its updates. Every process must come here.
        """
        before = self.weights
        try:
            rows, collect_metrics = self.collector.collect(self._publish(step), left)
        except PoolLost:
            self.weights = before  # a checkpoint that is saved now is of a run that has not begun this batch
            raise
        longest, logprobs = self.processes.largest(
            [max(len(row.token_ids) for row in rows), int(any(row.logprobs for row in rows))]
        )
        batch = Batch.of(rows, self.processes.device, self.args.mask_truncated_completions, longest, bool(logprobs))
        batch.tokens = self.processes.added_up([float(batch.mask.sum())])[0]
        rewards = self._finite_rewards(rows, step)
        self.comparison.compare(batch)
        with self.clock("old_logps"):
            stale = self.cycle.several_updates  # the ratio's old policy is not the one before each of them
            needed = self.kl_coefficient.value or (stale and not self.noisy_old)
            clean = self.passes.logps(self.policy.wrapped, rows, batch.width) if needed else None
            batch.old = self.samplers.logps(batch) if self.noisy_old else clean if stale else None
            batch.reference = self._reference(batch)
            batch.values = self._values(batch)
        with self.clock("advantages"):
            batch.advantages = self._advantages(batch, rewards, self._kl_penalty(batch, clean))
        self._log_rollout(batch, rewards, collect_metrics)
        shuffled = batch.select(torch.randperm(len(rows)).tolist())  # as TRL shuffles rows over updates
        return batch, self.dealer.deal(shuffled, self.processes.largest)

    def _publish(self, step: int) -> Weights:
        """The policy as it is now, to the engine, with this step's noise: of each batch of a step another draw."""
        draw = self.weights.draw + 1 if self.weights.version == step else 0
        self.weights = Weights(version=step, sigma=self.noise_stage.stage.sigma, draw=draw)
        with self.clock("rollout"):
            self.engine.publish(self.weights)
        return self.weights

    def _finite_rewards(self, rows: list[Trajectory], step: int) -> torch.Tensor:
        """float32 [rows of all processes, functions], infinite ones as NaN, which counts as none; whether an update can
        be made of them stands in `nonfinite`."""
        functions = self.collector.rewards
        rewards = self.processes.rows(functions.of(rows).to(self.processes.device))
        shown = functools.partial(completions_of, rows, functions.names)
        self.nonfinite.look_at(step + 1, rewards, functions.names, functions.infinite(rows), shown)
        return rewards.masked_fill(rewards.isinf(), math.nan)

    def _reference(self, batch: Batch) -> torch.Tensor | None:
        if not self.policy.refers:
            return None
        with self.policy.reference() as model:
            return self.passes.logps(model, batch.rows, batch.width)

    def _values(self, batch: Batch) -> torch.Tensor | None:
        return None if self.critic is None else self.passes.values(self.policy.wrapped, batch.rows, batch.width)

    @torch.no_grad()
    def _kl_penalty(self, batch: Batch, policy: torch.Tensor | None) -> torch.Tensor | None:
        """What the KL divergence of the policy without noise takes from the reward of each token, float32 [rows,
        tokens], 0 where none is trained on; None where the reward has none."""
        coefficient = self.kl_coefficient
        if not coefficient.value:
            return None
        assert policy is not None
        assert batch.reference is not None
        kl = kl_divergence(policy, batch.reference, self.config.algorithm.kl_in_reward_estimator).masked_fill(
            ~batch.mask, 0.0
        )
        penalty = coefficient.value * kl
        by_row = self.processes.rows(kl.sum(dim=1) / batch.mask.sum(dim=1))  # NaN of a row without a token
        self.metrics.value("kl_in_reward/coefficient", coefficient.value)
        if not by_row.isnan().all():
            mean = by_row.nanmean().item()
            self.metrics.value("kl_in_reward", mean)
            coefficient.adapt(mean, len(by_row))
        return penalty

    @torch.no_grad()
    def _advantages(self, batch: Batch, rewards: torch.Tensor, penalty: torch.Tensor | None) -> torch.Tensor:
        """float32 [rows, 1], or [rows, tokens] where tokens have advantages of their own; fills the batch's `returns`
        where there is a critic.

        Args:
            rewards: float32 [rows of all processes, functions].
            penalty: what is taken from the reward of each token.
        """
        functions = self.collector.rewards.weights.to(rewards.device)
        first = len(batch.rows) * self.processes.rank
        local = weighted_sum(rewards, functions)[first : first + len(batch.rows)]
        scored = Scored(
            rewards=local if penalty is None else local - penalty.sum(dim=1),
            token_rewards=token_rewards(local, batch.mask, penalty),
            mask=batch.mask,
            group_size=self.collector.group_size,
            gather=self.processes.rows,
            first=first,
            gamma=self.config.algorithm.gamma,
            lam=self.config.algorithm.lam,
            values=batch.values,
            baselines=self._baselines(batch, functions) if self.algorithm.greedy else None,
            by_function=rewards,
            weights=functions,
            scale=self.args.scale_rewards,  # type: ignore[arg-type]
        )
        if self.critic is not None:
            scored = replace(scored, generalized=generalized(scored))
            batch.returns = self.critic.targets(scored)
        by_function = self.args.multi_objective_aggregation == "normalize_then_sum"
        estimate = self.algorithm.advantages or (normalized_by_function if by_function else group_relative)
        advantages = estimate(scored)
        if scored.group_size > 1:
            self.metrics.value("frac_reward_zero_std", equal_groups(scored.groups()).float().mean().item())
        if self.nonfinite.unusable:
            advantages = torch.full_like(advantages, math.nan)  # and so the loss, of which no update is made
        return advantages if advantages.ndim == 2 else advantages[:, None]

    def _baselines(self, batch: Batch, functions: torch.Tensor) -> torch.Tensor:
        baselines = torch.tensor([row.baseline for row in batch.rows], dtype=torch.float32)
        return weighted_sum(baselines.to(functions.device), functions)

    def _log_rollout(self, batch: Batch, rewards: torch.Tensor, metrics: dict[str, float]) -> None:
        functions = self.collector.rewards
        self.metrics.values(rollout_metrics(batch, rewards, functions.names, functions.weights, self.processes))
        self.metrics.values(metrics | self.engine.take_metrics() | logged_by_rewards(functions, self.processes))
        if self.engine.remote:
            ages = [self.weights.version - row.weights.version for row in batch.rows]
            steps = torch.tensor(ages, device=self.processes.device)
            self.metrics.mean("pool/staleness", steps)
            self.metrics.extreme("pool/staleness_max", steps, torch.ones_like(steps, dtype=torch.bool))
        self.metrics.mean("update/rows_left_out", ~self.dealer.computed(batch))

    # A micro-batch

    def loss(self, model: Any, micro_batch: MicroBatch, step: int, accumulation: int) -> torch.Tensor:
        """[]: a micro-batch's part of the loss of its update, whose parts are added up.

        Args:
            model: the policy, wrapped.
            micro_batch: that has rows.
            step: optimizer steps that were made.
            accumulation: micro-batches of this update.
        """
        batch = micro_batch.batch
        assert batch is not None
        readers: Sequence[Reader] = ("policy",) if self.critic is None else ("policy", "critic")
        outputs = self.passes.score(model, batch.rows, batch.width, readers)
        if micro_batch.padding:
            return (outputs.logps * 0.0).sum() + (0.0 if outputs.values is None else (outputs.values * 0.0).sum())
        assert batch.advantages is not None
        rows = self.args.per_device_train_batch_size * accumulation
        tokens = max(batch.tokens, 1.0) / self.processes.count * accumulation / self.cycle.per_generation
        update = Update(rows=rows, tokens=tokens, micro_batches=accumulation)
        inputs = LossInputs(
            policy=outputs.logps,
            old=outputs.logps.detach() if batch.old is None else batch.old,
            mask=batch.mask,
            advantages=batch.advantages,
            sampler=batch.sampler,
            reference=batch.reference,
            entropies=outputs.entropies,
        )
        if (share := self.args.top_entropy_quantile) < 1.0:
            assert inputs.entropies is not None
            threshold = entropy_threshold(inputs.entropies, inputs.mask, share, self.processes.rows)
            inputs = replace(inputs, entropy_threshold=threshold)
        policy = policy_loss(inputs, self.settings, update)
        self._measure(inputs, policy, step, batch.rows)
        loss = policy.loss
        if self.entropy_bonus is not None:
            assert inputs.entropies is not None
            mask = inputs.mask
            if inputs.entropy_threshold is not None:
                mask = mask & (inputs.entropies >= inputs.entropy_threshold)
            loss = loss + self.entropy_bonus.loss(inputs.entropies, mask, accumulation)
        if outputs.aux_loss is not None:
            loss = loss + self.router_coefficient * outputs.aux_loss / accumulation
            self.metrics.mean("aux_loss", outputs.aux_loss)
        if self.critic is not None:
            assert outputs.values is not None
            assert batch.values is not None
            assert batch.returns is not None
            value_loss = self.critic.loss(outputs.values, batch.values, batch.returns, batch.mask, tokens)
            loss = loss * self.critic.policy_learns(step) + value_loss
        return loss

    def _measure(self, inputs: LossInputs, outputs: LossOutputs, step: int, rows: Sequence[Trajectory]) -> None:
        """The numbers of a micro-batch, for the log; nothing is exchanged, nor waited for."""
        self.metrics.add_loss(inputs, outputs)
        if inputs.sampler is None:
            return
        other = self.collector.batches_ahead > 0 or any(row.weights.sigma != 0 for row in rows)
        self.metrics.add_sampler(inputs.sampler, inputs.old, inputs.mask, other and not self.noisy_old)
        fresh = all(row.weights.version == step for row in rows)  # the policy is the one that drew, before an update
        if self.config.noise_injection.enabled and fresh and not self.comparison.quantised:
            self.metrics.kl("aqn/kl", inputs.sampler, inputs.policy, inputs.mask)

    def end_of_update(self) -> None:
        """Every process must come here."""
        if self.entropy_bonus is not None:
            self.metrics.mean(
                "entropy_coef", torch.as_tensor(self.entropy_bonus.coefficient, device=self.processes.device)
            )
            self.entropy_bonus.end_of_update(self.processes.sum)
