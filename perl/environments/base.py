"""What answers the policy between its turns."""

from __future__ import annotations

from typing import Any, Protocol

from perl.records import Message


class Environment(Protocol):
    """The other side of one conversation at a time. It may also have `get_reward() -> float | None`, asked once when
    the conversation has ended, and of None where it has no opinion.

    What it raises, and a call that takes longer than environment.tool_timeout_s, ends the conversation as a failure.
    """

    def reset(self, row: dict[str, Any]) -> list[Message]:
        """Begin a conversation on this row of the data set; the messages of its prompt: row["prompt"], or others."""
        ...

    def step(self, message: Message) -> list[Message] | None:
        """What the policy is shown after its turn `message`, a whole one, {"role": "assistant", "content": text} and
        "tool_calls" where it makes any (perl.environments.calls); None: the conversation has ended. Of the last turn
        that it may take nothing is shown."""
        ...
