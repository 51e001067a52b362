"""What becomes of each vllm_* field of TRL's GRPOConfig, with engine vllm and with another."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from trl import GRPOConfig

from perl.base.errors import UserError
from perl.config.load import parse

VLLM = ("--config.rollout.engine", "vllm")
CORRECTED = ("--config.rollout.importance_correction", "token")
REMOVED = "refused"
HONOURED = "honoured with engine vllm, else no effect"
ALWAYS = "honoured with engine vllm and with importance_correction, else no effect"

FIELDS = {
    "vllm_enable_sleep_mode": ("true", HONOURED),
    "vllm_gpu_memory_utilization": ("0.2", HONOURED),
    "vllm_importance_sampling_cap": ("4.0", ALWAYS),  # TRL's old name of clip_max, which it sets
    "vllm_importance_sampling_clip_max": ("4.0", ALWAYS),
    "vllm_importance_sampling_clip_min": ("0.5", ALWAYS),
    "vllm_importance_sampling_correction": ("false", HONOURED),
    "vllm_importance_sampling_mode": ("token_mask", HONOURED),
    "vllm_max_model_length": ("96", HONOURED),
    "vllm_mode": ("colocate", HONOURED),
    "vllm_model_impl": ("transformers", HONOURED),
    "vllm_structured_outputs_regex": ("[0-9]+", HONOURED),
    "vllm_tensor_parallel_size": ("2", HONOURED),
    "vllm_group_port": ("51217", REMOVED),
    "vllm_server_base_url": ("http://host:8000", REMOVED),
    "vllm_server_host": ("host", REMOVED),
    "vllm_server_port": ("8001", REMOVED),
    "vllm_server_timeout": ("10", REMOVED),
}
"""Field -> (another value than its default, what becomes of it)."""


def without_effect(name: str, *argv: str) -> list[str]:
    return [line for line in parse([*argv]).warnings if line.startswith(f"--config.training.{name} has no effect")]


def test_the_table_has_each_field_of_trl():
    assert {field.name for field in fields(GRPOConfig) if field.name.startswith("vllm_")} == FIELDS.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_honoured_or_has_no_effect_with_one_warning_or_is_refused(name):
    value, becomes = FIELDS[name]
    words = (f"--config.training.{name}", value)
    if becomes == REMOVED:
        for engine in ((), VLLM):
            with pytest.raises(UserError, match=re.escape(f"unknown flag {words[0]}; did you mean")):
                parse([*engine, *words])
        return
    assert without_effect(name, *words, *VLLM) == []
    assert len(without_effect(name, *words)) == 1
    assert len(without_effect(name, *words, *CORRECTED)) == (becomes == HONOURED)
