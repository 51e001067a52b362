"""Comparisons of sampler and trainer without a model."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from perl.training.passes import SamplerCheck, Samplers


class Nobody(Samplers):
    """Whatever drew, `passes` says its log-probabilities."""

    def policy(self, weights: Any, noisy: bool = True) -> AbstractContextManager[Any]:
        return nullcontext()


def compared(*, engine: Any, passes: Any, processes: Any, metrics: Any, clock: Any) -> SamplerCheck:
    samplers = Nobody(engine=engine, passes=passes, processes=processes, noise=None)
    sampling: Any = None
    return SamplerCheck(
        samplers=samplers,
        metrics=metrics,
        clock=clock,
        sampling=sampling,
        batches_ahead=0,
        itemsize=4,
    )
