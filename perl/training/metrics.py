"""What a step measures of its rollouts and its losses, as means and extremes over all processes.

rollout_metrics   a generation batch: lengths, rewards, advantages
Metrics           sums of the micro-batches, which stay on the device until the next log
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from perl.algorithms.grpo import weighted_sum
from perl.base.errors import say_once
from perl.records import Trajectory
from perl.rewards.score import Rewards
from perl.training.batch import Batch
from perl.training.loss import LossInputs, LossOutputs, Measured, masked_mean
from perl.training.processes import Processes

LAST = ("pool/queue", "pool/restarts")
"""Of these a log has the last value, not the mean."""
LOW_RATIO = 0.5
"""Mean of the importance sampling ratios below which most of the gradient is lost."""


def rollout_metrics(batch: Batch, rewards: torch.Tensor, names: Sequence[str], weights: torch.Tensor,
                    processes: Processes) -> dict[str, float]:  # fmt: skip
    """What the log shows of a generation batch. Every process must come here.

    Args:
        batch: with its advantages.
        rewards: float32 [rows of all processes, functions], NaN where a function gave none.
        names, weights: of the functions.
    """
    assert batch.advantages is not None
    rows, mask = batch.rows, batch.mask
    numbers = torch.tensor(
        [[len(row.prompt_ids), sum(row.sampled), row.finish == "length", row.failure is None] for row in rows],
        dtype=torch.float32,
    )
    gathered = processes.rows(numbers.to(mask.device)).cpu()
    whole = gathered[:, 3].bool()
    gathered = gathered[whole] if whole.any() else gathered  # a conversation that failed has no length
    prompts, lengths, cut = gathered[:, 0], gathered[:, 1], gathered[:, 2].bool()
    ended = lengths[~cut] if not cut.all() else torch.zeros(1)
    metrics = {
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": cut.float().mean(),
        "completions/mean_terminated_length": ended.mean(),
        "completions/min_terminated_length": ended.min(),
        "completions/max_terminated_length": ended.max(),
        "prompts/mean_length": prompts.mean(),
        "prompts/max_length": prompts.max(),
        "prompts/min_length": prompts.min(),
    }
    total = weighted_sum(rewards, weights.to(rewards.device)).cpu()
    for place, name in enumerate(names):
        one = rewards[:, place].cpu()
        metrics |= {f"rewards/{name}/mean": one.nanmean(), f"rewards/{name}/std": deviation(one)}
    metrics |= {"reward": total.nanmean(), "reward_std": deviation(total)}
    if (known := total[~total.isnan()]).numel():
        metrics |= {"reward/max": known.max(), "reward/min": known.min()}
    values = batch.advantages.expand(mask.shape)[mask].float()
    sums = [float(len(values)), values.sum().item(), values.square().sum().item()]
    count, added, squares = processes.added_up(sums)
    ends = [values.max().item(), -values.min().item()] if len(values) else [-math.inf, -math.inf]
    high, low = processes.numbers(ends).amax(dim=0)
    if count:
        mean = added / count
        metrics |= {"advantages/mean": mean, "advantages/std": max(0.0, squares / count - mean**2) ** 0.5}
        metrics |= {"advantages/max": high, "advantages/min": -low}
    return {name: float(value) for name, value in metrics.items()}


def logged_by_rewards(functions: Rewards, processes: Processes) -> dict[str, float]:
    """Means over the processes of what reward functions have logged of a generation batch. Every process must come
    here."""
    means = {}
    for name in sorted(set(processes.gathered(list(functions.metrics)))):
        values = functions.metrics.get(name, [])
        total, count = processes.added_up([float(sum(values)), float(len(values))])
        if count:  # of what may not have happened, as a call of a tool
            means[name] = total / count
    functions.metrics.clear()
    return means


def deviation(values: torch.Tensor) -> torch.Tensor:
    """[]: the standard deviation with Bessel's correction of those that are no NaN; NaN of fewer than two."""
    return values[~values.isnan()].std() if (~values.isnan()).sum() > 1 else torch.tensor(math.nan)


