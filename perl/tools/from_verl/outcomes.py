"""What becomes of a key of verl: one of three outcomes, and the handlers that decide which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from perl.tools.from_verl import batch as arithmetic
from perl.tools.from_verl.batch import Batch, BatchError
from perl.tools.from_verl.overrides import Command, Unreadable
from perl.tools.from_verl.values import anything, shown

LORA_RATE = 10.0
"""LoRA's best learning rate over that of full training (LoRA Without Regret, Thinking Machines Lab, 2025)."""
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
    learning_rate_factor: float | None = None
    """Of verl's learning rates; None: LORA_RATE for what verl trains whole and LoRA does here, 1 for the rest."""
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

    def rate_factor(self, critic: bool = False) -> float:
        """What verl's learning rate of the policy, or of the critic, is multiplied by."""
        if self.choices.learning_rate_factor is not None:
            return self.choices.learning_rate_factor
        ranks = self["critic.model.lora_rank"], self["critic.model.lora.rank"]
        same = any(ranks) if critic else self.is_lora or self.is_full
        return 1.0 if same else LORA_RATE

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
Condition = str | Callable[[Verl], Any]
"""KEY of verl that must be true, KEY=VALUE, KEY!=VALUE, or what decides."""


# Handlers for the table


def to(name: str, convert: Callable[[Any], Any] = anything, of: str = "") -> Handler:
    """The value (that of the key `of`, where it is given), converted, is the recipe's field `name`."""
    return lambda value, verl: Translated({name: convert(verl[of] if of else value)})


def off(why: str, handler: Handler, *values: Any) -> Handler:
    """Without effect where the value is one of `values` (where none are given: null, false, 0, empty), because of
    `why`; else `handler`."""

    def handle(value: Any, verl: Verl) -> Outcome:
        is_off = value in values if values else not value
        return NoEffect(why.format(shown(value))) if is_off else handler(value, verl)

    return handle


def refused(why: str) -> Handler:
    """Refused, unless the value is null, false or empty: then it is off in verl too."""
    return off(OFF, lambda value, verl: Refused(why))


OFF = "{} leaves it off, as it is here"


def choice(outcomes: Mapping[Any, Outcome], otherwise: str) -> Handler:
    """What stands for the value in a table; another is refused because of `otherwise`, where {} is the value."""

    def handle(value: Any, verl: Verl) -> Outcome:
        chosen = next((outcome for known, outcome in outcomes.items() if known == value), None)
        return chosen or Refused(otherwise.format(shown(value)))

    return handle


def when(condition: Condition, otherwise: str) -> Callable[[Handler], Handler]:
    """The handler where the condition holds; else without effect, because of `otherwise`."""

    def limited(handler: Handler) -> Handler:
        return lambda value, verl: handler(value, verl) if holds(condition, verl) else NoEffect(otherwise)

    return limited


def holds(condition: Condition, verl: Verl) -> bool:
    if not isinstance(condition, str):
        return bool(condition(verl))
    key, equals, value = condition.partition("=")
    actual = verl[key.removesuffix("!")]
    return bool(actual) if not equals else (actual == value) != key.endswith("!")


def same_as(key: str) -> Handler:
    """Without effect where the value is that of another key, from which it comes in verl."""

    def handle(value: Any, verl: Verl) -> Outcome:
        if value in (None, verl[key]):
            return NoEffect(f"{key} decides")
        return Refused(f"it differs from {key}, {shown(verl[key])}; set that instead")

    return handle
