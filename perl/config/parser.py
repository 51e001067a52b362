"""Command-line parsing shared by every entry point: jsonargparse, with one-line errors and no abbreviations."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import NoReturn

import yaml
from docstring_parser import parse as parse_docstring
from jsonargparse import ArgumentParser, Namespace

from perl.base.errors import UserError, nearest

OTHER_NAMES = {
    "adv_estimator": ("name",),
    "batch_size": ("per_device_train_batch_size",),
    "clip_ratio": ("epsilon",),
    "clip_ratio_high": ("epsilon_high",),
    "clip_ratio_low": ("epsilon",),
    "cliprange_value": ("value_clip",),
    "entropy_coeff": ("entropy_coef",),
    "epochs": ("num_train_epochs",),
    "filter_groups": ("dynamic_sampling",),
    "kl_coef": ("kl_in_reward",),
    "kl_loss_coef": ("beta",),
    "kl_loss_type": ("kl_estimator",),
    "kl_penalty": ("kl_in_reward_estimator",),
    "learning_rate": ("lr",),
    "limit": ("example_numbers", "max_samples"),
    "loss_agg_mode": ("loss_type",),
    "lr": ("learning_rate",),
    "max_num_gen_batches": ("max_resample_factor",),
    "model": ("model_name_or_path",),
    "num_fewshot": ("few_shot",),
    "output_path": ("result_dir",),
    "rank": ("r",),
    "system_instruction": ("system_prompt",),
    "tasks": ("dataset",),
}
"""What other programs, verl and lm-evaluation-harness among them, call a field -> ours."""


WORDS = {
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "NoneType": "null",
    "PositiveInt": "a whole number from 1",
    "NonNegativeInt": "a whole number from 0",
    "PositiveFloat": "a number above 0",
    "NonNegativeFloat": "a number from 0",
    "ClosedUnitInterval": "a number from 0 to 1",
}
"""jsonargparse's name of a type -> what a user may write."""
MAPPING = "a JSON object"


class Parser(ArgumentParser):
    """jsonargparse's parser, but an error is a UserError of one line, unknown flags name the nearest known one, and
    a flag is never taken for a longer one that it abbreviates."""

    all_flags = "--help"
    """What lists every flag."""

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("exit_on_error", False)
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        raise UserError(self._explain(message)) from ex

    def refuse_nulls(self, values: Namespace) -> None:
        """A UserError for a null, or a blank, where the field's type has none: jsonargparse takes it for one that
        nobody has said."""
        try:
            self.validate(values, skip_unset=False, skip_required=True)
        except TypeError as error:
            expected = self._explain(str(error)).partition(", not ")[0]
            raise UserError(f"{expected}, not null; leave the line out") from error

    def known_flags(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings if option.startswith("--")]

    def _explain(self, message: str) -> str:
        if match := re.search(r"[Uu]nrecognized arguments?: (.*)", message, flags=re.DOTALL):
            words = match[1].split()
            flag = next((word for word in words if word.startswith("-")), None)
            if flag is None:
                return f"unexpected argument {words[0]!r}: every value follows its flag"
            return self._unknown(flag.split("=")[0])
        if match := re.match(r"the following arguments are required: (.*)", message):
            flags = {known.removeprefix("--"): known for known in self.known_flags()}
            return f"missing: {', '.join(flags.get(name, name) for name in match[1].split(', '))}; see --help"
        if match := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
            return self._unknown(f"--{match[1]}.{match[2]}")
        if match := re.search(r"[Pp]arser key \"([\w.]+)\": Unable to load config \"(.*?)\"", message):
            return self._no_field(match[1], match[2])
        if match := re.search(r"Parser key \"([\w.]+)\":\s*(.*)", message, flags=re.DOTALL):
            if expected := re.match(r"Expected a <class 'list'>. Got value: (.*)", match[2], flags=re.DOTALL):
                return f"--{match[1]}: expected a list, not {expected[1]}{_as_list(expected[1])}"
            return f"--{match[1]}: {_expected(match[2]) or match[2].replace('<class ', '').replace('>.', '.')}"
        return message

    def _no_field(self, group: str, value: str) -> str:
        """--config.algorithm ppo: the group of --config.algorithm.name."""
        fields = [known for known in self.known_flags() if known.startswith(f"--{group}.")]
        first = next((known for known in fields if _last(known) in ("name", "type", "enabled")), fields[0])
        return f"--{group} {value}: is a group of fields; write --{group}.FIELD VALUE, such as {first}"

    def _unknown(self, flag: str) -> str:
        word = _last(flag)
        # The same field of another group, or what other programs call it; else the nearest in spelling.
        same = [known for known in self.known_flags() if _last(known) in (word, *OTHER_NAMES.get(word, ()))]
        group = flag.rpartition(".")[0]
        # A field of the flag's own group first; the critic's fields are named as the policy's, and seldom meant.
        of_group = [known for known in same if known.rpartition(".")[0] == group]
        same = of_group or [known for known in same if not known.startswith("--config.critic.")] or same
        guess = nearest(flag, same) or same[0] if same else nearest(flag, self._alike(group))
        return f"unknown flag {flag}; " + (
            f"did you mean {guess}?" if guess else f"{self.all_flags} lists the known ones"
        )

    def _alike(self, group: str) -> list[str]:
        """The flags that one of `group` may be, misspelt: none where no group has such a name, as of another one."""
        groups = {known.rpartition(".")[0] for known in self.known_flags()}
        parts, names = group.removeprefix("--config.").split("."), [_last(each) for each in groups]
        return self.known_flags() if group in groups or any(nearest(part, names) for part in parts) else []


