"""Log-probabilities of completions without padding, and with each prompt computed once for all of its completions.

A padded micro-batch of B rows is B x (longest prompt + longest completion) tokens. Packed, it is one sequence

    prompt 1 without its last token | last token, completion 1 | last token, completion 2 | prompt 2 … | …

in which linear layers meet every token once and no padding. The last prompt token is repeated, so that the hidden
state before each completion token is the one that predicts it. Attention alone needs to know which tokens belong
together: a prompt attends to itself, a row to its prompt and itself. The forward is given that as its `layout`
(perl.engines.attention), so the model's code stays as it is, gradient checkpointing included. The output layer gets
the hidden states that predict a completion token and no others.

Attention makes no mask of it: all of it is causal, the last query with the last key ("bottom right"). A kernel for
sequences of different lengths computes that where there is one, sdpa row by row otherwise; on a CPU, where sdpa would
need a mask, a row's attention to its prompt and to itself are computed apart and merged (arXiv 2402.05099, Hydragen).

The numbers are those of the padded forward up to floating-point order: each token sees the same keys at the same
positions. Sharing prefixes in training: arXiv 2506.05433 (Prefix Grouper).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from perl import device
from perl.device import takes_bottom_right
from perl.engines.attention import adopt, layout_lost, numbers_of
from perl.engines.decoder import unsupported_reason
from perl.runs.metrics import Work, sequences

if TYPE_CHECKING:
    from perl.config.training import TrainingConfig
    from perl.device import Kernel

log = logging.getLogger(__name__)


class Group(NamedTuple):
    """Where a prompt and its rows stand in the sequence, behind one another."""

    prefix: slice
    """The prompt without its last token, which may be nothing."""
    rows: list[slice]
    """Each the last prompt token and a completion."""


class CriticsPart(NamedTuple):
    """The rows once more, behind the policy's, for the critic to value (perl.training.critic)."""

    start: int
    """Its first token; 0: nothing of the sequence is the policy's."""
    valued: torch.Tensor
    """int64 [completion tokens]: places whose hidden states the critic's head gets."""


