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

from perl.algorithms import ALGORITHMS, settings_of
from perl.base.errors import UserError, nearest
from perl.base.paths import user_path
from perl.base.redact import drop_secrets
from perl.config.adapter import take_adapter
from perl.config.files import find_files, look_for
from perl.config.help import add_help
from perl.config.parser import Parser
from perl.config.peft_fields import leave_out_other_methods
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
SAY_ONE_THING = (
    *((ours, trl) for ours, trl in ALIASES),
    ("rollout.engine", "training.use_vllm"),
    ("training.max_steps", "training.num_train_epochs"),
)
"""What a recipe says by one of these names goes before what its base says by another."""
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
UNMERGED = ("lora", "rslora", "lora_plus", "lora_fa", "pissa", "milora", "milora_plus")
"""Methods whose layers add scale * B A x to the base's product, which may be a quantised one."""
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


@dataclass
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
        return parser.parse_object({"config": content}, defaults=False), written_in
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
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UserError(f"--recipe {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: no UTF-8, or a date that there is not
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
    warnings += explain_correction(values, flags, recipe)
    values.rollout.importance_correction = correction_of(values.rollout)
    if values.noise_injection.seed is None:
        values.noise_injection.seed = values.common.seed
    check_values(values)
    return warnings


def explain_correction(values: Namespace, flags: Namespace, recipe: Namespace) -> list[str]:
    """A line where the user leaves to perl how vLLM's probabilities are corrected: TRL's default is another."""
    name = "training.vllm_importance_sampling_mode"
    used = values.rollout.engine == "vllm" and values.training.vllm_importance_sampling_correction
    if not used or name in flags or name in recipe:
        return []
    return [f"rollout.engine vllm: {name} is {values[name]}, not sequence_mask as in TRL (docs/training.md)"]


def correction_of(rollout: RolloutConfig) -> str:
    """How the loss is corrected for the policy that drew: `importance_correction`, auto resolved."""
    if rollout.importance_correction != "auto":
        return rollout.importance_correction
    return "token" if rollout.lag or rollout.max_staleness or rollout.quantization != "none" else "none"


def resolve_algorithm(values: Namespace, flags: Namespace, recipe: Namespace) -> list[str]:
    """Set what the algorithm sets and neither recipe nor flags say; a line for each that they say otherwise."""
    name, lines = values.algorithm.name, []
    for field, value in settings_of(name).items():
        chosen = next((source[field] for source in (flags, recipe) if field in source), value)
        values[field] = chosen
        if chosen != value:
            who = "--config." if field in flags else "the recipe's "
            lines.append(f"{who}{field} {chosen} goes before algorithm {name}, which sets {value}")
    return lines


def resolve_aliases(values: Namespace, flags: Namespace, recipe: Namespace, aliases: Sequence[tuple[str, str]]) -> None:
    """Give both names of one thing the same value. A flag goes before the recipe whichever name each uses; two
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

    A flag goes before the recipe, as everywhere: num_train_epochs as a flag before the recipe's max_steps, which
    transformers would take. Said in the same place, max_steps decides, as in transformers (of two flags
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


def check_values(values: Namespace) -> None:
    """Checks over several fields that need neither a device nor a file."""
    reward, noise, training = values.reward, values.noise_injection, values.training
    if reward.weights is not None and len(reward.weights) != len(reward.functions):
        raise UserError(
            f"--config.reward.weights has {len(reward.weights)} entries, --config.reward.functions has"
            f" {len(reward.functions)}; give one weight for each function"
        )
    if not reward.functions and values.environment.factory is None:
        raise UserError("--config.reward.functions is empty; give at least one, e.g. '[\"accuracy\"]'")
    if reward.function_deadline_s is not None and reward.function_deadline_s >= training.ddp_timeout:
        raise UserError(
            f"--config.reward.function_deadline_s {reward.function_deadline_s:g}: other processes wait for a reward for"
            f" --config.training.ddp_timeout {training.ddp_timeout} s; write less, or raise ddp_timeout"
        )
    low, high = training.cispo_min_ratio, training.epsilon_high
    high = training.epsilon if high is None else high
    if training.loss_type == "cispo" and low is not None and low > high:
        raise UserError(
            f"--config.training.cispo_min_ratio {low:g} is above the highest ratio, --config.training.epsilon_high"
            f" {high:g}; cispo's is a ratio, such as 5"
        )
    adaptive = noise.schedule == "target_kl"
    if noise.enabled and not adaptive and noise.sigma_end > noise.sigma_start:
        raise UserError(
            f"--config.noise_injection.sigma_end ({noise.sigma_end}) is above sigma_start ({noise.sigma_start});"
            " noise decays: swap them"
        )
    if noise.enabled and adaptive and noise.target_kl_end > noise.target_kl_start:
        raise UserError(
            f"--config.noise_injection.target_kl_end ({noise.target_kl_end}) is above target_kl_start"
            f" ({noise.target_kl_start}); the target decays: swap them"
        )
    if noise.enabled and adaptive and noise.sigma_start == 0:
        raise UserError(
            "--config.noise_injection.sigma_start 0: schedule target_kl multiplies it, and never leaves 0;"
            " give a positive sigma_start"
        )
    if noise.enabled and noise.schedule in ("exponential", "logarithmic") and noise.sigma_end == 0:
        raise UserError(
            f"--config.noise_injection.schedule {noise.schedule} never reaches sigma_end 0;"
            " give a positive sigma_end or schedule linear"
        )
    twice = noise.old_logps == "noisy" and training.vllm_importance_sampling_correction
    if noise.enabled and values.rollout.engine == "vllm" and twice:
        raise UserError(
            "--config.noise_injection.old_logps noisy: TRL's correction would count the noise once more; write"
            " --config.training.vllm_importance_sampling_correction false, or old_logps clean"
        )
    algorithm = values.algorithm
    if algorithm.kl_in_reward > 0.0 and training.multi_objective_aggregation != "sum_then_normalize":
        raise UserError(
            "--config.algorithm.kl_in_reward: there is no one reward to take it from where"
            " multi_objective_aggregation is normalize_then_sum; --config.training.beta puts KL into the loss"
        )
    if training.beta < 0.0:
        raise UserError(
            f"--config.training.beta {training.beta:g}: a coefficient below 0 drives the policy away from the"
            " reference; write a number from 0"
        )
    if values.rollout.importance_correction.startswith("sequence") and training.loss_type == "vespo":
        raise UserError(
            f"--config.rollout.importance_correction {values.rollout.importance_correction}: loss_type vespo weights"
            " sequences itself; write token"
        )
    if training.eval_strategy not in (None, "no"):
        raise UserError(
            "--config.training.eval_strategy: leave it at no; --config.validation.datasets scores while the model"
            " trains, perl/eval.py scores checkpoints"
        )
    check_workers(values)
    check_quantization(values)
    check_dynamic_sampling(values)
    check_validation(values)
    check_critic(values)
    check_environment(values)


def pieces_of(group: int, rows: int, rollout: RolloutConfig) -> int:
    """Completions of a piece, of a generation batch of `rows` in groups: by default a quarter, in whole groups; a group
    with max_staleness."""
    return group if rollout.max_staleness else rollout.piece_size or group * max(1, rows // group // 4)


def drawn_at_once(group: int, rows: int, rollout: RolloutConfig) -> int:
    """Completions that a worker decodes together: a piece, or with max_staleness whole groups, as many as perl's own
    loop decodes on an accelerator."""
    size = pieces_of(group, rows, rollout)
    return max(size, min(256, rows) // size * size) if rollout.max_staleness else size


def check_workers(values: Namespace) -> None:
    """What cannot be drawn by workers, or ahead."""
    rollout = values.rollout
    tensor_parallel = values.training.vllm_tensor_parallel_size
    if rollout.workers and rollout.engine == "generate":
        raise UserError(
            f"--config.rollout.workers {rollout.workers}: workers draw with engine fast or vllm; write"
            " --config.rollout.engine fast, or --config.rollout.workers 0"
        )
    if rollout.workers and rollout.engine == "vllm" and tensor_parallel > 1:
        raise UserError(
            f"--config.training.vllm_tensor_parallel_size {tensor_parallel}: a worker has one device; leave it out, or"
            " write --config.rollout.workers 0"
        )
    if rollout.piece_size and not rollout.workers and rollout.engine != "fast":
        raise UserError(
            f"--config.rollout.piece_size {rollout.piece_size}: without workers engine fast alone draws in pieces;"
            " leave it out, or write --config.rollout.engine fast"
        )
    if rollout.lag and rollout.max_staleness:
        raise UserError(
            f"--config.rollout.max_staleness {rollout.max_staleness}: --config.rollout.lag {rollout.lag} says which"
            " policy draws; write one of the two"
        )
    if rollout.max_staleness and rollout.piece_size:
        raise UserError(
            f"--config.rollout.piece_size {rollout.piece_size}: with max_staleness there are no pieces; leave it out,"
            f" or write --config.rollout.lag {rollout.max_staleness} in the place of max_staleness"
        )
    if rollout.max_staleness and ALGORITHMS[values.algorithm.name].greedy:
        raise UserError(
            f"--config.rollout.max_staleness {rollout.max_staleness}: algorithm {values.algorithm.name} draws a greedy"
            " completion of each prompt, for which an engine would run empty each time; write --config.rollout.lag"
            f" {rollout.max_staleness} in its place"
        )
    if not (ahead := rollout.lag or rollout.max_staleness):
        return
    flag = f"--config.rollout.{'lag' if rollout.lag else 'max_staleness'}"
    if not rollout.workers:
        raise UserError(
            f"{flag} {ahead}: the trainer cannot draw while it trains; write --config.rollout.workers 1 or more, or"
            f" {flag} 0"
        )
    if values.peft.type == "none":
        raise UserError(
            f"{flag} {ahead}: all weights are trained, and each policy that is kept is a whole model; write {flag} 0,"
            " or --config.peft.type lora"
        )
    if values.algorithm.dynamic_sampling:
        raise UserError(
            f"{flag} {ahead}: which prompts a batch has under algorithm.dynamic_sampling is known when the batch"
            f" before it is scored, so nothing can be drawn ahead; write {flag} 0, or"
            " --config.algorithm.dynamic_sampling false"
        )
    if values.noise_injection.enabled and values.noise_injection.schedule == "target_kl":
        raise UserError(
            f"{flag} {ahead}: noise_injection.schedule target_kl measures what the noise does to the policy that is"
            f" trained, and an older one draws; write --config.noise_injection.schedule linear, or {flag} 0"
        )


def check_quantization(values: Namespace) -> None:
    """What a quantised base cannot be had with while completions are sampled."""
    rollout = values.rollout
    if values.model.quantization != "none" and rollout.engine == "vllm":
        raise UserError(
            f"--config.model.quantization {values.model.quantization}: vLLM is not given such a base; write"
            " --config.rollout.engine fast, or none"
        )
    if rollout.quantization == "none":
        return
    flag, leave_out = f"--config.rollout.quantization {rollout.quantization}", "--config.rollout.quantization none"
    if values.model.quantization != "none":
        raise UserError(
            f"{flag}: the base is quantised already, by --config.model.quantization {values.model.quantization}; write"
            " none for one of the two"
        )
    if rollout.engine == "generate":
        raise UserError(
            f"{flag}: --config.rollout.engine generate draws with weights that perl does not quantise; write"
            f" --config.rollout.engine fast, or {leave_out}"
        )
    if values.peft.type not in UNMERGED:
        why = "all weights are trained" if values.peft.type == "none" else "is no sum of the base's product and its own"
        raise UserError(
            f"{flag}: --config.peft.type {values.peft.type}: {why}, and the base is what is quantised; write lora, or"
            f" {leave_out}"
        )
    if rollout.merge_adapter is True:
        raise UserError(
            f"{flag}: --config.rollout.merge_adapter true: quantised weights would round most of the adapter away;"
            f" leave it out, or write {leave_out}"
        )


def check_critic(values: Namespace) -> None:
    """What the algorithm's advantages are made of must be there: a group to compare, or a critic."""
    algorithm, generations = ALGORITHMS[values.algorithm.name], values.training.num_generations
    if algorithm.groups and generations == 1:
        raise UserError(
            f"--config.training.num_generations 1: algorithm {values.algorithm.name} compares the completions of a"
            " prompt; write 2 or more, or --config.algorithm.name ppo, which has a critic instead"
        )
    if algorithm.critic and values.peft.type == "none":
        raise UserError(
            f"--config.peft.type none: the critic of algorithm {values.algorithm.name} computes on a frozen base; write"
            " lora, or --config.algorithm.name grpo"
        )
    if algorithm.critic and values.peft.type == "ln_tuning":
        raise UserError(
            f"--config.peft.type ln_tuning: the critic of algorithm {values.algorithm.name} would compute with the"
            " policy's norms; write lora, or --config.algorithm.name grpo"
        )
    if algorithm.critic and 0 < values.training.max_steps <= values.critic.warmup_steps:
        raise UserError(
            f"--config.critic.warmup_steps {values.critic.warmup_steps}: the training ends after step"
            f" {values.training.max_steps}, before the policy would learn; write less, or raise"
            " --config.training.max_steps"
        )
    if algorithm.critic and values.training.torch_compile:
        raise UserError(
            f"--config.training.torch_compile true: algorithm {values.algorithm.name} computes policy and critic in one"
            " packed sequence, which torch_compile can't have; leave it out"
        )


def check_environment(values: Namespace) -> None:
    """What conversations of several turns can't be had with."""
    environment, rollout, data = values.environment, values.rollout, values.dataset
    if environment.tool_call_parser == "python_fence" and "python" not in environment.tools:
        raise UserError(
            "--config.environment.tool_call_parser python_fence: blocks of code are calls of the tool python; write"
            " --config.environment.tools '[\"python\"]', or leave it out"
        )
    if not environment.tools and environment.factory is None:
        return
    flag = "--config.environment.tools" if environment.tools else "--config.environment.factory"
    if rollout.engine == "generate":
        raise UserError(
            f"--config.rollout.engine generate: draws torch's own random numbers, so that with {flag} a run would"
            " depend on how long an answer takes; write --config.rollout.engine fast"
        )
    longest, patience = environment.tool_timeout_s * (environment.max_turns + 1), values.training.ddp_timeout
    if longest >= patience and (not rollout.workers or values.validation.datasets):
        raise UserError(
            f"--config.environment.tool_timeout_s {environment.tool_timeout_s:g}: with max_turns"
            f" {environment.max_turns} other processes may wait {longest:g} s, and --config.training.ddp_timeout is"
            f" {patience} s; write less, or raise ddp_timeout"
        )
    if rollout.workers and environment.tool_timeout_s >= rollout.deadline_s:
        raise UserError(
            f"--config.environment.tool_timeout_s {environment.tool_timeout_s:g}: a worker may say nothing for so long,"
            f" and --config.rollout.deadline_s is {rollout.deadline_s:g} s; write less, or raise deadline_s"
        )
    if rollout.engine == "vllm" and values.training.vllm_tensor_parallel_size > 1:
        raise UserError(
            f"--config.training.vllm_tensor_parallel_size {values.training.vllm_tensor_parallel_size}: processes that"
            f" share an engine give it all prompts at once, and with {flag} they come turn by turn; leave it out"
        )
    if data.truncation != "error" and not data.filter_overlong_prompts:
        raise UserError(
            f"--config.dataset.truncation {data.truncation}: a prompt that lists tools can't be cut; use"
            " --config.dataset.filter_overlong_prompts true"
        )


def check_dynamic_sampling(values: Namespace) -> None:
    algorithm = values.algorithm
    if not algorithm.dynamic_sampling:
        return
    if values.training.num_generations == 1:
        raise UserError(
            "--config.algorithm.dynamic_sampling true: one completion of a prompt is always equal to itself, so that no"
            " group would be kept; write false, or --config.training.num_generations 2 or more"
        )
    if algorithm.max_resample_factor < 1:
        raise UserError(
            f"--config.algorithm.max_resample_factor {algorithm.max_resample_factor:g}: a batch has to be drawn once;"
            " write a number from 1"
        )
    known = [*values.reward.functions, *(["environment"] if values.environment.factory else []), "sum"]
    if algorithm.dynamic_sampling_metric not in (None, *known):
        raise UserError(
            f"--config.algorithm.dynamic_sampling_metric {algorithm.dynamic_sampling_metric}: no such reward; write"
            f" one of {', '.join(known)}"
        )


def check_validation(values: Namespace) -> None:
    validation, training = values.validation, values.training
    if not validation.datasets:
        if validation.save_best:
            raise UserError(
                "--config.validation.save_best true: there is no score to choose by; name"
                " --config.validation.datasets too, e.g. '[\"gsm8k\"]'"
            )
        return
    during = validation.every_steps is not None or validation.after_train
    if not during and (validation.save_best or not validation.before_train):
        raise UserError(
            "--config.validation.after_train false: no step is validated; name --config.validation.every_steps, or"
            " leave --config.validation.datasets out"
        )
    check_quantized(values)
    if training.metric_for_best_model is not None:
        raise UserError(
            f"--config.training.metric_for_best_model {training.metric_for_best_model}: is of TRL's own evaluation;"
            " write --config.validation.save_best true"
        )


def scored_quantizations(values: Any) -> tuple[str, ...]:
    """What a validation scores the policy above: the base as it is ("none"), by rollout.quantization, or both.

    Args:
        values: with the groups `rollout` and `validation`.
    """
    rollout = values.rollout
    if not values.validation.quantized:
        return ("none",)
    alone = rollout.engine == "vllm" and not rollout.workers
    return (rollout.quantization,) if alone else ("none", rollout.quantization)


def check_quantized(values: Namespace) -> None:
    """Which policies can be validated: vLLM in the trainer's process holds the quantised one alone, and where vLLM
    draws in workers the trainer's own model validates, which is not quantised."""
    rollout, quantized = values.rollout, values.validation.quantized
    flag = "--config.validation.quantized"
    if rollout.quantization == "none":
        if quantized:
            raise UserError(
                f"{flag} true: --config.rollout.quantization is none, so no policy is quantised; write int8 there, or"
                f" {flag} false"
            )
    elif rollout.engine == "vllm" and not rollout.workers and not quantized:
        raise UserError(
            f"{flag} false: vLLM holds the policy above the {rollout.quantization} base alone, and validates; write"
            f" {flag} true, or --config.rollout.workers 1, with which the trainer's own model validates"
        )
    elif rollout.engine == "vllm" and rollout.workers and quantized:
        raise UserError(
            f"{flag} true: the workers alone hold the {rollout.quantization} base, and the trainer's own model"
            f" validates; write {flag} false, and score checkpoints by perl/eval.py --quantization"
            f" {rollout.quantization}"
        )


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
