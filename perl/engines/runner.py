"""The model's side of a decoder: prefills, decode steps and the draw of their tokens, on the device."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicCache

from perl import device
from perl.base.errors import say_once
from perl.device.sharding import any_rank, is_sharded
from perl.engines import graphs
from perl.engines.attention import adopt, layout_lost, numbers_of
from perl.engines.cache import BLOCK_SIZE, BlockCache, KeysAndValues, KVCache, Prefix, RowCache
from perl.engines.sampling import sample, uniforms
from perl.engines.scheduler import PromptGroup, Sequence, left_pad, mark_seen
from perl.records import Sampling

if TYPE_CHECKING:
    from perl.device import Kernel


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
        tokens, positions, drawn, active = torch.zeros(4, rows, dtype=torch.long, device=where)
        return cls(tokens, positions, drawn, active, torch.zeros(rows, max_new_tokens, device=where), None)

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


class Runner:
    """Computes one run of a decoder.

    Args:
        decoder: it owns the cache, the rows and the graphs, which live on after the run.
        running: the scheduler's, row i of a step being running[i].
    """

    def __init__(self, decoder: Any, sampling: Sampling, running: list[Sequence]):
        self.decoder, self.sampling, self.running = decoder, sampling, running
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
        if decoder.kernel is not None and (reason := kept or self._kernel_lost(inner)):
            say_once(f"decode steps are computed by sdpa: {reason}")
            decoder.kernel = None
        self.kernel = decoder.kernel
        self.captures = decoder.capture and not self.processors
        if decoder.capture and (reason := graphs.unsupported_reason(decoder.model, kept)):
            say_once(f"decoding without captured graphs: {reason}")
            self.captures = False
        self.graphs_for = (sampling.distribution, graphs.baked_in(inner)) if self.captures else None
        self.reads_late = 0 if self.on_cpu or self.processors else 1
        """Steps whose tokens may still be on the device."""

    def _kernel_lost(self, model: Any) -> str | None:
        """Why the decoder's kernel can't compute the attention of `model`, or None."""
        decoder, numbers, block_size = self.decoder, numbers_of(model), self.block_size or BLOCK_SIZE
        if decoder.kernel_fits:
            return None
        if (reason := decoder.kernel.missing(*numbers, block_size)) is None:
            reason = layout_lost(model, BlockCache.without_weights(model, *numbers, block_size))
        decoder.kernel_fits = reason is None
        return reason

    def clear(self) -> None:
        """Forget the rows of a run before, which may have been broken off."""
        for held in (self.decoder.cache, self.decoder.rows):
            if held is not None:
                held.clear()

    @property
    def cache(self) -> KVCache:
        assert self.decoder.cache is not None
        return self.decoder.cache

    @property
    def rows(self) -> Rows:
        assert self.decoder.rows is not None
        return self.decoder.rows

    # Prefill

    def prefill(self, groups: list[PromptGroup], size: tuple[int, int]) -> KVCache:
        """Compute each group's logits, and keep its keys and values in the decoder's cache, which has room for `size`
        (rows, tokens of each) then."""
        going_on = [group for group in groups if group.start is not None]
        for part in ([group for group in groups if group.start is None], going_on):
            if part:
                self._prefill(part, size)
        return self._sized(size)

    def _prefill(self, groups: list[PromptGroup], size: tuple[int, int]) -> None:
        """What these have of earlier sequences is not computed again."""
        ids, mask = left_pad([group.fresh for group in groups], self.decoder.pad_token_id, self.where)
        prefilled = DynamicCache(config=self.model.config)
        starts = [len(group.token_ids) - len(group.fresh) for group in groups]
        if before := max(starts):
            mask = torch.cat([self._begun(prefilled, groups, before), mask], dim=1)
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)[:, before:]
        logits = self._forward(ids, mask, positions, prefilled)
        layers: list[Any] = prefilled.layers  # all DynamicLayer, see unsupported_reason
        states = [(layer.keys, layer.values) for layer in layers]
        cache = self._sized(size, [(keys[0], values[0]) for keys, values in states])
        for i, group in enumerate(groups):
            first, last = slice(before - starts[i], before), slice(-len(group.fresh), None)
            group.logits = logits[i]

            def own(tensor: torch.Tensor, i: int = i, first: slice = first, last: slice = last) -> torch.Tensor:
                fresh = tensor[i, :, last]
                return torch.cat([tensor[i, :, first], fresh], dim=1) if before else fresh

            group.prefix = cache.keep([(own(keys), own(values)) for keys, values in states], len(group.token_ids))
            if group.start is not None:
                cache.drop(group.start)
                group.start = None

    def _begun(self, prefilled: DynamicCache, groups: list[PromptGroup], before: int) -> torch.Tensor:
        """Put what the groups start with, padded on the left, into `prefilled`: the mask of it, int64 [groups,
        before]."""
        starts = [self.cache.states_of(group.start) for group in groups if group.start is not None]
        for number, layers in enumerate(zip(*starts, strict=True)):
            keys, values = (
                torch.stack([F.pad(layer[side], (0, 0, before - layer[side].shape[1], 0)) for layer in layers])
                for side in (0, 1)
            )
            prefilled.update(keys, values, number)
        places = torch.arange(before).flip(0)
        return device.to_device(torch.stack([(places < layers[0][0].shape[1]).long() for layers in starts]), self.where)

    def _sized(self, size: tuple[int, int], like: KeysAndValues | None = None) -> KVCache:
        """The decoder's cache, made or extended."""
        decoder, cache = self.decoder, self.decoder.cache
        rows, longest = size
        if decoder.fixed and self.captures:  # what the cache held before does not cut the shape of a step
            rows, longest = graphs.rounded(rows, longest)
        max_seq_len = -(-longest // BLOCK_SIZE) * BLOCK_SIZE
        if cache is None:
            assert like is not None
            a_token = sum(
                states.shape[-3] * states.shape[-1] * states.element_size() for pair in like for states in pair
            )
            shape = rows, max_seq_len, decoder.max_batch_tokens or decoder.room() // a_token
            cache = RowCache(like, *shape) if self.block_size is None else BlockCache(like, *shape, self.block_size)
            decoder.cache = cache
        elif cache.fit(rows, max_seq_len):
            decoder.graphs = None  # they read where the cache was
        return cache

    def first_tokens(self, joining: list[tuple[PromptGroup, Sequence]]) -> tuple[torch.Tensor, Rows]:
        """The next token of sequences whose prompts are computed, float32 [2, sequences] as of `step`, and what their
        rows begin with."""
        sequences = [sequence for _, sequence in joining]
        logits = torch.stack([group.logits for group, _ in joining])  # type: ignore[arg-type]
        seeds = np.array([sequence.seed for sequence in sequences], dtype=np.uint64)
        places = np.arange(max(sequence.max_new_tokens for sequence in sequences))
        uniform = device.to_device(torch.from_numpy(uniforms(seeds[:, None], places)), self.where)
        state = torch.tensor([[sequence.length, sequence.launched] for sequence in sequences])
        positions, drawn = device.to_device(state, self.where).unbind(dim=1)
        seen = None
        if self.sampling.repetition_penalty != 1:
            seen = mark_seen([group.token_ids for group, _ in joining], logits.shape[-1], self.where)
        result = self._draw(sequences, logits, uniform.gather(1, drawn[:, None])[:, 0], seen)
        return result, Rows(result[0].long(), positions, drawn + 1, torch.ones_like(drawn), uniform, seen)

    def place(self, prefixes: list[Prefix], first: Rows, staying: list[int]) -> None:
        """Give the sequences `staying` of those that joined the next rows; they are in `running` afterwards."""
        for prefix in prefixes:
            self.cache.append(prefix)
        chosen = device.to_device(torch.tensor(staying), self.where)
        rows = self._make_rows(first.uniforms.shape[1], first.seen)
        new = slice(len(self.running), len(self.running) + len(staying))
        for target, source in zip(rows.tensors(), first.tensors(), strict=False):
            target[(new, *(slice(size) for size in source.shape[1:]))] = source[chosen]

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
        for target, source in zip(new.tensors(), [] if old is None else old.tensors(), strict=False):
            kept = (slice(len(self.running)), *(slice(size) for size in source.shape[1:]))
            target[kept] = source[kept]
        self.decoder.rows, self.decoder.graphs = new, None
        return new

    def remove(self, count: int, moves: list[tuple[int, int]]) -> None:
        """Rows from `count` on are free, once `moves` (source, target) have been made."""
        self.cache.remove(count, moves)
        rows = self.rows
        for tensor in rows.tensors():
            for source, target in moves:
                tensor[target].copy_(tensor[source])
        for tensor in (rows.active, rows.positions, rows.drawn):
            tensor[count:] = 0

    # Step

    def step(self) -> torch.Tensor:
        """Draw one token for each running sequence, which has a place in the cache: float32 [2, rows], tokens and
        log-probabilities."""
        width = max(sequence.length for sequence in self.running)
        if self.kernel is not None:
            width = self.cache.max_seq_len  # the lengths are numbers that it reads, not shapes
        return self._step_function()(len(self.running), width)[0]

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
            ids, _ = left_pad(so_far, self.decoder.pad_token_id, self.where)
            processed = logits.clone()
            for processor in self.processors:
                processed = processor(ids, processed)  # type: ignore[arg-type]
        tokens, logprobs = sample(processed, self.sampling, uniform, seen=seen, model_logits=logits)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        return torch.stack([tokens.float(), logprobs])

    # The model

    def idle(self) -> None:
        """Where forwards gather the parameters: one of one token for nothing, as long as another rank computes."""
        while self.lockstep and any_rank(False, self.where):
            one = torch.ones(1, 1, dtype=torch.long, device=self.where)
            cache = DynamicCache(config=self.model.config)
            self._call_model(one * self.decoder.pad_token_id, one, one - 1, cache)

    def _forward(self, *inputs: Any, **options: Any) -> torch.Tensor:
        """As `_call_model`, where every rank takes part."""
        if self.lockstep:
            any_rank(True, self.where)
        return self._call_model(*inputs, **options)

    def _call_model(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache, **options: Any
    ) -> torch.Tensor:
        """float32 logits [rows, vocabulary] of the last token; ids and positions [rows, tokens]."""
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
