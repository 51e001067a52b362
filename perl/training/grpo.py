"""The main path of training: configuration -> prompts -> GRPO with AQN -> adapter, or model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perl.base.files import SAVING
from perl.config.derived import reward_calls
from perl.config.load import Config, parse
from perl.grading import Grader
from perl.rewards.deadline import RewardDeadline
from perl.rewards.functions import build_rewards, grade_early, reward_context
from perl.rewards.score import environment
from perl.runs.callbacks import StopOnSignal
from perl.runs.checkpoints import CRITIC
from perl.runs.model_card import write_training_card
from perl.runs.out_of_memory import explain_out_of_memory
from perl.runs.run import (
    begin,
    describe_run,
    fit,
    hide_vllm,
    log_writers,
    push_result,
    users_error,
)
from perl.runs.setup import check_processes, load_model
from perl.training.preflight import Checked, check_run
from perl.training.validation import Validation

if TYPE_CHECKING:
    from perl.training.trainer import PerlGRPOTrainer


def train(argv: Sequence[str]) -> Path:
    """Train as the command line `argv` says and return the run's folder; adapter/ in it, or model/, is the result.

    Raises:
        UserError: before a model is loaded, for whatever the user can fix.
        Stopped: a signal ended the run, after a checkpoint.
    """
    parsed = parse(argv)
    check_processes()
    parsed.require_files()
    config = parsed.build()
    with StopOnSignal() as stop, begin(config, parsed) as run_dir:
        checked = check_run(config, run_dir)
        trainer_class = import_trainer()
        with (
            environment_opened(checked),
            explain_out_of_memory(config) as watch,
            Grader(deadline_s=config.reward.deadline_s) as grader,
        ):
            describe_run(run_dir, config, parsed, checked)
            context = reward_context(config, grader)
            functions = build_rewards(config.reward.functions, context) if config.reward.functions else []
            rewards = reward_deadline(config).over(config.reward.functions, functions)
            if checked.conversations is not None and checked.conversations.source.rewards:
                rewards.append(environment)
                if config.training.reward_weights is not None:
                    config.training.reward_weights = [*config.training.reward_weights, 1.0]
            with users_error("--config"):  # TRL checks combinations of its own arguments
                trainer = trainer_class(
                    config,
                    model=load_model(config),
                    train_dataset=checked.dataset,
                    processing_class=checked.tokenizer,
                    reward_funcs=rewards,
                    grade_early=grade_early(config.reward.functions, context),
                    conversations=checked.conversations,
                    validation=open_validation(config, run_dir, checked, grader),
                    write_card=functools.partial(write_training_card, run_dir),
                    callbacks=[*log_writers(run_dir), stop],
                )
            watch.clock = trainer.clock
            with contextlib.closing(trainer.step.engine):
                fit(trainer, run_dir, checked.checkpoint, stop)
            save_critic(trainer, run_dir)
            push_result(trainer, run_dir)
    return run_dir


def environment_opened(checked: Checked) -> contextlib.AbstractContextManager[None]:
    """Inside, the run's environments can be asked."""
    return contextlib.nullcontext() if checked.conversations is None else checked.conversations.source.opened()


def reward_deadline(config: Config) -> RewardDeadline:
    """All functions together take less than the time that other processes wait for the rewards: they may be called one
    after the other, and twice with a greedy completion of each prompt."""
    shared = config.training.ddp_timeout / 2 / reward_calls(config)
    seconds = config.reward.function_deadline_s or shared
    return RewardDeadline(
        seconds,
        "if it needs longer, raise --config.reward.function_deadline_s, and --config.training.ddp_timeout, which must"
        " be longer",
    )


def import_trainer() -> type[PerlGRPOTrainer]:
    """The trainer class. TRL is never shown vLLM, which the rollouts drive themselves."""
    hide_vllm()
    from perl.training.trainer import PerlGRPOTrainer

    return PerlGRPOTrainer


def open_validation(config: Config, run_dir: Path, checked: Checked, grader: Grader) -> Validation | None:
    """What validates while the model trains; None where no dataset is named."""
    if checked.validation is None:
        return None
    training = config.training
    return Validation(checked.validation, grader, run_dir, training.process_index, training.world_size)


def save_critic(trainer: PerlGRPOTrainer, run_dir: Path) -> None:
    """The critic, whole, where there is one."""
    if trainer.step.critic is not None:
        trainer.save_critic(run_dir / SAVING)
        trainer.put_in_place(run_dir / SAVING / CRITIC.parent, run_dir / CRITIC.parent)
