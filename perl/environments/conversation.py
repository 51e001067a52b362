"""Conversations with an environment, as what an engine's feed gives and takes.

    reset -> prompt -> engine -> a turn -> step, in a thread -> observed tokens -> engine -> … -> the end

A turn's tokens are those that were drawn, and stay. While an environment is at work other rows are decoded; answers
that come within GRACE_S are waited for, so that the turns of a group are prefilled together. A conversation ends
    with the answer: step gives None                                                         finish of its last turn
    after environment.max_turns turns: the last one is stepped, and nothing shown            finish of its last turn
    where a turn is cut off, or the observation and one token have no room: it is not shown  "length"
    as a failure: reset or step raised, or took too long                                     no reward
"""

from __future__ import annotations

import contextvars
import copy
import itertools
import json
import logging
import math
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perl import device
from perl.base.errors import RankError, UserError
from perl.base.lock import HeldLock
from perl.config.schema import EnvironmentConfig
from perl.engines.base import Engine
from perl.environments.template import ConversationTemplate
from perl.environments.tools import EnvironmentSource, ToolUse
from perl.environments.waiting import THREADS
from perl.models.images import has_images
from perl.prompts import ChatTemplate
from perl.records import Completion, Message, Prompt, Sampling, Trajectory
from perl.rewards.files import NOT_FINITE, RAISED

log = logging.getLogger(__name__)

GRACE_S = 0.005
"""What answers sooner costs others no more than a step of the engine."""
AHEAD = 2
"""Conversations for each row of the engine: it is full though half of them wait for their environments."""
LONGEST = 500
"""Characters of an environment's error that are told."""
MOST_THREADS = 512
"""Of calls, in a process: most of them were left behind, as these can't be ended."""
LOCK_S = 5.0
"""How much longer than a call may take one may hold the interpreter's lock before the process ends: while it is held,
nobody can leave the call."""
LOOK_S = 0.05
"""So often further rows are asked for while nothing but environments is at work."""


