"""In what an evaluation asks otherwise than the training has: a line to the user for each such way."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perl import device
from perl.config.evaluation import EvalConfig, environment_flags
from perl.tasks.trained import trained_with

log = logging.getLogger(__name__)

OF_A_CONVERSATION = ("tools", "factory", "max_turns", "max_observation_tokens", "tool_call_parser")
"""Fields of the environment that its tokens depend on."""


def warn_of_training(config: EvalConfig, folders: Iterable[Path]) -> None:
    """One line for each way in which adapters or models were trained otherwise than they are scored."""
    told = set[str]()
    for folder in folders:
        for group, differs in DIFFERS.items():
            if (how := differs(config, trained_with(folder, group))) and how not in told:
                told.add(how)
                log.warning("%s was trained %s", folder, how)


def _in_conversations(config: EvalConfig, environment: dict[str, Any]) -> str | None:
    if not (flags := environment_flags(environment)):
        return None
    if not config.environment.used:
        return f"in conversations, and its first turn alone is scored; write {shlex.join(flags)}"
    ours = asdict(config.environment)
    if other := [name for name in OF_A_CONVERSATION if _named(ours[name]) != _named(environment.get(name, ours[name]))]:
        return f"in conversations of other settings ({', '.join(other)}); write {shlex.join(flags)}"
    return None


def _named(value: Any) -> Any:
    """A user's file by its name: it may have moved, and each command has its own working directory."""
    if isinstance(value, list):
        return [_named(item) for item in value]
    return Path(value).name if isinstance(value, str) else value


def _above_another_base(config: EvalConfig, rollout: dict[str, Any]) -> str | None:
    trained = rollout.get("quantization")
    if not isinstance(trained, str) or trained == config.quantization:
        return None
    how = f"--quantization {trained}" + ("" if trained == "none" else " --use_vllm --adapter_mode lora")
    if trained not in ("none", *device.VLLM_QUANTIZES[device.detect().kind]):
        how = "--config.validation.quantized true in the training, as vLLM has no such products here"
    return (
        f"with --config.rollout.quantization {trained}, and is scored with --quantization {config.quantization}: as it"
        f" drew in training it is scored by {how}"
    )


def _by_other_arguments(config: EvalConfig, training: dict[str, Any]) -> str | None:
    given = training.get("chat_template_kwargs")
    if not given or given == config.chat_template_kwargs:
        return None
    return f"with other prompts: write --chat_template_kwargs {shlex.quote(json.dumps(given))}"


def _after_another_system_turn(config: EvalConfig, dataset: dict[str, Any]) -> str | None:
    text = dataset.get("system_prompt")
    if not isinstance(text, str) or text == config.system_prompt:
        return None
    word = shlex.quote(text) if text.isprintable() else f"$'{repr(text + chr(34))[1:-2]}'"  # bash's own escapes
    return f"with other prompts: write --system_prompt {word}"


DIFFERS: dict[str, Callable[[EvalConfig, dict[str, Any]], str | None]] = {
    "environment": _in_conversations,
    "rollout": _above_another_base,
    "training": _by_other_arguments,
    "dataset": _after_another_system_turn,
}
"""Group of a training's configuration -> how it differs from the evaluation's, in words; None: in nothing."""
