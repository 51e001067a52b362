"""A rollout by perl's own decode loop, in the place and with the arguments of the model's `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from perl.engines.decode import generate_completions
from perl.prompts import row_seed
from perl.records import Sampling


def rollout_seeds(seed: int, draw: tuple[int, ...], rows: int, rank: int, group_size: int) -> list[int]:
    """A seed for each of this rank's `rows`: it depends on the run's seed, the rollout, and the row's place among the
    rows of all ranks, so another number of ranks samples the same completions.

    Args:
        draw: names the rollout (global step, count within it).
        rows: rows of each rank; TRL gives rank k the k-th slice of the batch, groups one after the other.
        group_size: completions of each prompt.
    """
    places = range(rank * rows, (rank + 1) * rows)
    key = "-".join(map(str, draw))
    return [row_seed(seed, f"{key}-{place // group_size}", place % group_size) for place in places]


def generate_fast(
    policy: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    config: GenerationConfig,
    seeds: Sequence[int],
    max_batch_tokens: int,
    capture: bool = False,
) -> tuple[torch.Tensor, list[list[float]]]:
    """What `policy.generate` would return for left-padded prompts: int64 [rows, prompt width + longest completion],
    padded on the right; and the log-probability of each drawn token (perl.engines.sampling.choose).

    Args:
        input_ids, attention_mask: int64 [rows, prompt width].
        config: TRL's generation configuration; its sampling, eos and length are used.
        seeds: one for each row.
        max_batch_tokens, capture: see perl.engines.rows.Job.
    """
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
    eos, pad = config.eos_token_id, config.pad_token_id
    assert pad is not None
    assert eos is not None
    finished = generate_completions(
        policy,
        prompts,
        1,
        sampling_of(config),
        seeds,
        eos_token_ids=[eos] if isinstance(eos, int) else list(eos),
        pad_token_id=int(pad),
        max_batch_tokens=max_batch_tokens,
        capture=capture,
    )
    width = max(len(row.token_ids) for row in finished)
    completions = input_ids.new_full((len(finished), width), int(pad))
    for index, row in enumerate(finished):
        completions[index, : len(row.token_ids)] = torch.tensor(row.token_ids)
    return torch.cat([input_ids, completions], dim=1), [row.logprobs for row in finished]


def sampling_of(config: GenerationConfig) -> Sampling:
    """The distribution that a GenerationConfig describes; None is off."""
    return Sampling(
        temperature=1.0 if config.temperature is None else float(config.temperature),
        top_p=1.0 if config.top_p is None else float(config.top_p),
        top_k=int(config.top_k or 0),
        min_p=float(config.min_p or 0.0),
        repetition_penalty=1.0 if config.repetition_penalty is None else float(config.repetition_penalty),
        max_new_tokens=int(config.max_new_tokens or 256),
    )
