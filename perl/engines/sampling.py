"""Sampling with one random stream per row.

A row's tokens depend on its logits and its own seed alone, never on its neighbours, the batch size, the order of the
rows or the number of devices, because token t of a row is drawn with one uniform number that is a hash of (row seed,
t), by inverting the cumulative distribution. That is also twenty times faster than a torch.Generator per row at a
vocabulary of 152k, where every row needs its own call of multinomial.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from perl.base.errors import UserError
from perl.records import Sampling

if TYPE_CHECKING:
    import torch

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
NUCLEUS_GUESS = 1024
"""On a CPU top-p looks for its nucleus among this many best tokens before it sorts the whole vocabulary. An accelerator
sorts at once: to look first would make the host wait for it at every token."""
CPU_NUMBERS = 2**19
"""Logits that a CPU draws from at once: what is computed of them (four arrays of their size) stays in its cache."""


def validate(sampling: Sampling) -> None:
    """Raise a UserError for values that no distribution has."""
    limits = {
        "temperature": (sampling.temperature >= 0, "0 (greedy) or more"),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1 (1 is off)"),
        "top_k": (sampling.top_k >= 0, "0 (off) or more"),
        "min_p": (0 <= sampling.min_p < 1, "at least 0 (off) and below 1"),
        "repetition_penalty": (sampling.repetition_penalty > 0, "above 0 (1 is off)"),
        "max_new_tokens": (sampling.max_new_tokens >= 1, "1 or more"),
    }
    for name, (holds, wanted) in limits.items():
        if not holds:
            raise UserError(f"{name}: {getattr(sampling, name)} is not possible; write a value {wanted}")


def uniforms(seeds: Sequence[int] | np.ndarray, positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each row: a hash (splitmix64's finaliser, twice) of (seed, position).

    Args:
        seeds: the row's own seed, 64 bits, [rows].
        positions: index of the token to draw within the completion, [rows]; any shapes that broadcast.

    Returns:
        float32 [rows], multiples of 2**-24, so that u * total < total also in float32.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seeds, dtype=np.uint64) + GOLDEN_GAMMA)
        state = _mix(state + (np.asarray(positions, dtype=np.uint64) + np.uint64(1)) * GOLDEN_GAMMA)
    return ((state >> np.uint64(40)) * 2.0**-24).astype(np.float32)


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def sample(
    logits: torch.Tensor,
    sampling: Sampling,
    uniform: torch.Tensor,
    *,
    seen: torch.Tensor | None = None,
    model_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the next token of each row.

    In this order, as transformers does it: repetition penalty, temperature, top-k, top-p, min-p. Tokens that tie
    with the last one kept are kept too.

    Args:
        logits: float32 [rows, vocabulary].
        sampling: the distribution; temperature 0 takes the best token.
        uniform: float32 [rows], from `uniforms`; not read when greedy.
        seen: bool [rows, vocabulary], tokens in the row's prompt or completion; needed for a repetition penalty.
        model_logits: the model's own logits where `logits` have passed through logits processors.

    Returns:
        tokens int64 [rows], and their log-probabilities float32 [rows] as TRL's trainer computes them:
        log_softmax(model logits / temperature), without penalty or truncation; greedy counts as temperature 1.
    """
    import torch

    given, rows = (logits, uniform, seen, model_logits), max(2, CPU_NUMBERS // logits.shape[-1])
    if logits.device.type != "cpu" or len(logits) <= rows:
        return _sample(sampling, *given)
    parts = zip(*(itertools.repeat(None) if each is None else each.split(rows) for each in given), strict=False)
    tokens, logprobs = zip(*(_sample(sampling, *part) for part in parts), strict=True)  # type: ignore[arg-type]
    return torch.cat(tokens), torch.cat(logprobs)


def _sample(
    sampling: Sampling,
    logits: torch.Tensor,
    uniform: torch.Tensor,
    seen: torch.Tensor | None,
    model_logits: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    greedy = sampling.temperature == 0
    temperature = 1.0 if greedy else sampling.temperature
    if sampling.repetition_penalty != 1:
        if seen is None:
            raise ValueError("a repetition penalty needs `seen`")
        penalty = sampling.repetition_penalty
        scores = (logits / penalty).where(logits > 0, logits * penalty).where(seen, logits)
    else:
        scores = logits
    tokens = scores.argmax(dim=-1) if greedy else _invert_cdf(filter_logits(scores / temperature, sampling), uniform)
    model_scores = (logits if model_logits is None else model_logits) / temperature
    chosen = model_scores.gather(-1, tokens[:, None])[:, 0]
    return tokens, chosen - model_scores.logsumexp(dim=-1)


def filter_logits(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """`scores` ([rows, vocabulary], after temperature) with -inf where top-k, top-p or min-p removes the token."""
    floor = None
    vocabulary, on_cpu = scores.shape[-1], scores.device.type == "cpu"
    top_k = min(sampling.top_k, vocabulary)
    if top_k:
        best = scores.topk(top_k, dim=-1).values
        floor = best[:, -1:]
        if sampling.top_p < 1:
            floor = _nucleus_floor(best, best.logsumexp(dim=-1, keepdim=True), sampling.top_p)
    elif sampling.top_p < 1:
        log_total = scores.logsumexp(dim=-1, keepdim=True)
        best = scores.topk(min(NUCLEUS_GUESS, vocabulary), dim=-1).values if on_cpu else None
        if best is None or ((best - log_total).exp().sum(dim=-1) < sampling.top_p).any():
            best = scores.sort(dim=-1, descending=True).values
        floor = _nucleus_floor(best, log_total, sampling.top_p)
    if sampling.min_p > 0:
        likely = scores.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        floor = likely if floor is None else floor.maximum(likely)
    return scores if floor is None else scores.masked_fill(scores < floor, float("-inf"))


def _nucleus_floor(best: torch.Tensor, log_total: torch.Tensor, top_p: float) -> torch.Tensor:
    """Score [rows, 1] of the last token of the nucleus. `best`: scores [rows, k], descending, that hold it."""
    mass = (best - log_total).exp()
    before = mass.cumsum(dim=-1) - mass
    last = (before < top_p).sum(dim=-1, keepdim=True) - 1
    return best.gather(-1, last.clamp(min=0))


def _invert_cdf(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Token [rows] at which the cumulative distribution of softmax(scores) passes `uniform`."""
    import torch

    probabilities = scores.softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp(max=scores.shape[-1] - 1)
    # An accelerator's parallel scan need not rise monotonically, so the search may end on a removed token there.
    removed = probabilities.gather(-1, tokens) == 0
    if scores.device.type != "cpu" or removed.any():
        tokens = tokens.where(~removed, probabilities.argmax(dim=-1, keepdim=True))
    return tokens[:, 0]
