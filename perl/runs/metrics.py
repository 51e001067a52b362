"""What a training step costs: seconds a phase, tokens/s a device, MFU and memory.

Where each number comes from, and what several processes make of it, is written down in docs/performance.md.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from perl import device
from perl.models.folders import takes_images

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

PHASES = ("rollout", "reward", "advantages", "old_logps", "update")
"""Phases that are logged as timing/…; `prepare` (tokenizing, padding) shows in timing/step only."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What FLOPs are counted from."""

    base: int
    """Frozen weights that multiply every token: all linear layers with the output head, without the embedding table."""
    adapter: int
    """Trained weights that multiply every token: A and B of LoRA, or all that `base` counts where all are trained."""
    attention: int
    """Layers x heads x head size: multiply-adds of one query with one key, and of its weight with one value."""


def model_size(model: torch.nn.Module) -> ModelSize | None:
    """Size of a model that is trained, with an adapter or without; None for a mixture of experts, where a token meets
    only a part of the weights, and where images are computed too."""
    from torch.nn import Linear

    config = model.config.get_text_config()  # type: ignore[operator,union-attr]
    if takes_images(model.config):
        return None
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    base = adapter = 0
    for name, module in model.named_modules():
        if isinstance(module, Linear):  # in x out and not numel(): ZeRO-3 leaves empty tensors in the layers
            weights = module.in_features * module.out_features
            if module.weight.requires_grad:
                adapter += weights
            elif "lora_" not in name:
                base += weights
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelSize(base, adapter, config.num_hidden_layers * heads * head_dim)


@dataclass(frozen=True, slots=True)
class Work:
    """What a pass through the model computes."""

    tokens: int
    """Tokens that go through the linear layers."""
    pairs: int
    """Query-key pairs: a token meets itself and what stands before it, n (n + 1) / 2 in a sequence of n."""


