"""From command line and recipe to one resolved Config, with every contradiction found before a model is loaded.

recipe (YAML) < flags  ->  Namespace  ->  aliases resolved  ->  Config
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import yaml
from jsonargparse import Namespace

from perl.algorithms import settings_of
from perl.base.errors import UserError, lookup, nearest
from perl.base.files import read_yaml
from perl.base.paths import user_path
from perl.base.redact import drop_secrets
from perl.config.adapter import take_adapter
from perl.config.checks import check_values
from perl.config.files import find_files, look_for
from perl.config.help import add_help
from perl.config.parser import Parser
from perl.config.peft_fields import leave_out_other_methods, list_names
from perl.config.ranges import check_numbers
from perl.config.schema import GROUPS, Groups, RolloutConfig
from perl.config.unused_flags import RULES, Rule, flags_without_effect

if TYPE_CHECKING:
    from perl.config.training import TrainingConfig

# Two names of one thing: (ours, TRL's, default when neither is given).
ALIASES = (
    ("common.seed", "training.seed"),
    ("dataset.max_prompt_length", "training.max_prompt_length"),
    ("reward.weights", "training.reward_weights"),
)
CORRECTION = "rollout.importance_correction"
TRLS_CORRECTION = ("training.vllm_importance_sampling_correction", "training.vllm_importance_sampling_mode")
MODES = {
    "token_truncate": "token",
    "token_mask": "token_mask",
    "sequence_truncate": "sequence",
    "sequence_mask": "sequence_mask",
}
"""TRL's vllm_importance_sampling_mode -> ours."""
SAY_ONE_THING = (
    *((ours, trl) for ours, trl in ALIASES),
    ("rollout.engine", "training.use_vllm"),
    ("training.max_steps", "training.num_train_epochs"),
    (CORRECTION, *TRLS_CORRECTION),
)
"""What a recipe says by one of these names overrides what its base says by another."""
NOT_TAKEN: tuple[str | int, ...] = (
    "transformers_continuous_batching_config",
    "use_transformers_continuous_batching",
    "use_transformers_paged",
    "vllm_group_port",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
)
"""Fields of TRL's that are no flags here: of engines that perl has not."""
OF_ONE_RUN = ("output_dir", "resume_from_checkpoint")
TRL_EPOCHS = 3.0
"""num_train_epochs where nobody has said it."""


C = TypeVar("C")
"""The resolved configuration of a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(Generic[C]):
    """A program that trains: what its command line holds, and what is made of it."""

    name: str
    """Of its module: "perl.train"."""
    purpose: str
    groups: Mapping[str, type]
    """Every group that is ours; each field is a flag."""
    training: str
    """The dataclass of the group `training` in perl.config.training, TRL's."""
    resolve: Callable[[Namespace, Namespace, Namespace], list[str]]
    """(values, the flags alone, the recipe alone) -> warnings: settles in `values` what the user has left open or said
    twice; a UserError for a contradiction."""
    rules: Sequence[Rule]
    config: type[C]

    def training_class(self) -> type:
        """Imported when it is needed, which takes seconds."""
        from perl.config import training

        return getattr(training, self.training)


@dataclass(kw_only=True)
class Config(Groups):
    """The resolved configuration of a training run."""

    training: TrainingConfig


