"""Log-probabilities of completions without padding, and with each prompt computed once for all of its completions.

A padded micro-batch of B rows is B x (longest prompt + longest completion) tokens. Packed, it is one sequence

    prompt 1 without its last token | last token, completion 1 | last token, completion 2 | prompt 2 … | …

in which linear layers meet every token once and no padding. The last prompt token is repeated, so that the hidden
state before each completion token is the one that predicts it. Attention alone needs to know which tokens belong
together: a prompt attends to itself, a row to its prompt and itself. The forward is given that as its `layout`
(perl.engines.attention), so the model's code stays as it is, gradient checkpointing included.

The numbers are those of the padded forward up to floating-point order: each token sees the same keys at the same
positions. Sharing prefixes in training: arXiv 2506.05433 (Prefix Grouper).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from perl.engines.attention import adopt, sdpa_without_copies
from perl.engines.decoder import unsupported_reason
from perl.training.metrics import Work, sequences


class Uses:
    """How often attention has used a Packing. An object of its own: FSDP2 hands on copies of dataclasses."""

    def __init__(self) -> None:
        self.count = 0


@dataclass(frozen=True)
class Packing:
    """Which tokens of one sequence of L tokens attend to which: prompts to themselves, rows to their prompt and
    themselves. All int64 on the model's device unless said otherwise."""

    prefixes: torch.Tensor
    """[prompts, longest prefix]: place in the sequence of each prompt's tokens but the last, padded with 0."""
    rows: torch.Tensor
    """[rows, 1 + longest completion]: place of the last prompt token and the completion, padded with 0."""
    prompt_of: torch.Tensor
    """[rows]: index into `prefixes`."""
    visible: torch.Tensor
    """bool [rows, 1, 1 + longest completion, longest prefix + 1 + longest completion]: keys that a token sees."""
    back: torch.Tensor
    """[L]: for each token, its place among all results: those of `prefixes` first, then those of `rows`."""
    uses: Uses = field(default_factory=Uses)
    """A model that drops the argument on its way would compute nonsense."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scaling: float | None
    ) -> torch.Tensor:
        """See perl.engines.attention.Layout; rows is 1, tokens and columns are L."""
        self.uses.count += 1
        parts = []
        if self.prefixes.shape[1]:
            # Padded on the right, where causality hides the padding from every real token.
            q, k, v = (_take(states[0], self.prefixes) for states in (query, key, value))
            k, v = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (k, v))
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, scale=scaling)
            parts.append(found.transpose(1, 2))
        seen = torch.cat([self.prefixes[self.prompt_of], self.rows], dim=1)
        k, v = (_take(states[0], seen) for states in (key, value))
        parts.append(sdpa_without_copies(_take(query[0], self.rows), k, v, self.visible, dropout, scaling))
        return torch.cat([part.flatten(0, 1) for part in parts])[self.back][None]


def _take(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[heads, L, head_dim] at places [batch, tokens]: [batch, heads, tokens, head_dim]."""
    taken = states.index_select(1, places.flatten())
    return taken.unflatten(1, tuple(places.shape)).transpose(0, 1)


@dataclass(frozen=True)
class Packed:
    """A micro-batch as one sequence of L tokens."""

    input_ids: torch.Tensor
    """int64 [1, L]."""
    position_ids: torch.Tensor
    """int64 [1, L]: each token's position in its own row."""
    labels: torch.Tensor
    """int64 [1, L]: the token where it is one of a completion, else -100."""
    packing: Packing
    completions: torch.Tensor
    """int64 [rows, completion width]: place of each completion token in the sequence, 0 where there is none."""
    pairs: int
    """Query-key pairs that attention computes."""

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """From [1, L - 1], what was computed for each token but the first, to [rows, completion width], 0 where
        there is no token."""
        there = self.completions > 0
        return values[0][(self.completions - 1).clamp(min=0)].where(there, values.new_zeros(()))


