"""Algorithms of reinforcement learning: what each sets of the configuration, and how rewards become advantages.

To add one: a module with an Algorithm, and its line in ALGORITHMS. Rollouts, rewards, packing and the optimizer are
the same for all (perl/training/step.py); so is the loss (perl/training/loss.py), which settings choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perl.algorithms.algorithm import Algorithm
from perl.algorithms.grpo import CISPO, DAPO, DR_GRPO, GDPO, GRPO, GRPO_PASSK, GSPO, LUSPO, SAPO, VESPO
from perl.algorithms.ppo import PPO
from perl.algorithms.reinforce_plus_plus import REINFORCE_PLUS_PLUS, REINFORCE_PLUS_PLUS_BASELINE
from perl.algorithms.remax import REMAX
from perl.algorithms.rloo import GPG, OPO, RLOO
from perl.base.errors import lookup

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": GRPO,
    "dapo": DAPO,
    "dr_grpo": DR_GRPO,
    "gspo": GSPO,
    "luspo": LUSPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "vespo": VESPO,
    "gdpo": GDPO,
    "grpo_passk": GRPO_PASSK,
    "rloo": RLOO,
    "remax": REMAX,
    "opo": OPO,
    "gpg": GPG,
    "reinforce_plus_plus": REINFORCE_PLUS_PLUS,
    "reinforce_plus_plus_baseline": REINFORCE_PLUS_PLUS_BASELINE,
    "ppo": PPO,
}


def settings_of(name: str) -> Mapping[str, Any]:
    """What the algorithm sets, by the names of flags without --config. A UserError for an unknown name."""
    return lookup(ALGORITHMS, name, "algorithm", "--config.algorithm.name").settings
