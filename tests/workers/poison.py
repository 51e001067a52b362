"""Two transformers engines, of which one dies of a token and one is late. Unpickling their options puts them into a
worker's ENGINES."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from perl.engines import ENGINES, Engine

POISON = 9
"""Token that no process survives in a prompt."""


@dataclass(frozen=True)
class Hook:
    """What makes the model die."""

    token: int

    def __call__(self, _, args, kwargs):
        if (kwargs["input_ids"] == self.token).any() and kwargs["input_ids"].shape[1] > 1:
            os.kill(os.getpid(), signal.SIGKILL)


def build(model_path: str, *, hook: Hook, **options) -> Engine:
    from perl.engines.hf import HFEngine

    engine = HFEngine(model_path, **options)
    engine.model.register_forward_pre_hook(hook, with_kwargs=True)
    return engine


@dataclass(frozen=True)
class Late:
    """Loads the model that the worker's `variable` names only when that model's folder has gone; others at once."""

    variable: str = "LATE_MODEL"


def build_late(model_path: str, *, late: Late, **options) -> Engine:
    from perl.engines.hf import HFEngine

    while model_path == os.environ.get(late.variable) and Path(model_path).exists():
        time.sleep(0.05)
    return HFEngine(model_path, **options)


ENGINES["poison"] = build
ENGINES["late"] = build_late
