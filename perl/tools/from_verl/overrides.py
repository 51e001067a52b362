"""verl's configuration of one command: its defaults, then YAML files, then KEY=VALUE, as Hydra composes them.

Overrides are read by Hydra's own parser, files and interpolations by OmegaConf.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from perl.base.errors import UserError, nearest
from perl.base.paths import user_path
from perl.tools.from_verl.shell import TRAINERS, read_script, read_source
from perl.tools.from_verl.state import UNKNOWN, Launch, Script

DEFAULTS = Path(__file__).parent / "ppo_trainer.yaml"
MODULE = "verl.trainer.main_ppo"
PARSER = OverridesParser.create()
DAPO = {
    "data.gen_batch_size": "${data.train_batch_size}",
    "reward_model.reward_manager": "dapo",
    "reward_model.overlong_buffer": {"enable": False, "len": 0, "penalty_factor": 0.0, "log": False},
    "trainer.project_name": "verl-dapo",
}
"""What recipe/dapo/config/dapo_trainer.yaml of verl changes."""
BASES: dict[str, dict[str, Any]] = {"ppo_trainer": {}, "ppo_megatron_trainer": {}, "dapo_trainer": DAPO}
"""verl's own configurations -> what they say that ppo_trainer.yaml does not, of what matters here."""
OPTIONS = {
    "--config-name": "--config-name",
    "-cn": "--config-name",
    "--config-path": "--config-path",
    "-cp": "--config-path",
    "--config-dir": "--config-path",
    "-cd": "--config-path",
}
"""Hydra's options that say where keys come from; the others do not train."""
REFERENCE = re.compile(r"\$\{\s*(\.*)([\w.-]+)\s*\}")
"""A key that a value names, seen from the group of the value where dots stand before it."""
NESTED = re.compile(r"\$\{[^{}:]*\$\{")
MOST_STEPS = 100
"""From a key to one that names none."""
LARGEST_FILE = 1 << 18
"""Bytes of a YAML file: a multiple of verl's own configuration, read in seconds."""
MOST_CHARACTERS = 1 << 14
"""Of all settings: Hydra's parser takes seconds for as many."""


@dataclass(frozen=True)
class Unreadable:
    """The value of a key that only a run of the script would show."""

    why: str


@dataclass
class Command:
    """What a user gives: keys with their values, over verl's defaults."""

    given: dict[str, Any]
    """Each leaf that the user sets, as it stands there; interpolations are resolved by `value`."""
    config: DictConfig
    read: dict[str, str]
    """Options and sections of Hydra -> what was made of them."""
    environment: dict[str, str | Unreadable] = field(default_factory=dict)
    before: str = ""
    notes: list[str] = field(default_factory=list)
    """What was left out or put right, one line each."""

    def value(self, key: str) -> Any:
        """The value of a key after interpolation, as plain Python; None where it is missing.

        Raises:
            UserError: its interpolation leads nowhere.
        """
        if isinstance(self.given.get(key), Unreadable):
            return self.given[key]
        self._cost(key)
        try:
            selected = OmegaConf.select(self.config, key)
            return OmegaConf.to_container(selected, resolve=True) if OmegaConf.is_config(selected) else selected
        except (OmegaConfBaseException, ValueError, RecursionError) as error:
            text = str(error).strip().splitlines()[0]
            raise UserError(f"{key}={self.given.get(key)}: {text}; give the value itself") from error

    @cached_property
    def _plain(self) -> dict[str, Any]:
        """The configuration with its interpolations as they are written."""
        return cast(dict[str, Any], OmegaConf.to_container(self.config, resolve=False))

    @cached_property
    def _costs(self) -> dict[str, int]:
        """Key -> what resolving it costs, for those of which it is known; 0 while it is computed."""
        return {}

    def _cost(self, key: str, depth: int = 0) -> int:
        """What resolving a key costs: its characters and, each time again, those of the keys that it names.

        Raises:
            UserError: more than MOST_CHARACTERS, as where each of a chain of keys names the next one twice.
        """
        if key in self._costs:
            return self._costs[key]
        self._costs[key] = cost = 0
        value: Any = self._plain
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else value
        for leaf, text in ((leaf, str(value)) for leaf, value in leaves(value, key)):
            cost += len(text)
            for dots, name in REFERENCE.findall(text):
                base = leaf.split(".")[: -len(dots)] if dots else []
                cost += 1 + self._cost(".".join([*base, name]), depth + 1)
            if cost > MOST_CHARACTERS or depth > MOST_STEPS or NESTED.search(text):
                why = "its interpolations nest" if NESTED.search(text) else "its interpolations grow without end"
                raise UserError(f"{leaf}={text:.80}: {why}; give the value itself")
        self._costs[key] = cost
        return cost


