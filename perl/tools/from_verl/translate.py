"""Every key of a command of verl, into one of three lists, and the recipe that comes of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from perl.algorithms.grpo import DAPO
from perl.base.errors import UserError, nearest
from perl.base.redact import HIDDEN, drop_secrets, is_secret
from perl.environments.tools import MOST_CALLS
from perl.tools.from_verl.batch import Batch, BatchError, N
from perl.tools.from_verl.handlers import TURNS
from perl.tools.from_verl.keys import ALWAYS, ENVIRONMENT, KEYS, NAMES, NO_VARIABLE, VALIDATION, handler_of
from perl.tools.from_verl.outcomes import Choices, NoEffect, Outcome, Refused, Translated, Verl
from perl.tools.from_verl.overrides import Command, Unreadable, default_keys
from perl.tools.from_verl.values import shown

LEFT_OUT = "secrets in it stay out of the recipe: have your code read them from the environment"


FRAGMENT = "a fragment goes behind its whole command, as in from-verl run.sh -- KEY=VALUE …"
PLACEHOLDER = re.compile(r"<[A-Za-z][\w -]*>|\bpath[/_]to\b|(?<![A-Za-z])your[_-]\w", re.IGNORECASE)


@dataclass
class Translation:
    """What a command of verl is here."""

    translated: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Key -> fields of the recipe (or variables of the command) with their values."""
    no_effect: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Keys that the user does not give, whose default in verl is written out."""
    notes: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    """Key -> its value as the user wrote it."""
    batch: Batch | None = None
    follows: str = ""
    """The key whose refusal comes of what is missing in a fragment."""
    nodes: int = 1
    device: str = "npu"

    def recipe(self) -> dict[str, tuple[Any, str]]:
        """Field of the recipe -> its value and the key that it comes from; the user's keys after verl's defaults."""
        return {
            name: (value, key)
            for source in (self.defaults, self.translated)
            for key, fields in source.items()
            for name, value in fields.items()
            if "." in name
        }

    def variables(self) -> dict[str, str]:
        """Environment variables of the command."""
        both = [fields for source in (self.defaults, self.translated) for fields in source.values()]
        return {name: str(value) for fields in both for name, value in fields.items() if "." not in name}


def translate(command: Command, choices: Choices) -> Translation:
    """Sort every key of the command, and verl's defaults that decide the result, into the lists.

    Raises:
        UserError: an interpolation that leads nowhere, or a choice that contradicts the command.
    """
    verl, result = Verl(command, choices), Translation()
    if choices.full and verl.is_lora:
        raise UserError("--full: this command of verl trains a LoRA adapter; leave --full out")
    if choices.full and verl.has_critic:
        raise UserError("--full: the critic of PPO (adv_estimator=gae) computes on a frozen base; leave --full out")
    for key in ALWAYS:
        if key not in command.given and f"~{key}" not in command.read:
            outcome = _outcome(key, command.value(key), verl)
            if isinstance(outcome, Translated):
                result.defaults[key] = outcome.fields
            elif isinstance(outcome, Refused):
                result.refused[key] = f"verl's default: {outcome.why}"
    for key in command.given:
        value = command.value(key)
        secret = is_secret(key, value)
        result.values[key] = "?" if isinstance(value, Unreadable) else HIDDEN if secret else shown(drop_secrets(value))
        _note(result, key, _outcome(key, value, verl))
    if _is_dapo(recipe := result.recipe()):
        result.translated[recipe["algorithm.dynamic_sampling"][1]]["algorithm.name"] = "dapo"
    result.no_effect |= command.read
    if command.before:
        result.no_effect[command.before] = "accelerate starts the processes here"
    _environment(result, command)
    result.batch = verl.batch if isinstance(verl.batch, Batch) else None
    nodes = verl["trainer.nnodes"]
    result.nodes = nodes if isinstance(nodes, int) and choices.processes is None else 1
    result.device = str(verl["trainer.device"])
    result.notes += [*command.notes, *_placeholders(result), *_notes(verl, result)]
    is_ppo = verl.has_critic and "algorithm.adv_estimator" in command.given
    if isinstance(verl.batch, BatchError) and N not in command.given and verl.batch.key in result.values and not is_ppo:
        result.refused |= {N: f"is missing, and verl's default is {verl[N]}: {FRAGMENT}"}
        result.follows = verl.batch.key
    return result


def _placeholders(result: Translation) -> Iterator[str]:
    """A line for each setting that the user is meant to fill in."""
    for key in result.translated:
        if (found := PLACEHOLDER.search(result.values.get(key, ""))) is not None:
            yield f"{key}={result.values[key]}: {found[0]} is a placeholder; write your own"


def _is_dapo(recipe: Mapping[str, tuple[Any, str]]) -> bool:
    """Whether a run is DAPO, so that its name says so."""
    settings = {name: value for name, (value, _) in recipe.items()}
    alike = DAPO.settings.keys() - {"reward.functions"}
    return (
        "algorithm.name" not in settings
        and all(settings.get(name) == DAPO.settings[name] for name in alike)
        and "overlong" in settings.get("reward.functions", ())
    )


def _outcome(key: str, value: Any, verl: Verl) -> Outcome:
    handler = handler_of(key)
    if handler is None and isinstance(value, Unreadable):
        return Refused(value.why)
    if handler is None:
        return Refused(_unknown(key))
    if isinstance(handler, NoEffect):
        return handler
    if isinstance(value, Unreadable):
        if key in NAMES:
            return NoEffect(f"a name that only a run of the script shows ({value.why}); the run is named here")
        return Refused(f"its value cannot be read: {value.why}")
    try:
        return handler(value, verl)
    except ValueError as error:
        return Refused(str(error))
    except TypeError:
        return Refused(f"{shown(value)} is no value for it")


def _note(result: Translation, key: str, outcome: Outcome) -> None:
    if isinstance(outcome, Translated):
        written = {name: drop_secrets(value) if "." in name else value for name, value in outcome.fields.items()}
        if written != outcome.fields:
            result.notes.append(f"{key}: {LEFT_OUT}")
        result.translated[key] = written
        if outcome.note and not any(note.endswith(f": {outcome.note}") for note in result.notes):
            result.notes.append(f"{key}: {outcome.note}")  # once, where several keys come to the same
    elif isinstance(outcome, NoEffect):
        result.no_effect[key] = outcome.why
    elif VALIDATION.fullmatch(key) and handler_of(key) is not None:
        result.no_effect[key] = f"left out: {outcome.why}"
        result.notes.append(f"warning: {key}={result.values[key]} is left out of the validation: {outcome.why}")
    else:
        result.refused[key] = outcome.why


def _unknown(key: str) -> str:
    known = [*KEYS, *default_keys()]
    last = key.rpartition(".")[2]
    same = [name for name in known if name.rpartition(".")[2] == last]
    guess = (nearest(key, same) or same[0]) if same else nearest(key, known)
    return "verl has no such key" + (f"; did you mean {guess}?" if guess else "")


def _environment(result: Translation, command: Command) -> None:
    for name, value in command.environment.items():
        if is_secret(name, value):
            result.no_effect[name] = "a secret, which is not printed: export it in the shell that starts the run"
            continue
        result.values[name] = "?" if isinstance(value, Unreadable) else value
        if name in ENVIRONMENT and isinstance(value, Unreadable):
            result.no_effect[name] = f"export it yourself: {value.why}"
        elif name in ENVIRONMENT:
            result.translated[name] = {name: value}
        else:
            known = (why for start, why in NO_VARIABLE.items() if name.startswith(start))
            result.no_effect[name] = next(known, "nothing here reads it")


def _rate(recipe: Mapping[str, tuple[Any, str]], field: str, factor: float) -> str:
    """The learning rate that is written, and how to have verl's."""
    written = f"{recipe.get(field, (0.0, ''))[0]:g} is written"
    if factor == 1.0:
        return f"{written}, as in verl"
    return f"{written}, {factor:g} times verl's: --learning_rate_factor 1 keeps verl's"


