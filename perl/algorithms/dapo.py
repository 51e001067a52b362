"""DAPO: clip-higher, dynamic sampling, the loss as a mean over tokens, and a softer punishment of long completions."""

from __future__ import annotations

from perl.algorithms.algorithm import Algorithm

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