def descriptions(kind: type) -> dict[str, str]:
    """Field -> what it does, of a dataclass: from its docstring's Args, or the field's metadata."""
    texts = {entry.arg_name: entry.description or "" for entry in parse_docstring(kind.__doc__ or "").params}
    help_of = {field.name: field.metadata["help"] for field in dataclasses.fields(kind) if "help" in field.metadata}
    return {name: " ".join(text.split()).rstrip(".") for name, text in {**texts, **help_of}.items()}


def _expected(complaint: str) -> str | None:
    """jsonargparse's complaint about a value of another type, or of none of several types, in the words of a command
    line; None where it complains of something else."""
    one_type = r"Expected an? (?:<class ')?(?:typing\.)?(\w+)(?:\[(.*?)\])?(?:'>)?\. Got value: (.*)"
    if one := re.match(one_type, complaint, flags=re.DOTALL):
        return f"expected {' or '.join((one[2] or WORDS.get(one[1], one[1])).split(', '))}, not {one[3].strip()}"
    of_range = r"Not of type (\w+): (?:(.*) does not conform|.*: '(.*)'$|.*'NoneType'$)"
    if one := re.match(of_range, complaint, flags=re.DOTALL):
        return f"expected {WORDS.get(one[1], one[1])}, not {one[2] or one[3]}"
    union = re.search(r"Subtypes: [\[(](.*)[\])]\s+Errors:.*Given value: (.*)", complaint, flags=re.DOTALL)
    if union is None:
        return None
    kinds = re.findall(r"<class '([\w.]+)'>|(?:typing\.)?Literal\[(.*?)\]|([\w.]+\[[^<]*?\])", union[1])
    last = [(kind.rpartition(".")[2], literal or other) for kind, literal, other in kinds]
    names = [WORDS.get(kind, kind) or (MAPPING if other.startswith("dict[") else other) for kind, other in last]
    value = union[2].strip()
    as_list = _as_list(value) if names[0].startswith("list[") else ""
    return f"expected {' or '.join(names)}, not {value}{as_list}"


def _as_list(value: str) -> str:
    """What to write for a list of the words in `value`: '["accuracy", "format"]' for accuracy,format; nothing for a
    list that breaks off."""
    if value.strip().startswith("["):
        return ""
    return f"; write '{json.dumps([_scalar(word) for word in value.strip().split(',')])}'"


def _scalar(word: str) -> str | float | bool | None:
    """What YAML reads in a word; the word itself where that is no scalar of JSON, or where it is not YAML."""
    try:
        read = yaml.safe_load(word)
    except (yaml.YAMLError, ValueError, RecursionError):  # a ValueError: a date that there is not
        return word
    return read if read is None or isinstance(read, str | float | int) else word


def _last(flag: str) -> str:
    return flag.rpartition(".")[2].removeprefix("--")
