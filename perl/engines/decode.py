"""Completing rows with a transformers model: the fast loop where it can serve the model, else the model's own.

Two callers: the evaluator's HFEngine streams (`decode`); a trainer completes a whole generation batch with the model
it is training (`generate_completions`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from perl.engines.base import warn_once
from perl.engines.fast import decode_fast, unsupported_reason
from perl.engines.rows import DEFAULT_BATCH_TOKENS, Finished, Job, Row
from perl.engines.sampling import validate
from perl.engines.stock import decode_stock
from perl.records import Sampling

if TYPE_CHECKING:
    from transformers import LogitsProcessor


def decode(
    model: Any, job: Job, processors: Sequence[LogitsProcessor] = (), *, stream: bool = True
) -> Iterator[Finished]:
    """Complete `job.rows`, yielding each row when it is through: with `fast.decode_fast`, or with `model.generate`
    and one line in the log where that can't serve the model.

    `model` must be in evaluation mode. Rows are computed while the iterator is consumed, so `model` must stay as it
    is until then; with stream=False the fast loop computes everything inside `model.generate`.
    """
    if reason := unsupported_reason(model):
        warn_once(f"decoding with the model's own generate, as the fast loop can't serve it: {reason}")
        return decode_stock(model, job, processors)
    return decode_fast(model, job, processors, stream=stream)


def generate_completions(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    group_size: int,
    sampling: Sampling,
    seeds: Sequence[int],
    *,
    eos_token_ids: Collection[int],
    pad_token_id: int,
    max_batch_tokens: int = DEFAULT_BATCH_TOKENS,
    capture: bool = False,
    processors: Sequence[LogitsProcessor] = (),
) -> list[Finished]:
    """Complete every prompt `group_size` times with a model in memory, such as one in training.

    Everything is computed before this returns, so a context around the call (noise on the weights, merged adapters,
    gathered parameters) holds for every token. Dropout is off meanwhile, and each module's training flag is put
    back. A prompt that occurs several times is prefilled once, so `group_size=1` with repeated prompts costs the same
    as a group.

    Args:
        model: a transformers model or a PeftModel, unwrapped from DDP, FSDP or DeepSpeed, parameters gathered.
        prompt_ids: token ids of each prompt, without padding.
        group_size: completions per prompt.
        sampling: the distribution and max_new_tokens; n and seed are not read.
        seeds: len(prompt_ids) * group_size seeds, one a completion, prompt by prompt (`prompts.row_seed`).
        eos_token_ids: tokens that end a completion.
        pad_token_id: fills masked places; which token it is changes nothing.
        max_batch_tokens, capture: see `rows.Job`.
        processors: logits processors, called as in `model.generate` with left-padded ids.

    Returns:
        len(prompt_ids) * group_size completions, prompt by prompt. `token_ids` holds the end-of-sequence token where
        `stopped`; `logprobs` are the sampler's own, as `sampling.choose` defines them.
    """
    validate(sampling)
    if len(seeds) != len(prompt_ids) * group_size:
        raise ValueError(f"{len(seeds)} seeds for {len(prompt_ids)} prompts of {group_size} completions each")
    rows = [
        Row(
            prompt_ids=tuple(prompt_ids[index // group_size]),
            seed=seed,
            max_new_tokens=sampling.max_new_tokens,
        )
        for index, seed in enumerate(seeds)
    ]
    job = Job(
        rows=rows,
        sampling=sampling,
        eos_token_ids=frozenset(eos_token_ids),
        pad_token_id=pad_token_id,
        max_batch_tokens=max_batch_tokens,
        capture=capture,
    )
    with evaluation_mode(model):
        return sorted(decode(model, job, processors, stream=False), key=lambda finished: finished.index)


@contextlib.contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Switch dropout and gradient checkpointing off, and put each module's training flag back afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