class Metrics:
    """Sums on this process between two logs.

    Args:
        logged: by name, the numbers of which TRL logs the mean.
        correction: how the loss is corrected for the sampler's log-probabilities (LossSettings.correction).

    Attributes:
        noisy: since the last log, tokens were drawn with noise that the trainer's policy had not: it differs from the
            sampler's by more than rounding.
    """

    def __init__(self, processes: Processes, logged: dict[str, list[float]], correction: str | None = None):
        self.processes, self.logged, self.correction = processes, logged, correction
        self.noisy = False
        self._sums: dict[str, torch.Tensor] = {}
        """float32 [2]: values and how many."""
        self._highest: dict[str, torch.Tensor] = {}
        """float32 []: the lowest value has its sign turned, and "-" before its name."""

    def value(self, name: str, number: float) -> None:
        """A number that all processes know."""
        if name in LAST:
            self.logged[name].clear()
        self.logged[name].append(number)

    def values(self, numbers: dict[str, float]) -> None:
        for name, number in numbers.items():
            self.value(name, number)

    @torch.no_grad()
    def mean(self, name: str, values: torch.Tensor, counted: torch.Tensor | None = None) -> None:
        """Of the values of all tokens, or rows, that are `counted`; None: all. Nothing is exchanged, nor waited for."""
        counted = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
        sums = torch.stack([values.float().masked_fill(~counted, 0.0).sum(), counted.sum().float()])
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    @torch.no_grad()
    def extreme(self, name: str, values: torch.Tensor, counted: torch.Tensor, lowest: bool = False) -> None:
        values = (-values if lowest else values).float().masked_fill(~counted, -math.inf).amax()
        name = f"-{name}" if lowest else name
        self._highest[name] = torch.maximum(self._highest[name], values) if name in self._highest else values

    def add_loss(self, inputs: LossInputs, outputs: LossOutputs) -> None:
        """What a micro-batch's loss has measured."""
        measured = dict(outputs.metrics)
        if inputs.entropies is not None:
            measured["entropy"] = Measured(inputs.entropies.detach(), inputs.mask)
        apart = (inputs.old.float() - inputs.policy.detach().float()).clamp(-20, 20)
        measured["approx_kl"] = Measured(apart, inputs.mask)  # verl's actor/ppo_kl
        for name, (values, counted) in measured.items():
            self.mean(name, values, counted)
        some = inputs.mask.any(dim=1, keepdim=True)
        for name, lowest in (("low", True), ("high", False)):
            if (one := measured.get(f"clip_ratio/{name}_mean")) is not None:
                row_values = one.values if one.values.shape[1] == 1 else masked_mean(one.values, inputs.mask)
                self.extreme(f"clip_ratio/{name}_{'min' if lowest else 'max'}", row_values, some, lowest)
        if (ratio := measured.get("sampling/importance_sampling_ratio/mean")) is not None:
            self.extreme("sampling/importance_sampling_ratio/min", *ratio, lowest=True)
            self.extreme("sampling/importance_sampling_ratio/max", *ratio)

    def add_sampler(self, sampler: torch.Tensor, policy: torch.Tensor, mask: torch.Tensor, noisy: bool) -> None:
        """Log-probabilities of drawn tokens by the sampler and by the trainer's policy of that time, in nats: [rows,
        tokens]."""
        apart, known = difference(sampler, policy, mask)
        self.mean("rollout/logp_mismatch", apart.abs(), known)
        self.kl("rollout/logp_kl", sampler, policy, mask)
        self.noisy |= noisy

    def kl(self, name: str, drew: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> None:
        """KL(policy that drew || other policy) from their log-probabilities of drawn tokens, nats: the mean of
        r - 1 - log r with r = p_other / p_drew ("k3" of John Schulman's "Approximating KL divergence", 2020). A token
        without a number does not count."""
        apart, known = difference(drew, other, mask)
        self.mean(name, apart.exp() - 1 - apart, known)

    def add_returns(self, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> None:
        """Of a generation batch's tokens of `mask`: what a critic said of them, and what it is to learn. Every process
        must come here."""
        errors, values, returns = (returns - values)[mask], values[mask], returns[mask]
        sums = torch.stack([values.sum(), returns.sum(), errors.sum()]).tolist()
        tokens, *sums = self.processes.added_up([float(len(returns)), *sums])
        if not tokens:
            return
        value, mean, error = (each / tokens for each in sums)
        squares = torch.stack([(returns - mean).square().sum(), (errors - error).square().sum()]).tolist()
        variance, unexplained = (each / tokens for each in self.processes.added_up(squares))
        ends = torch.stack([values, -values, returns, -returns])
        highest = self.processes.numbers(ends.amax(dim=1).tolist() if len(values) else [-math.inf] * 4).amax(dim=0)
        for name, end in zip(("values_max", "values_min", "returns_max", "returns_min"), highest.tolist(), strict=True):
            self.value(f"critic/{name}", -end if name.endswith("min") else end)
        self.values({"critic/values_mean": value, "critic/returns_mean": mean})
        if variance > (1e-5 * mean) ** 2:  # equal returns, but for their rounding, leave nothing to explain
            self.value("critic/explained_variance", 1.0 - unexplained / variance)

    def take_mean(self, name: str) -> float | None:
        """Of all processes, which is logged, and start again; None where nothing was added. Every process must come
        here."""
        sums = self._sums.pop(name, None)
        total, count = self.processes.added_up([0.0, 0.0] if sums is None else sums.tolist())
        if not count:
            return None
        self.value(name, total / count)
        return total / count

    def flush(self, tolerance: float | None = None) -> None:
        """Hand all that was added to the log, and start again. Every process must come here.

        Args:
            tolerance: as SamplerCheck has it; nothing is said of a difference within it.
        """
        names = sorted(set(self.processes.gathered([*self._sums, *(f"max {name}" for name in self._highest)])))
        sums = dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True)) if self._sums else {}
        means = [name for name in names if not name.startswith("max ")]
        highest = [name.removeprefix("max ") for name in names if name.startswith("max ")]
        local = [x for name in means for x in sums.get(name, (0.0, 0.0))]
        local += [float(self._highest.get(name, -math.inf)) for name in highest]
        gathered = self.processes.numbers(local).double().cpu() if local else torch.zeros(1, 0)
        self._sums, self._highest = {}, {}
        totals, ends = gathered[:, : 2 * len(means)].sum(dim=0), gathered[:, 2 * len(means) :].amax(dim=0)
        for name, (total, count) in zip(means, totals.view(-1, 2).tolist(), strict=True):
            if count:
                self.value(name, total / count)
        for name, value in zip(highest, ends.tolist(), strict=True):
            if value > -math.inf:
                self.value(name.removeprefix("-"), -value if name.startswith("-") else value)
        self._warn(tolerance)

    def _warn(self, tolerance: float | None) -> None:
        """Once where sampler and trainer were one policy at the start and are not any more, and where the correction
        for their difference takes most of the gradient."""
        apart, ratio = (
            self.logged.get("rollout/logp_mismatch"),
            self.logged.get("sampling/importance_sampling_ratio/mean"),
        )
        if apart and tolerance is not None and apart[-1] > tolerance and not self.noisy:
            say_once(
                f"rollout: the sampler's log-probabilities are more than {tolerance:.2g} nats from the trainer's,"
                " which is no rounding: it may have missed the adapter, or it samples an older policy"
                " (rollout/logp_mismatch shows it)"
            )
        if ratio and ratio[-1] < LOW_RATIO:
            remedy = (
                "sampler and trainer are far apart (rollout/logp_mismatch)"
                if self.correction == "token"
                else "write --config.rollout.importance_correction token"
            )
            say_once(
                f"rollout: the importance sampling ratios are below {LOW_RATIO} on average, so that most of the"
                f" gradient is lost (sampling/importance_sampling_ratio/mean, mode {self.correction}): {remedy}"
            )
        self.noisy = False

    def state(self) -> dict[str, Any]:
        """What was added since the last log: tensors and plain values, for `restore` in another process, whose sampler
        is compared anew."""
        return {"sums": self._sums, "highest": self._highest, "noisy": self.noisy}

    def restore(self, state: dict[str, Any]) -> None:
        self._sums, self._highest = dict(state["sums"]), dict(state["highest"])
        self.noisy = state["noisy"]


def difference(sampler: torch.Tensor, policy: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log p_policy - log p_sampler, float32 [rows, tokens] and 0 where it is not known; and where it is."""
    apart = policy.detach().float() - sampler.float()
    known = mask & ~apart.isnan()
    return apart.masked_fill(~known, 0.0), known


def completions_of(rows: Sequence[Trajectory], names: Sequence[str]) -> list[dict[str, Any]]:
    """What is shown of each completion: its prompt, itself, its rewards by the functions' names, its extras."""
    return [
        {"prompt": row.row["prompt"], "completion": row.completion, **dict(zip(names, row.rewards, strict=True)),
         **row.extras}
        for row in rows
    ]  # fmt: skip
