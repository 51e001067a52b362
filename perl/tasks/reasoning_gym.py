"""reasoning-gym as a source of problems: `reasoning_gym:NAME?setting=value&…`, made here, without a network.

    reasoning_gym:chain_sum
    reasoning_gym:countdown?max_numbers=3&max_target=50&size=500&seed=1

The settings are the generator's keyword arguments (its difficulty); `size` is the number of problems and `seed` from 0
to SEEDS - 1. The training split and the held-out one (test) draw with seeds that never meet. What is right the
generator's own scoring says (perl.grading.entries), so those of it that the audit has found faulty are refused:
reasoning_gym.json, which `python -m benchmarks.reward_audit` writes.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from perl.base.errors import UserError, lookup
from perl.tasks.files import Row

TASK = "reasoning_gym"
AUDITED = Path(__file__).with_name("reasoning_gym.json")
"""{"version": …, "sound": [name], "refused": {name: reason}}"""
SIZES = {"train": 2000, "test": 200}
SPAN = 10_000_000
"""Seeds of a `seed`: reasoning-gym seeds each problem with that of its data set and its place."""
SEEDS = 200
"""numpy's generators take 32 bits."""


def is_generated(spec: str) -> bool:
    return spec.partition(":")[0] == TASK


def generated_rows(spec: str, split: str | None, task: str | None, audited: bool = True) -> Iterator[tuple[Row, str]]:
    """Yield (row, place), the row's answer being an entry (perl.grading.entries).

    Args:
        split: train, or test, which is the default.
        task: what the user wants to grade by; another than TASK is a UserError.
        audited: whether a generator that the audit has not found sound is a UserError.
    """
    split = split or "test"
    if split not in SIZES:
        raise UserError(f"{spec}: no split {split!r}; splits: {', '.join(SIZES)}")
    if task not in (None, TASK):
        raise UserError(f"{spec}: is graded by its own scoring, not as task {task}; leave the task out")
    name, settings = _read(spec)
    size, seed = settings.pop("size", SIZES[split]), settings.pop("seed", 0)
    if not isinstance(size, int) or not 1 <= size <= SPAN // 2:
        raise UserError(f"{spec}: size {size}: write a number from 1 to {SPAN // 2}")
    if not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise UserError(f"{spec}: seed {seed}: write a number from 0 to {SEEDS - 1}")
    if importlib.util.find_spec(TASK) is None:
        raise UserError(f"{spec}: reasoning-gym is not installed; pip install -e '.[{TASK}]'")
    from reasoning_gym.factory import DATASETS, create_dataset  # pyright: ignore[reportMissingImports]

    lookup(DATASETS, name, "generator of reasoning-gym", spec)
    if audited:
        _require_sound(spec, name)
    first = seed * SPAN + (SPAN // 2 if split == "test" else 0)
    try:
        made = create_dataset(name, seed=first, size=size, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(
            f"{spec}: {error or 'the generator refuses these settings'}; its settings:"
            f" {', '.join(field for field in DATASETS[name][1].__dataclass_fields__ if field not in ('seed', 'size'))}"
        ) from error
    for place in range(size):
        entry = _entry(made, place, spec)
        if not isinstance(entry["answer"], str):
            raise UserError(f"{spec}: the generator ships no answer")
        gold = {"answer": entry["answer"], "generator": name, "settings": settings}
        gold |= {"question": entry["question"], "metadata": entry["metadata"]}
        text = json.dumps(gold, ensure_ascii=False, default=str)
        yield (
            {"question": entry["question"], "answer": text, "data_source": f"{TASK}/{name}"},
            f"{spec} {split}:{place + 1}",
        )


def _entry(made: Any, place: int, spec: str) -> dict[str, Any]:
    try:
        return made[place]
    except Exception as error:  # whatever a generator raises that finds out late
        said = " ".join(str(error).split())[:200]
        raise UserError(
            f"{spec}: the generator makes no problem {place + 1} by these settings ({type(error).__name__}: {said});"
            " write others"
        ) from error


def _read(spec: str) -> tuple[str, dict[str, Any]]:
    name, _, query = spec.partition(":")[2].partition("?")
    if not name:
        raise UserError(f"{spec}: names no generator; write {TASK}:countdown, or another's name")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise UserError(f"{spec}: {error}; write {TASK}:{name}?setting=value&other=value") from error
    return name, {key: _value(text) for key, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _require_sound(spec: str, name: str) -> None:
    audited = json.loads(AUDITED.read_text(encoding="utf-8"))
    if name in audited["sound"]:
        return
    why = audited["refused"].get(name, f"not there in {audited['version']}, the version that was audited")
    raise UserError(f"{spec}: its own scoring did not pass the audit ({why}); choose another (docs/reward_audit.md)")