def read_command(source: str | None, words: Sequence[str], settings: Mapping[str, str] | None = None) -> Command:
    """Read a script, a YAML file, or a command line.

    Args:
        source: path of a script (.sh) or of a configuration (.yaml); None where `words` hold the whole command.
        words: KEY=VALUE, or a whole command line; with a source they override what it says.
        settings: variables of the script, before those of the environment.
    """
    if settings and (source is None or Path(source).suffix in (".yaml", ".yml")):
        raise UserError("--set: only a script has variables; write KEY=VALUE behind --")
    if source is None:
        return _compose(*_of_words(words), [], Path.cwd())
    path = user_path(source)
    if not path.is_file():
        raise UserError(f"{source}: no such file; give a script (.sh), a configuration (.yaml), or -- KEY=VALUE …")
    if path.suffix in (".yaml", ".yml"):
        script = Script(place=str(path), variables=dict(os.environ))
        return _compose(Launch(MODULE, [], {}, "", str(path)), script, words, path.parent, path)
    return _compose(*read_script(path, os.environ, settings), words, path.parent)


def _of_words(words: Sequence[str]) -> tuple[Launch, Script]:
    """The command behind `--`: KEY=VALUE alone, or from `python3 -m …` on."""
    if not words:
        raise UserError("from-verl: give a script (.sh), a configuration (.yaml), or -- KEY=VALUE …")
    script = Script(place="command line", variables=dict(os.environ))
    if any(trainer in word for trainer in TRAINERS for word in words):
        return read_source(script, shlex.join(words).encode())
    return Launch(MODULE, list(words), {}, "", "command line"), script


def _compose(launch: Launch, script: Script, extra: Sequence[str], folder: Path, file: Path | None = None) -> Command:
    overrides, options = _split_options(launch, script)
    if sum(map(len, (*overrides, *extra))) > MOST_CHARACTERS:
        raise UserError(f"{launch.place}: settings of more than {MOST_CHARACTERS:,} characters; write them to a .yaml")
    command = Command({}, copy.deepcopy(_defaults()), {}, before=launch.before)
    command.notes += script.notes
    for name, value in launch.environment.items():
        why = script.reasons_in(value)
        command.environment[name] = Unreadable(why[0]) if why else value
    if "main_dapo" in launch.module:
        _add_base(command, "dapo_trainer")
    if file is not None:
        _add_file(command, file)
    if (name := options.get("--config-name")) is not None:
        _add_named(command, name, options.get("--config-path"), folder)
    for option, value in options.items():
        command.read[option] = f"read: {value}; its keys are listed by themselves"
    for word in overrides:
        _add_override(command, script, word, launch.place)
    for word in extra:
        _add_override(command, script, word, "command line")
    return command


def _split_options(launch: Launch, script: Script) -> tuple[list[str], dict[str, str]]:
    """The overrides, and Hydra's options with their values."""
    overrides, options, words = [], {}, iter(launch.words)
    for word in words:
        if not word.startswith("-"):
            overrides.append(word)
            continue
        flag, equals, value = word.partition("=")
        if flag not in OPTIONS:
            raise UserError(
                f"{launch.place}: {flag}: not one of {', '.join(dict.fromkeys(OPTIONS.values()))}, which are read here;"
                " a setting is written KEY=VALUE"
            )
        if (value := value if equals else next(words, None)) is None:
            raise UserError(f"{launch.place}: {flag}: its value is missing")
        if why := script.reasons_in(value):
            raise UserError(f"{flag}: {why[0]}")
        options[OPTIONS[flag]] = value
    return overrides, options


