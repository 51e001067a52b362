"""The decode loop: completes sequences with a transformers model in memory, continuously batched.

    while there are sequences that wait, run, or have a token under way:
        1. poll      read the sequences that have come
        2. prefill   let waiting ones in: each prompt is computed once for all its sequences; draw first tokens
        3. step      one token for each running sequence, on the device, its random numbers made ahead
        4. collect   read the tokens of the step before; sequences that end leave, and the last ones take their rows

Against the model's own `generate`: a prompt is prefilled once, however many completions it gets; a sequence that ends
leaves the batch at once, and a waiting one takes its place; no key or value is copied for the attention of a new token
(perl.engines.attention); each sequence draws from its own random stream (perl.engines.sampling), so that what it gets
depends neither on its neighbours nor on the memory that there is. When that runs short the newest sequences are parked:
they wait and are computed again from their tokens.

An accelerator is never waited for: while it computes a step the host reads the tokens of the one before, so that a
sequence that ended is computed once more for nothing. On a CPU tokens are read at once.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from perl import device
from perl.device.sharding import any_rank, is_sharded
from perl.engines import graphs
from perl.engines.attention import adopt, layout_lost, numbers_of
from perl.engines.base import warn_once
from perl.engines.cache import BLOCK_SIZE, KERNEL_BLOCK_SIZE, BlockCache, KeysAndValues, KVCache, Prefix, RowCache
from perl.engines.sampling import sample, uniforms, validate
from perl.engines.sequence import Sequence, left_pad, mark_seen
from perl.engines.stock import generate_stock
from perl.records import Sampling

if TYPE_CHECKING:
    from transformers import LogitsProcessor

    from perl.device import Kernel

MAX_NUM_SEQS = {"accelerator": 256, "cpu": 64}
"""More sequences at once make a step slower by as much as they share it: on a CPU soon, elsewhere hardly."""
PREFILL_TOKENS = 8_192
"""Most prompt tokens, padding included, in one prefill: bounds the activations, not the cache."""
REFILL_SHARE = 8
"""Waiting sequences are let in once so large a share of the rows is free: a prefill for each single sequence that ends
would cost an accelerator a step each time."""
CACHE_SHARE = 0.5
"""Of the memory that is free, how much the KV cache may take where no bound is given."""
KEPT_SHARE = 0.25
"""Of an accelerator's memory, how much must be free after a rollout for the cache to stay."""


@dataclass(slots=True)
class PromptGroup:
    """Sequences that wait and begin with the same tokens: a prompt, or what a parked sequence has come to."""

    token_ids: tuple[int, ...]
    waiting: deque[Sequence] = field(default_factory=deque)
    max_len: int = 0
    """The most that one of them may come to."""
    logits: torch.Tensor | None = None
    """float32 [vocabulary] after the last token, once it is prefilled."""
    prefix: Prefix | None = None
    """Its place in the cache, once it is prefilled."""

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.max_len = max(self.max_len, sequence.max_len)


