"""What an algorithm is, and what its advantages are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The completions of a generation batch with their rewards: those of this process, and how to see the others'."""

    rewards: torch.Tensor
    """float32 [rows]: weighted sums of the reward functions, less algorithm.kl_in_reward times the KL divergence of the
    completion; NaN where no function gave one."""
    token_rewards: torch.Tensor
    """float32 [rows, tokens]: the same, spread over the tokens: the functions' at the last one that is trained on, each
    token's own KL divergence; 0 where `mask` is False and in rows without a reward."""
    mask: torch.Tensor
    """bool [rows, tokens]: the tokens that are trained on."""
    group_size: int
    """Completions of each prompt, one after the other."""
    gather: Callable[[torch.Tensor], torch.Tensor]
    """From [rows] of this process to [rows of all processes], process after process: groups are whole there. Any other
    first dimension that is the same on every process will do."""
    first: int
    """Place of this process's first row among the rows of all."""
    gamma: float = 1.0
    """Discount of a reward by token, algorithm.gamma."""
    lam: float = 1.0
    """Lambda of generalized advantage estimation, algorithm.lam."""
    values: torch.Tensor | None = None
    """float32 [rows, tokens]: the critic's, before the update; None for an algorithm without one."""
    generalized: tuple[torch.Tensor, torch.Tensor] | None = None
    """Advantages and returns, float32 [rows, tokens], that perl.algorithms.ppo.generalized makes of `values`; None
    for an algorithm without a critic."""
    baselines: torch.Tensor | None = None
    """float32 [rows]: the weighted reward of the greedy completion of each row's prompt, NaN where no function gave
    one; None for an algorithm without (`Algorithm.greedy`)."""
    by_function: torch.Tensor | None = None
    """float32 [rows of all processes, functions]: the rewards before they are added up, NaN where a function gave
    none."""
    weights: torch.Tensor | None = None
    """float32 [functions], training.reward_weights."""
    scale: Literal["group", "batch", "none"] = "group"
    """What an advantage is divided by, where the estimator lets the user choose: training.scale_rewards."""

    def groups(self) -> torch.Tensor:
        """float32 [groups, group_size]: the rewards of all processes."""
        return self.gather(self.rewards).view(-1, self.group_size)

    def without_advantage(self) -> torch.Tensor:
        """bool [groups, group_size]: rows without a reward, and rows whose group has no two different ones. What they
        are compared with is their own reward, but for rounding: their advantage is an exact 0."""
        rewards = self.groups()
        return rewards.isnan() | equal_groups(rewards)[:, None]

    def rewarded(self) -> torch.Tensor:
        """bool [rows, tokens]: the tokens that are trained on, of rows that have a reward."""
        return self.mask & ~self.rewards.isnan()[:, None]

    def local(self, gathered: torch.Tensor) -> torch.Tensor:
        """Of a tensor [rows of all processes, or groups, group_size] the rows [rows] of this process."""
        return gathered.flatten()[self.first : self.first + len(self.rewards)]


def equal_groups(rewards: torch.Tensor) -> torch.Tensor:
    """bool [groups]: whether all rewards of a group [groups, group_size] are the same number, or NaN for none, so that
    its advantages are 0.

    In floating point, reward minus the group's mean need not be: the mean of eight 1.2 is not 1.2, and divided by the
    deviation of that rounding an advantage of 1e-3 remains.
    """
    unknown = rewards.isnan()
    return rewards.masked_fill(unknown, -math.inf).amax(dim=1) <= rewards.masked_fill(unknown, math.inf).amin(dim=1)


Advantages = Callable[[Scored], "torch.Tensor"]
"""float32 [rows] or [rows, tokens] of this process; 0 where a row has no reward. Every process calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One algorithm."""

    paper: str
    """Its source, such as "arXiv 2402.03300"."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What it sets of the configuration, by the names of flags without --config; a recipe or a flag that says
    otherwise overrides it."""
    advantages: Advantages | None = None
    """How rewards become advantages; None: perl.algorithms.grpo.group_relative, by training.scale_rewards."""
    uses: frozenset[str] = frozenset()
    """Flags without --config that `advantages` reads and others may not, such as "algorithm.gamma"."""
    groups: bool = True
    """The completions of a prompt are compared with each other: there must be at least two."""
    greedy: bool = False
    """A greedy completion of each prompt is drawn and scored too, and not trained on: `Scored.baselines`."""
    critic: bool = False
    """`advantages` are made of a critic's values (perl.training.critic)."""