# Files


@cache
def _defaults() -> DictConfig:
    return cast(DictConfig, OmegaConf.load(DEFAULTS))


@cache
def default_keys() -> tuple[str, ...]:
    """Every leaf of verl's defaults."""
    return tuple(key for key, _ in leaves(OmegaConf.to_container(_defaults(), resolve=False)))


def _add_base(command: Command, name: str) -> None:
    for key, value in BASES[name].items():
        OmegaConf.update(command.config, key, value, force_add=True)


def _add_named(command: Command, name: str, path: str | None, folder: Path) -> None:
    """--config-name, one of verl's own or a file of the user's."""
    stem = name.removesuffix(".yaml")
    places = [base / user_path(path) if path else base for base in (folder, Path.cwd())]
    for place in places:
        if (file := place / f"{stem}.yaml").is_file():
            return _add_file(command, file)
    if stem in BASES:
        return _add_base(command, stem)
    looked = " or ".join(dict.fromkeys(map(str, places)))
    raise UserError(f"--config-name {name}: no {stem}.yaml in {looked}; name its folder with --config-path")


def _add_file(command: Command, file: Path, depth: int = 0) -> None:
    """A YAML file: first those that its `defaults` names, then its own keys."""
    if depth > 20:
        raise UserError(f"{file}: its defaults lead back to itself")
    try:
        if (size := file.stat().st_size) > LARGEST_FILE:
            raise UserError(f"{file}: {size:,} bytes; a configuration has {LARGEST_FILE:,} at most")
        loaded = OmegaConf.load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{file}: not YAML: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise UserError(f"{file}: must hold keys, such as algorithm: {{adv_estimator: grpo}}")
    content = OmegaConf.to_container(loaded, resolve=False)
    assert isinstance(content, dict)
    for base in content.pop("defaults", None) or []:
        _add_default(command, file, base, depth)
    if "hydra" in content:
        content.pop("hydra")
        command.read["hydra"] = "Hydra's own settings: where it looks for files and writes its logs"
    for key, value in leaves(content):
        _set(command, key, value, str(file))


def _add_default(command: Command, file: Path, base: Any, depth: int) -> None:
    if base == "_self_":
        return
    if isinstance(base, str) and (base_file := file.parent / f"{base.removesuffix('.yaml')}.yaml").is_file():
        _add_file(command, base_file, depth + 1)
    elif isinstance(base, str) and base in BASES:
        _add_base(command, base)
    else:
        guess = nearest(str(base), BASES)
        hint = f"did you mean {guess}?" if guess else f"verl's own are {', '.join(BASES)}"
        raise UserError(f"{file}: defaults: no {base!r} next to it, and verl has none of this form; {hint}")
    megatron = "; Megatron is only how verl spreads the model, accelerate's file decides that here"
    command.read["defaults"] = f"read: {base}{megatron if 'megatron' in str(base) else ''}"


