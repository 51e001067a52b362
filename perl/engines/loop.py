"""The fast decode loop: read what has come, admit rows into free slots, take one step with all, let go of the ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from transformers import LogitsProcessorList
from transformers.cache_utils import Cache, DynamicCache

from perl.engines import graphs
from perl.engines.attention import adopt
from perl.engines.base import warn_once
from perl.engines.rows import Finished, Job, Row, arrived, left_pad, mark_seen
from perl.engines.sampling import choose, uniforms
from perl.engines.slots import SlotCache

PREFILL_TOKENS = 8_192
"""Most prompt tokens, padding included, in one prefill: bounds the activations, not the cache."""
REFILL_SHARE = 8
"""Waiting rows are let in once a REFILL_SHARE-th of the slots is free: a prefill for each single row that ends would
cost an accelerator a step each time."""


@dataclass(slots=True)
class Live:
    """A row in flight."""

    index: int
    row: Row
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.row.prompt_ids) + len(self.token_ids)


@dataclass(slots=True)
class Group:
    """Rows that wait and share a prompt."""

    prompt_ids: tuple[int, ...]
    waiting: deque[Live]
    reach: int
    """The most that one of them may come to."""
    logits: torch.Tensor | None = None
    """float32 [vocabulary] for the first new token, once the prompt is prefilled."""
    states: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Keys and values of each layer, [heads, prompt length, head_dim], once the prompt is prefilled."""

    def keep_own_copy(self) -> None:
        """Let go of the batch that the prompt was prefilled in."""
        self.logits = _prefilled(self).clone()
        self.states = [(keys.clone(), values.clone()) for keys, values in self.states]


def group_rows(rows: Iterable[Live], groups: Iterable[Group] = ()) -> deque[Group]:
    """`rows` by prompt, beside or in the `groups` that wait already; those that may become longest first."""
    by_prompt = {group.prompt_ids: group for group in groups}
    for live in rows:
        group = by_prompt.setdefault(live.row.prompt_ids, Group(live.row.prompt_ids, deque(), 0))
        group.waiting.append(live)
        group.reach = max(group.reach, live.row.reach)
    return deque(sorted(by_prompt.values(), key=lambda group: -group.reach))


def _prefilled(group: Group) -> torch.Tensor:
    assert group.logits is not None
    return group.logits