@dataclass(slots=True)
class Rows:
    """What a decode step knows of its rows, on the device; row i is the i-th running sequence."""

    tokens: torch.Tensor
    """int64 [rows]: the last token drawn, which is not in the cache yet."""
    positions: torch.Tensor
    """int64 [rows]: its position."""
    drawn: torch.Tensor
    """int64 [rows]: tokens drawn so far."""
    active: torch.Tensor
    """int64 [rows]: 1 where there is a sequence, 0 in the rows beyond, which a captured graph computes for nothing."""
    uniforms: torch.Tensor
    """float32 [rows, most new tokens]: the numbers that tokens are drawn with."""
    seen: torch.Tensor | None
    """bool [rows, vocabulary]: tokens in prompt and completion, where there is a repetition penalty."""

    @classmethod
    def blank(cls, rows: int, max_new_tokens: int, where: torch.device) -> Rows:
        def zeros() -> torch.Tensor:
            return torch.zeros(rows, dtype=torch.long, device=where)

        return cls(zeros(), zeros(), zeros(), zeros(), torch.zeros(rows, max_new_tokens, device=where), None)

    def clear(self) -> None:
        """No row has a sequence."""
        for tensor in (self.positions, self.drawn, self.active):
            tensor.zero_()

    def state(self) -> list[torch.Tensor]:
        """What a step changes."""
        state = [self.tokens, self.positions, self.drawn]
        return state if self.seen is None else [*state, self.seen]

    def tensors(self) -> list[torch.Tensor]:
        return [self.active, self.uniforms, *self.state()]


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The layout (perl.engines.attention) of a decode step whose attention reads the blocks of the cache itself."""

    kernel: Kernel
    table: torch.Tensor
    """int32 [rows, blocks]."""
    lengths: torch.Tensor | list[int]
    """Of the rows, on the device or on the host, as the kernel wants them."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scaling: float | None
    ) -> torch.Tensor:
        """query: [rows, heads, 1, head_dim]; key and value: all blocks, [blocks, block size, key heads, head_dim]."""
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return self.kernel(query[:, :, 0], key, value, self.table, self.lengths, scale)[:, None]


Result = tuple[device.Read, list[Sequence]]
"""float32 [2, rows], tokens and log-probabilities, on their way to the host, and the sequences that drew them."""


def unsupported_reason(model: Any) -> str | None:
    """Why a Decoder can't serve `model` (a transformers model or a PeftModel), or None where it can."""
    peft_config = getattr(model, "active_peft_config", None)
    if peft_config is not None and peft_config.is_prompt_learning:
        return f"{peft_config.peft_type.value} puts virtual tokens before the prompt"
    inner = model.get_base_model() if peft_config is not None else model
    config = inner.config
    text_config = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if text_config is not config or inner.main_input_name != "input_ids":
        return "it takes more than text"
    if getattr(inner, "_is_stateful", False):
        return "its cache is recurrent"
    if inner._auto_class is not None:  # transformers 5 has is_remote_code() for this, 4.57 has not
        return "its code is not part of transformers"
    kinds = {type(layer) for layer in DynamicCache(config=text_config).layers} - {DynamicLayer}
    if kinds:
        return f"its cache has {', '.join(sorted(kind.__name__ for kind in kinds))}"
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        return "it takes no position_ids"
    if config._attn_implementation == "flex_attention":
        return "flex_attention compiles again for each shape"
    return None


