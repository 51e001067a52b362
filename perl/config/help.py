"""`--help` of perl.train and perl.sft: what most runs set, shortly; a group or all with `--help GROUP|all`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perl.config.parser import Parser

MOST_USED: dict[str, dict[str, str]] = {
    "what to train on what": {
        "model.model_name_or_path": "a folder, or a name on the hub",
        "dataset.dataset_name_or_path": "a task (gsm8k, dapo-math, …), a name on the hub, a file or a folder",
        "dataset.max_prompt_length": "longest prompt in tokens; null is no limit",
    },
    "how long": {
        "training.max_steps": "optimizer steps; -1: num_train_epochs decides",
        "training.num_train_epochs": "passes over the data, where max_steps is -1",
    },
    "batch": {
        "training.per_device_train_batch_size": "completions (perl.sft: rows) of a micro-batch on each device",
        "training.gradient_accumulation_steps": "micro-batches of an update",
        "training.num_generations": "completions of a prompt",
        "training.max_completion_length": "longest completion in tokens",
        "training.max_length": "longest row in tokens",
    },
    "update": {
        "training.learning_rate": "at its highest; a LoRA needs about 10 times a full training's",
        "training.beta": "coefficient of the KL divergence from the reference in the loss",
        "algorithm.name": "grpo, dapo, gspo, rloo, ppo, … (docs/algorithms.md)",
        "peft.type": "lora, dora, pissa, … (docs/peft.md); none trains all weights",
        "peft.r": "rank",
        "peft.lora_alpha": "the update is scaled by lora_alpha / r",
        "peft.adapter": "folder of a trained adapter that the training starts from",
    },
    "rollout and reward": {
        "rollout.engine": "perl's decode loop, the model's own generate, or vLLM",
        "noise_injection.enabled": "adaptive quantization noise (AQN) while completions are sampled",
        "reward.functions": "accuracy, strict, format, think, overlong, or path/to/file.py:function",
    },
    "what is written": {
        "training.output_dir": "folder of the run; null is a new one under outputs/",
        "training.save_steps": "steps between checkpoints",
        "training.resume_from_checkpoint": "a checkpoint, or auto: the last one in output_dir",
        "training.logging_steps": "steps between two rows of metrics.jsonl",
        "training.report_to": "wandb, tensorboard, trackio or none",
        "validation.datasets": "what to score on while the model trains",
        "validation.every_steps": "steps between two validations",
    },
}
"""Title -> field of `config` -> what it does, the most used first. A program shows those that it has."""
ALL = "all"
HELP = f"the most used flags; with a group every flag of it, with `{ALL}` every flag"


def add_help(parser: Parser, groups: Iterable[str]) -> None:
    """Add `-h, --help [GROUP|all]` to a parser that has no help.

    Args:
        groups: names of the program's groups, in order.
    """
    names = list(groups)
    parser.all_flags = f"--help {ALL}"

    class Help(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None):
            if values != ALL:
                of_group = {name: "" for name in _by_field(parser) if name.startswith(f"{values}.")}
                _leave(parser, {str(values): of_group} if values else MOST_USED)
            parser.usage = f"{parser.prog} [--recipe FILE] [--config.GROUP.FIELD VALUE …]"
            parser.epilog = f"--help {ALL} lists every flag, --help GROUP those of a group: {', '.join(names)}."
            parser.print_help()
            parser.exit()

    metavar = f"GROUP|{ALL}"
    choices = [*names, ALL]
    parser.add_argument(
        "-h", "--help", action=Help, nargs="?", metavar=metavar, choices=choices, help=HELP, default=argparse.SUPPRESS
    )


def _leave(parser: argparse.ArgumentParser, parts: Mapping[str, Mapping[str, str]]) -> None:
    """Of the parser's flags only those of `parts`: title -> field -> help ("": the flag's own). For a process that ends
    behind it."""
    actions = _by_field(parser)
    parser._action_groups = []
    parser.add_argument_group("options")._group_actions = [actions["recipe"], actions["help"]]
    for title, texts in parts.items():
        group = parser.add_argument_group(title)
        for name in (name for name in texts if name in actions):
            action = actions[name]
            action.option_strings, action.metavar = action.option_strings[:1], action.metavar or "VALUE"
            action.help = texts[name] or action.help
            group._group_actions.append(action)


def _by_field(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {action.dest.removeprefix("config."): action for action in parser._actions}
