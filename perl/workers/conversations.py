"""What a worker does where samples are conversations with an environment: its engine draws the turns, and its own tools
and environments answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from perl.config.schema import EnvironmentConfig
from perl.rewards.files import is_file
from perl.workers.worker import EngineJob, Inbox, Ready, Request, WeightsSpec, WorkerEvent, completed


@dataclass(frozen=True, slots=True)
class TalkRequest(Request):
    """A conversation to have; its id ends with the problem's key and which of its conversations it is."""

    row: dict[str, Any]
    """What the environment's reset gets."""


@dataclass(frozen=True, slots=True)
class TalkJob:
    """An engine of ENGINES draws the turns of each conversation."""

    unit: ClassVar[str] = "rows"

    engine: EngineJob
    environment: EnvironmentConfig
    tokenizer: str
    """Folder of the tokenizer whose chat template words the turns."""
    context: int | None
    """Most tokens of a conversation; None: any number."""

    def paths(self, weights: WeightsSpec) -> list[str]:
        named = [*self.environment.tools, *([self.environment.factory] if self.environment.factory else [])]
        files = [name.rpartition(":")[0] for name in named if is_file(name)]
        return [*self.engine.paths(weights), self.tokenizer, *files]

    def serve(self, weights: WeightsSpec, inbox: Inbox) -> Iterator[WorkerEvent]:
        from perl.environments.conversation import open_conversations
        from perl.environments.scored import Asked, converse
        from perl.environments.tools import load_environment
        from perl.models.folders import load_tokenizer

        source = load_environment(self.environment)
        conversations = open_conversations(self.environment, source, load_tokenizer(self.tokenizer))

        def asked(request: TalkRequest) -> Asked:
            key, sample = request.id[-2:]
            return Asked(prompt=request.prompt, key=str(key), sample=int(sample), row=request.row)

        with source.opened():
            started = time.monotonic()
            engine = self.engine.build(weights)
            yield Ready(engine.max_num_seqs, time.monotonic() - started)
            yield from completed(
                engine,
                weights,
                inbox,
                lambda feed: converse(
                    conversations, engine, (None if each is None else asked(each) for each in feed), self.context
                ),
            )
            engine.close()