@dataclass
class _Builder:
    """Tokens, positions and labels of the sequence as it grows."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int], start: int, scored: bool) -> list[int]:
        """Append tokens whose positions begin at `start`; return their places."""
        places = range(len(self.ids), len(self.ids) + len(tokens))
        self.ids += tokens
        self.positions += range(start, start + len(tokens))
        self.labels += tokens if scored else [-100] * len(tokens)
        return list(places)


class Row(NamedTuple):
    """Token ids of one row, without padding."""

    prompt: tuple[int, ...]
    completion: list[int]


def split_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_width: int) -> list[Row]:
    """The rows of a padded batch; its last `completion_width` columns hold the completions."""
    ids, mask = input_ids.tolist(), attention_mask.tolist()
    width = input_ids.shape[1] - completion_width
    rows = []
    for row, seen in zip(ids, mask, strict=True):
        real = [token if there else None for token, there in zip(row, seen, strict=True)]
        prompt = tuple(token for token in real[:width] if token is not None)
        rows.append(Row(prompt, [token for token in real[width:] if token is not None]))
    return rows


def packed_length(rows: Sequence[Row]) -> int:
    """Tokens of the packed sequence."""
    prompts = {row.prompt for row in rows}
    return sum(len(prompt) - 1 for prompt in prompts) + sum(1 + len(row.completion) for row in rows)


def pack(rows: Sequence[Row], completion_width: int, device: torch.device | str) -> Packed:
    """Lay `rows`, each with a prompt of at least one token, out as one sequence."""
    builder = _Builder()
    prompts = list(dict.fromkeys(prompt for prompt, _ in rows))
    number = {prompt: index for index, prompt in enumerate(prompts)}
    prefixes: list[list[int]] = [[] for _ in prompts]
    own: list[list[int]] = [[] for _ in rows]
    for index, prompt in enumerate(prompts):
        prefixes[index] = builder.add(prompt[:-1], 0, scored=False)
        for row, (other, completion) in enumerate(rows):
            if other == prompt:
                last = builder.add(prompt[-1:], len(prompt) - 1, scored=False)
                own[row] = last + builder.add(completion, len(prompt), scored=True)

    prefix_width, row_width = max(map(len, prefixes)), max(map(len, own))
    back = [0] * len(builder.ids)
    for index, places in enumerate([*prefixes, *own]):
        first = index < len(prefixes)
        start = index * prefix_width if first else len(prefixes) * prefix_width + (index - len(prefixes)) * row_width
        for offset, place in enumerate(places):
            back[place] = start + offset

    def tensor(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    def padded(lists: list[list[int]], width: int) -> torch.Tensor:
        return tensor([places + [0] * (width - len(places)) for places in lists]).view(len(lists), width)

    prompt_of = tensor([number[prompt] for prompt, _ in rows])
    lengths = tensor([len(places) for places in prefixes])[prompt_of]
    in_prefix = torch.arange(prefix_width, device=device) < lengths[:, None]
    causal = torch.ones(row_width, row_width, dtype=torch.bool, device=device).tril()
    visible = torch.cat([in_prefix[:, None].expand(-1, row_width, -1), causal.expand(len(rows), -1, -1)], dim=2)
    packing = Packing(
        prefixes=padded(prefixes, prefix_width),
        rows=padded(own, row_width),
        prompt_of=prompt_of,
        visible=visible[:, None],
        back=tensor(back),
    )
    return Packed(
        input_ids=tensor([builder.ids]),
        position_ids=tensor([builder.positions]),
        labels=tensor([builder.labels]),
        packing=packing,
        completions=padded([places[1:] for places in own], completion_width),
        pairs=sum(_pairs(0, len(places)) for places in prefixes)
        + sum(_pairs(len(prompt) - 1, len(places)) for (prompt, _), places in zip(rows, own, strict=True)),
    )


def _pairs(before: int, length: int) -> int:
    """Query-key pairs of `length` tokens after `before` others."""
    return length * before + length * (length + 1) // 2


def enable_packing(model: Any) -> str | None:
    """Let forwards of `model` (a transformers model or a PeftModel) take a Packing as their `layout`; those without one
    stay as they were.

    Returns:
        None, or why its micro-batches can't be packed.
    """
    return unsupported_reason(model) or adopt(model)


LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""What TRL's `_get_per_token_logps_and_entropies` returns: log-probabilities and entropies [rows, completion width],
and the auxiliary loss of a mixture of experts."""


def log_probs(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    width: int,
    padded: Callable[[torch.Tensor, torch.Tensor, int], LogProbs],
    *,
    pack_rows: bool,
    compute_entropy: bool,
) -> tuple[LogProbs, Work]:
    """Log-probabilities of the completions, 0 where there is no token, by as few tokens as it takes.

    Args:
        model: has TRL's fused head and, with `pack_rows`, `enable_packing`.
        input_ids, attention_mask: int64 [rows, prompt width + `width`], prompts on the left.
        padded: the forward as TRL does it, of (input_ids, attention_mask, completion width); it gets only those
            columns that are not padding in every row.
        pack_rows: pack the rows where that saves tokens.
    """
    rows = split_rows(input_ids, attention_mask, width)
    prompt = max(len(row.prompt) for row in rows)
    completion = max(1, *(len(row.completion) for row in rows))
    if pack_rows and packed_length(rows) < len(rows) * (prompt + completion):
        packed = pack(rows, width, input_ids.device)
        output = model(**forward_arguments(packed), labels=packed.labels, fused_lm_head=True)
        if not packed.packing.uses.count:
            raise RuntimeError("the model's attention was not given the layout of the packed micro-batch")
        entropies = packed.unpack(output.entropy) if compute_entropy else None
        return (packed.unpack(output.log_probs), entropies, None), Work(packed.input_ids.shape[1], packed.pairs)
    columns = slice(input_ids.shape[1] - width - prompt, input_ids.shape[1] - width + completion)
    found = padded(input_ids[:, columns], attention_mask[:, columns], completion)
    logps, entropies, aux_loss = found
    missing = (0, width - completion)
    work = sequences([len(row.prompt) + len(row.completion) for row in rows])
    return (F.pad(logps, missing), None if entropies is None else F.pad(entropies, missing), aux_loss), work


def forward_arguments(packed: Packed) -> dict[str, Any]:
    """Arguments of the model's forward. A mask of four dimensions is what transformers hands on as it is."""
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=packed.input_ids.device)
    return {
        "input_ids": packed.input_ids,
        "position_ids": packed.position_ids,
        "attention_mask": nothing,
        "layout": packed.packing,
    }