@dataclass(slots=True)
class Job:
    """A call of an environment, in a thread of its own: one that hangs can't be ended, but left."""

    row: Trajectory
    call: Callable[[], Any]
    then: Callable[[Any], None]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Of the thread that has made this, in which the call would be without one of its own."""
    began: float = 0.0
    result: Any = None
    error: BaseException | None = None


class Jobs:
    """Calls under way, on the device of the thread that makes this.

    Args:
        seconds: that each may take.
        at_once: so many at most.
    """

    def __init__(self, seconds: float, at_once: int):
        self.seconds, self.at_once = seconds, at_once
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}
        self.through: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.newest = 0.0
        """When the last one began."""
        self.held = HeldLock(seconds + LOCK_S)
        self.device = device.current()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, job: Job) -> None:
        self.waiting.append(job)
        self._start()

    def take(self, until: float) -> tuple[Job, bool] | None:
        """The next that is through, or late (True); None where there is none until that time (time.monotonic)."""
        while self.running:
            first = next(iter(self.running.values()))  # they began in this order
            now = time.monotonic()
            try:
                job = self.through.get(timeout=max(0.0, min(until, first.began + self.seconds) - now))
            except queue.Empty:
                if time.monotonic() >= first.began + self.seconds:
                    return self._leave(first), True
                return None
            if self.running.get(id(job)) is job:  # one that was left has come too late
                return self._leave(job), False
        return None

    def _leave(self, job: Job) -> Job:
        del self.running[id(job)]
        self._start()
        return job

    def _start(self) -> None:
        while self.waiting and len(self.running) < self.at_once:
            job = self.waiting.popleft()
            job.began = self.newest = time.monotonic()
            self.running[id(job)] = job
            try:
                if sum(each.name == THREADS for each in threading.enumerate()) >= MOST_THREADS:
                    raise RuntimeError(f"{MOST_THREADS} calls of tools and environments hang; no further one is begun")
                self._begin(job)
            except RuntimeError as error:
                job.error = error
                self.through.put(job)

    def _begin(self, job: Job) -> None:
        """Raises RuntimeError where the system gives no further thread."""
        self.held.begin()
        try:
            threading.Thread(target=self._run, args=(job,), name=THREADS, daemon=True).start()
        except BaseException:
            self.held.end()
            raise

    def _run(self, job: Job) -> None:
        try:
            device.use(self.device)
            job.result = job.context.run(job.call)
        except BaseException as error:  # noqa: BLE001  # asyncio's CancelledError, Rust's panics: this thread's alone
            job.error = error
        self.held.end()  # a call that was left as late may take the lock yet
        self.through.put(job)


@dataclass(slots=True, kw_only=True)
class Conversations:
    """
    Attributes:
        on_turn: called in `run` when a turn has been drawn, or an environment has answered.
    """

    source: EnvironmentSource
    template: ConversationTemplate
    config: EnvironmentConfig
    on_turn: Callable[[], None] = lambda: None

    def run(
        self,
        rows: Iterable[Trajectory | None],
        engine: Engine,
        in_step: bool = False,
        frees: bool = False,
    ) -> Iterator[Trajectory]:
        """Each of the rows when its conversation has ended. Its environment stays with it until `free`.

        Args:
            rows: as they come, None for "nothing at the moment", as in an engine's feed. Rows that are all there, as
                those of a batch are, make one stream of the engine.
            in_step: nobody's next turn begins before all have been answered, in the order of the rows, so that what is
                drawn together does not depend on how long answers take. The rows are all there.
            frees: an environment is free when its conversation has ended, and AHEAD times what the engine draws at once
                are under way at most.
        """
        talk = _Talk(self, iter(rows), in_step, frees)
        while True:
            for place, completion in engine.stream(talk.feed(engine)):
                talk.drawn(place, completion)
                yield from talk.take_ended()
            yield from talk.take_ended()
            if not talk.goes_on:
                return

    def measure(self, rows: Sequence[Trajectory], metrics: dict[str, list[float]]) -> None:
        """What the log shows of these conversations, by TRL's names where it has one: the mean is logged of the numbers
        of all processes."""
        failed = [row for row in rows if row.failure is not None]
        if failed:
            first = failed[0].failure
            log.warning(
                "environment: %d of %d conversations have failed, the first one: %s", len(failed), len(rows), first
            )
        metrics["environment/failure_frequency"] += [float(row.failure is not None) for row in rows]
        metrics["turns/mean"] += [float(row.turns) for row in rows]
        if self.source.schemas:
            metrics["tools/call_frequency"] += [float(len(row.outcomes)) for row in rows]
            metrics["tools/failure_frequency"] += [float(has_failed) for row in rows for has_failed in row.outcomes]

    def free(self, rows: Sequence[Trajectory]) -> None:
        """Their environments, where they are here, may be reset: the rewards are known. That of a failure may still be
        at work."""
        for row in rows:
            if row.failure is None and row.environment is not None:
                self.source.instances.append(row.environment)
            row.environment = None


class _Talk:
    """The conversations of one run."""

    def __init__(self, parts: Conversations, rows: Iterator[Trajectory | None], in_step: bool, frees: bool):
        self.parts, self.rows, self.in_step, self.frees = parts, rows, in_step, frees
        self.more = True
        """Further rows may come."""
        self.under_way = 0
        """Conversations."""
        self.held_back = False
        """Rows were not asked for, as so many conversations are under way."""
        self.jobs = Jobs(parts.config.tool_timeout_s, parts.source.at_once)
        self.ready: dict[Sampling, deque[tuple[Trajectory, Prompt]]] = {}
        """What the engine may be given, by the distribution that it is drawn from; `current` is under way."""
        self.current = Sampling()
        self.turn: deque[tuple[Trajectory, Prompt]] = deque()
        """In step: what is left to be given of the turn that is under way."""
        self.places = itertools.count()
        """Of the prompts that the engine is given next."""
        self.given: dict[int, Trajectory] = {}
        """The row of each prompt that the engine has not drawn, by its place."""
        self.latest: dict[int, int] = {}
        """By id of a row whose conversation goes on, the place of its last prompt."""
        self.ended: deque[Trajectory] = deque()

    @property
    def goes_on(self) -> bool:
        return bool(self.more or self.jobs or self.ready or self.turn or self.given)

    def feed(self, engine: Engine) -> Iterator[Prompt | None]:
        """Of one stream. It ends before `goes_on` does where nothing is drawn, and rows have ended that whoever sends
        further ones waits for."""
        self.places, self.given, self.latest = itertools.count(), {}, {}
        self._take_rows(engine)
        while self.goes_on:
            self._take_answers()
            if prompt := self._next():
                yield prompt
            elif self.given:
                yield None
            elif self.more and self.ended and not self.held_back:
                return
            self._take_rows(engine)

    def drawn(self, place: int, completion: Completion) -> None:
        self.parts.on_turn()
        row = self.given.pop(place)
        if completion.error is not None:
            self._fail(row, completion.error)
            return
        row.add(completion)
        message = self.parts.template.message(completion.content_ids)
        row.completion.append(message)
        if completion.finish_reason == "length":
            self._end(row)
        else:
            # ToolUse knows a turn by its identity, and copies what it gives to tools.
            asked = message if isinstance(row.environment, ToolUse) else copy.deepcopy(message)
            self._call(row, lambda: row.environment.step(asked), lambda shown: self._observed(row, shown))

    def take_ended(self) -> Iterator[Trajectory]:
        while self.ended:
            yield self.ended.popleft()

    # Between the engine and the environments

    def _take_rows(self, engine: Engine) -> None:
        """All that have come, and may begin."""
        while self.more:
            self.held_back = self.frees and self.under_way >= AHEAD * engine.max_num_seqs
            if self.held_back or (row := next(self.rows, self)) is None:
                return
            if isinstance(row, _Talk):
                self.more = False
            else:
                self.under_way += 1
                self._begin(row)

    def _next(self) -> Prompt | None:
        """The next prompt that the engine may have."""
        if (found := self._of_turn() if self.in_step else self._of_current()) is None:
            return None
        row, prompt = found
        place = next(self.places)
        self.given[place] = row
        follows = self.latest.get(id(row))
        self.latest[id(row)] = place
        return replace(prompt, follows=follows, followed=row.turns + 1 < self.parts.config.max_turns)

    def _of_current(self) -> tuple[Trajectory, Prompt] | None:
        """The engine draws from one distribution at a time, so that what is drawn from another one waits until no other
        is under way."""
        if not self.given and self.ready:
            self.current = next(iter(self.ready))
        if (ready := self.ready.get(self.current)) is None:
            return None
        found = ready.popleft()
        if not ready:
            del self.ready[self.current]
        return found

    def _of_turn(self) -> tuple[Trajectory, Prompt] | None:
        """Of the turn that is under way; of the next one where all of that is drawn and answered."""
        if not (self.turn or self.given or self.jobs) and self.ready:
            first = min(self.ready, key=lambda each: min(place_of(row) for row, _ in self.ready[each]))
            self.turn.extend(sorted(self.ready.pop(first), key=lambda each: place_of(each[0])))
        return self.turn.popleft() if self.turn else None

    def _take_answers(self) -> None:
        """All that have come; where nothing else is to do the next one is waited for, however long it takes."""
        while self.jobs:
            idle = not self.given and not self.turn and (self.in_step or not self.ready)
            patience = time.monotonic() + LOOK_S if self.more else math.inf
            if (taken := self.jobs.take(patience if idle else self.jobs.newest + GRACE_S)) is None:
                return
            self.parts.on_turn()
            job, late = taken
            if late:
                self._late(job.row)
            elif isinstance(job.error, RankError):
                raise job.error
            elif job.error is not None:
                self._fail(job.row, explained(job.error))
            else:
                job.then(job.result)

    def _begin(self, row: Trajectory) -> None:
        """On an environment that is free. One that is made, too late for its row perhaps, is free for the next."""
        row.completion = []
        free, make = self.parts.source.instances, self.parts.source.make
        if not free:
            self._call(row, lambda: free.append(make()), lambda _: self._begin(row))
            return
        environment = row.environment = free.pop()
        columns = copy.deepcopy(row.row)  # of all samples of the prompt
        self._call(row, lambda: environment.reset(columns), lambda messages: self._asked(row, messages))

    def _asked(self, row: Trajectory, messages: Any) -> None:
        ids, columns = row.prompt_ids, row.row
        if messages != row.row["prompt"]:
            if why := not_messages(messages):
                self._fail(row, f"reset {why}")
                return
            plain = self.parts.template.plain
            messages = [
                m
                if m["role"] == "assistant" or m in row.row["prompt"]
                else {**m, "content": plain(m["content"], own_words(row.row["prompt"][place : place + 1], m))}
                for place, m in enumerate(as_written(messages))
            ]
            try:
                ids = tuple(self.parts.template.prompt(messages))
            except (UserError, ValueError) as error:
                self._fail(row, str(error))
                return
            columns = {**row.row, "prompt": messages}
        if (prompt := replace(row, prompt_ids=ids).next_prompt()).sampling.max_new_tokens < 1:
            # The row keeps its own prompt: it stays in the batch, and is computed.
            assert row.asked is not None
            self._fail(row, f"the prompt's {len(ids)} tokens leave no room in a context of {row.asked.longest}")
            return
        row.prompt_ids, row.row = ids, columns
        self._give(row, prompt)

    def _give(self, row: Trajectory, prompt: Prompt) -> None:
        self.ready.setdefault(prompt.sampling.distribution, deque()).append((row, prompt))

    def _observed(self, row: Trajectory, shown: Any) -> None:
        if shown is None or row.turns == self.parts.config.max_turns:
            self._end(row)
            return
        if why := not_messages(shown):
            self._fail(row, f"step {why}")
            return
        if any("tool_calls" in message for message in shown):
            self._fail(row, "step gave tool_calls, which the model alone makes")
            return
        cut = self.parts.template.cut
        shown = [{**message, "content": cut(message["content"], len(shown))} for message in as_written(shown)]
        try:
            ids = self.parts.template.observation(shown)
        except (UserError, ValueError) as error:
            self._fail(row, str(error))
            return
        before = len(row.token_ids)
        row.observe(ids)
        if (prompt := row.next_prompt()).sampling.max_new_tokens < 1:
            del row.token_ids[before:], row.sampled[before:]
            row.finish = "length"
            self._end(row)
            return
        row.completion += shown
        self._give(row, prompt)

    def _late(self, row: Trajectory) -> None:
        seconds = self.jobs.seconds
        shown = None
        if isinstance(row.environment, ToolUse):
            shown = row.environment.timed_out(row.completion[-1], seconds) if row.completion else None
            row.environment.waiting.cancel()  # behind timed_out: its thread makes no further calls
        if shown is None:
            self._fail(row, f"no answer within {seconds:g} s (environment.tool_timeout_s)")
        else:
            self._observed(row, shown)

    def _over(self, row: Trajectory) -> None:
        self.latest.pop(id(row), None)
        row.outcomes = row.environment.outcomes if isinstance(row.environment, ToolUse) else []
        if self.frees:
            self.parts.free([row])
        self.under_way -= 1
        self.ended.append(row)

    def _end(self, row: Trajectory) -> None:
        def reward() -> float | None:
            given = row.environment.get_reward()
            number = None if given is None else float(given)
            return number if number is None or math.isfinite(number) else NOT_FINITE

        def rewarded(number: float | None) -> None:
            row.environment_reward = number
            self._over(row)

        if self.parts.source.rewards:
            self._call(row, reward, rewarded)
        else:
            self._over(row)

    def _fail(self, row: Trajectory, reason: str) -> None:
        row.failure = reason
        self._over(row)

    def _call(self, row: Trajectory, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self.jobs.add(Job(row, call, then))


def place_of(row: Trajectory) -> tuple[int, int]:
    return row.position, row.sample


def open_conversations(config: EnvironmentConfig, source: EnvironmentSource, template: ChatTemplate) -> Conversations:
    """How the environments of `source` are talked to. A UserError where the model's chat template can't word it."""
    if has_images(template.tokenizer):
        raise UserError(
            "--config.environment: a model that takes images answers in one turn; name a model of texts, or leave"
            " environment.tools and environment.factory out"
        )
    of_turns = ConversationTemplate(
        template.tokenizer,
        source.schemas,
        source.role,
        config.tool_call_parser,
        template.given,
        config.max_observation_tokens,
    )
    return Conversations(source=source, template=of_turns, config=config)


def not_messages(shown: Any) -> str | None:
    """What is wrong with messages that an environment gave, or None."""
    whole = isinstance(shown, list) and shown and all(isinstance(message, dict) for message in shown)
    if not whole or not all(isinstance(m.get("content"), str) and isinstance(m.get("role"), str) for m in shown):
        return f"gave {shown!r:.60}, no list of messages, each with role and content"
    for message in shown:
        if not isinstance(message.get("name", ""), str) or not is_json({**message, "content": ""}):
            return f"gave {message!r:.60}, whose name is no text, or whose fields are no JSON"
    return None


def as_written(messages: list[Message]) -> list[Message]:
    """As samples.jsonl holds them. The user's own kinds of text, an enum's say, can't be read by other processes."""
    return json.loads(json.dumps(messages))


def own_words(at: Sequence[Message], message: Message) -> int:
    """With how many characters of the row's own prompt a message begins, where it is the one `at` that place with a
    text behind it."""
    own = at[0]["content"] if at and at[0]["role"] == message["role"] else ""
    return len(own) if isinstance(own, str) and message["content"].startswith(own) else 0


def is_json(value: Any) -> bool:
    """What samples.jsonl takes."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # half of a surrogate pair is no text
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def explained(error: BaseException) -> str:
    """A line of what an environment raised, and where, in words that any file takes."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    try:
        words = str(error)
    except RAISED as other:
        words = f"its text can't be had: {type(other).__name__}"
    words = " ".join(words.encode(errors="backslashreplace").decode().split())
    if len(words) > LONGEST:
        words = f"{words[:LONGEST]}…"
    return f"{type(error).__name__}: {words} ({Path(frame.filename).name}:{frame.lineno})"
