"""Algorithms as their papers write them, for pages and cards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TITLES = {
    "dr_grpo": "Dr. GRPO",
    "grpo_passk": "GRPO for pass@k",
    "remax": "ReMax",
    "reinforce_plus_plus": "REINFORCE++",
    "reinforce_plus_plus_baseline": "REINFORCE++ baseline",
}
"""All other algorithms are their names in capitals."""


def algorithm_of(config: Mapping[str, Any]) -> str:
    """What trained the run with this config.yaml: the algorithm's name, or sft for a run of perl.sft, which has no
    rewards."""
    if "reward" not in config:
        return "sft"
    return (config.get("algorithm") or {}).get("name", "grpo")


def title_of(algorithm: str) -> str:
    """GRPO, Dr. GRPO, REINFORCE++, … for what algorithm_of returns."""
    return TITLES.get(algorithm, algorithm.upper())
