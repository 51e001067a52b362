"""Rows and summaries as the evaluator leaves them, for tests that make result folders by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from perl.base.provenance import provenance
from perl.tasks import TASKS


def record(key: str, sample: int = 0, **changes: Any) -> dict[str, Any]:
    """A row of samples.jsonl: a correct answer to GSM8K unless `changes` say otherwise."""
    made = {
        "key": key, "sample": sample, "seed": 7, "task": "gsm8k", "source": f"test.jsonl:{key}",
        "prompt": f"<|user|>\nQuestion {key}?\nAnswer with ####.<|end|>\n<|model|>\n", "gold": "18",
        "completion": "so it is\n#### 18", "score": 1.0, "scores": {"flexible": 1.0, "strict": 1.0},
        "extracted": "18", "reason": "correct", "prompt_tokens": 20, "tokens": 10, "finish_reason": "stop",
        "time": 0.5, "engine": "hf", "error": None,
    }  # fmt: skip
    assert changes.keys() <= made.keys() | {"conversation"}
    return made | changes


def summary(records: list[dict[str, Any]], n: int, **changes: Any) -> dict[str, Any]:
    """A summary.json of GSM8K; its intervals are as wide as they may be, not the evaluator's."""
    sampling = asdict(TASKS["gsm8k"].sampling)
    sampling.pop("n")
    count, accuracy = len(records), sum(r["score"] for r in records) / len(records)
    names = ["accuracy", f"avg@{n}", *(f"{kind}@{k}" for kind in ("pass", "maj") for k in dict.fromkeys((1, n)))]
    rules = dict.fromkeys(rule for r in records for rule in r["scores"])
    asked = {rule: [r["scores"][rule] for r in records if rule in r["scores"]] for rule in rules}
    return {
        "problems": count // n, "samples": count, "n": n,
        "metrics": {name: {"value": accuracy, "low": 0.0, "high": 1.0} for name in names},
        "rules": {rule: {"mean": sum(scores) / len(scores), "scored": len(scores)} for rule, scores in asked.items()},
        "truncated": sum(r["finish_reason"] == "length" for r in records) / count,
        "unextracted": sum(r["extracted"] is None for r in records) / count,
        "timeouts": 0, "grading_errors": 0, "not_generated": 0, "engines": ["hf"],
        "mean_tokens": sum(r["tokens"] for r in records) / count, "max_tokens": max(r["tokens"] for r in records),
        "mean_prompt_tokens": 20.0, "tokens": sum(r["tokens"] for r in records),
        "generation": None, "tasks": ["gsm8k"], "model": "models/tiny", "adapter": None, "adapter_mode": "merge",
        "base_hash": "0123", "adapter_hash": None, "dtype": "float32", "max_model_len": None, "dataset": "gsm8k",
        "split": None, "step": None, "grading": {"gsm8k": {"rules": ["flexible", "strict"], "primary": "flexible"}},
        "grading_hash": "89ab", "styles": {"gsm8k": {"template": "{question}", "system_prompt": None, "few_shot": []}},
        "sampling": sampling, "merge": None, "chat_template": "{{ messages }}", "chat_template_hash": "4567",
        "provenance": provenance(),
    } | changes  # fmt: skip


def sweep(*names: str, **changes: Any) -> dict[str, Any]:
    """A sweep.json whose candidates were scored after step 5, unless `changes` of each say otherwise."""
    entry = {"adapter": None, "adapter_hash": None, "step": 5, "error": None, "metrics": {}} | changes
    return {"model": "a", "candidates": [{"name": name} | entry for name in names], "provenance": provenance()}