def leaves(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is not a mapping; an empty mapping is a value."""
    if not isinstance(content, dict) or not content:
        yield prefix, content
        return
    for key, value in content.items():
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))


# KEY=VALUE


def _add_override(command: Command, script: Script, word: str, place: str) -> None:
    if word.strip() in ("{", "}"):
        return command.notes.append(f"{place}: a stray {word.strip()} is left out")
    unknown = script.reasons_in(word)
    if unknown and UNKNOWN.search(word.partition("=")[0]):
        raise UserError(f"{unknown[0]}; a whole KEY=VALUE depends on it")
    try:
        try:
            override = PARSER.parse_override(UNKNOWN.sub("unknown", word))
        except (HydraException, OmegaConfBaseException, ValueError, RecursionError):
            if (readable := _put_right(command, word, place)) is None:
                raise
            override = PARSER.parse_override(UNKNOWN.sub("unknown", readable))
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise UserError(f"{place}: {UNKNOWN.sub('?', word)!r:.200}: {_hint(word, error)}") from error
    key = str(override.key_or_group) + (f"@{override.package}" if override.package is not None else "")
    if override.is_delete():
        return _remove(command, key)
    if unknown:
        command.given[key] = Unreadable(unknown[0])
        return None
    if override.is_sweep_override():
        raise UserError(
            f"{place}: {word}: Hydra would start one run for each of these values; give one, or a list as KEY=[a,b]"
        )
    try:
        content = override.value()
    except (HydraException, ValueError) as error:
        raise UserError(f"{place}: {word}: {str(error).splitlines()[0]}") from error
    for leaf, value in leaves(content, key):
        _set(command, leaf, value, place)
    return None


def _put_right(command: Command, word: str, place: str) -> str | None:
    """A setting that Hydra cannot read because of a placeholder or a brace too many, without them; None for others."""
    key, equals, value = word.partition("=")
    if equals and re.search(r"<[A-Za-z][\w -]*>", value) and not set("'\"\\") & set(value):
        return f"{key}='{value}'"
    brace = next((b for b, other in ("}{", "{}") if value.count(b) == value.count(other) + 1), None)
    if brace is None or "${" in value.replace("}", "", value.count("}") * (brace == "}")):
        return None
    at = value.rindex("}") if brace == "}" else value.index("{")
    command.notes.append(f"{place}: {key}: a stray {brace} is left out")
    return f"{key}={value[:at]}{value[at + 1 :]}"


def _hint(word: str, error: Exception) -> str:
    if not word.strip():
        return "an empty word; a variable in quotes may be empty: leave its quotes out"
    if "=" not in word:
        return "a setting is written KEY=VALUE"
    key, _, value = word.partition("=")
    if not re.fullmatch(r"\s*[+~]{0,2}[\w./@${}:-]+\s*", key):
        return f"{key!r} is no key; write KEY=VALUE, such as data.train_batch_size=64"
    if value.startswith("~"):
        return "Hydra does not take ~; write $HOME or the whole path"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"Hydra cannot read the value ({reason:.120}); quote it as KEY='\"VALUE\"'"


def _set(command: Command, key: str, value: Any, place: str) -> None:
    if not key:
        return
    group = key.rpartition(".")[0]
    if isinstance(value, str) and "." not in key and OmegaConf.is_dict(OmegaConf.select(command.config, key)):
        _forget_below(command, key)
        command.given[key] = _chosen(key, value)
        return
    if "." not in group and isinstance(chosen := command.given.get(group), str):
        command.given[group] = _chosen(group, chosen)
        OmegaConf.update(command.config, group, {}, force_add=True)
    if group and (above := OmegaConf.select(command.config, group)) is not None and not OmegaConf.is_dict(above):
        raise UserError(f"{place}: {key}: {group} is a setting, not a group of settings")
    try:
        OmegaConf.update(command.config, key, value, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{place}: {key}: {str(error).splitlines()[0]}") from error
    _forget_below(command, key)
    command.given[key] = value


def _chosen(group: str, name: str) -> Unreadable:
    return Unreadable(f"it chooses {name}, a file of verl's for the group {group}; write its keys")


def _remove(command: Command, key: str) -> None:
    """~KEY: as if the user had not set it; verl's default of it is left out too."""
    command.given.pop(key, None)
    _forget_below(command, key)
    parent, _, name = key.rpartition(".")
    above = OmegaConf.select(command.config, parent) if parent else command.config
    if isinstance(above, DictConfig) and name in above:
        del above[name]
    command.read[f"~{key}"] = "taken out of the configuration"


def _forget_below(command: Command, key: str) -> None:
    """What was given below a key, and is gone with it."""
    for below in [name for name in command.given if name.startswith(f"{key}.")]:
        del command.given[below]
