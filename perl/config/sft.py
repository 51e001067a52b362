"""Configuration of perl.sft: the groups that it shares with perl.train, its own data, and TRL's SFTConfig, whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_type_hints

from jsonargparse import Namespace

from perl.base.errors import UserError
from perl.config.load import Parsed, Program, parse_for, resolve_aliases
from perl.config.schema import SFTGroups
from perl.config.unused_flags import OF_ANY_TRAINING, Rule, only_with, unread

if TYPE_CHECKING:
    from perl.config.training import SFTTrainingConfig

ALIASES = (("common.seed", "training.seed"),)
RULES = (
    *OF_ANY_TRAINING,
    Rule(
        ("training.eval_", "training.per_device_eval_batch_size", "dataset.eval_split", "dataset.eval_ex"),
        lambda v: v.dataset.eval_dataset is not None,
        "dataset.eval_dataset names no rows",
    ),
    only_with("training.packing_strategy", "training.packing", True),
    unread("dataset_text_field", "rows of plain text are not read"),
)


@dataclass(kw_only=True)
class SFTRunConfig(SFTGroups):
    """The resolved configuration of a supervised fine-tuning."""

    training: SFTTrainingConfig


def parse(argv: Sequence[str]) -> Parsed[SFTRunConfig]:
    """Parse a command line of perl.sft. Raises UserError for anything that cannot be what the user meant."""
    return parse_for(SFT, argv)


def resolve_sft(values: Namespace, flags: Namespace, recipe: Namespace) -> list[str]:
    resolve_aliases(values, flags, recipe, ALIASES)
    training = values.training
    evaluates = training.eval_strategy not in (None, "no")
    if evaluates and values.dataset.eval_dataset is None:
        raise UserError(
            f"--config.training.eval_strategy {training.eval_strategy}: there are no rows to evaluate on; name"
            " --config.dataset.eval_dataset"
        )
    if values.dataset.eval_dataset is not None and not evaluates:
        raise UserError(
            f"--config.dataset.eval_dataset {values.dataset.eval_dataset}: is never looked at; write"
            " --config.training.eval_strategy epoch, or steps with --config.training.eval_steps N"
        )
    if training.auto_find_batch_size:
        raise UserError(
            "--config.training.auto_find_batch_size true: where memory runs out, training would begin again from step 0"
            " with weights that are trained; leave it out, and lower --config.training.per_device_train_batch_size"
        )
    if training.packing and training.max_length is None:
        raise UserError("--config.training.packing true: packs rows up to max_length tokens; give it a number")
    if training.eval_packing and not training.packing:
        raise UserError(
            "--config.training.eval_packing true: without --config.training.packing true the rows that are evaluated"
            " would see each other; write both, or leave it out"
        )
    for field, file in (("chat_template_path", "chat_template.jinja"), ("eos_token", "tokenizer_config.json")):
        if training[field] is not None:
            raise UserError(
                f"--config.training.{field} {training[field]}: perl.train and perl/eval.py would take the model's own;"
                f" put it into {file} in the model's folder, where all three read it"
            )
    if (training.dataset_num_proc or 1) > 1:
        raise UserError(
            f"--config.training.dataset_num_proc {training.dataset_num_proc}: numbers in turns would be"
            " rounded on their way to other processes; leave it out"
        )
    if training.dataset_kwargs:
        raise UserError("--config.training.dataset_kwargs: rows are prepared by perl.sft; leave it out")
    return []


SFT = Program(
    name="perl.sft",
    purpose="Train a LoRA adapter on worked answers (supervised fine-tuning).",
    groups=get_type_hints(SFTGroups),
    training="SFTTrainingConfig",
    resolve=resolve_sft,
    rules=RULES,
    config=SFTRunConfig,
)
