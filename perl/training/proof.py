"""Proof that completions come from the policy that is trained: a sampler that runs the base model, or the weights of
the step before, learns nothing and looks healthy.

The weights themselves are checked by AdapterFold.check. Here the sampler's log-probabilities of the tokens that it
drew are held against two forward passes of the trainer's model under the same noise: with the adapter, and without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from perl.engines.rows import left_pad
from perl.errors import RankError

PROVED_ROWS = 4
"""Rows of each process that a proof looks at."""
TOLERANCE = {4: 1e-3, 2: 0.2}
"""Largest mean difference between the sampler's and the trainer's log-probabilities, in nats, by bytes of a weight.
Float32 differs in the order of sums alone: 24 bits leave a logit of 20 about 1e-6, and some hundred sums in a row less
than a hundred times that. In bfloat16, of 8 bits, sampler and trainer round the same outputs at different places
(autocast, packing, the cache): random weights, whose every token is improbable and shows the logit's whole error, were
0.005 apart at 28 M, 0.014 at Qwen2.5-0.5B's shape and 0.029 at 1.5B's; a quarter of 7B's layers, 0.020, makes 0.06 of
all. What is nearer to the base than to the adapted model is found below without these numbers."""
VISIBLE = {4: 1e-5, 2: 1e-2}
"""From this size on of the largest weight in B, an adapter changes some token's log-probability in that dtype."""


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """The first rows of a rollout, for a forward pass; int64 [rows, prompt width + completion width]."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    drawn: torch.Tensor
    """bool [rows, completion width]: the tokens that were drawn, the end-of-sequence token included."""

    @property
    def width(self) -> int:
        return self.drawn.shape[1]

    def of_lists(self, logps: Sequence[Sequence[float | None]]) -> torch.Tensor:
        """The drawn tokens' numbers out of those of all rows, float32 [tokens]; NaN where TRL says None."""
        flat = [math.nan if value is None else value for row in logps[: len(self.drawn)] for value in row]
        return torch.tensor(flat, dtype=torch.float32, device=self.drawn.device)


def drawn_rows(
    prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, completion_ids: torch.Tensor, eos_token_ids: Sequence[int]
) -> DrawnRows:
    """The first PROVED_ROWS rows. All arguments int64 [rows, width], prompts padded on the left, completions after
    their end-of-sequence token."""
    completions = completion_ids[:PROVED_ROWS]
    ends = torch.isin(completions, torch.tensor(list(eos_token_ids), device=completions.device)).long()
    drawn = ends.cumsum(dim=1) - ends == 0
    return DrawnRows(
        input_ids=torch.cat([prompt_ids[:PROVED_ROWS], completions], dim=1),
        attention_mask=torch.cat([prompt_mask[:PROVED_ROWS], drawn.to(prompt_mask.dtype)], dim=1),
        drawn=drawn,
    )


def rows_of_lists(prompts: Sequence[list[int]], completions: Sequence[list[int]], device: torch.device) -> DrawnRows:
    """The first PROVED_ROWS rows of an engine that gives lists: all tokens of a completion were drawn."""
    ids, mask = left_pad(prompts[:PROVED_ROWS], 0, device)  # 0: any token, it is masked
    rows = [torch.tensor(row, device=device) for row in completions[:PROVED_ROWS]]
    drawn = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return DrawnRows(
        input_ids=torch.cat([ids, pad_sequence(rows, batch_first=True)], dim=1),
        attention_mask=torch.cat([mask, drawn], dim=1),
        drawn=drawn.bool(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Log-probabilities of the same drawn tokens in nats, float32 [tokens] each."""

    sampler: torch.Tensor
    adapted: torch.Tensor
    """By the trainer's model with its adapter apart."""
    base: torch.Tensor
    """By the trainer's model without the adapter."""
    itemsize: int
    """Bytes of a weight, of the sampler's or the trainer's, the fewer."""
    largest_b: float
    """Largest absolute weight that starts at zero (B of LoRA)."""
    share_lost: float = 0.0
    """Of the adapter's update, what the sampler's weights lost by rounding."""
    comparable: bool = True
    """False: the sampler's numbers are of a truncated distribution (top-p), so that they lie higher by nature."""
    merges: bool = True
    """False: the sampler does not heed rollout.merge_adapter."""


def require_same_policy(evidence: Evidence) -> None:
    """Raise a RankError that says what the sampler missed."""
    count = len(evidence.sampler)
    if not count:
        return
    from_adapted = float((evidence.sampler - evidence.adapted).abs().nanmean())
    from_base = float((evidence.sampler - evidence.base).abs().nanmean())
    effect = float((evidence.adapted - evidence.base).abs().mean())
    remedy = "; --config.rollout.engine generate samples with the trainer's own model"
    if evidence.merges:
        remedy += ", --config.rollout.merge_adapter false with the adapter apart"
    if effect == 0 and evidence.largest_b > VISIBLE[evidence.itemsize]:
        raise RankError(
            f"rollout: the adapter is trained (B reaches {evidence.largest_b:.2g}) but changes no log-probability of"
            f" {count} drawn tokens: the model computes without it"
        )
    # The noise of rounding is the same against both, so the ratio needs no tolerance: a sampler with the adapter is
    # never this much closer to the base, one without it is as soon as the adapter's effect is twice the noise.
    if from_base < from_adapted / 2:
        raise RankError(
            f"rollout: the sampler missed the adapter: over {count} drawn tokens its log-probabilities are"
            f" {from_base:.2g} from the base model's and {from_adapted:.2g} from the adapted model's{remedy}"
        )
    allowed = TOLERANCE[evidence.itemsize] + 2 * evidence.share_lost * effect
    if evidence.comparable and not from_adapted <= allowed:
        raise RankError(
            f"rollout: the sampler does not run the policy that is trained: over {count} drawn tokens its"
            f" log-probabilities are {from_adapted:.2g} from the trainer's on average, where {allowed:.2g} is"
            f" rounding{remedy}"
        )
