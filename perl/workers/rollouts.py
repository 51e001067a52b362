"""What a worker of a training does: it holds a copy of the policy, and completes pieces with the version that each
names.

A piece is a few prompts that are decoded together and with no others, as what is decoded together changes the last bits
of a number: so a completion does not depend on which worker draws it, nor on what else that worker has. Where a run
need not repeat to the last bit (rollout.max_staleness) pieces are not kept apart: an engine decodes as many at once as
it has room for, and runs empty before it takes another version.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from perl.base.errors import UserError
from perl.device.numerics import Numerics
from perl.engines.base import Engine
from perl.records import Completion, Prompt, Trajectory, Weights
from perl.workers.conversations import Talks
from perl.workers.worker import Inbox, Ready, Result, WorkerEvent

if TYPE_CHECKING:
    from perl.environments.conversation import Conversations


@dataclass(frozen=True, slots=True)
class Version:
    """A policy that was sent out."""

    run: str
    """Names the process that sent it: two runs, and a run that goes on, never have the same."""
    weights: Weights
    digest: str
    """perl.adapters.delivery.digest, by the trainer."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Prompts that one engine completes, in this order; with an environment, rows that conversations are had on."""

    id: tuple[int, int]
    """(which call for completions, which piece of it)."""
    prompts: tuple[Prompt, ...] | tuple[Trajectory, ...]

    @property
    def prompt_id(self) -> tuple[int]:
        """What fails with it when it kills its workers (perl.workers.retries): nothing else does."""
        return self.id[:1]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A piece's completions, in the order of its prompts; with an environment, the rows at the end of their
    conversations."""

    completions: tuple[Completion, ...] | tuple[Trajectory, ...]
    version: Version
    """That the piece asked for."""
    digest: str
    """Of what the engine held while it drew them."""
    seconds: float
    """That its engine had drawn since it had finished the piece before, or had nothing."""
    drained_s: float = 0.0
    """That its engine had run down before, to take this version."""
    worker: str = ""
    """The process that drew it: its node and number."""

    @property
    def tokens(self) -> int:
        return sum(len(each.sampled_ids) for each in self.completions)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutJob:
    """How a worker gets its copy of the policy, and draws with it."""

    unit: ClassVar[str] = "pieces"

    base: str
    """Folder of the policy's base."""
    open_copy: Callable[[], Copy]
    """Called once, in the worker."""
    piece_size: int
    newest: bool
    """An engine decodes pieces together, as they come; else each with no others."""
    talks: Talks | None
    """With an environment."""
    numerics: Numerics
    """The trainer's, for each worker."""

    def paths(self, weights: Version) -> list[str]:
        return [self.base, *(self.talks.paths if self.talks else ())]

    def serve(self, weights: Version, inbox: Inbox) -> Iterator[WorkerEvent]:
        self.numerics.take()
        copy = self.open_copy()
        pieces = max(1, copy.max_num_seqs // self.piece_size) if self.newest else 1
        with contextlib.nullcontext() if self.talks is None else self.talks.opened() as conversations:
            if conversations is not None:
                conversations.on_turn = inbox.working
            yield Ready(pieces)
            yield from self._drawn(copy, conversations, pieces, inbox)
        copy.close()

    def _drawn(
        self, copy: Copy, conversations: Conversations | None, pieces: int, inbox: Inbox
    ) -> Iterator[WorkerEvent]:
        drained_s, worker = 0.0, f"{socket.gethostname()} {os.getpid()}"
        while (version := inbox.next_weights(wait=True)) is not None:
            with contextlib.ExitStack() as stack:
                try:
                    name = f"{version.run}-{version.digest[:16]}"
                    held = stack.enter_context(copy.holding(version.weights, name, inbox.payload))
                except UserError as error:  # another start of this worker would be told the same
                    while inbox.next_weights(wait=True) == version:
                        yield Result(inbox.take().id, Completion.failed(str(error)), 1)
                    continue
                while inbox.next_weights(wait=True) == version:
                    feed = PieceFeed(inbox, version, self.newest)
                    drawn = copy.stream(feed) if conversations is None else self._conversed(conversations, copy, feed)
                    for position, completion in drawn:
                        inbox.working()
                        if done := feed.done(position, completion):
                            piece, completions, seconds = done
                            result = Drawn(completions, version, held, seconds, drained_s, worker)
                            yield Result(piece.id, result, pieces)
                            drained_s = 0.0
                    drained_s += feed.drained()

    def _conversed(self, conversations: Conversations, copy: Copy, feed: PieceFeed) -> Iterator[tuple[int, Trajectory]]:
        """As `Copy.stream` has it. A row's environment is free at its end."""
        places: dict[int, int] = {}
        """By id of a row, which its piece holds."""

        def rows() -> Iterator[Any]:
            for row in feed:
                if row is not None:
                    places[id(row)] = len(places)
                yield row

        for row in conversations.run(rows(), copy, in_step=not self.newest):
            conversations.free([row])
            yield places[id(row)], row


class PieceFeed:
    """Prompts or rows of the pieces in the inbox, as an engine's feed (see Engine.stream): of one piece, or with
    `newest` of all that this version completes, as they come."""

    def __init__(self, inbox: Inbox, version: Version, newest: bool):
        self._inbox, self._version, self._newest = inbox, version, newest
        self._prompts: deque[Any] = deque()
        self._owners: list[tuple[Piece, dict[int, Any], int]] = []
        """Of each prompt that was given: its piece, what is completed of that, and its place in it."""
        self._under_way = 0
        """Pieces."""
        self._since = time.monotonic()
        self._ended: float | None = None

    def __iter__(self) -> PieceFeed:
        return self

    def __next__(self) -> Any:
        if not self._prompts:
            if self._owners and not self._newest:
                raise StopIteration
            idle = not self._under_way
            needed = self._inbox.next_weights(wait=idle)
            if needed is None and not self._inbox.ended:
                return None
            if needed != self._version:
                self._ended = self._ended or time.monotonic()
                raise StopIteration
            if idle:
                self._since = time.monotonic()
            piece = self._inbox.take()
            made: dict[int, Any] = {}
            self._owners += [(piece, made, place) for place in range(len(piece.prompts))]
            self._prompts.extend(piece.prompts)
            self._under_way += 1
        return self._prompts.popleft()

    def done(self, position: int, completion: Any) -> tuple[Piece, tuple[Any, ...], float] | None:
        """The piece that is whole with the completion of the prompt at `position` of this feed, its completions, and
        the seconds since the one before."""
        piece, made, place = self._owners[position]
        made[place] = completion
        if len(made) < len(piece.prompts):
            return None
        self._under_way -= 1
        since, self._since = self._since, time.monotonic()
        return piece, tuple(made[each] for each in range(len(made))), self._since - since

    def drained(self) -> float:
        """Seconds since another version was needed."""
        return 0.0 if self._ended is None or self._inbox.ended else time.monotonic() - self._ended


class Copy(Engine, Protocol):
    """A worker's copy of the policy."""

    def holding(self, weights: Weights, name: str, payload: Any) -> AbstractContextManager[str]:
        """Inside, it is the policy that `payload` makes, with this noise; gives the digest of what it holds.

        Args:
            name: that no other policy has.
        """
        ...
