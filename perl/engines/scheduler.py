"""Sequences, and which of them wait, run and leave: row i of a decode step is the i-th running sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from perl import device
from perl.engines.cache import KVCache, Prefix
from perl.records import Completion

if TYPE_CHECKING:
    from perl.models.pixels import MakeImages

PREFILL_TOKENS = 8_192
"""Most prompt tokens, padding included, in one prefill: bounds the activations, not the cache."""
KEPT_SHARE = 0.25
"""Of the cache's tokens, those of sequences that have ended and may be followed."""
STARTED_TOKENS = 65_536
"""Most places, padding included, that hold the kept beginnings of what one prefill goes on from: they are copied."""
REFILL_SHARE = 8
"""Waiting sequences are let in once so large a share of the rows is free: a prefill for each single sequence that ends
would cost an accelerator a step each time."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion: what is asked for, then what was drawn."""

    prompt_ids: tuple[int, ...]
    seed: int
    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)
    """Drawn tokens; the last one is the end-of-sequence token when `stopped`."""
    logprobs: list[float] = field(default_factory=list)
    """The log-probability of each token when it was drawn, as `sampling.sample` defines it."""
    stopped: bool = False
    """Ended by an end-of-sequence token, and not cut off at max_new_tokens."""
    index: int = -1
    """Place among the sequences that the decoder read."""
    images: MakeImages | None = None
    """Of its prompt's images."""
    follows: int | None = None
    """`index` of the sequence that its prompt goes on from."""
    followed: bool = False
    """Another one may follow."""
    launched: int = 0
    """Tokens drawn, those included that are still to be read from the device."""

    @property
    def max_len(self) -> int:
        """Tokens that it may come to."""
        return len(self.prompt_ids) + self.max_new_tokens

    @property
    def length(self) -> int:
        """Tokens of prompt and completion now, those included that are still to be read."""
        return len(self.prompt_ids) + self.launched

    @property
    def finished(self) -> bool:
        return self.stopped or len(self.token_ids) == self.max_new_tokens

    @property
    def goes_on(self) -> bool:
        """Whether a further token is to be drawn."""
        return not self.finished and self.launched < self.max_new_tokens

    def completion(self) -> Completion:
        """What an engine gives back for it, once it is finished."""
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason="stop" if self.stopped else "length",
        )


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
    start: Prefix | None = None
    """What is kept of the sequence that it goes on from; needed until it is prefilled."""

    @property
    def fresh(self) -> tuple[int, ...]:
        """Its tokens that are still to be computed."""
        return self.token_ids[0 if self.start is None else self.start.length :]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.max_len = max(self.max_len, sequence.max_len)