def sequences(lengths: Sequence[int]) -> Work:
    """A pass over sequences of these lengths in tokens, each by itself; decoding with a cache takes as much."""
    return Work(sum(lengths), sum(n * (n + 1) // 2 for n in lengths))


def forward_flops(size: ModelSize, work: Work) -> float:
    """FLOPs of one forward pass.

    2 for each weight and token, and 4 for each query-key pair of a head's dimension (PaLM, arXiv 2204.02311,
    appendix B, with the pairs that there are instead of n^2).
    """
    return 2.0 * (size.base + size.adapter) * work.tokens + 4.0 * size.attention * work.pairs


def update_flops(size: ModelSize, work: Work) -> float:
    """FLOPs of forward and backward with a frozen base: 4 for a base weight (output, gradient of the input), 6 for an
    adapter's (gradient of the weight too), 12 for a query-key pair. A forward that gradient checkpointing repeats is
    not counted: these are the model's FLOPs, not the hardware's."""
    return (4.0 * size.base + 6.0 * size.adapter) * work.tokens + 12.0 * size.attention * work.pairs


@dataclass(frozen=True, slots=True)
class RankStep:
    """One optimizer step of one process, as it is exchanged: seconds a phase, tokens, FLOPs, memory."""

    step: float
    rollout: float
    reward: float
    advantages: float
    old_logps: float
    update: float
    tokens: float
    flops: float
    memory_gb: float
    hbm_utilization: float


def step_metrics(
    ranks: Sequence[RankStep], peak_flops: float | None, has_memory: bool, workers: int = 0
) -> dict[str, float]:
    """The metrics of one optimizer step of all processes.

    Seconds and memory are those of the slowest and of the fullest process, tokens and FLOPs are sums. What is not
    known has no entry: perf/mfu without `peak_flops` (of one device) or countable FLOPs, memory on a CPU. Each of the
    `workers` that sample has a device of its own.
    """
    seconds = max(rank.step for rank in ranks)
    metrics = {f"timing/{phase}": max(getattr(rank, phase) for rank in ranks) for phase in PHASES}
    metrics["timing/step"] = seconds
    metrics["perf/throughput"] = sum(rank.tokens for rank in ranks) / seconds / (len(ranks) + workers)
    flops = sum(rank.flops for rank in ranks)
    if peak_flops and flops:
        metrics["perf/mfu"] = flops / seconds / (peak_flops * len(ranks))
    if has_memory:
        metrics["perf/max_memory_allocated_gb"] = max(rank.memory_gb for rank in ranks)
        metrics["perf/hbm_utilization"] = max(rank.hbm_utilization for rank in ranks)
    return metrics


def add_step(logged: dict[str, list[float]], metrics: dict[str, float]) -> None:
    """Add the metrics of a step to those of the steps since the last log, of which TRL logs the mean: memory is a
    peak, of which the last one counts."""
    for name, value in metrics.items():
        before = [] if "memory" in name or "hbm" in name else logged.get(name, [])
        logged[name] = [*before, value]


class StepClock(TrainerCallback):
    """Measures every optimizer step, from its first micro-batch to the optimizer's step; saving, logging and loading
    of data are outside. `with clock("rollout"): …` charges time to a phase; what runs in no phase is the update.

    Args:
        size: None leaves FLOPs uncounted.
        gather: from a tensor (1, 10) of this process to (processes, 10).
        report: takes the metrics of a step, on every process.
        workers: rollout.workers.
        now: seconds; read after `synchronize`, so that kernels still running are charged to the phase they belong to.
    """

    def __init__(
        self,
        size: ModelSize | None,
        gather: Callable[[torch.Tensor], torch.Tensor],
        report: Callable[[dict[str, float]], None],
        workers: int = 0,
        now: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] = device.synchronize,
    ):
        self.size, self.gather, self.report, self.workers = size, gather, report, workers
        self.now, self.synchronize = now, synchronize
        self.peak_flops = device.peak_flops()
        self.failed_in: str | None = None
        self._phases: list[str] = []
        self._outside = "setup"
        self._reset()

    def _reset(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._tokens = self._flops = 0.0
        self.synchronize()
        self._read = self.now()

    @property
    def phase(self) -> str:
        """The phase that runs: of PHASES, `prepare`, or `setup` before the first step."""
        return self._phases[-1] if self._phases else self._outside

    def _charge(self) -> None:
        self.synchronize()
        now = self.now()
        self._seconds[self.phase] += now - self._read
        self._read = now

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Charges the time inside to `phase`, and none of it to the phase around."""
        self._charge()
        self._phases.append(phase)
        try:
            yield
            self._charge()
        except BaseException:
            self.failed_in = self.failed_in or phase
            raise
        finally:
            self._phases.pop()

    def count_forward(self, work: Work) -> None:
        """A rollout, or log-probabilities, are computed."""
        if self.size:
            self._flops += forward_flops(self.size, work)

    def count_update(self, work: Work) -> None:
        """The loss and its gradient are computed."""
        if self.size:
            self._flops += update_flops(self.size, work)

    def count_trained(self, tokens: int) -> None:
        """The step trains on samples of so many tokens, prompts included."""
        self._tokens += tokens

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and not (self.size and self.peak_flops):
            why = (
                "a mixture of experts, or a vision tower"
                if not self.size
                else f"no peak FLOP/s is known for {device.name()}"
            )
            log.info("perf/mfu is left out: %s", why)

    def on_step_begin(self, args, state, control, **kwargs):
        self._outside = "update"
        self._reset()

    def on_step_end(self, args, state, control, **kwargs):
        import torch

        self._charge()
        memory = device.peak_memory()
        measured = (
            sum(self._seconds.values()),
            *(self._seconds[phase] for phase in PHASES),
            self._tokens,
            self._flops,
            *((memory.allocated / 2**30, memory.reserved / memory.total) if memory else (0.0, 0.0)),
        )
        # float32: HCCL takes no float64. Tokens are exact up to 2^24 a process and step.
        rows: Any = self.gather(torch.tensor([measured], dtype=torch.float32, device=args.device)).tolist()
        steps = [RankStep(*row) for row in rows]
        self.report(step_metrics(steps, self.peak_flops, memory is not None, self.workers))