class Decoder:
    """Completes sequences with `model`; its cache and captured graphs live on from one run to the next.

    Args:
        model: a transformers model or a PeftModel, not wrapped by DDP, FSDP or DeepSpeed. Its weights may change
            between runs, in place.
        eos_token_ids: tokens that end a completion.
        pad_token_id: fills masked places; which token it is changes nothing.
        max_batch_tokens: most tokens of KV cache at once; None is what memory allows. A sequence that is longer than
            this alone is decoded alone.
        max_num_seqs: most sequences in flight; None is MAX_NUM_SEQS.
        capture: run decode steps as captured graphs where the accelerator and the model allow it (perl.engines.graphs).
        kernel: one that reads the blocks of the cache itself (perl.device.kernels.PAGED), where it takes the model's
            numbers.
        block_size: tokens of a block of the cache; None is the device's (perl.engines.cache).
        stock: draw by the model's own `generate` (perl.engines.stock).
        generation_kwargs: fields of a GenerationConfig that the loop does not serve; with any of them, and for a model
            that it can't serve, the model's own `generate` draws instead, which one line says.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_token_ids: Collection[int],
        pad_token_id: int,
        max_batch_tokens: int | None = None,
        max_num_seqs: int | None = None,
        capture: bool = False,
        kernel: Kernel | None = None,
        block_size: int | None = None,
        stock: bool = False,
        generation_kwargs: dict[str, Any] | None = None,
    ):
        self.model = model
        self.eos_token_ids, self.pad_token_id = frozenset(eos_token_ids), pad_token_id
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs or MAX_NUM_SEQS["cpu" if model.device.type == "cpu" else "accelerator"]
        self.capture, self.kernel, self.block_size, self.stock = capture, kernel, block_size, stock
        self.generation_kwargs = generation_kwargs or {}
        self.processors: list[LogitsProcessor] = []
        """Further logits processors, called with left-padded ids before a token is drawn."""
        self.cache: KVCache | None = None
        self.rows: Rows | None = None
        self.graphs: graphs.StepGraphs | None = None

    def stock_reason(self) -> str | None:
        """Why the model's own `generate` draws instead of the loop; None where the loop does."""
        reason = unsupported_reason(self.model)
        if reason is None and self.generation_kwargs:
            reason = f"generation_kwargs has {', '.join(sorted(self.generation_kwargs))}"
        return reason

    def run(self, source: Iterable[Sequence | None], sampling: Sampling) -> Iterator[Sequence]:
        """Complete the sequences of `source`, yielding each one when it is finished.

        Args:
            source: read while others are decoded; None when there is nothing at the moment (perl.engines.base.Feed).
            sampling: the distribution; n, seed and max_new_tokens are the sequences' own.

        The model must be in evaluation mode, and its weights must stay as they are until the iterator is at its end.
        """
        validate(sampling)
        if not self.stock and (reason := self.stock_reason()) is not None:
            warn_once(f"decoding with the model's own generate, as the decode loop can't serve it: {reason}")
        if self.stock or self.stock_reason() is not None:
            return generate_stock(
                self.model,
                source,
                sampling,
                eos_token_ids=self.eos_token_ids,
                pad_token_id=self.pad_token_id,
                max_batch_tokens=self.max_batch_tokens,
                max_num_seqs=self.max_num_seqs,
                processors=self.processors,
                generation_kwargs=self.generation_kwargs,
            )
        return _Run(self, source, sampling).finished()

    def release(self) -> None:
        """Give the cache's memory back, and the graphs that read it."""
        self.cache = self.rows = self.graphs = None

    def release_if_short(self) -> None:
        """Release the cache where an accelerator has little memory left for what comes next."""
        memory, free = device.peak_memory(), device.free_memory()
        if memory is None or free is None:
            self.release()  # on a CPU: it has no graphs, and costs nothing to make
        elif free < KEPT_SHARE * memory.total:
            self.release()
            device.empty_cache()