class Decoder:
    """One run over a Job. `run` is the algorithm; the rest are its parts."""

    def __init__(
        self, model: Any, job: Job, processors: LogitsProcessorList, logits_to_keep: int | None, lockstep: bool
    ):
        self.model = model
        self.job = job
        self.processors = processors
        self.options = {} if logits_to_keep is None else {"logits_to_keep": logits_to_keep}
        self.lockstep = lockstep
        """All ranks run the same number of forwards; those that are through idle until the last one is."""
        kept = adopt(model)
        self.own_attention = kept is None
        self.captures = job.capture
        if job.capture and (reason := graphs.unsupported_reason(kept, lockstep)):
            warn_once(f"decoding without captured graphs: {reason}")
            self.captures = False
        self.graphs: graphs.StepGraphs | None = None
        self.source = iter(job.rows)
        self.read = 0
        """Rows that came from `source`."""
        self.groups: deque[Group] = deque()
        self.waiting = 0
        self.live: list[Live] = []
        """Row i is in slot i of the cache."""
        self.cache: SlotCache | None = None
        self.seen: torch.Tensor | None = None
        """bool [live rows, vocabulary] when there is a repetition penalty."""

    @torch.no_grad()
    def run(self) -> Iterator[Finished]:
        while self._listen() or self.live:
            while (free := self._free_slots()) > 0:
                yield from self._admit(free)
            if self.live:
                yield from self._step()
        while self.lockstep and self._any_rank_decodes(False):
            self._idle()

    def _listen(self) -> bool:
        """Read the rows that there are; whether any wait."""
        fresh = [Live(index, row) for index, row in arrived(self.source, self.read)]
        if fresh:
            self.groups = group_rows(fresh, self.groups)
            self.read += len(fresh)
            self.waiting += len(fresh)
        return self.waiting > 0

    def _free_slots(self) -> int:
        """How many waiting rows may join now."""
        if not self.waiting:
            return 0
        allowed = self._allowed_rows()
        enough = min(max(1, allowed // REFILL_SHARE), self.waiting) if self.live else 1
        free = allowed - len(self.live)
        return free if free >= enough else 0

    def _allowed_rows(self) -> int:
        return max(1, self.job.max_batch_tokens // self._widest())

    def _widest(self) -> int:
        """Columns that rows in flight and the next group may come to."""
        waiting = self.groups[0].reach if self.groups else 0
        return max([waiting, *(live.row.reach for live in self.live)])

    def _admit(self, free: int) -> Iterator[Finished]:
        """Take up to `free` waiting rows, prefill the prompts that are new, draw first tokens, fill slots."""
        allowed, widest = self._allowed_rows(), self._widest()
        taken = self._take(free)
        self._prefill([group for group, _ in taken if group.logits is None])
        joining = [live for _, rows in taken for live in rows]
        logits = torch.stack([_prefilled(group) for group, rows in taken for _ in rows])
        seen = self._seen_prompts(joining, logits.shape[-1])
        self._draw(joining, logits, seen)
        staying = [not self._ended(live) for live in joining]
        rows_now = len(self.live) + sum(staying)
        self._reserve(rows_now, min(allowed, rows_now + self.waiting), widest, taken[0][0].states)
        for group, rows in taken:
            self._fill_slots(group, [live for live in rows if not self._ended(live)])
        if seen is not None:
            seen = seen[torch.tensor(staying, device=seen.device)]
            self.seen = seen if self.seen is None else torch.cat([self.seen, seen])
        yield from (self._finished(live) for live in joining if self._ended(live))

    def _fill_slots(self, group: Group, rows: list[Live]) -> None:
        assert self.cache is not None
        self.cache.insert(len(self.live), len(rows), group.states)
        self.live += rows
        if group.waiting:
            group.keep_own_copy()

    def _take(self, free: int) -> list[tuple[Group, list[Live]]]:
        """The next groups with the rows of theirs that join, at most `free` rows and PREFILL_TOKENS to prefill."""
        taken: list[tuple[Group, list[Live]]] = []
        longest = fresh = 0
        while self.groups and free:
            group = self.groups[0]
            if group.logits is None:
                longest, fresh = max(longest, len(group.prompt_ids)), fresh + 1
                if fresh > 1 and longest * fresh > PREFILL_TOKENS:
                    break
            rows = [group.waiting.popleft() for _ in range(min(free, len(group.waiting)))]
            taken.append((group, rows))
            free -= len(rows)
            self.waiting -= len(rows)
            if not group.waiting:
                self.groups.popleft()
        return taken

    def _prefill(self, groups: list[Group]) -> None:
        """Compute first logits and cache of each group's prompt."""
        if not groups:
            return
        ids, mask = left_pad([group.prompt_ids for group in groups], self.job.pad_token_id, self.model.device)
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        layers: list[Any] = cache.layers  # all DynamicLayer, see unsupported_reason
        logits = self._forward(ids, mask, positions, cache)
        for i, group in enumerate(groups):
            length = len(group.prompt_ids)
            group.logits = logits[i]
            group.states = [(layer.keys[i, :, -length:], layer.values[i, :, -length:]) for layer in layers]

    def _reserve(self, rows: int, slots: int, columns: int, like: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Have a cache for `rows` rows, remade with `slots` slots of `columns` columns where it is too small: rows
        get shorter as we go, and then more of them fit."""
        if self.cache is None:
            self.cache = SlotCache(like, slots, columns)
        elif rows > self.cache.slots or columns > self.cache.columns:
            self.cache.resize(slots, columns, len(self.live), max((live.length for live in self.live), default=0))
            self.graphs = None  # they write to where the cache was

    def _step(self) -> Iterator[Finished]:
        """Draw one token for each row in flight, and let go of the rows that end."""
        lengths = [live.length for live in self.live]
        width = max(lengths)
        tokens = torch.tensor([live.token_ids[-1] for live in self.live], device=self.model.device)
        logits = self._decode(tokens, torch.tensor(lengths, device=self.model.device), width)
        self._draw(self.live, logits, self.seen)
        ended = [live for live in self.live if self._ended(live)]
        if ended:
            self._close_gaps(width)
        yield from map(self._finished, ended)

    def _close_gaps(self, width: int) -> None:
        """Keep the rows that go on, in the first slots; the last ones move into the places of those that ended."""
        assert self.cache is not None
        going = [i for i, live in enumerate(self.live) if not self._ended(live)]
        target = [i for i in range(len(going)) if self._ended(self.live[i])]
        source = going[len(going) - len(target) :]
        order = list(range(len(going)))
        for i, j in zip(target, source, strict=True):
            order[i] = j
        if target:
            self.cache.move(source, target, width)
        if self.seen is not None:
            self.seen = self.seen[torch.tensor(order, dtype=torch.long, device=self.seen.device)]
        self.live = [self.live[i] for i in order]

    def _decode(self, tokens: torch.Tensor, lengths: torch.Tensor, width: int) -> torch.Tensor:
        """float32 logits [rows, vocabulary] after each row's last token (int64 [rows]), which `lengths` counts."""
        assert self.cache is not None
        if self.captures and self.graphs is None:
            slots, columns = self.cache.slots, self.cache.columns
            self.graphs = graphs.StepGraphs(self._compute, slots, columns, self.job.pad_token_id, tokens.device)
        return (self.graphs or self._compute)(tokens, lengths, width)

    def _compute(self, tokens: torch.Tensor, lengths: torch.Tensor, width: int) -> torch.Tensor:
        """`_decode`, reading `width` columns of the cache."""
        assert self.cache is not None
        self.cache.begin(lengths - 1, width)
        visible = torch.arange(width, device=tokens.device) < lengths[:, None]
        # Of four dimensions: transformers hands it on as it is, instead of working it out and reading it back.
        mask = visible[:, None, None] if self.own_attention else visible
        return self._forward(tokens[:, None], mask, lengths[:, None] - 1, self.cache)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """float32 logits [rows, vocabulary] of the last token; ids and positions [rows, tokens]."""
        if self.lockstep:
            self._any_rank_decodes(True)
        return self._call_model(ids, mask, positions, cache)

    def _any_rank_decodes(self, this_one: bool) -> bool:
        busy = torch.tensor(int(this_one), device=self.model.device)
        dist.all_reduce(busy, op=dist.ReduceOp.MAX)
        return bool(busy.item())

    def _idle(self) -> None:
        """A forward of one token for nothing, to take part in gathering the parameters."""
        one = torch.ones(1, 1, dtype=torch.long, device=self.model.device)
        self._call_model(one * self.job.pad_token_id, one, one - 1, DynamicCache(config=self.model.config))

    def _call_model(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **self.options,
        )
        return output.logits[:, -1].float()

    def _draw(self, rows: list[Live], logits: torch.Tensor, seen: torch.Tensor | None) -> None:
        """Append the next token of each row, drawn from `logits` [rows, vocabulary], and mark it in `seen`."""
        processed = logits
        if self.processors:
            so_far = [live.row.prompt_ids + tuple(live.token_ids) for live in rows]
            ids, _ = left_pad(so_far, self.job.pad_token_id, logits.device)
            processed = self.processors(ids, logits.clone())  # type: ignore[arg-type]
        numbers = uniforms([live.row.seed for live in rows], [len(live.token_ids) for live in rows])
        uniform = torch.from_numpy(numbers).to(logits.device)
        tokens, logprobs = choose(processed, self.job.sampling, uniform, seen=seen, model_logits=logits)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        for live, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            live.token_ids.append(token)
            live.logprobs.append(logprob)

    def _seen_prompts(self, rows: list[Live], vocabulary: int) -> torch.Tensor | None:
        if self.job.sampling.repetition_penalty == 1:
            return None
        return mark_seen([live.row.prompt_ids for live in rows], vocabulary, self.model.device)

    def _stopped(self, live: Live) -> bool:
        return live.token_ids[-1] in self.job.eos_token_ids

    def _ended(self, live: Live) -> bool:
        return len(live.token_ids) == live.row.max_new_tokens or self._stopped(live)

    def _finished(self, live: Live) -> Finished:
        return Finished(index=live.index, token_ids=live.token_ids, logprobs=live.logprobs, stopped=self._stopped(live))