@dataclass
class Parsed(Generic[C]):
    """What `parse` found, before `config.training` is built (building it starts the process group)."""

    values: Namespace
    """Every field of every group, typed; `values.training` holds the arguments of TRL's configuration."""
    warnings: list[str]
    """One line for each flag that the user set and that has no effect in this run, and for each file of the recipe that
    is taken from elsewhere than the working directory."""
    missing: list[str]
    """One line for each file that the recipe names and that is nowhere."""
    parser: Parser
    program: Program[C]

    def require_files(self) -> None:
        """Raise a UserError where a file that the recipe names is nowhere. (Tools that read none need none.)"""
        if self.missing:
            raise UserError(self.missing[0])

    def build(self, processes: int | None = None) -> C:
        """Make the program's configuration; TRL's checks itself here, and an error of its is a UserError.

        Args:
            processes: check it for a run of so many processes, without starting this one's process group.
        """
        from perl.config.training import planned

        groups = {name: group(**_numbers(_as_dict(self.values[name]))) for name, group in self.program.groups.items()}
        kind = self.program.training_class()
        try:
            kind = kind if processes is None else planned(kind, processes)
            groups["training"] = kind(**_as_dict(self.values.training))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise UserError(f"--config.training: {error}") from error
        return self.program.config(**groups)

    def dump(self) -> str:
        """The whole configuration as YAML that `--recipe` reads again to repeat the run. Left out: secrets, and what
        belongs to one run alone (its folder, the checkpoint it went on from)."""
        # With nulls: one that overrides a default (max_prompt_length: null) is part of the configuration.
        plain = yaml.safe_load(self.parser.dump(Namespace(config=self.values), skip_unset=False))["config"]
        for name in OF_ONE_RUN:
            plain["training"].pop(name, None)
        plain = drop_secrets(plain)
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def parse(argv: Sequence[str]) -> Parsed[Config]:
    """Parse a command line of perl.train. Raises UserError for anything that cannot be what the user meant."""
    return parse_for(GRPO, argv)


def parse_for(program: Program[C], argv: Sequence[str]) -> Parsed[C]:
    """Parse a command line of `program`."""
    parser = build_parser(program)
    flags = parser.parse_args(list(argv), defaults=False)
    path, taken = None, []
    if flags.get("recipe") is not None:
        path, taken = look_for(flags.recipe, "--recipe")
    recipe, written_in = read_recipe(path, parser, program)
    # A second parse, now over recipe and defaults, types everything that neither of them gave.
    values = parser.parse_args(list(argv), namespace=recipe.clone()).config
    given, written = flags.get("config") or Namespace(), recipe.get("config") or Namespace()
    if values.training.output_dir:
        values.training.output_dir = str(user_path(values.training.output_dir))
    if str(values.training.resume_from_checkpoint).lower() == "auto" and values.training.output_dir is None:
        raise UserError(
            "--config.training.resume_from_checkpoint auto: a run without --config.training.output_dir has a new folder"
            " each time, with nothing to go on from; name its folder"
        )
    found, missing = find_files(values, given, written_in)
    warnings = [*taken, *found, *program.resolve(values, given, written)]
    warnings += resolve_length(values, given, written)
    warnings += take_adapter(values, given, written)
    warnings += leave_out_other_methods(values, given, written)
    list_names(values)
    check_numbers(values)
    warnings += flags_without_effect(values, given, program.rules)
    return Parsed(values=values, warnings=warnings, missing=missing, parser=parser, program=program)


def build_parser(program: Program) -> Parser:
    """The parser of a program: `--recipe FILE` and `--config.<group>.<field>` for every field."""
    parser = Parser(
        prog=f"python -m {program.name}",
        description=f"{program.purpose} Flags override the recipe, the recipe overrides the defaults.",
        add_help=False,
    )
    parser.add_argument("--recipe", type=str, default=None, help="YAML file with groups common, model, dataset, …")
    for name, group in program.groups.items():
        parser.add_class_arguments(group, f"config.{name}")
    parser.add_class_arguments(program.training_class(), "config.training", skip=set(NOT_TAKEN))
    add_help(parser, [*program.groups, "training"])
    return parser


def read_recipe(path: str | None, parser: Parser, program: Program) -> tuple[Namespace, dict[str, Path]]:
    """The recipe's values, typed by the parser, and the file that says each field; an unknown key is an
    error that names the nearest flag."""
    if path is None:
        return Namespace(), {}
    content, written_in = recipe_content(path, program)
    try:
        recipe = parser.parse_object({"config": content}, defaults=False)
        parser.refuse_nulls(recipe)
        return recipe, written_in
    except UserError as error:
        field = re.search(r"--config\.(\w+\.\w+)", str(error))
        file = written_in.get(field[1]) if field else None
        at_fault = path if file is None or os.path.samefile(file, path) else file
        raise UserError(f"--recipe {at_fault}: {error}") from error