class Scheduler:
    """The sequences of one run of a decoder, of which `max_num_seqs` run at once at most."""

    def __init__(self, max_num_seqs: int):
        self.max_num_seqs = max_num_seqs
        self.groups: deque[PromptGroup] = deque()
        self.running: list[Sequence] = []
        self.read = self.waiting = 0
        """Sequences read so far, and of them those that wait in `groups`."""
        self.kept: dict[int, Prefix] = {}
        """By index, what sequences that have ended leave for those that follow; the oldest first."""

    def poll(self, source: Iterator[Sequence | None]) -> bool:
        """Read the sequences that there are now, up to the next None or the end; whether any wait."""
        groups: dict[tuple[int, ...], PromptGroup] = {}
        for sequence in iter(lambda: next(source, None), None):
            groups = groups or {group.token_ids: group for group in self.groups}  # where one has come: it is hashed
            sequence.index, self.read = self.read, self.read + 1
            group = groups.setdefault(sequence.prompt_ids, PromptGroup(sequence.prompt_ids))
            group.add(sequence)
            if sequence.follows in self.kept and group.start is None and group.logits is None:
                group.start = self.kept.pop(sequence.follows)
            self.waiting += 1
        if groups:  # those that may become longest first: neighbours need little padding
            self.groups = deque(sorted(groups.values(), key=lambda group: -group.max_len))
        return self.waiting > 0

    def size(self) -> tuple[int, int]:
        """Rows and tokens of each that the cache must have for the sequences that there are."""
        longest = [group.max_len for group in self.groups] + [sequence.max_len for sequence in self.running]
        return min(self.max_num_seqs, self.waiting + len(self.running)), max(longest, default=1)

    @property
    def free(self) -> int:
        """Rows."""
        return self.max_num_seqs - len(self.running)

    def refills(self) -> bool:
        """Whether enough rows are free for a prefill."""
        return not self.running or self.free >= min(max(1, self.max_num_seqs // REFILL_SHARE), self.waiting)

    def next_groups(self, cache: KVCache | None) -> list[PromptGroup]:
        """The groups from which sequences may come next, with PREFILL_TOKENS to compute at most."""
        free, groups = self.free, []
        room = cache.room if cache is not None else PREFILL_TOKENS
        longest = fresh = started = 0
        for group in self.groups:
            if free <= 0 or (groups and room <= 0):
                break
            if group.logits is None:
                longest, fresh = max(longest, len(group.fresh)), fresh + 1
                started = max(started, len(group.token_ids) - len(group.fresh))
                if fresh > 1 and (longest * fresh > PREFILL_TOKENS or started * fresh > STARTED_TOKENS):
                    break
            groups.append(group)
            free -= len(group.waiting)
            room -= cache.prompt_cost(len(group.token_ids)) if cache is not None else len(group.token_ids)
        if self.running and groups and room < 0:
            groups.pop()  # computed now, it would have to wait
        return groups

    def admit(self, groups: list[PromptGroup], cache: KVCache) -> list[tuple[PromptGroup, Sequence]]:
        """As many sequences of these prefilled groups as there is room for."""
        joining: list[tuple[PromptGroup, Sequence]] = []
        free, taken = self.free, 0
        for group in groups:
            while free > 0 and group.waiting and group.prefix is not None:
                taken += cache.cost(group.prefix)
                if taken > cache.room:
                    if self.running or joining:
                        break
                    self.forget_prompts(cache, but=group)  # a sequence alone is let in whatever its length
                joining.append((group, group.waiting.popleft()))
                free -= 1
            if group.waiting:
                break
        self.waiting -= len(joining)
        return joining

    def keep_waiting(self, groups: list[PromptGroup], cache: KVCache) -> None:
        """Once the admitted have their rows: keep the prompts of those that still wait, and let the others go."""
        for group in groups:
            if group.prefix is not None and group.waiting:
                group.prefix.keep_own_copy()
            elif group.prefix is not None:
                cache.drop(group.prefix)
        self.groups = deque(group for group in self.groups if group.waiting)

    def forget_prompts(self, cache: KVCache, but: PromptGroup | None = None) -> bool:
        """Give back what is kept of prompts for sequences that wait or may follow; whether there was any."""
        kept = [*self.kept.values()]
        self.kept = {}
        for group in self.groups:
            if group is not but:
                kept += [prefix for prefix in (group.prefix, group.start) if prefix is not None]
                group.prefix = group.start = group.logits = None
        for prefix in kept:
            cache.drop(prefix)
        return bool(kept)

    def keep(self, cache: KVCache, leaving: list[int]) -> None:
        """Of these rows, whose sequences have ended, what others that follow begin with; of all of them at most
        KEPT_SHARE of the cache's tokens, the oldest being forgotten."""
        for row in leaving:
            sequence = self.running[row]
            if sequence.followed:
                length = min(cache.held[row], len(sequence.prompt_ids) + len(sequence.token_ids))
                self.kept[sequence.index] = cache.keep_row(row, length)
        while sum(prefix.length for prefix in self.kept.values()) > KEPT_SHARE * cache.max_tokens:
            cache.drop(self.kept.pop(next(iter(self.kept))))

    def leave(self, leaving: list[int]) -> list[tuple[int, int]]:
        """These rows' sequences run no longer; the last ones take their rows: (source, target) of each that moves."""
        gone = set(leaving)
        staying = [row for row in range(len(self.running)) if row not in gone]
        targets = [row for row in leaving if row < len(staying)]
        moves = list(zip(staying[len(staying) - len(targets) :], targets, strict=True))
        for source, target in moves:
            self.running[target] = self.running[source]
        del self.running[len(staying) :]
        return moves

    def park(self, sequence: Sequence) -> None:
        """A sequence that left its row waits, and is computed again from its tokens."""
        so_far = sequence.prompt_ids + tuple(sequence.token_ids)
        group = next((group for group in self.groups if group.token_ids == so_far), None)
        if group is None:
            group = PromptGroup(so_far)
            self.groups.appendleft(group)
        group.add(sequence)
        self.waiting += 1


def left_pad(sequences: List[List[int]], pad_token_id: int, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, int64 [rows, longest], padded on the left. The host waits for nothing."""
    width = max(map(len, sequences))
    ids = [[pad_token_id] * (width - len(sequence)) + list(sequence) for sequence in sequences]
    mask = [[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences]
    padded = device.to_device(torch.tensor([ids, mask]), where)
    return padded[0], padded[1]


def mark_seen(sequences: List[List[int]], vocabulary: int, where: torch.device) -> torch.Tensor:
    """bool [rows, vocabulary]: which tokens each sequence holds. Padding does not count."""
    rows = [row for row, sequence in enumerate(sequences) for _ in sequence]
    tokens = [token for sequence in sequences for token in sequence]
    places = device.to_device(torch.tensor([rows, tokens]), where)
    seen = torch.zeros(len(sequences), vocabulary, dtype=torch.bool, device=where)
    seen[places[0], places[1]] = True
    return seen
