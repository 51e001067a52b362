"""A transformers engine that one token kills. Unpickling POISON_OPTIONS puts it into a worker's ENGINES."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

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


ENGINES["poison"] = build
