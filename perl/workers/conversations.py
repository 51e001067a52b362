"""What a worker does where samples, or a training's rows, are conversations with an environment: its engine draws the
turns, and its own tools and environments answer."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from perl.base.errors import UserError
from perl.base.paths import user_path
from perl.base.provenance import text_hash
from perl.config.schema import EnvironmentConfig
from perl.records import Trajectory
from perl.rewards.files import is_file
from perl.workers.worker import EngineJob, Inbox, Ready, Request, WeightsSpec, WorkerEvent, completed

if TYPE_CHECKING:
    from perl.environments.conversation import Conversations
    from perl.prompts import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Talks:
    """How a worker of a training has conversations."""

    environment: EnvironmentConfig
    template: ChatTemplate
    """Words the turns."""
    hashes: dict[str, str]
    """Of the user's files (`hashes_of`): a worker that starts later, or on another node, has the same."""

    @property
    def paths(self) -> list[str]:
        return [str(file) for file in files_of(self.environment)]

    def opened(self) -> contextlib.AbstractContextManager[Conversations]:
        for file, found in hashes_of(self.environment).items():
            if found != self.hashes.get(file):
                raise UserError(
                    f"{file} is not what it was when the workers began (on node {socket.gethostname()}); put that back"
                )
        return opened(self.environment, self.template)


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
    template_kwargs: dict[str, Any] | None = None
    """What that is given besides."""

    def paths(self, weights: WeightsSpec) -> list[str]:
        return [*self.engine.paths(weights), self.tokenizer, *map(str, files_of(self.environment))]

    def serve(self, weights: WeightsSpec, inbox: Inbox) -> Iterator[WorkerEvent]:
        from perl.environments.scored import converse, trajectory_of
        from perl.models.folders import load_tokenizer
        from perl.prompts import ChatTemplate

        def row(request: TalkRequest) -> Trajectory:
            key, sample = request.id[-2:]
            return trajectory_of(request.prompt, str(key), int(sample), request.row, self.context)

        template = ChatTemplate(load_tokenizer(self.tokenizer), self.template_kwargs)
        with opened(self.environment, template) as conversations:
            engine = self.engine.build(weights)
            yield Ready(engine.max_num_seqs)
            yield from completed(
                engine,
                weights,
                inbox,
                lambda feed: converse(conversations, engine, (None if each is None else row(each) for each in feed)),
            )
            engine.close()


def absolute(environment: EnvironmentConfig) -> EnvironmentConfig:
    """With the user's files by their whole paths: a worker's working directory may be another."""
    tools = [str(user_path(name).absolute()) if is_file(name) else name for name in environment.tools]
    factory = environment.factory and str(user_path(environment.factory).absolute())
    return replace(environment, tools=tools, factory=factory)


def files_of(environment: EnvironmentConfig) -> list[Path]:
    """The user's own that it names."""
    named = [*environment.tools, *([environment.factory] if environment.factory else [])]
    return [user_path(name.rpartition(":")[0]) for name in named if is_file(name)]


def hashes_of(environment: EnvironmentConfig) -> dict[str, str]:
    """Of what these files hold, by path; none of one that is missing."""
    return {str(file): text_hash(file.read_bytes()) for file in files_of(environment) if file.is_file()}


def identity_of(environment: EnvironmentConfig) -> dict[str, Any] | None:
    """What conversations depend on: the settings, and a hash of the user's files; None where nothing answers."""
    if not environment.used:
        return None
    return asdict(environment) | {"files_hash": text_hash([file.read_bytes() for file in files_of(environment)])}


@contextlib.contextmanager
def opened(environment: EnvironmentConfig, template: ChatTemplate) -> Iterator[Conversations]:
    """Conversations with these environments, which can be asked inside."""
    from perl.environments.conversation import open_conversations
    from perl.environments.tools import load_environment

    source = load_environment(environment)
    conversations = open_conversations(environment, source, template)
    with source.opened():
        yield conversations