MEANINGS = {
    "guide": "the Ascend guide's: linear decay, on post_attention_layernorm",
    "code": "QeRL's code's: exponential decay after a first stage without noise, on all norms",
}
"""Of noise_injection, by --noise_rule."""


def _notes(verl: Verl, result: Translation) -> list[str]:
    """What a user should know of the whole, one line each."""
    notes, recipe = [], result.recipe()
    if not verl.is_lora and not verl.is_full:
        full = "" if verl.has_critic else ", --full trains all weights"
        notes.append(
            "verl would train all weights; here a LoRA adapter (r 16 on all linear layers) is trained. LoRA's best"
            " learning rate is about ten times that of full training (LoRA Without Regret, 2025);"
            f" {_rate(recipe, 'training.learning_rate', verl.rate_factor())}{full}"
        )
    if verl["trainer.noise_injection.enabled"] is True:
        chosen = verl.choices.noise_rule
        (other,) = MEANINGS.keys() - {chosen}
        notes.append(f"noise: the meaning is {MEANINGS[chosen]}; --noise_rule {other} takes {MEANINGS[other]}")
    rewards = recipe.get("reward.functions", ([], ""))[0]
    if "validation.datasets" in recipe and any(".py:" in name for name in rewards):
        notes.append(
            "verl validates by custom_reward_function too; here validation grades by the task of each row's"
            " data_source, and rows of none are refused: leave their file out of data.val_files"
        )
    if "environment.tools" in recipe:
        calls = f"{TURNS}.max_parallel_calls"
        notes.append(
            f"{calls} is no limit here: verl makes the first {shown(verl[calls])} of a turn's calls; here up to"
            f" {MOST_CALLS} are made, one after the other"
        )
    if verl.has_critic:
        notes.append(
            "the critic is LoRA of its own on the frozen base, with a head that starts at 0, where verl trains a whole"
            f" model; of its learning rate {_rate(recipe, 'critic.lr', verl.rate_factor(critic=True))}"
        )
    if recipe.get("training.scale_rewards", ("", ""))[0] == "group":
        notes.append("advantages are divided by the standard deviation plus 1e-4 (TRL), in verl plus 1e-6")
    if (k := verl.updates_per_rollout) > 1:
        notes.append(
            f"a step of verl is {k} optimizer steps here: save_freq, test_freq and warm-up are {k} times verl's"
        )
    return notes
