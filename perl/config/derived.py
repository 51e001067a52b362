"""What follows from several fields of a configuration of perl.train, for all that ask."""

from __future__ import annotations

import math
from typing import Any

from perl.algorithms import ALGORITHMS
from perl.config.schema import CorrectionMode, RolloutConfig


def batches_ahead(rollout: RolloutConfig) -> int:
    """By how many generation batches the policy that draws is older than the one that is trained, at most."""
    return rollout.lag or rollout.max_staleness


def correction_of(rollout: RolloutConfig) -> CorrectionMode:
    """How the loss is corrected for the policy that drew: `importance_correction`, auto resolved."""
    if rollout.importance_correction != "auto":
        return rollout.importance_correction
    another = rollout.engine == "vllm" or batches_ahead(rollout) or rollout.quantization != "none"
    return "token" if another else "none"


def reward_calls(values: Any) -> int:
    """Calls of reward functions that a generation batch waits for, one after the other: twice as many with a greedy
    completion of each prompt (ReMax).

    Args:
        values: with the groups `reward` and `algorithm`.
    """
    return max(1, len(values.reward.functions)) * (2 if ALGORITHMS[values.algorithm.name].greedy else 1)


def rows_stand(training: Any) -> bool:
    """Whether the loss depends on which rows share a micro-batch, so that each has the per_device_train_batch_size rows
    that TRL gives it: a mean over its tokens (bnpo, an entropy bonus), or a rank among them (top_entropy_quantile). A
    router's auxiliary loss depends on them too, which only the loaded model tells.

    Args:
        training: the group `training`, or what was built of it.
    """
    of_entropies = training.top_entropy_quantile < 1.0 or training.use_adaptive_entropy or training.entropy_coef != 0.0
    return training.loss_type == "bnpo" or of_entropies


def pieces_of(group: int, rows: int, rollout: RolloutConfig) -> int:
    """Completions of a piece, of a generation batch of `rows` in groups: by default a quarter, in whole groups; a group
    with max_staleness."""
    return group if rollout.max_staleness else rollout.piece_size or group * max(1, rows // group // 4)


def too_many_workers(config: Any) -> str | None:
    """That some workers of a training never draw, as fewer pieces are handed out at once, and what to write; None where
    each can have one.

    Args:
        config: as it was built.
    """
    training, rollout = config.training, config.rollout
    group, rows = training.num_generations or 1, training.generation_batch_size or 1
    batches, size, groups = batches_ahead(rollout) + 1, pieces_of(group, rows, rollout), rows // group
    greedy = groups if ALGORITHMS[config.algorithm.name].greedy else 0
    pieces = math.ceil((rows + greedy) / size) * batches
    if rollout.workers <= pieces:
        return None
    needed = math.ceil(rollout.workers / batches)
    smaller = f"--config.rollout.piece_size {group * (groups // needed)}, or " if needed <= groups else ""
    return (
        f"--config.rollout.workers {rollout.workers}: no more than {pieces} pieces of {size} completions are handed out"
        f" at once, and the other workers never draw; write {smaller}--config.rollout.workers {pieces}"
    )


def draws_alike(rollout: RolloutConfig) -> bool:
    """Completions are drawn in pieces at fixed places: neither the number of workers nor what memory is free then may
    decide how a piece is computed."""
    return not rollout.max_staleness and bool(rollout.workers or rollout.piece_size)


def drawn_at_once(group: int, rows: int, rollout: RolloutConfig) -> int:
    """Completions that a worker decodes together: a piece, or with max_staleness whole groups, as many as perl's own
    loop decodes on an accelerator."""
    size = pieces_of(group, rows, rollout)
    return max(size, min(256, rows) // size * size) if rollout.max_staleness else size


def validates_by_vllm(values: Any) -> bool:
    """Where workers draw, the trainer's own model validates.

    Args:
        values: with the group `rollout`.
    """
    return values.rollout.engine == "vllm" and not values.rollout.workers


def scored_quantizations(values: Any) -> tuple[str, ...]:
    """What a validation scores the policy above: the base as it is ("none"), by rollout.quantization, or both.

    Args:
        values: with the groups `rollout` and `validation`.
    """
    rollout = values.rollout
    if not values.validation.quantized:
        return ("none",)
    return (rollout.quantization,) if validates_by_vllm(values) else ("none", rollout.quantization)
