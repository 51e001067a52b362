"""What becomes of a key of verl: one of three outcomes, and the handlers that decide which."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from perl.tools.from_verl import batch as arithmetic
from perl.tools.from_verl.batch import Batch, BatchError
from perl.tools.from_verl.overrides import Command, Unreadable

ADAPTER = "actor_rollout_ref.model.lora_adapter_path"


@dataclass(frozen=True)
class Translated:
    """Written to the recipe: fields of `group.field`, or NUM_PROCESSES and the like for the command."""

    fields: dict[str, Any]
    note: str = ""
    """What differs in spite of it; printed."""


@dataclass(frozen=True)
class NoEffect:
    """Changes nothing of the result here."""

    why: str


@dataclass(frozen=True)
class Refused:
    """Would change the result; nothing is written."""

    why: str


Outcome = Translated | NoEffect | Refused


@dataclass(frozen=True)
class Choices:
    """What the user chooses where verl says nothing, or two things."""

    engine: str = "fast"
    noise_rule: str = "guide"
    processes: int | None = None
    """Devices to train on, where they are not verl's."""
    learning_rate_factor: float = 1.0
    full: bool = False
    """Train all weights where verl does; else a LoRA adapter."""


@dataclass(frozen=True)
class Verl:
    """verl's configuration, as handlers read it."""

    command: Command
    choices: Choices = field(default_factory=Choices)

    def __getitem__(self, key: str) -> Any:
        """The value of a key, the user's or verl's default."""
        value = self.command.value(key)
        return None if isinstance(value, Unreadable) else value

    def first(self, *keys: str) -> Any:
        """The value that the user gives for one of these names of one setting, else the first one's default."""
        for key in keys:
            if key in self.command.given:
                return self[key]
        return self[keys[0]]

    @property
    def is_lora(self) -> bool:
        ranks = self["actor_rollout_ref.model.lora_rank"], self["actor_rollout_ref.model.lora.rank"]
        return any(isinstance(rank, int) and rank > 0 for rank in ranks) or bool(self[ADAPTER])

    @property
    def is_full(self) -> bool:
        """All weights are trained here too."""
        return self.choices.full and not self.is_lora

    @property
    def has_critic(self) -> bool:
        """PPO."""
        return self["algorithm.adv_estimator"] == "gae"

    @property
    def devices(self) -> Any:
        if self.choices.processes is not None:
            return self.choices.processes
        per_node, nodes = self["trainer.n_gpus_per_node"], self["trainer.nnodes"]
        if not isinstance(per_node, int) or not isinstance(nodes, int):
            return None
        return per_node * nodes

    @cached_property
    def batch(self) -> Batch | BatchError:
        prompts, n = self["data.train_batch_size"], self["actor_rollout_ref.rollout.n"]
        mini, epochs = self["actor_rollout_ref.actor.ppo_mini_batch_size"], self["actor_rollout_ref.actor.ppo_epochs"]
        epochs = epochs if isinstance(epochs, int) else 1
        try:
            if self["actor_rollout_ref.actor.use_dynamic_bsz"]:
                whole = arithmetic.make_batch(self.devices, prompts, mini, None, n, epochs)
                return arithmetic.make_batch(self.devices, prompts, mini, self._rows_of_tokens(whole), n, epochs)
            return arithmetic.make_batch(self.devices, prompts, mini, self._micro(), n, epochs)
        except BatchError as error:
            return error

    def _rows_of_tokens(self, whole: Batch) -> int:
        """As many completions as surely fit ppo_max_token_len_per_gpu, and divide a device's share of an update."""
        most = self["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"]
        lengths = self["data.max_prompt_length"], self["data.max_response_length"]
        if not all(isinstance(value, int) and value > 0 for value in (most, *lengths)):
            return 1
        share = whole.per_device_train_batch_size
        return max(rows for rows in range(1, share + 1) if share % rows == 0 and rows <= max(1, most // sum(lengths)))

    def _micro(self) -> int:
        """Completions in a forward and backward pass of a device."""
        micro, whole = self[arithmetic.MICRO], self["actor_rollout_ref.actor.ppo_micro_batch_size"]
        if micro is None and isinstance(whole, int) and isinstance(self.devices, int):
            return max(1, whole // self.devices)
        if micro is None:
            raise BatchError(
                arithmetic.MICRO, "is not given, and verl has no default; give it, or use_dynamic_bsz=True"
            )
        return micro

    @property
    def updates_per_rollout(self) -> int:
        """k times ppo_epochs: optimizer steps here in one step of verl."""
        return self.batch.updates_per_rollout if isinstance(self.batch, Batch) else 1


Handler = Callable[[Any, Verl], Outcome]
"""Decides about a value; a ValueError of it (or a TypeError) is a refusal."""


# Handlers for the table


def to(name: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Handler:
    """The value as it stands, or converted, is the recipe's field `name`."""

    return lambda value, verl: Translated({name: convert(value)}, note)


def no_effect(why: str) -> Handler:
    return _Ignores(why)


@dataclass(frozen=True)
class _Ignores:
    """A handler that never looks at the value."""

    why: str

    def __call__(self, value: Any, verl: Verl) -> Outcome:
        return NoEffect(self.why)


def ignores_value(handler: Handler) -> bool:
    return isinstance(handler, _Ignores)


def refused(why: str, *neutral: Any) -> Handler:
    """Refused, unless the value is null, false, empty, or one of `neutral`: then it is off in verl too."""

    def handle(value: Any, verl: Verl) -> Outcome:
        if not value or value in neutral:
            return NoEffect(f"{shown(value)} leaves it off, as it is here")
        return Refused(why)

    return handle


def only(*same: Any, why: str, otherwise: str) -> Handler:
    """Without effect where the value is one of `same`; any other is refused."""

    def handle(value: Any, verl: Verl) -> Outcome:
        return NoEffect(why) if value in same else Refused(otherwise)

    return handle


def where(condition: Callable[[Verl], Any], handler: Handler, otherwise: str) -> Handler:
    """`handler` where the condition holds; else without effect, because of `otherwise`."""
    return lambda value, verl: handler(value, verl) if condition(verl) else NoEffect(otherwise)


# Values


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise ValueError(f"{shown(value)} is not a whole number")
    return int(value)


def positive(value: Any) -> int:
    if whole(value) < 1:
        raise ValueError(f"{shown(value)} is not a whole number from 1")
    return int(value)


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{shown(value)} is not a number")
    return float(value)


def yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{shown(value)} is neither true nor false")
    return value


def text(value: Any) -> str:
    if isinstance(value, dict | list) or value is None or value == "":
        raise ValueError("it is empty" if value == "" else f"{shown(value)} is not a text")
    return str(value)


def path(value: Any) -> str:
    """A path, or a name on the hub; `~` is written out, as verl does."""
    return os.path.expanduser(text(value))


def paths(value: Any) -> list[str]:
    return [path(item) for item in texts(value)]


def texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError("[] is an empty list")
    return [text(item) for item in values]


def one_or_more(value: Any) -> str | list[str]:
    found = texts(value)
    return found[0] if len(found) == 1 else found


def shown(value: Any) -> str:
    """A value as a user of verl writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    return str(value)