class _Run:
    """One run of a Decoder. `finished` is the algorithm; the rest are its parts."""

    def __init__(self, decoder: Decoder, source: Iterable[Sequence | None], sampling: Sampling):
        self.decoder, self.sampling = decoder, sampling
        self.source = iter(source)
        self.eos_token_ids, self.pad_token_id = decoder.eos_token_ids, decoder.pad_token_id
        self.processors = decoder.processors
        self.lockstep = is_sharded(decoder.model)
        """Each forward gathers weights from other ranks, so all ranks run the same number of them: those that are
        through idle until the last one is."""
        peft = hasattr(decoder.model, "get_base_model")
        # FSDP2 gathers in the forward of the module that it was given, which is the outer one.
        self.model = decoder.model.get_base_model() if peft and not self.lockstep else decoder.model
        inner = decoder.model.get_base_model() if peft else decoder.model
        parameters = inspect.signature(inner.forward).parameters
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.where: torch.device = inner.device
        kept = adopt(inner)
        self.own_attention = kept is None
        self.on_cpu = self.where.type == "cpu"
        self.block_size = decoder.block_size or (None if self.on_cpu else BLOCK_SIZE)
        self.kernel = decoder.kernel
        if self.kernel is not None:
            self.block_size = KERNEL_BLOCK_SIZE
            reason = kept or self.kernel.missing(*numbers_of(inner), self.block_size) or layout_lost(inner)
            if reason is not None:
                warn_once(f"decode steps are computed by sdpa: {reason}")
                self.kernel, self.block_size = None, BLOCK_SIZE
        self.captures = decoder.capture and not self.processors
        if decoder.capture and (reason := graphs.unsupported_reason(decoder.model, kept)):
            warn_once(f"decoding without captured graphs: {reason}")
            self.captures = False
        self.graphs_for = (sampling.distribution, graphs.baked_in(inner)) if self.captures else None
        self.reads_late = 0 if self.on_cpu or self.processors else 1
        """Steps whose tokens may still be on the device."""
        self.groups: deque[PromptGroup] = deque()
        self.read = self.waiting = 0
        self.running: list[Sequence] = []
        self.results: deque[Result] = deque()
        self.done: deque[Sequence] = deque()

    @torch.no_grad()
    def finished(self) -> Iterator[Sequence]:
        if self.decoder.cache is not None:  # of a run before, which may have been broken off
            self.decoder.cache.clear()
        if self.decoder.rows is not None:
            self.decoder.rows.clear()
        while self._poll() or self.running or self.results:
            while self.waiting and self._prefill():
                yield from self._flush()
            if self.running:
                self._step()
            self._collect(self.reads_late if self.running else 0)
            yield from self._flush()
        while self.lockstep and any_rank(False, self.where):
            self._idle()

    @property
    def cache(self) -> KVCache:
        assert self.decoder.cache is not None
        return self.decoder.cache

    @property
    def rows(self) -> Rows:
        assert self.decoder.rows is not None
        return self.decoder.rows

    def _flush(self) -> Iterator[Sequence]:
        while self.done:
            yield self.done.popleft()

    # 1. Poll

    def _poll(self) -> bool:
        """Read the sequences that there are now, up to the next None or the end; whether any wait."""
        groups = {group.token_ids: group for group in self.groups}
        before = self.waiting
        for sequence in iter(lambda: next(self.source, None), None):
            sequence.index, self.read = self.read, self.read + 1
            groups.setdefault(sequence.prompt_ids, PromptGroup(sequence.prompt_ids)).add(sequence)
            self.waiting += 1
        if self.waiting > before:  # those that may become longest first: neighbours need little padding
            self.groups = deque(sorted(groups.values(), key=lambda group: -group.max_len))
        return self.waiting > 0

    # 2. Prefill

    def _prefill(self) -> bool:
        """Compute the next prompts, and let in as many of their sequences as there is room for; whether any came."""
        free = self.decoder.max_num_seqs - len(self.running)
        if self.running and free < min(max(1, self.decoder.max_num_seqs // REFILL_SHARE), self.waiting):
            return False
        groups = self._next_groups(free)
        self._compute_prompts([group for group in groups if group.logits is None])
        joining: list[tuple[PromptGroup, Sequence]] = []
        cache, taken = self._cache(), 0
        for group in groups:
            while free > 0 and group.waiting and group.prefix is not None:
                taken += cache.cost(group.prefix)
                if taken > cache.room:
                    if self.running or joining:
                        break
                    self._forget_prompts(but=group)  # a sequence alone is let in whatever its length
                joining.append((group, group.waiting.popleft()))
                free -= 1
            if group.waiting:
                break
        self.waiting -= len(joining)
        if joining:
            self._join(joining)
        for group in groups:
            if group.prefix is not None and group.waiting:
                group.prefix.keep_own_copy()
            elif group.prefix is not None:
                cache.drop(group.prefix)
        self.groups = deque(group for group in self.groups if group.waiting)
        return bool(joining)

    def _forget_prompts(self, but: PromptGroup | None = None) -> bool:
        """Give back what is kept of prompts for sequences that wait; whether there was any."""
        kept = [group for group in self.groups if group.prefix is not None and group is not but]
        for group in kept:
            self.cache.drop(group.prefix)  # type: ignore[arg-type]
            group.prefix = group.logits = None
        return bool(kept)

    def _next_groups(self, free: int) -> list[PromptGroup]:
        """The groups from which `free` sequences may come, with PREFILL_TOKENS to compute at most."""
        cache, groups = self.decoder.cache, []
        room = cache.room if cache is not None else PREFILL_TOKENS
        longest = fresh = 0
        for group in self.groups:
            if free <= 0 or (groups and room <= 0):
                break
            if group.logits is None:
                longest, fresh = max(longest, len(group.token_ids)), fresh + 1
                if fresh > 1 and longest * fresh > PREFILL_TOKENS:
                    break
            groups.append(group)
            free -= len(group.waiting)
            room -= cache.prompt_cost(len(group.token_ids)) if cache is not None else len(group.token_ids)
        if self.running and groups and room < 0:
            groups.pop()  # computed now, it would have to wait
        return groups

    def _compute_prompts(self, groups: list[PromptGroup]) -> None:
        """Compute each group's logits, and keep its keys and values."""
        if not groups:
            return
        ids, mask = left_pad([group.token_ids for group in groups], self.pad_token_id, self.where)
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        prefilled = DynamicCache(config=self.model.config)
        logits = self._forward(ids, mask, positions, prefilled)
        layers: list[Any] = prefilled.layers  # all DynamicLayer, see unsupported_reason
        states = [(layer.keys, layer.values) for layer in layers]
        cache = self._cache([(keys[0], values[0]) for keys, values in states])
        for i, group in enumerate(groups):
            length = len(group.token_ids)
            group.logits = logits[i]
            group.prefix = cache.keep(
                [(keys[i, :, -length:], values[i, :, -length:]) for keys, values in states], length
            )

    def _cache(self, like: KeysAndValues | None = None) -> KVCache:
        """The decoder's cache, made or extended for the sequences that there are."""
        decoder, cache = self.decoder, self.decoder.cache
        longest = max(
            [group.max_len for group in self.groups] + [sequence.max_len for sequence in self.running], default=1
        )
        max_seq_len = -(-longest // BLOCK_SIZE) * BLOCK_SIZE
        rows = min(decoder.max_num_seqs, self.waiting + len(self.running))
        if cache is None:
            assert like is not None
            a_token = sum(
                states.shape[-3] * states.shape[-1] * states.element_size() for pair in like for states in pair
            )
            free = int(device.available_memory() * CACHE_SHARE) // a_token
            size = rows, max_seq_len, decoder.max_batch_tokens or free
            cache = RowCache(like, *size) if self.block_size is None else BlockCache(like, *size, self.block_size)
            decoder.cache = cache
        elif rows > cache.max_num_seqs or longest > cache.max_seq_len:
            cache.extend(rows, max_seq_len)
            decoder.graphs = None  # they read where the cache was
        return cache

    def _join(self, joining: list[tuple[PromptGroup, Sequence]]) -> None:
        """Draw the next token of sequences whose prompts are computed, and give each that goes on a row."""
        sequences = [sequence for _, sequence in joining]
        logits = torch.stack([group.logits for group, _ in joining])  # type: ignore[arg-type]
        seeds = np.array([sequence.seed for sequence in sequences], dtype=np.uint64)
        places = np.arange(max(sequence.max_new_tokens for sequence in sequences))
        uniform = torch.from_numpy(uniforms(seeds[:, None], places)).to(self.where)
        drawn = torch.tensor([sequence.launched for sequence in sequences], device=self.where)
        seen = None
        if self.sampling.repetition_penalty != 1:
            seen = mark_seen([group.token_ids for group, _ in joining], logits.shape[-1], self.where)
        result = self._draw(sequences, logits, uniform.gather(1, drawn[:, None])[:, 0], seen)
        self._launched(result, sequences)
        self._collect(self.reads_late)
        staying = [i for i, sequence in enumerate(sequences) if self._goes_on(sequence)]
        for i in staying:
            prefix = joining[i][0].prefix
            assert prefix is not None
            self.cache.append(prefix)
        if not staying:
            return
        chosen = torch.tensor(staying, device=self.where)
        first = len(self.running)
        rows = self._make_rows(uniform.shape[1], seen)
        new = slice(first, first + len(staying))
        rows.tokens[new] = result[0].long()[chosen]
        rows.positions[new] = torch.tensor([sequences[i].length - 1 for i in staying], device=self.where)
        rows.drawn[new] = drawn[chosen] + 1
        rows.active[new] = 1
        rows.uniforms[new, : uniform.shape[1]] = uniform[chosen]
        if seen is not None:
            assert rows.seen is not None
            rows.seen[new] = seen[chosen]
        self.running += [sequences[i] for i in staying]

    def _make_rows(self, max_new_tokens: int, seen: torch.Tensor | None) -> Rows:
        """The decoder's rows, remade where they are too few or too short."""
        old, count = self.decoder.rows, self.cache.max_num_seqs
        if old is not None and len(old.tokens) >= count and old.uniforms.shape[1] >= max_new_tokens:
            if seen is None or old.seen is not None:
                return old
            count, max_new_tokens = len(old.tokens), old.uniforms.shape[1]
        new = Rows.blank(count, max_new_tokens, self.where)
        if seen is not None:
            new.seen = torch.zeros(count, seen.shape[1], dtype=torch.bool, device=self.where)
        for mine, theirs in zip(new.tensors(), [] if old is None else old.tensors(), strict=False):
            kept = (slice(len(self.running)), *(slice(size) for size in theirs.shape[1:]))
            mine[kept] = theirs[kept]
        self.decoder.rows, self.decoder.graphs = new, None
        return new

    # 3. Step

    def _step(self) -> None:
        """Draw one token for each running sequence."""
        cache = self.cache
        while self.running and not cache.grow():
            self._park()
        if not self.running:
            return
        count, width = len(self.running), max(sequence.length for sequence in self.running)
        if self.kernel is not None:
            width = cache.max_seq_len  # the lengths are numbers that it reads, not shapes
        result, _ = self._step_function()(count, width)
        self._launched(result, list(self.running))
        self._leave([row for row, sequence in enumerate(self.running) if sequence.launched == sequence.max_new_tokens])

    def _step_function(self) -> graphs.Compute:
        """`_compute`, by captured graphs where they are asked for."""
        if not self.captures:
            return self._compute
        decoder, rows, cache = self.decoder, self.rows, self.cache
        if decoder.graphs is None or decoder.graphs.made_for != self.graphs_for:
            on_host = self.kernel is not None and self.kernel.host_lengths
            decoder.graphs = graphs.StepGraphs(
                self.graphs_for, rows.state(), cache.max_num_seqs, cache.max_seq_len, on_host
            )
        return decoder.graphs.bind(self._compute, self._host_lengths)

    def _compute(self, count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of the first `count` rows, reading `width` places of each row of the cache: the result, float32 [2,
        count], and the logits, float32 [count, vocabulary]. The same operations each time, and nothing read back."""
        rows, cache = self.rows, self.cache
        tokens, positions, drawn = rows.tokens[:count], rows.positions[:count], rows.drawn[:count]
        width = cache.begin(positions, width, whole=self.kernel is not None)
        if self.kernel is not None:
            assert isinstance(cache, BlockCache)
            lengths = self._host_lengths(count) if self.kernel.host_lengths else (positions + 1).int()
            layout = PagedStep(self.kernel, cache.table[:count], lengths)
            nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self.where)
            logits = self._forward(tokens[:, None], nothing, positions[:, None], cache, layout=layout)
        else:
            visible = torch.arange(width, device=self.where) <= positions[:, None]
            # Of four dimensions: transformers hands it on as it is, instead of working it out and reading it back.
            mask = visible[:, None, None] if self.own_attention else visible
            logits = self._forward(tokens[:, None], mask, positions[:, None], cache)
        uniform = rows.uniforms[:count].gather(1, drawn[:, None])[:, 0]
        seen = None if rows.seen is None or self.sampling.repetition_penalty == 1 else rows.seen[:count]
        result = self._draw(self.running[:count], logits, uniform, seen)
        active = rows.active[:count]
        tokens.copy_(result[0])
        positions.add_(active)
        drawn.add_(active)
        return result, logits

    def _host_lengths(self, count: int) -> list[int]:
        """Tokens of each of the first `count` rows in the cache, the one to be computed included; 1 beyond them."""
        lengths = [sequence.length for sequence in self.running[:count]]
        return lengths + [1] * (count - len(lengths))

    def _draw(
        self, sequences: list[Sequence], logits: torch.Tensor, uniform: torch.Tensor, seen: torch.Tensor | None
    ) -> torch.Tensor:
        """float32 [2, rows]: the next token of each row (exact: below 2**24) and its log-probability; marks it in
        `seen`."""
        processed = logits
        if self.processors:
            so_far = [sequence.prompt_ids + tuple(sequence.token_ids) for sequence in sequences]
            ids, _ = left_pad(so_far, self.pad_token_id, self.where)
            processed = logits.clone()
            for processor in self.processors:
                processed = processor(ids, processed)  # type: ignore[arg-type]
        tokens, logprobs = sample(processed, self.sampling, uniform, seen=seen, model_logits=logits)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        return torch.stack([tokens.float(), logprobs])

    def _launched(self, result: torch.Tensor, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.launched += 1
        self.results.append((device.start_read(result), sequences))

    # 4. Collect

    def _collect(self, late: int) -> None:
        """Read all results but the last `late`; sequences that ended leave."""
        ended: set[Sequence] = set()
        while len(self.results) > late:
            read, sequences = self.results.popleft()
            tokens, logprobs = read.wait().tolist()
            for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
                if sequence.finished:
                    continue  # computed for nothing, as its end was not known yet
                sequence.token_ids.append(int(token))
                sequence.logprobs.append(logprob)
                sequence.stopped = sequence.token_ids[-1] in self.eos_token_ids
                if sequence.finished:
                    ended.add(sequence)
                    self.done.append(sequence)
        if ended:
            self._leave([row for row, sequence in enumerate(self.running) if sequence in ended])

    def _goes_on(self, sequence: Sequence) -> bool:
        return not sequence.finished and sequence.launched < sequence.max_new_tokens

    def _leave(self, leaving: list[int]) -> None:
        """Free these rows; the last rows move into their places."""
        if not leaving:
            return
        cache, rows = self.cache, self.rows
        gone = set(leaving)
        staying = [row for row in range(len(self.running)) if row not in gone]
        count = len(staying)
        targets = [row for row in leaving if row < count]
        moves = list(zip(staying[count - len(targets) :], targets, strict=True))
        cache.remove(count, moves)
        for tensor in rows.tensors():
            for source, target in moves:
                tensor[target].copy_(tensor[source])
        for source, target in moves:
            self.running[target] = self.running[source]
        rows.active[count : len(self.running)] = 0
        rows.positions[count : len(self.running)] = 0
        rows.drawn[count : len(self.running)] = 0
        del self.running[count:]

    def _park(self) -> None:
        """Memory is short: forget the prompts that are kept for sequences that wait, then the newest sequence, which
        waits and is computed again from its tokens."""
        if self._forget_prompts():
            return
        self._collect(0)
        if len(self.running) < 2:
            return
        sequence = self.running[-1]
        self._leave([len(self.running) - 1])
        so_far = sequence.prompt_ids + tuple(sequence.token_ids)
        group = next((group for group in self.groups if group.token_ids == so_far), None)
        if group is None:
            group = PromptGroup(so_far)
            self.groups.appendleft(group)
        group.add(sequence)
        self.waiting += 1

    # The model

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache, **options: Any
    ) -> torch.Tensor:
        """float32 logits [rows, vocabulary] of the last token; ids and positions [rows, tokens]."""
        if self.lockstep:
            any_rank(True, self.where)
        return self._call_model(ids, mask, positions, cache, **options)

    def _idle(self) -> None:
        """A forward of one token for nothing, to take part in gathering the parameters."""
        one = torch.ones(1, 1, dtype=torch.long, device=self.where)
        self._call_model(one * self.pad_token_id, one, one - 1, DynamicCache(config=self.model.config))

    def _call_model(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache, **options: Any
    ) -> torch.Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **self.options,
            **options,
        )
        return output.logits[:, -1].float()
