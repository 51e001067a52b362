"""Group Relative Policy Optimization, and what differs from it in TRL's arguments alone."""

from __future__ import annotations

from perl.algorithms.algorithm import Algorithm

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
"""One ratio for a whole completion; the paper's section 5.1 clips it at 3e-4 and 4e-4."""

CISPO = Algorithm(
    paper="arXiv 2506.13585",
    settings={"training.loss_type": "cispo", "training.epsilon_high": 5.0, "training.beta": 0.0},
)
"""The clipped ratio is a weight of the log-probability: no token loses its gradient."""

SAPO = Algorithm(
    paper="arXiv 2511.20347",
    settings={"training.loss_type": "sapo", "training.beta": 0.0},
)
"""A smooth gate on the ratio instead of a clip."""
