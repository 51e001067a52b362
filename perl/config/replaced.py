"""Flags that are not there -> what to write instead: those that were removed, and lm-evaluation-harness's, which are
not taken as ours (some of its values mean another thing: `--limit 0.1` is a share, `--model vllm` an engine)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from perl.base.errors import UserError

COLOCATE = "vLLM runs in the trainer's process, on its device"
NO_BATCHING = "leave it out: the engine is gone; --config.rollout.engine fast batches completions continuously"
SHARED_BASE = "leave it out: the critic computes on the policy's base"

REMOVED_VALUES: dict[tuple[str, Any], str] = {
    ("rollout.engine", "continuous_batching"): "write fast, which batches completions continuously too",
    ("training.vllm_mode", "server"): f"write colocate: {COLOCATE}",
}
"""(field, value) -> what to write instead."""

REMOVED_FIELDS: dict[str, tuple[Any, str]] = {
    "critic.model_name_or_path": (None, SHARED_BASE),
    "critic.share_base": (True, SHARED_BASE),
    "training.transformers_continuous_batching_config": (None, NO_BATCHING),
    "training.use_transformers_continuous_batching": (False, NO_BATCHING),
    "training.use_transformers_paged": (False, NO_BATCHING),
    "training.vllm_group_port": (51216, f"leave it out: {COLOCATE}"),
    "training.vllm_server_base_url": (None, f"leave it out: {COLOCATE}"),
    "training.vllm_server_host": ("0.0.0.0", f"leave it out: {COLOCATE}"),
    "training.vllm_server_port": (8000, f"leave it out: {COLOCATE}"),
    "training.vllm_server_timeout": (240.0, f"leave it out: {COLOCATE}"),
}
"""Field -> (its old default, with which the config.yaml of an older run is still read; what to write instead)."""


def refuse_removed_flags(argv: Sequence[str]) -> None:
    """Raise a UserError for the first flag of a command line that was removed, or whose value was."""
    for flag, value in _flags(argv):
        name = flag.removeprefix("--config.")
        _, instead = REMOVED_FIELDS.get(name, (None, REMOVED_VALUES.get((name, value))))
        if instead:
            raise UserError(f"{f'{flag} {value}'.strip()}: was removed; {instead}")


def without_removed(group: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's fields of a group without those that were removed and that say what is done anyway; a UserError for
    those that say otherwise."""
    kept = {}
    for name, value in fields.items():
        field = f"{group}.{name}"
        default, instead = REMOVED_FIELDS.get(field, (None, None))
        if instead is None:
            kept[name] = value
            instead = REMOVED_VALUES.get((field, value)) if isinstance(value, str) else None
        elif value == default:
            continue
        if instead:
            raise UserError(f"{field} {value}: was removed; {instead}")
    return kept


MODEL_ARGS = {
    "pretrained": "--model",
    "peft": "--adapter",
    "dtype": "--dtype",
    "max_model_len": "--max_model_len",
    "max_length": "--max_model_len",
    "tensor_parallel_size": "--tp_size",
    "data_parallel_size": "--dp_size",
    "gpu_memory_utilization": "--gpu_memory_utilization",
    "enforce_eager": "--enforce_eager",
}
GEN_KWARGS = {
    "temperature": "--temperature",
    "top_p": "--top_p",
    "top_k": "--top_k",
    "max_gen_toks": "--max_new_tokens",
    "max_new_tokens": "--max_new_tokens",
    "max_tokens": "--max_new_tokens",
    "seed": "--seed",
}
"""Keys of `KEY=VALUE,KEY=VALUE` that have a flag here."""

HARNESS: dict[str, str | dict[str, str]] = {
    "--apply_chat_template": "leave it out: the model's chat template is always applied",
    "--batch_size": "leave it out: the batch is kept as full as memory allows; --max_batch_tokens bounds the KV cache"
    " without --use_vllm, --gpu_memory_utilization with it",
    "--fewshot_as_multiturn": "leave it out: the examples of --few_shot are always turns of the chat",
    "--gen_kwargs": GEN_KWARGS,
    "--limit": "write --max_samples {value}",
    "--log_samples": "leave it out: every completion is in samples.jsonl",
    "--max_batch_size": "leave it out: the batch is kept as full as memory allows",
    "--model_args": MODEL_ARGS,
    "--num_fewshot": "write --few_shot {value}",
    "--output_path": "write --result_dir {value}",
    "--system_instruction": "write --system_prompt {value}",
    "--tasks": "write --dataset {value}",
}
"""lm-evaluation-harness's flag -> what to do instead, given its value, or the flags of its value's keys."""


def refuse_harness_flags(argv: Sequence[str]) -> None:
    """Raise a UserError for the first flag of lm-evaluation-harness."""
    for flag, value in _flags(argv):
        if flag not in HARNESS:
            continue
        hint = HARNESS[flag]
        if flag == "--limit" and "." in value:
            instead = "write --max_samples and how many problems of each dataset"
        else:
            instead = hint.format(value=value).rstrip() if isinstance(hint, str) else _translated(value, hint)
        raise UserError(f"{f'{flag} {value}'.strip()}: is lm-evaluation-harness's flag; {instead}")


def _translated(value: str, flags: Mapping[str, str]) -> str:
    """`pretrained=M,dtype=bfloat16` -> `--model M --dtype bfloat16`; keys without a flag are named."""
    words = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    pairs = [(key.strip(), given) for key, _, given in words]
    new = " ".join(f"{flags[key]} {given}".rstrip() for key, given in pairs if key in flags)
    without = ", ".join(key for key, _ in pairs if key not in flags)
    write = f"write {new or ' '.join(dict.fromkeys(flags.values()))}"
    return f"{write}; there is no flag for {without}" if without else write


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(flag, its value or "") of each flag of a command line."""
    for word, following in zip_longest(argv, argv[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            yield flag, value if equals or following.startswith("--") else following
