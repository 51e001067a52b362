"""Group Relative Policy Optimization, and what differs from it in TRL's arguments alone."""

from __future__ import annotations

import math
from typing import Any

import torch

from perl.algorithms.algorithm import Algorithm, Scored, equal_groups

GRPO = Algorithm(paper="arXiv 2402.03300")
"""Sets nothing: TRL's defaults."""

DR_GRPO = Algorithm(
    paper="arXiv 2503.20783",
    settings={"training.loss_type": "dr_grpo", "training.scale_rewards": "none"},
)
"""Neither the length of a completion nor the deviation of its group divides the loss."""

GSPO = Algorithm(
    paper="arXiv 2507.18071",
    settings={
        "training.loss_type": "grpo",
        "training.importance_sampling_level": "sequence",
        "training.epsilon": 3e-4,
        "training.epsilon_high": 4e-4,
        "training.beta": 0.0,
    },
)
"""One ratio for a whole completion; the paper's section 5.1 clips it at 3e-4 and 4e-4. It differs from GRPO where a
rollout serves several updates: training.steps_per_generation 4 times gradient_accumulation_steps there."""

DAPO = Algorithm(
    paper="arXiv 2503.14476",
    settings={
        "algorithm.dynamic_sampling": True,
        "training.loss_type": "dapo",
        "training.epsilon": 0.2,
        "training.epsilon_high": 0.28,
        "training.beta": 0.0,
        "reward.functions": ["accuracy", "overlong"],
    },
)
"""Clip-higher, dynamic sampling, the loss as a mean over tokens, and a softer punishment of long completions."""

LUSPO = Algorithm(
    paper="arXiv 2602.05261",
    settings={"training.loss_type": "luspo", "training.importance_sampling_level": "sequence", "training.beta": 0.0},
)
"""GSPO with each completion weighted by its length, so that long ones count no less a token."""

CISPO = Algorithm(
    paper="arXiv 2506.13585",
    settings={"training.loss_type": "cispo", "training.epsilon_high": 5.0, "training.beta": 0.0},
)
"""The clipped ratio is a weight of the log-probability: no token loses its gradient. The bound is that of ScaleRL,
arXiv 2510.13786; the paper of CISPO gives none."""

SAPO = Algorithm(
    paper="arXiv 2511.20347",
    settings={
        "training.loss_type": "sapo",
        "training.sapo_temperature_pos": 1.0,
        "training.sapo_temperature_neg": 1.05,
        "training.beta": 0.0,
    },
)
"""A smooth gate on the ratio instead of a clip."""

VESPO = Algorithm(paper="arXiv 2602.10693", settings={"training.loss_type": "vespo", "training.beta": 0.0})
"""Completions weighted by a gamma density of their ratio, TRL's k and lambda."""

GDPO = Algorithm(
    paper="arXiv 2601.05242",
    settings={"training.multi_objective_aggregation": "normalize_then_sum"},
)
"""Each reward function is normalized within the group before they are added up: for several of them."""


def group_relative(scored: Scored) -> torch.Tensor:
    """A_i = (r_i - mean of its group) / (s + 1e-4) with s by `scored.scale` (arXiv 2402.03300, equation 3, with TRL's
    constant): float32 [rows]."""
    rewards = scored.groups()
    advantages = rewards - rewards.nanmean(dim=1, keepdim=True)
    scale = deviation(scored)
    advantages = advantages if scale is None else advantages / (scale + 1e-4)
    return scored.local(advantages.masked_fill(scored.without_advantage(), 0.0))


def normalized_by_function(scored: Scored) -> torch.Tensor:
    """The rewards of each function less their group's mean, divided by its deviation + 1e-4, added up with the
    functions' weights, and the sums normalized so over all completions (GDPO, arXiv 2601.05242, section 3): float32
    [rows], exactly 0 where every function gave all of a group the same."""
    assert scored.by_function is not None
    assert scored.weights is not None
    groups = scored.by_function.view(-1, scored.group_size, len(scored.weights))
    normalized = (groups - groups.nanmean(dim=1, keepdim=True)) / (nanstd(groups, dim=1, keepdim=True) + 1e-4)
    total = weighted_sum(normalized.flatten(end_dim=1), scored.weights)
    advantages = ((total - total.nanmean()) / (nanstd(total) + 1e-4)).nan_to_num(nan=0.0).view(-1, scored.group_size)
    equal = torch.stack([equal_groups(one) for one in (groups * scored.weights).unbind(dim=2)]).all(dim=0)
    return scored.local(advantages.masked_fill(equal[:, None], 0.0))


def weighted_sum(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """float [rows]: the sums of the functions' rewards [rows, functions], NaN where a row has none."""
    return (rewards * weights).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), math.nan)


def nanstd(values: torch.Tensor, **over: Any) -> torch.Tensor:
    """The standard deviation, with Bessel's correction, of those that are no NaN; `over` is as for a sum."""
    squares = (values - values.nanmean(**over)).square().nansum(**over)
    return (squares / ((~values.isnan()).sum(**over) - 1).clamp(min=1)).sqrt()


def deviation(scored: Scored) -> torch.Tensor | None:
    """`nanstd` of the rewards of each group ([groups, 1]), of all ([]), or None, by `scored.scale`."""
    match scored.scale:
        case "none":
            return None
        case "group":
            return nanstd(scored.groups(), dim=1, keepdim=True)
        case "batch":
            return nanstd(scored.groups())


def best_of_group(scored: Scored) -> torch.Tensor:
    """The best completion of a group has the best reward less the second best, divided as `scored.scale` says; the
    others 0 (arXiv 2503.19595): float32 [rows]. What it raises is the best of k, pass@k."""
    rewards = scored.groups()
    best, place = rewards.masked_fill(rewards.isnan(), -torch.inf).topk(2, dim=1)
    lead = (best[:, :1] - best[:, 1:]).nan_to_num(nan=0.0, posinf=0.0)  # posinf: the only reward of its group
    scale = deviation(scored)
    lead = lead if scale is None else lead / (scale + 1e-6)
    return scored.local(torch.zeros_like(rewards).scatter_(1, place[:, :1], lead))


GRPO_PASSK = Algorithm(paper="arXiv 2503.19595", advantages=best_of_group, uses=frozenset({"training.scale_rewards"}))
