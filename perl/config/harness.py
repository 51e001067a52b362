"""What lm-evaluation-harness calls a flag -> what to write here. Its flags are not taken as ours: some of its values
mean another thing (`--limit 0.1` is a share, `--model vllm` an engine)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from perl.base.errors import UserError

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


def _renamed(flag: str) -> Callable[[str], str]:
    return lambda value: f"write {flag} {value}".rstrip()


def _left_out(why: str) -> Callable[[str], str]:
    return lambda value: f"leave it out: {why}"


def _limit(value: str) -> str:
    if "." in value:
        return "write --max_samples and how many problems of each dataset"
    return f"write --max_samples {value}".rstrip()


def _translated(flags: dict[str, str]) -> Callable[[str], str]:
    """`pretrained=M,dtype=bfloat16` -> `--model M --dtype bfloat16`; keys without a flag are named."""

    def hint(value: str) -> str:
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        new = " ".join(f"{flags[key.strip()]} {given}".rstrip() for key, _, given in pairs if key.strip() in flags)
        without = ", ".join(key.strip() for key, _, _ in pairs if key.strip() not in flags)
        write = f"write {new or ' '.join(dict.fromkeys(flags.values()))}"
        return f"{write}; there is no flag for {without}" if without else write

    return hint


HINTS: dict[str, Callable[[str], str]] = {
    "--apply_chat_template": _left_out("the model's chat template is always applied"),
    "--batch_size": _left_out(
        "the batch is kept as full as memory allows; --max_batch_tokens bounds the KV cache without --use_vllm,"
        " --gpu_memory_utilization with it"
    ),
    "--fewshot_as_multiturn": _left_out("the examples of --few_shot are always turns of the chat"),
    "--gen_kwargs": _translated(GEN_KWARGS),
    "--limit": _limit,
    "--log_samples": _left_out("every completion is in samples.jsonl"),
    "--max_batch_size": _left_out("the batch is kept as full as memory allows"),
    "--model_args": _translated(MODEL_ARGS),
    "--num_fewshot": _renamed("--few_shot"),
    "--output_path": _renamed("--result_dir"),
    "--system_instruction": _renamed("--system_prompt"),
    "--tasks": _renamed("--dataset"),
}
"""Flag -> what to do instead, given its value ("" where it has none)."""


def refuse_harness_flags(argv: Sequence[str], known: Iterable[str]) -> None:
    """Raise a UserError for the first flag of lm-evaluation-harness that this parser does not know."""
    hints = {flag: hint for flag, hint in HINTS.items() if flag not in set(known)}
    for place, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag not in hints:
            continue
        following = argv[place + 1] if place + 1 < len(argv) else ""
        if not equals and not following.startswith("--"):
            value = following
        shown = f"{flag} {value}".strip()
        raise UserError(f"{shown}: is lm-evaluation-harness's flag; {hints[flag](value)}")
