"""What is scored: a base alone, or a base with one adapter. A sweep scores several, each into a folder of its own.

    result_dir/sweep.json            the table and the curve (perl.scoring.results.Sweep)
    result_dir/logs/worker-N.log
    result_dir/CANDIDATE/            as the result_dir of a single evaluation: summary.json, merge.json
        DATASET/                     run.json, samples.jsonl, summary.json

A single evaluation has one candidate without a name, whose folder is result_dir itself.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perl.base.errors import UserError
from perl.base.files import typed
from perl.base.paths import checkpoints_in, step_of_checkpoint, user_path
from perl.models.folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, content_hash, require_adapter
from perl.scoring.results import BEST_FILE

logger = logging.getLogger(__name__)

BASE = "base"
"""After --adapter: the base without an adapter, as one of a sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The base with one adapter, or alone."""

    name: str = ""
    """Name of its folder below result_dir; empty for the one of a single evaluation, which is result_dir itself."""
    adapter: Path | None = None
    adapter_hash: str | None = None
    step: int | None = None
    """Optimizer steps that the adapter was trained for, as far as its folder tells; 0 for the base."""

    def served(self, mode: str) -> str | None:
        """What the engine serves alongside the base under this --adapter_mode, as Prompt.adapter names it."""
        return str(self.adapter.resolve()) if self.adapter is not None and mode == "lora" else None


def find_candidates(words: Sequence[str] | None) -> tuple[Candidate, ...]:
    """What the words after --adapter stand for: adapters, run folders with all their checkpoints, the base.

    Raises a UserError for a folder without an adapter, and for one that is named twice.
    """
    if not words:
        return (Candidate(),)
    candidates = [candidate for word in words for candidate in _of_word(word)]
    if len(words) == 1 and len(candidates) == 1 and candidates[0].adapter == user_path(words[0]):
        return (replace(candidates[0], name=""),)
    if list(words) == [BASE]:
        raise UserError("--adapter base: the base alone needs no --adapter; leave it out, or write adapters with it")
    return tuple(_named(candidates))


def _of_word(word: str) -> Iterator[Candidate]:
    if word == BASE:
        yield Candidate(step=0)
        return
    folder = user_path(word)
    if whole := whole_model(folder):
        raise UserError(f"--adapter {word}: {whole} is a whole model; write --model {whole}, and no --adapter")
    checkpoints = checkpoints_of(folder) if folder.is_dir() and not (folder / ADAPTER_CONFIG).is_file() else []
    if not checkpoints:
        require_adapter(folder)
        yield _of_folder(folder)
        return
    seen: dict[str | None, Path] = {}
    for adapter in checkpoints:
        if not (adapter / ADAPTER_WEIGHTS).is_file() or not (adapter / ADAPTER_CONFIG).is_file():
            logger.warning("%s holds no whole adapter (half-written?) and is left out", adapter)
            continue
        candidate = _of_folder(adapter)
        if candidate.adapter_hash in seen:
            logger.warning("%s is the same adapter as %s and is left out", adapter, seen[candidate.adapter_hash])
            continue
        seen[candidate.adapter_hash] = adapter
        yield candidate
    if not seen:
        raise UserError(f"--adapter {folder}: none of its checkpoints holds a whole adapter")


def whole_model(folder: Path) -> Path | None:
    """Where a run that trained all weights has left its model: the folder itself or, of a run's, model/ or the last
    checkpoint; None where an adapter lies there, or nothing."""
    for place in (folder, folder / "model", *reversed(checkpoints_in(folder))):
        if (place / ADAPTER_CONFIG).is_file():
            return None
        if (place / "config.json").is_file():
            return place
    return None


def checkpoints_of(run: Path) -> list[Path]:
    """The checkpoints of a training run in the order of their steps, and its final adapter."""
    final = run / "adapter"
    return checkpoints_in(run) + ([final] if (final / ADAPTER_CONFIG).is_file() else [])


def _of_folder(adapter: Path) -> Candidate:
    return Candidate(adapter=adapter, adapter_hash=content_hash(adapter), step=_step(adapter))


def _step(adapter: Path) -> int | None:
    if (step := step_of_checkpoint(adapter.resolve())) >= 0:
        return step
    for name, field in (("trainer_state.json", "global_step"), (BEST_FILE, "step")):
        try:
            return typed(json.loads((adapter / name).read_text(encoding="utf-8"))[field], int)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return None


def _named(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Each with the name of its folder, and its parent's before it where two would have the same."""
    places = [c.adapter.resolve() if c.adapter is not None else None for c in candidates]
    for place in {place for place in places if places.count(place) > 1}:
        raise UserError(f"--adapter: {place or BASE} is named twice; write it once")
    short_names = [_plain(place.name) if place is not None else BASE for place in places]
    names = [
        f"{_plain(place.parent.name)}-{name}" if place is not None and short_names.count(name) > 1 else name
        for place, name in zip(places, short_names, strict=True)
    ]
    for candidate, place, name in zip(candidates, places, names, strict=True):
        if names.count(name) > 1:
            raise UserError(f"--adapter {place}: another folder would also be written to {name}; score them apart")
        yield replace(candidate, name=name)


def _plain(name: str) -> str:
    return re.sub(r"[^\w.\-]+", "_", name).strip("._") or "adapter"