class Packing:
    """Which tokens of one sequence of L tokens attend to which: prompts to themselves, rows to their prompt and
    themselves. Not a dataclass: FSDP2 hands on copies of those, and `uses` must count.

    Args:
        groups: cover the sequence, in its order.
        scored: int64 [completion tokens], on the model's device: places whose hidden states the output layer gets.
        kernel: one for rows of different lengths (perl.device.kernels.VARLEN), used where it takes the numbers.
        critics: what of the sequence is the critic's; None: nothing.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        scored: torch.Tensor,
        kernel: Kernel | None = None,
        critics: CriticsPart | None = None,
    ):
        self.groups, self.scored, self.kernel, self.critics = groups, scored, kernel, critics
        self.values: torch.Tensor | None = None
        """What the critic's head has made of the hidden states at `critics.valued`: float32 [1, N]."""
        self.uses = 0
        """Attention layers that were given this. A model that drops it on its way would compute nonsense."""
        self._keys: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scaling: float | None
    ) -> torch.Tensor:
        """See perl.engines.attention.Layout; rows is 1, tokens and columns are L."""
        self.uses += 1
        kind = query.device.type
        if torch.is_autocast_enabled(kind):  # which casts for sdpa, and not for the functions below
            query, key, value = (states.to(torch.get_autocast_dtype(kind)) for states in (query, key, value))
        plain = dropout == 0.0 and query.shape[-1] == value.shape[-1]
        if plain and self.kernel is not None and self.kernel.missing(query.dtype, query.shape[-1]) is None:
            return self._by_kernel(self.kernel, query, key, value, scaling)
        if plain and kind == "cpu":
            return _CpuAttention.apply(query, key, value, self.groups, scaling)
        return self._by_row(query, key, value, dropout, scaling)

    def _sequences(self) -> Iterator[tuple[slice, slice]]:
        """Each as (keys before its own tokens, its tokens), in the order of the tokens."""
        for prefix, rows in self.groups:
            if prefix.start < prefix.stop:
                yield slice(prefix.start, prefix.start), prefix
            yield from ((prefix, row) for row in rows)

    def _by_kernel(
        self,
        kernel: Kernel,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        cu_query, cu_key = [0], [0]
        for before, tokens in self._sequences():
            cu_query.append(tokens.stop)
            cu_key.append(cu_key[-1] + _length(before) + _length(tokens))
        if self._keys is None:  # for the first layer
            spans = [range(part.start, part.stop) for pair in self._sequences() for part in pair]
            keys = torch.tensor([place for span in spans for place in span])
            self._keys = device.to_device(keys, query.device)
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
        key, value = key[self._keys], value[self._keys]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return kernel(query.contiguous(), key, value, cu_query, cu_key, scale)[None]

    def _by_row(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scaling: float | None
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        outputs = []
        for before, tokens in self._sequences():
            seen = (torch.cat([states[:, :, before], states[:, :, tokens]], dim=2) for states in (key, value))
            k, v = (states.repeat_interleave(group, dim=1) for states in seen)
            causal = _length(before) == 0
            mask = None if causal else self._bottom_right(_length(before), _length(tokens), query.device)
            outputs.append(
                F.scaled_dot_product_attention(
                    query[:, :, tokens], k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout, scale=scaling
                )
            )
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def _bottom_right(self, before: int, count: int, device: torch.device) -> torch.Tensor:
        """What sdpa takes for `count` queries that see `before` keys and, of as many more, those up to themselves: on
        CUDA a word for it, elsewhere a part of one mask [longest row, longest prefix + longest row] of all rows and
        layers."""
        if takes_bottom_right(device):
            return causal_lower_right(count, before + count)
        prefix = max(_length(group.prefix) for group in self.groups)
        if self._mask is None:
            row = max(_length(row) for group in self.groups for row in group.rows)
            self._mask = torch.ones(row, prefix + row, dtype=torch.bool, device=device).tril(diagonal=prefix)
        return self._mask[:count, prefix - before : prefix + count]


FEW_PAIRS = 90_000
"""Queries times keys up to which torch's backward for CPUs is faster in float32 than in bfloat16, which packs the
numbers of each head first: 12 times with 17 of each, 5 times with 84, 1.5 times with 220, as fast with 300."""


def _length(span: slice) -> int:
    return span.stop - span.start


class _CpuAttention(torch.autograd.Function):
    """`Packing.attend` by torch's flash attention for CPUs, which knows causality without a mask only where there are
    as many queries as keys.

    softmax over two sets of keys is the mean of the softmax over each, weighted by the sums of exponentials, whose
    logarithms the kernel returns. Its backward takes each set by itself, given the merged result and logarithm: both
    enter a key's gradient as constants of the query.

    In bfloat16 the backward of few queries and keys is computed in float32 (FEW_PAIRS).

    The query heads that share a key head become a dimension of their own, along which keys are seen again at the same
    place in memory: no copy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        groups: Sequence[Group],
        scaling: float | None,
    ) -> torch.Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        _, heads, tokens, head_dim = query.shape
        q, k, v = _by_key_head(query, key, value)
        result = query.new_empty(1, tokens, heads, head_dim)
        out = _split_heads(result.transpose(1, 2), len(k))
        lse = query.new_empty(q.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))

        def attend(queries: slice, keys: slice, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
            return kernel(q[:, :, queries], k[:, :, keys], v[:, :, keys], 0.0, causal, scale=scaling)

        for prefix, rows in groups:
            for span in [prefix, *rows] if _length(prefix) else rows:
                out[:, :, span], lse[:, :, span] = attend(span, span, causal=True)
            if _length(prefix):
                every = slice(rows[0].start, rows[-1].stop)
                to_prompt, lse_prompt = attend(every, prefix, causal=False)
                share = torch.sigmoid(lse_prompt - lse[:, :, every])[..., None]
                out[:, :, every] = torch.lerp(out[:, :, every].to(lse.dtype), to_prompt.to(lse.dtype), share)
                lse[:, :, every] = torch.logaddexp(lse_prompt, lse[:, :, every])
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.groups, ctx.scaling = groups, scaling
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, result, lse = ctx.saved_tensors
        key_heads, dtype = key.shape[1], lse.dtype
        grad_query, grad_key, grad_value = (torch.empty_like(states, dtype=dtype) for states in (query, key, value))
        to_query = _split_heads(grad_query, key_heads)

        @functools.cache
        def states_in(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
            out, grad = (_split_heads(states.to(dtype).transpose(1, 2), key_heads) for states in (result, grads[0]))
            return (grad, *_by_key_head(*(states.to(dtype) for states in (query, key, value))), out)

        def attend(queries: slice, keys: slice, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            few = _length(queries) * _length(keys) <= FEW_PAIRS
            grad, q, k, v, out = states_in(dtype if few else query.dtype)
            gradients = kernel(
                grad[:, :, queries],
                q[:, :, queries],
                k[:, :, keys],
                v[:, :, keys],
                out[:, :, queries],
                lse[:, :, queries],
                0.0,
                causal,
                scale=ctx.scaling,
            )
            return gradients[0], gradients[1].sum(dim=1), gradients[2].sum(dim=1)

        for prefix, rows in ctx.groups:
            for span in [prefix, *rows] if _length(prefix) else rows:
                to_query[:, :, span], grad_key[0, :, span], grad_value[0, :, span] = attend(span, span, causal=True)
            if _length(prefix):
                every = slice(rows[0].start, rows[-1].stop)
                queries, keys, values = attend(every, prefix, causal=False)
                to_query[:, :, every] += queries
                grad_key[0, :, prefix] += keys
                grad_value[0, :, prefix] += values
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _split_heads(states: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[1, heads, tokens, head_dim] as [key heads, query heads of each, tokens, head_dim]."""
    return states[0].unflatten(0, (key_heads, -1))


def _by_key_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views [key heads, query heads of each, tokens, head_dim]."""
    q = _split_heads(query, key.shape[1])
    return q, *(states[0][:, None].expand(-1, q.shape[1], -1, -1) for states in (key, value))


@dataclass(frozen=True)
class Packed:
    """A micro-batch as one sequence of L tokens, N of which are of completions."""

    input_ids: torch.Tensor
    """int64 [1, L]."""
    position_ids: torch.Tensor
    """int64 [1, L]: each token's position in its own row."""
    targets: torch.Tensor
    """int64 [1, N]: the completions' tokens, row by row, which the hidden states at `packing.scored` predict."""
    packing: Packing
    completions: torch.Tensor
    """int64 [rows, completion width]: 1 + each completion token's place in `targets`, 0 where there is none."""
    work: Work

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """From [1, N], what was computed for each target, to [rows, completion width], 0 where there is no token."""
        return F.pad(values[0], (1, 0))[self.completions]


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What a forward says of rows: float [rows, width], 0 where there is no token; None for what it was not asked."""

    logps: Any = None
    """Log-probabilities at the training's temperature, in nats."""
    entropies: torch.Tensor | None = None
    """None from a reference model, whose head makes none."""
    aux_loss: torch.Tensor | None = None
    """[]: of a mixture of experts' router."""
    values: torch.Tensor | None = None
    """float32: the critic's."""


Reader = Literal["policy", "critic"]
"""Whose adapter computes a copy of the rows."""


class Row(Protocol):
    """What a packed sequence is made of: a perl.records.Trajectory, whose tokens are lists on the host."""

    prompt_ids: tuple[int, ...]
    token_ids: list[int]


def prompt_work(prompt: int) -> Work:
    """What a packed sequence takes for a prompt of so many tokens, whatever its rows."""
    return sequences([prompt - 1])


def row_work(prompt: int, completion: int) -> Work:
    """What a packed sequence takes for each row, besides its prompt's own."""
    whole, before = sequences([prompt + completion]), sequences([prompt - 1])
    return Work(whole.tokens - before.tokens, whole.pairs - before.pairs)


def packed_work(rows: Sequence[Row]) -> Work:
    """What the packed sequence of these rows takes."""
    works = [prompt_work(len(prompt)) for prompt in {row.prompt_ids for row in rows}]
    works += [row_work(len(row.prompt_ids), len(row.token_ids)) for row in rows]
    return Work(sum(work.tokens for work in works), sum(work.pairs for work in works))


def pack(
    rows: Sequence[Row],
    completion_width: int,
    where: torch.device | str,
    kernel: Kernel | None = None,
    readers: Sequence[Reader] = ("policy",),
) -> Packed:
    """Lay `rows`, each with a prompt of at least one token, out as one sequence, once for each of its readers."""
    ids: list[int] = []
    positions: list[int] = []

    def add(tokens: Sequence[int], start: int) -> slice:
        ids.extend(tokens)
        positions.extend(range(start, start + len(tokens)))
        return slice(len(ids) - len(tokens), len(ids))

    groups: list[Group] = []
    starts: dict[Reader, int] = {}
    scored: dict[Reader, list[int]] = {"policy": []}
    for reader in readers:
        starts[reader] = len(ids)
        spans: dict[int, slice] = {}
        for prompt in dict.fromkeys(row.prompt_ids for row in rows):
            prefix = add(prompt[:-1], 0)
            members = [index for index, row in enumerate(rows) if row.prompt_ids == prompt]
            for index in members:
                spans[index] = add([prompt[-1], *rows[index].token_ids], len(prompt) - 1)
            groups.append(Group(prefix, [spans[index] for index in members]))
        scored[reader] = [place for i in range(len(rows)) for place in range(spans[i].start, spans[i].stop - 1)]

    def tensor(values: Any) -> torch.Tensor:
        return device.to_device(torch.tensor(values, dtype=torch.long), where)

    critics = CriticsPart(starts["critic"], tensor(scored["critic"])) if "critic" in readers else None
    policy = "policy" in readers
    work = packed_work(rows)
    completions, targets = [], 0
    for row in rows:
        tokens = len(row.token_ids)
        completions.append([*range(targets + 1, targets + tokens + 1), *[0] * (completion_width - tokens)])
        targets += tokens
    return Packed(
        input_ids=tensor([ids]),
        position_ids=tensor([positions]),
        targets=tensor([[token for row in rows for token in row.token_ids] if policy else []]),
        packing=Packing(groups, tensor(scored["policy"]), kernel, critics),
        completions=tensor(completions),
        work=Work(len(readers) * work.tokens, len(readers) * work.pairs),
    )


@dataclass(frozen=True, slots=True)
class PackingPlan:
    packed: bool
    """Rows are packed where that saves tokens, not padded."""
    kernel: Kernel | None
    """Of packed attention; None is sdpa."""


def plan_packing(policy: Any, args: TrainingConfig, aux_loss: bool, mixed_precision: str) -> PackingPlan:
    """Whether micro-batches of `policy` (a transformers model or a PeftModel) are packed, which it is prepared for; the
    main process logs a line for what is not done, and why.

    Args:
        aux_loss: the loss has a router's auxiliary loss.
        mixed_precision: accelerate's word for what autocast computes in.
    """
    say = log.info if args.process_index == 0 else log.debug
    if aux_loss or args.torch_compile:
        padded = "the router's auxiliary loss" if aux_loss else "torch_compile wants one shape"
    else:
        padded = enable_packing(policy)
    if padded:
        say("micro-batches are padded, not packed: %s", padded)
        if args.max_tokens_per_microbatch is not None:
            say("training.max_tokens_per_microbatch has no effect: micro-batches are padded")
        return PackingPlan(False, None)
    kernel = device.varlen_attention(args.attention_kernels)
    if kernel is not None:
        dtype, head_dim = numbers_of(policy)
        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)
        if (missing := kernel.missing(autocast or dtype, head_dim)) is not None:
            say("packed micro-batches are computed by sdpa: %s", missing)
            kernel = None
    return PackingPlan(True, kernel)


def enable_packing(model: Any) -> str | None:
    """Let forwards of `model` (a transformers model or a PeftModel) take a Packing as their `layout`; those without one
    stay as they were.

    Returns:
        None, or why its micro-batches can't be packed.
    """
    if reason := unsupported_reason(model) or adopt(model):
        return reason
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if reason := layout_lost(inner):
        return reason
    backbone = inner.base_model
    if _keep_scored not in backbone._forward_hooks.values():
        backbone.register_forward_hook(_keep_scored, with_kwargs=True)
    return None


def _keep_scored(backbone: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Of a packed forward's hidden states those that predict a completion token: TRL's fused head computes all that it
    gets, but on CUDA and CPUs, where it selects by label itself."""
    if isinstance(layout := kwargs.get("layout"), Packing):
        output.last_hidden_state = output.last_hidden_state[:, layout.scored]
    return output


def forward_arguments(packed: Packed) -> dict[str, Any]:
    """Arguments of the model's forward, whose output has log-probabilities and entropies [1, N]. A mask of four
    dimensions is what transformers hands on as it is."""
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=packed.input_ids.device)
    return {
        "input_ids": packed.input_ids,
        "position_ids": packed.position_ids,
        "attention_mask": nothing,
        "layout": packed.packing,
        "shift_labels": packed.targets,
        "fused_lm_head": True,
    }