def recipe_content(
    path: str, program: Program, above: tuple[Path, ...] = ()
) -> tuple[dict[str, dict[str, Any]], dict[str, Path]]:
    """Group -> field -> value, of a recipe over those of its base, another recipe (a path from its own folder), and
    group.field -> the file that says it.

    Args:
        above: the recipes whose base this one is.
    """
    file = Path(os.path.realpath(path))
    if file in above:
        raise UserError(f"--recipe {above[0]}: base {file} builds on itself; leave one base out")
    if Path(path).is_dir():
        raise UserError(f"--recipe {path}: is a folder; name a YAML file in it")
    if above and not file.exists():
        raise UserError(f"--recipe {above[-1]}: base: there is no file {path}")
    if not file.exists():
        raise UserError(f"--recipe: no file {path}; recipes/ holds the ones that come with perl")
    if not Path(path).is_file():
        raise UserError(f"--recipe {path}: is a device or a pipe, which is read twice; name a YAML file")
    try:
        content = read_yaml(Path(path).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UserError(f"--recipe {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: no UTF-8, or as read_yaml says
        raise UserError(f"--recipe {path}: not YAML: {error}") from error
    except RecursionError as error:
        raise UserError(f"--recipe {path}: not YAML: brackets nest too deep") from error
    groups = (*program.groups, "training")
    if not isinstance(content, dict):
        raise UserError(f"--recipe {path}: must hold groups ({', '.join(groups)})")
    base = content.pop("base", None)
    if not isinstance(base, str | None):
        raise UserError(f"--recipe {path}: base must be the path of a recipe, not {base!r:.60}")
    for name in content:
        if name not in groups:
            guess = nearest(str(name), groups)
            hint = f"did you mean {guess}?" if guess else f"groups of {program.name} are {', '.join(groups)}"
            raise UserError(f"--recipe {path}: unknown group {name!r}; {hint}")
        if not isinstance(content[name], dict):
            raise UserError(
                f"--recipe {path}: the group {name} must hold fields (NAME: VALUE), not {content[name]!r:.60}"
            )
    written_in = {f"{group}.{name}": file for group, fields in content.items() for name in fields}
    if base is None:
        return content, written_in
    under, under_in = recipe_content(str(file.parent / user_path(base)), program, (*above, file))
    for names in SAY_ONE_THING:
        if any(name in written_in for name in names):
            for group, name in (each.split(".") for each in names):
                under.get(group, {}).pop(name, None)
    return {name: under.get(name, {}) | content.get(name, {}) for name in under | content}, under_in | written_in


def resolve_grpo(values: Namespace, flags: Namespace, recipe: Namespace) -> list[str]:
    """What perl.train settles: the algorithm's settings, both names of one thing, the engine, the noise's seed, and
    what contradicts itself."""
    warnings = resolve_algorithm(values, flags, recipe)
    resolve_aliases(values, flags, recipe, ALIASES)
    engine = resolve_engine(flags, resolve_engine(recipe, RolloutConfig.engine))
    values.rollout.engine = engine
    values.training.use_vllm = engine == "vllm"
    resolve_correction(values, flags, recipe)
    if values.noise_injection.seed is None:
        values.noise_injection.seed = values.common.seed
    check_values(values)
    return warnings


def resolve_correction(values: Namespace, flags: Namespace, recipe: Namespace) -> None:
    """Have `rollout.importance_correction` say what TRL's two fields, which are of engine vllm, say of it, and these
    what it says. A flag overrides the recipe whichever of them it uses."""
    chosen = "auto"
    for source in (recipe, flags):
        ours = source.get(CORRECTION, "auto")
        trls = said_by_trl(source, chosen) if values.rollout.engine == "vllm" else "auto"
        if "auto" not in (ours, trls) and ours != trls:
            raise UserError(
                f"--config.{CORRECTION} is {ours} but --config.{TRLS_CORRECTION[0]} and _mode say {trls}: they mean the"
                " same; give one"
            )
        chosen = next((each for each in (ours, trls) if each != "auto"), chosen)
    values[CORRECTION] = chosen
    if chosen != "auto":
        values[TRLS_CORRECTION[0]] = chosen != "none"
    if chosen not in ("auto", "none"):
        values[TRLS_CORRECTION[1]] = next(mode for mode, ours in MODES.items() if ours == chosen)


def said_by_trl(source: Namespace, before: str) -> str:
    """`rollout.importance_correction` by TRL's fields; auto where they leave it at `before`."""
    asked, mode = (source.get(name) for name in TRLS_CORRECTION)
    if asked is False:
        return "none"
    if mode is None:
        return "token" if asked and before == "none" else "auto"
    return lookup(MODES, mode, "mode", f"--config.{TRLS_CORRECTION[1]}")


def resolve_algorithm(values: Namespace, flags: Namespace, recipe: Namespace) -> list[str]:
    """Set what the algorithm sets and neither recipe nor flags say; a line for each that they say otherwise."""
    name, lines = values.algorithm.name, []
    for field, value in settings_of(name).items():
        chosen = next((source[field] for source in (flags, recipe) if field in source), value)
        values[field] = chosen
        if chosen != value:
            who = "--config." if field in flags else "the recipe's "
            lines.append(f"{who}{field} {chosen} overrides algorithm {name}, which sets {value}")
    return lines


def resolve_aliases(values: Namespace, flags: Namespace, recipe: Namespace, aliases: Sequence[tuple[str, str]]) -> None:
    """Give both names of one thing the same value. A flag overrides the recipe whichever name each uses; two
    different values in one of them are an error."""
    for ours, trls in aliases:
        value = values[ours]
        for source in (recipe, flags):
            both = [name for name in (ours, trls) if name in source]
            if len(both) == 2 and source[ours] != source[trls]:
                raise UserError(
                    f"--config.{ours} is {source[ours]} but --config.{trls} is {source[trls]}: they mean the same;"
                    " give one"
                )
            value = source[both[0]] if both else value
        # jsonargparse's PositiveInt is an int that YAML cannot write under TRL's plain `int | None`.
        values[ours], values[trls] = value, int(value) if isinstance(value, int) else value


def resolve_length(values: Namespace, flags: Namespace, recipe: Namespace) -> list[str]:
    """Whether epochs or steps end the training, where a user has said both, and a line for what is left out.

    A flag overrides the recipe, as everywhere: num_train_epochs as a flag the recipe's max_steps, which transformers
    would take. Said in the same place, max_steps decides, as in transformers (of two flags
    perl/config/unused_flags.py tells)."""
    steps, epochs = values.training.max_steps, values.training.num_train_epochs
    if steps <= 0 or "training.num_train_epochs" not in flags:
        left_out = recipe.get("training.num_train_epochs", TRL_EPOCHS)
        if steps <= 0 or left_out == TRL_EPOCHS:  # a run's own config.yaml holds every default
            return []
        who = "--config.training" if "training.max_steps" in flags else "the recipe's"
        decides = f"{who}.max_steps" if who.startswith("--") else f"{who} max_steps"
        return [f"{decides} {steps} decides: the recipe's num_train_epochs {left_out:g} is left out"]
    if "training.max_steps" in flags:
        return []
    values.training.max_steps = -1
    return [f"--config.training.num_train_epochs {epochs:g} decides: the recipe's max_steps {steps} is left out"]


def resolve_engine(source: Namespace, before: str) -> str:
    """The engine that `source` names, by rollout.engine or by training.use_vllm; `before` where it says nothing."""
    engine, use_vllm = source.get("rollout.engine"), source.get("training.use_vllm")
    if engine is None:
        unchanged = use_vllm is None or use_vllm == (before == "vllm")
        return before if unchanged else "vllm" if use_vllm else RolloutConfig.engine
    if use_vllm is not None and use_vllm != (engine == "vllm"):
        raise UserError(
            f"--config.rollout.engine is {engine} but --config.training.use_vllm is {str(use_vllm).lower()}; give one"
        )
    return engine


def _as_dict(group: Any) -> dict[str, Any]:
    return group.as_dict() if isinstance(group, Namespace) else dict(group)


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """jsonargparse's PositiveInt and the like as plain numbers: torch.load refuses a checkpoint that holds others."""
    kinds = (bool, int, float)
    return {name: next((k(v) for k in kinds if isinstance(v, k)), v) for name, v in group.items()}


GRPO = Program(
    name="perl.train",
    purpose="Train a LoRA adapter with GRPO.",
    groups=GROUPS,
    training="TrainingConfig",
    resolve=resolve_grpo,
    rules=RULES,
    config=Config,
)
