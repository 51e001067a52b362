"""What a worker does where samples, or a training's rows, are conversations with an environment: its engine draws the
turns, and its own tools and environments answer."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perl.base.errors import UserError
from perl.base.paths import user_path
from perl.base.provenance import text_hash
from perl.config.schema import EnvironmentConfig
from perl.rewards.files import is_file

if TYPE_CHECKING:
    from perl.environments.conversation import Conversations
    from perl.prompts import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Talks:
    """How a worker has conversations."""

    environment: EnvironmentConfig
    template: ChatTemplate
    """Words the turns."""
    hashes: dict[str, str]
    """Of the user's files (`hashes_of`): a worker that starts later, or on another node, has the same."""

    @classmethod
    def of(cls, environment: EnvironmentConfig, template: ChatTemplate) -> Talks:
        """With the user's files as they are now, by their whole paths: a worker's working directory may be another."""
        environment = absolute(environment)
        return cls(environment=environment, template=template, hashes=hashes_of(environment))

    @property
    def paths(self) -> list[str]:
        return [str(file) for file in files_of(self.environment)]

    @contextlib.contextmanager
    def opened(self) -> Iterator[Conversations]:
        """Conversations with these environments, which can be asked inside."""
        from perl.environments.conversation import open_conversations
        from perl.environments.tools import load_environment

        for file, found in hashes_of(self.environment).items():
            if found != self.hashes.get(file):
                raise UserError(
                    f"{file} is not what it was when the workers began (on node {socket.gethostname()}); put that back"
                )
        source = load_environment(self.environment)
        conversations = open_conversations(self.environment, source, self.template)
        with source.opened():
            yield conversations


def absolute(environment: EnvironmentConfig) -> EnvironmentConfig:
    """With the user's files by their whole paths."""
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
